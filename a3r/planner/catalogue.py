"""What a study can be about: the games, and the knobs that can be a factor, with the words people use for them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from types import NoneType
from typing import Any, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from a3r.errors import QuestionError
from a3r.prereg.plan import Level
from swarm_engine.config import RESOLVED, ModelKind, TrainerConfig

WORDS: Mapping[str, tuple[str, ...]] = {
    "group_size": (
        "group sizes",
        "group size",
        "size of the group",
        "size of the groups",
        "episodes per task",
        "groups of",
    ),
    "tasks_per_update": ("tasks per update", "groups per update", "number of tasks", "tasks a step", "tasks per step"),
    "learning_rate": ("learning rates", "learning rate", "step size", "lr"),
    "beta1": ("beta 1", "beta1", "adam's first beta"),
    "beta2": ("beta 2", "beta2", "adam's second beta"),
    "weight_decay": ("weight decay",),
    "max_grad_norm": ("gradient clipping", "gradient clip", "grad clip", "gradient norm", "grad norm", "max grad norm"),
    "clip_low": ("lower clip", "clip low", "low clip", "lower clipping"),
    "clip_high": ("upper clip", "clip high", "clip higher", "high clip", "clip range", "clipping", "clip"),
    "normalize_by_std": (
        "normalization by the standard deviation",
        "normalisation by the standard deviation",
        "dividing by the standard deviation",
        "standard deviation normalization",
        "std normalization",
        "std normalisation",
        "normalizing by std",
        "advantage normalization",
        "advantage normalisation",
        "normalize by std",
    ),
    "algorithm": ("training algorithm", "algorithm"),
    "sft_weight": ("sft weight", "weight of imitation", "imitation weight"),
    "off_policy": ("off-policy correction", "importance sampling correction"),
    "aggregation": ("loss aggregation", "aggregation of the loss", "aggregation"),
    "kl_weight": ("kl weight", "kl penalty", "kl coefficient", "kl"),
    "entropy_weight": ("entropy weight", "entropy bonus", "entropy coefficient", "entropy"),
    "merge": ("merging", "merger", "merge"),
    "microbatch_tokens": ("microbatch tokens", "microbatch size", "microbatch"),
    "checkpoint_every": ("checkpoint every", "checkpoint interval", "updates between checkpoints"),
}
"""Phrases for fields of the trainer's config; a field that is not here goes by its own name."""


@dataclass(frozen=True, slots=True)
class Knob:
    """A setting that a study can vary."""

    path: str
    """`trainer.FIELD` or `rules.KNOB`."""
    label: str
    names: tuple[str, ...]
    """Lower-case phrases, words apart by one space."""
    kind: type
    """bool, int, float or str."""
    default: Level
    low: float = -math.inf
    high: float = math.inf
    is_low_open: bool = False
    """The lowest value itself is not allowed."""
    is_high_open: bool = False
    choices: tuple[str, ...] = ()
    """For text: every value there is."""

    @property
    def limits(self) -> str:
        """What it can be set to, in words."""
        if self.kind is bool:
            return "on or off"
        if self.choices:
            return " or ".join(self.choices)
        if math.isinf(self.high):
            return f"{'above' if self.is_low_open else 'from'} {self.low:g}"
        lower = f"above {self.low:g}, up to" if self.is_low_open else f"from {self.low:g} to"
        return f"{lower} {'below ' if self.is_high_open else ''}{self.high:g}"

    def value(self, number: float) -> Level:
        """A number as a value of this knob.

        Raises:
            QuestionError: it is out of range, or a fraction where there are none.
        """
        is_inside = (self.low < number if self.is_low_open else self.low <= number) and (
            number < self.high if self.is_high_open else number <= self.high
        )
        if not is_inside:
            raise QuestionError(f"{self.label} {number:g} is out of range: it goes {self.limits}")
        if self.kind is int:
            if not float(number).is_integer():
                raise QuestionError(f"{self.label} {number:g} is not a whole number")
            return int(number)
        return float(number)


@dataclass(frozen=True, slots=True)
class Game:
    """A built-in template, as a study needs to know it."""

    name: str
    version: str
    title: str
    names: tuple[str, ...]
    """Lower-case phrases it is known by."""
    knobs: tuple[Knob, ...]
    """Its own rules."""
    rules: Mapping[str, Level]
    """A value for every rule."""
    settings: Mapping[str, Level | None]
    """The trainer's and the training's settings, by dotted path."""
    start_weights: str
    reward_low: float
    reward_high: float


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Everything a question can be about."""

    games: tuple[Game, ...]
    trainer: tuple[Knob, ...] = field(default_factory=lambda: trainer_knobs())

    def knobs(self, game: Game) -> tuple[Knob, ...]:
        """What can be a factor in a study on this game."""
        return (*self.trainer, *game.knobs)

    def in_words(self) -> str:
        """What the planner can read, for a refusal."""
        rules = "; ".join(
            f"{', '.join(knob.label for knob in game.knobs)} ({game.name})" for game in self.games if game.knobs
        )
        return (
            "I read questions of the form: does FACTOR at LEVELS change METRIC on TEMPLATE?\n"
            f"  factors:   {', '.join(knob.label for knob in self.trainer)}"
            + (f"; and of the games: {rules}" if rules else "")
            + "\n  metrics:   final held-out reward (better, higher reward), area under the curve (learns faster), "
            "episodes to reach a held-out reward (to reach 0.6)\n"
            f"  templates: {', '.join(game.name for game in self.games)}\n"
            '  example:   "Does a group size of 8 learn tic-tac-toe faster than 4 at the same number of episodes?"'
        )


UNVARIED = frozenset({"teacher_weight"})
"""Fields that no study varies: a game has no teacher."""


def trainer_knobs() -> tuple[Knob, ...]:
    """Every numeric or enumerated field of the trainer's config that has more than one value and a default, which a
    knob that the default algorithm does not read has not."""
    config = TrainerConfig().resolved(ModelKind.EMBEDDED, has_lora=False)
    own = {name: value for name, value in asdict(config.knobs).items() if value is not None}
    own |= {name: getattr(config, name) for name in RESOLVED}
    known = {name: info for name, info in TrainerConfig.model_fields.items() if name not in UNVARIED}
    found = (_knob(name, info, own.get(name, info.default)) for name, info in known.items())
    return tuple(knob for knob in found if knob is not None)


def _knob(name: str, info: FieldInfo, default: Any) -> Knob | None:
    if default is None:
        return None
    kind: Any = info.annotation
    if NoneType in get_args(kind):
        (kind,) = (one for one in get_args(kind) if one is not NoneType)
    label = name.replace("_", " ")
    names = tuple(dict.fromkeys((*WORDS.get(name, ()), label)))
    path = f"trainer.{name}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        choices = tuple(str(member.value) for member in kind)
        return Knob(path, label, names, str, str(default.value), choices=choices) if len(choices) > 1 else None
    if kind is bool:
        return Knob(path, label, names, bool, bool(default))
    if kind not in (int, float) or get_origin(kind) or get_args(kind):
        return None
    low, high, is_low_open, is_high_open = -math.inf, math.inf, False, False
    for limit in info.metadata:
        match limit:
            case annotated_types.Ge(ge=value):
                low = float(value)  # type: ignore[arg-type]
            case annotated_types.Gt(gt=value):
                low, is_low_open = float(value), True  # type: ignore[arg-type]
            case annotated_types.Le(le=value):
                high = float(value)  # type: ignore[arg-type]
            case annotated_types.Lt(lt=value):
                high, is_high_open = float(value), True  # type: ignore[arg-type]
            case _:
                pass
    return Knob(path, label, names, kind, default, low, high, is_low_open, is_high_open)
