"""What a description came to: the game, where each rule was read, and what could not be used.

A `GameSpec` is data that a brain proposes and code checks. Every requirement points at the user's own words.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from pydantic import BaseModel, Field, model_validator

RuleValue = bool | int | float | str
"""What a template's knob may hold."""


class Frozen(BaseModel, frozen=True, extra="forbid"):
    """Base of the spec's models."""


class RequirementKind(StrEnum):
    """What a sentence asks for."""

    GAME = "game"
    """It says which game this is; the template has it built in."""
    RULE = "rule"
    """It sets one or more of the template's knobs."""


class Requirement(Frozen):
    """One thing the user asked for and got."""

    id: str = Field(pattern=r"^R[1-9][0-9]*$")
    sentence: int = Field(ge=0)
    """Index into the spec's source sentences."""
    kind: RequirementKind
    text: str = Field(min_length=1)
    """The user's words it was read from, a part of that sentence."""
    meaning: str = Field(min_length=1)
    """The same in the template's terms."""
    rules: tuple[str, ...] = ()
    """Knobs it sets; empty where the template works that way for every setting."""


class Unused(Frozen):
    """Words of the user that changed nothing, and why."""

    sentence: int = Field(ge=0)
    text: str = Field(min_length=1)
    reason: str = Field(min_length=1)


class GameSpec(Frozen):
    """A game in the terms of one template."""

    title: str
    source_sentences: tuple[str, ...] = ()
    """The description, cut into sentences, word for word; empty where a program named the template."""
    requirements: tuple[Requirement, ...] = ()
    template: str
    template_version: str
    rules: dict[str, RuleValue]
    """A value for every knob of the template."""
    unused: tuple[Unused, ...] = ()
    assumptions: tuple[str, ...] = ()
    """What the description left open and how it was settled."""

    @model_validator(mode="after")
    def _points_at_its_sentences(self) -> Self:
        quotes = [(item.sentence, item.text) for item in self.requirements]
        quotes += [(item.sentence, item.text) for item in self.unused]
        count = len(self.source_sentences)
        for sentence, text in quotes:
            if sentence >= count:
                raise ValueError(f"{text!r} points at sentence {sentence}, the description has {count}")
            if text not in self.source_sentences[sentence]:
                raise ValueError(f"{text!r} is not in sentence {sentence}; quote the description word for word")
        for requirement in self.requirements:
            if unknown := [rule for rule in requirement.rules if rule not in self.rules]:
                raise ValueError(f"{requirement.id} sets {unknown[0]!r}, the rules are {', '.join(sorted(self.rules))}")
        return self
