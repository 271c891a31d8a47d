"""Scripted players of Nim: how many stones to take. `luck` is any allowed number, drawn by chance."""

from __future__ import annotations

from collections.abc import Callable


def play_random(_left: int, _max_take: int, luck: int) -> int:
    """Any allowed number."""
    return luck


def play_scripted(left: int, max_take: int, luck: int) -> int:
    """Leave a multiple of `max_take + 1`, from which the other can't win; where that is impossible, any number."""
    return left % (max_take + 1) or luck


def play_greedy(left: int, max_take: int, luck: int) -> int:
    """Take all that is left when allowed, else any number."""
    return left if left <= max_take else luck


PLAYERS: dict[str, Callable[[int, int, int], int]] = {
    "random": play_random,
    "greedy": play_greedy,
    "scripted": play_scripted,
}
