"""Scripted players of Who is the Spy. They know their own clues and what was said, like everyone else."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol


class Vote(Protocol):
    """Which clue to vote for."""

    def __call__(
        self, seat: int, clues: Collection[str], said: Sequence[tuple[int, str]], luck: Sequence[int], /
    ) -> str:
        """Another seat's clue. `clues` fit one's own word, `luck` is a random order of all seats."""
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


def vote_for_any(seat: int, _clues: Collection[str], said: Sequence[tuple[int, str]], luck: Sequence[int]) -> str:
    """What anyone else said."""
    accused = next(other for other in luck if other != seat)
    return next(clue for other, clue in said if other == accused)


def vote_by_clues(seat: int, clues: Collection[str], said: Sequence[tuple[int, str]], luck: Sequence[int]) -> str:
    """A clue that does not fit one's own word; where all fit, anyone's."""
    strange = sorted(((luck.index(other), clue) for other, clue in said if other != seat and clue not in clues))
    return strange[0][1] if strange else vote_for_any(seat, clues, said, luck)


PLAYERS = {"random": Player(say_any, vote_for_any), "scripted": Player(say_any, vote_by_clues)}
