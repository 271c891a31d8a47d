"""The catalogue of the built-in games, from their templates."""

from __future__ import annotations

import re

from a3r.planner.catalogue import Catalogue, Game, Knob
from a3r.prereg.plan import Level
from swarm_engine.config import ModelKind, TrainerConfig
from vibe import library
from vibe.library import KnobKind, Template
from vibe.project import Training

TELLING = 3.0
"""Weight from which a template's keyword alone names the game."""


def builtin_catalogue() -> Catalogue:
    """Every template that vibe ships."""
    templates = [library.load(name) for name in library.names()]
    return Catalogue(tuple(_game(template, templates) for template in templates))


def _game(template: Template, templates: list[Template]) -> Game:
    elsewhere = {word for other in templates if other is not template for word in other.keywords}
    words = [word for word, weight in template.keywords.items() if weight >= TELLING and word not in elsewhere]
    names = {_plain(word) for word in (template.name, template.title, *words)}
    rewards = template.module("rewards")
    # What the engine would take by itself is written down, for a locked plan says what its runs are trained with.
    resolved = TrainerConfig().resolved(ModelKind.EMBEDDED, has_lora=False)
    trainer = {f"trainer.{name}": value for name, value in resolved.model_dump(mode="json").items()}
    training = {f"training.{name}": value for name, value in Training().model_dump(mode="json").items()}
    return Game(
        name=template.name,
        version=template.version,
        title=template.title,
        names=tuple(sorted(names)),
        knobs=tuple(_knob(knob) for knob in template.knobs),
        rules=dict(template.defaults),
        settings=trainer | training,
        start_weights=template.start_weights,
        reward_low=float(rewards.LOWEST),
        reward_high=float(rewards.HIGHEST),
    )


def _knob(knob: library.Knob) -> Knob:
    label = knob.name.replace("_", " ")
    stem = label.removesuffix("s")
    unit = knob.unit.split(" ")[0]
    near = [word for word in knob.words if stem in word]
    counted = [f"number of {label}"] if knob.kind is KnobKind.INT else []
    names = tuple(dict.fromkeys((*counted, label, *near, *([unit] if unit and unit != "in" else []))))
    path = f"rules.{knob.name}"
    default: Level = knob.default
    if knob.kind is KnobKind.CHOICE:
        return Knob(path, label, names, str, default, choices=tuple(knob.choices or ()))
    assert knob.low is not None
    assert knob.high is not None
    return Knob(path, label, names, int, default, low=knob.low, high=knob.high)


def _plain(word: str) -> str:
    return re.sub(r"(?<=[a-z])[-_./](?=[a-z])", " ", word.lower())
