"""Scripted players of Who is the Spy. They know their own clues and what was said, like everyone else."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol


class Vote(Protocol):
    """Whom to vote for."""

    def __call__(
        self, seat: int, clues: Collection[str], said: Sequence[tuple[int, str]], luck: Sequence[int], /
    ) -> int:
        """Another seat. `clues` fit one's own word, `luck` is a random order of all seats."""
        ...


class Clue(Protocol):
    """What to say."""

    def __call__(self, luck: Sequence[str]) -> str:
        """A clue out of `luck`, one's own clues in a random order."""
        ...


@dataclass(frozen=True, slots=True)
class Player:
    """How to speak and how to vote."""

    clue: Clue
    vote: Vote


def say_any(luck: Sequence[str]) -> str:
    """Any of one's clues."""
    return luck[0]


def vote_for_any(seat: int, _clues: Collection[str], _said: Sequence[tuple[int, str]], luck: Sequence[int]) -> int:
    """Anyone else."""
    return next(other for other in luck if other != seat)


def vote_by_clues(seat: int, clues: Collection[str], said: Sequence[tuple[int, str]], luck: Sequence[int]) -> int:
    """Someone who gave a clue that does not fit one's own word; where all fit, anyone else."""
    strange = {other for other, clue in said if clue not in clues}
    return next((other for other in luck if other != seat and other in strange), vote_for_any(seat, clues, said, luck))


PLAYERS = {"random": Player(say_any, vote_for_any), "scripted": Player(say_any, vote_by_clues)}
