"""Scripted walkers: a direction out of the neighbouring cells and the safe distances to the goal."""

from __future__ import annotations

from collections.abc import Callable, Mapping

Cell = tuple[int, int]


def walk_random(neighbours: Mapping[str, Cell], _distances: Mapping[Cell, int], luck: float) -> str:
    """Any direction that stays on the grid. `luck` is in [0, 1)."""
    return list(neighbours)[int(luck * len(neighbours))]


def walk_scripted(neighbours: Mapping[str, Cell], distances: Mapping[Cell, int], luck: float) -> str:
    """A step on a shortest safe way, any of them."""
    far = len(distances) + 1
    best = min(distances.get(cell, far) for cell in neighbours.values())
    good = [name for name, cell in neighbours.items() if distances.get(cell, far) == best]
    return good[int(luck * len(good))]


Player = Callable[[Mapping[str, Cell], Mapping[Cell, int], float], str]
PLAYERS: dict[str, Player] = {"random": walk_random, "scripted": walk_scripted}
