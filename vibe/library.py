"""The built-in games: where they are, what can be set, and their code.

A template is a folder: in a checkout `templates/NAME`, in the wheel `vibe/_templates/NAME`. Its modules are imported
as `vibe_templates.NAME`, whichever it is. A project's flat files are the same code; `load_game` imports them from its
folder.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from vibe.errors import UsageError
from vibe.spec import RuleValue

PACKAGE = "vibe_templates"


class KnobKind(StrEnum):
    """What values a knob takes."""

    INT = "int"
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Knob:
    """One rule of a game that can be set."""

    name: str
    kind: KnobKind
    default: RuleValue
    unit: str
    """What a number counts, e.g. `cells a side`; empty for a choice."""
    meaning: str
    words: tuple[str, ...]
    """Phrases in lower case that point at this knob."""
    low: int | None = None
    high: int | None = None
    """Both ends belong to the range; None for a choice."""
    is_size: bool = False
    """Whether `4x4` sets it."""
    choices: Mapping[str, tuple[str, ...]] | None = None
    """The values of a choice, each with phrases that mean it; None for a number."""

    def problem(self, value: object) -> str | None:
        """Why a value does not fit, or None where it does."""
        if self.kind is KnobKind.CHOICE:
            assert self.choices is not None
            return None if value in self.choices else f"{self.name} is {value!r}, it can be {', '.join(self.choices)}"
        assert self.low is not None
        assert self.high is not None
        if not isinstance(value, int) or isinstance(value, bool):
            return f"{self.name} is {value!r}, it takes a whole number of {self.unit}"
        if self.low <= value <= self.high:
            return None
        return f"{self.name} is {value}, it goes from {self.low} to {self.high} {self.unit}"


@dataclass(frozen=True, slots=True)
class Template:
    """A built-in game."""

    name: str
    version: str
    title: str
    path: Path
    """Its folder."""
    package: str
    """Under which its modules are imported."""
    knobs: tuple[Knob, ...]
    keywords: Mapping[str, float]
    """Phrases in lower case that speak for this game, and how strongly."""
    always: Mapping[str, int]
    """Nouns in the plural, with how many there are under every rule."""
    otherwise: Mapping[str, str]
    """Patterns for what people may ask of this game and it does otherwise, with what it does."""
    examples: tuple[str, ...]
    """Descriptions that mean it."""
    start_weights: str
    """Shipped policy for the default rules, a name of `swarm_engine.models`."""
    warm_up_share: float | None
    """Share of scripted play in the games that its start weights are cloned from; None where nobody has tried."""
    warm_up_updates: int
    """Updates of cloning that make them."""
    levels: tuple[str, ...] = ("random", "scripted")
    """Scripted players whose rewards a policy's are shown beside: legal random play and an honest one."""

    @property
    def defaults(self) -> dict[str, RuleValue]:
        """A value for every knob."""
        return {knob.name: knob.default for knob in self.knobs}

    def knob(self, name: str) -> Knob:
        """One of its knobs.

        Raises:
            UsageError: it has none of this name.
        """
        for knob in self.knobs:
            if knob.name == name:
                return knob
        known = ", ".join(knob.name for knob in self.knobs)
        raise UsageError(f"{self.name} has no rule {name!r}; its rules are {known}")

    def rules(self, **changes: RuleValue) -> dict[str, RuleValue]:
        """Every rule, the defaults changed by `changes`.

        Raises:
            UsageError: an unknown rule, a value out of range, or values that do not go together.
        """
        for name, value in changes.items():
            if problem := self.knob(name).problem(value):
                raise UsageError(problem)
        rules = self.defaults | changes
        try:
            self.module("env").Game(**rules)
        except ValueError as error:
            raise UsageError(str(error)) from error
        return rules

    def module(self, name: str) -> Any:
        """One of its modules, such as `env` or `rewards`."""
        return importlib.import_module(f"{self.package}.{name}")

    def summary(self, rules: Mapping[str, RuleValue]) -> str:
        """The game under these rules, in a sentence."""
        return str(self.module("template").summary(rules))

    def agents(self, rules: Mapping[str, RuleValue]) -> tuple[str, ...]:
        """Every agent that the policy may play."""
        return tuple(self.module("template").agents(rules))


def root() -> Path:
    """The folder of all templates.

    Raises:
        UsageError: neither a checkout nor a complete wheel.
    """
    here = Path(__file__).resolve().parent
    for folder in (here / "_templates", here.parent / "templates"):
        if folder.is_dir():
            return folder
    raise UsageError(f"there are no templates beside {here}; install the package again")


def names() -> tuple[str, ...]:
    """The built-in games, in alphabetical order."""
    return tuple(sorted(path.parent.name for path in root().glob("*/template.py")))


@cache
def load(name: str) -> Template:
    """A built-in game.

    Raises:
        UsageError: there is none of this name.
    """
    if name not in names():
        raise UsageError(f"there is no template {name!r}; there are {', '.join(names())}")
    _make_importable()
    package = f"{PACKAGE}.{name}"
    about = importlib.import_module(f"{package}.template")
    return Template(
        name=about.NAME,
        version=about.VERSION,
        title=about.TITLE,
        path=root() / name,
        package=package,
        knobs=tuple(_knob(knob, about.KNOBS[knob]) for knob in about.KNOBS),
        keywords=dict(about.KEYWORDS),
        always=dict(about.ALWAYS),
        otherwise=dict(about.OTHERWISE),
        examples=tuple(about.EXAMPLES),
        start_weights=about.START_WEIGHTS,
        warm_up_share=about.WARM_UP_SHARE,
        warm_up_updates=about.WARM_UP_UPDATES,
    )


def load_game(project: Path) -> Any:
    """The `Game` class of a project's folder. It runs in this process, so only for trusted code: tests, tools."""
    folder = str(project.resolve())
    name = f"_game_{hashlib.sha256(folder.encode()).hexdigest()[:16]}"
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [folder]
        sys.modules[name] = package
    return importlib.import_module(f"{name}.env").Game


def _make_importable() -> None:
    """Make the templates' folder the package `vibe_templates`."""
    if PACKAGE not in sys.modules:
        package = ModuleType(PACKAGE)
        package.__path__ = [str(root())]
        sys.modules[PACKAGE] = package


def _knob(name: str, about: Mapping[str, Any]) -> Knob:
    choices = about.get("choices")
    return Knob(
        name=name,
        kind=KnobKind(about["kind"]),
        default=about["default"],
        unit=about["unit"],
        meaning=about["meaning"],
        words=tuple(about["words"]),
        low=about.get("low"),
        high=about.get("high"),
        is_size=about.get("is_size", False),
        choices=None if choices is None else {value: tuple(words) for value, words in choices.items()},
    )
