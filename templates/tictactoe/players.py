"""Scripted players of tic-tac-toe: a cell out of a board, and nothing else known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

FREE = "."


def play_random(
    cells: Sequence[str], _mine: str, _theirs: str, _lines: Sequence[tuple[int, ...]], luck: Iterable[int]
) -> int:
    """The first free cell of a random order."""
    return next(cell for cell in luck if cells[cell] == FREE)


def play_scripted(
    cells: Sequence[str], mine: str, theirs: str, lines: Sequence[tuple[int, ...]], luck: Iterable[int]
) -> int:
    """Complete a line, else stop the other from completing one, else a random cell."""
    order = [cell for cell in luck if cells[cell] == FREE]
    for mark in (mine, theirs):
        for cell in order:
            if any(cell in line and all(cells[other] == mark for other in line if other != cell) for line in lines):
                return cell
    return order[0]


Player = Callable[[Sequence[str], str, str, Sequence[tuple[int, ...]], Iterable[int]], int]
PLAYERS: dict[str, Player] = {"random": play_random, "scripted": play_scripted}
