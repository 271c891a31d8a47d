"""A walk over a square grid: reach the goal, step into no hole, in a limited number of moves.

The map is drawn at `reset` and always has a safe way to the goal within the limit. A reply that is no direction, or
that leads off the grid, ends the walk and costs more than a hole: see rewards.py.
"""

from __future__ import annotations

import random
import zlib
from typing import Any, TypedDict

from . import players, rewards

AGENT = "walker"
NUM_DECKS = 4
"""Games lie in disjoint decks, seed % NUM_DECKS says in which; so a held-out game is never trained on."""
MAX_DEALS = 1000
"""Rules under which a deck is empty, for there are only a few different games, share what there is."""
MAX_NOTED = 80
"""Characters of a reply that the record keeps."""


class Turn(TypedDict):
    """The policy is to move."""

    seat: str
    agent: str
    system: str
    observation: str
    """The new user message for this seat."""


class End(TypedDict):
    """The walk is over."""

    rewards: dict[str, float]
    outcome: str
    metrics: dict[str, float]
    record: list[dict[str, str]]
    """What was said, in order: seat, text, note."""


class Game:
    """One walk at a time; `reset` starts the next."""

    def __init__(self, size: int = 3, holes: int = 2, moves: int = 6, start: str = "random") -> None:
        if not 3 <= size <= 8:
            raise ValueError(f"size is {size}, grids go from 3 to 8 cells a side; choose one of these")
        if not 0 <= holes <= size * size // 3:
            raise ValueError(f"holes is {holes}, a grid of this size has room for 0 to {size * size // 3}; lower it")
        if not 1 <= moves <= 40:
            raise ValueError(f"moves is {moves}, a walk takes 1 to 40; choose a number between")
        if start not in ("random", "corner"):
            raise ValueError(f"start is {start!r}, it can be random or corner; choose one of these")
        self.size = size
        self.holes = holes
        self.moves = moves
        self.start = start

    def reset(self, seed: int) -> Turn | End:
        """Draw the map of this seed: start, goal and holes, again until there is a safe way within the limit."""
        rng = random.Random(seed)
        cells = [(row, column) for row in range(self.size) for column in range(self.size)]
        num_deals = 0
        while True:
            start, self.goal, *holes = rng.sample(cells, 2 + self.holes)
            if self.start == "corner":
                start = (0, 0)
            self.pits = sorted(holes)
            if start == self.goal or start in holes or self._distances().get(start, self.moves + 1) > self.moves:
                continue
            num_deals += 1
            if deck_of((start, self.goal, self.pits)) == seed % NUM_DECKS or num_deals == MAX_DEALS:
                break
        self.place = start
        self.left = self.moves
        self._advice = random.Random(rng.random())
        self.record: list[dict[str, str]] = []
        return self._ask()

    def legal(self) -> list[str]:
        """The directions that stay on the grid; holes are allowed and end the walk."""
        return list(self._neighbours(self.place))

    def step(self, text: str) -> Turn | End:
        """Walk one cell."""
        answer = text.strip().casefold()
        neighbours = self._neighbours(self.place)
        if answer not in neighbours:
            self._note(text, "not a direction that stays on the grid: the walk ends")
            return self._end("illegal")
        self.place = neighbours[answer]
        self.left -= 1
        self._note(answer, shown(self.place))
        if self.place == self.goal:
            return self._end("arrived")
        if self.place in self.pits:
            return self._end("fell")
        if self.left == 0:
            return self._end("late")
        return self._ask()

    def suggest(self, player: str) -> str:
        """What a scripted player would answer here."""
        return players.PLAYERS[player](self._neighbours(self.place), self._distances(), self._advice.random())

    def snapshot(self) -> dict[str, Any]:
        """The whole state."""
        return {"place": self.place, "goal": self.goal, "pits": self.pits, "left": self.left}

    def _ask(self) -> Turn:
        system = (
            f"Walk on a {self.size} by {self.size} grid to the goal; avoid the holes. "
            "Cells are row,column from the top left. Answer up, down, left or right."
        )
        lines = [f"holes {' '.join(map(shown, self.pits))}"] if self.pits and self.left == self.moves else []
        lines.append(f"goal {shown(self.goal)} you {shown(self.place)}")
        return {"seat": "walker", "agent": AGENT, "system": system, "observation": "\n".join(lines)}

    def _neighbours(self, cell: tuple[int, int]) -> dict[str, tuple[int, int]]:
        """Where each direction that stays on the grid leads."""
        steps = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
        reached = {name: (cell[0] + down, cell[1] + right) for name, (down, right) in steps.items()}
        return {
            name: (row, col) for name, (row, col) in reached.items() if 0 <= row < self.size and 0 <= col < self.size
        }

    def _distances(self) -> dict[tuple[int, int], int]:
        """Safe steps from a cell to the goal; cells with no safe way are left out."""
        distances = {self.goal: 0}
        queue = [self.goal]
        for cell in queue:
            for near in self._neighbours(cell).values():
                if near not in distances and near not in self.pits:
                    distances[near] = distances[cell] + 1
                    queue.append(near)
        return distances

    def _note(self, text: str, note: str) -> None:
        self.record.append({"seat": "walker", "text": text[:MAX_NOTED], "note": note})

    def _end(self, result: str) -> End:
        return {
            "rewards": {AGENT: rewards.REWARDS[result]},
            "outcome": {"arrived": "success", "late": "truncated"}.get(result, "failure"),
            "metrics": {name: float(name == result) for name in rewards.REWARDS},
            "record": self.record,
        }


def deck_of(game: Any) -> int:
    """The deck that a freshly dealt game belongs to: a checksum of all that chance decided in it."""
    return zlib.crc32(repr(game).encode()) % NUM_DECKS


def shown(cell: tuple[int, int]) -> str:
    """A cell as row,column, from 1."""
    return f"{cell[0] + 1},{cell[1] + 1}"
