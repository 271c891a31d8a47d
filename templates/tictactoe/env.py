"""Tic-tac-toe: the policy against a scripted opponent, on a square board.

Everything that chance decides is drawn at `reset`, so the episodes of one seed meet the same opponent with the same
luck. A reply that is no free cell loses the game at once and costs more than losing: see rewards.py.
"""

from __future__ import annotations

import random
import zlib
from typing import Any, TypedDict

from . import players, rewards

AGENT = "player"
FREE, MINE, THEIRS = ".", "X", "O"
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
    """The game is over."""

    rewards: dict[str, float]
    outcome: str
    metrics: dict[str, float]
    record: list[dict[str, str]]
    """What was said, in order: seat, text, note."""


class Game:
    """One game at a time; `reset` starts the next."""

    def __init__(self, size: int = 3, win_length: int = 3, opponent: str = "random", first: str = "random") -> None:
        if not 3 <= size <= 4:
            raise ValueError(f"size is {size}, boards go from 3 to 4 cells a side; choose one of these")
        if not 3 <= win_length <= size:
            raise ValueError(f"win_length is {win_length}, on this board it goes from 3 to {size}; lower it")
        if opponent not in players.PLAYERS:
            raise ValueError(f"opponent is {opponent!r}, known are {', '.join(players.PLAYERS)}; choose one of these")
        if first not in ("random", "policy", "opponent"):
            raise ValueError(f"first is {first!r}, it can be random, policy or opponent; choose one of these")
        self.size = size
        self.win_length = win_length
        self.opponent = opponent
        self.first = first
        self.lines = winning_lines(size, win_length)

    def reset(self, seed: int) -> Turn | End:
        """Start the game of this seed."""
        rng = random.Random(seed)
        self.cells = [FREE] * self.size**2
        for _ in range(MAX_DEALS):
            self.luck = rng.sample(range(len(self.cells)), len(self.cells))
            """The opponent's order of preference among cells: the first free one of it is a random free cell."""
            self.is_policy_first = {"policy": True, "opponent": False}.get(self.first, rng.random() < 0.5)
            if deck_of((self.luck, self.is_policy_first)) == seed % NUM_DECKS:
                break
        self.record: list[dict[str, str]] = []
        self._advice = random.Random(rng.random())
        if not self.is_policy_first:
            self._opponent_moves()
        return self._ask()

    def legal(self) -> list[str]:
        """The free cells, by number."""
        return [str(index + 1) for index, cell in enumerate(self.cells) if cell == FREE]

    def step(self, text: str) -> Turn | End:
        """Play the policy's reply, then the opponent's."""
        answer = text.strip()
        if answer not in self.legal():
            self._note("player", text, "not the number of a free cell: the game is lost")
            return self._end("illegal")
        self._put(int(answer) - 1, MINE, "player")
        if self._has_won(MINE):
            return self._end("won")
        if FREE not in self.cells:
            return self._end("drawn")
        self._opponent_moves()
        if self._has_won(THEIRS):
            return self._end("lost")
        if FREE not in self.cells:
            return self._end("drawn")
        return self._ask()

    def suggest(self, player: str) -> str:
        """What a scripted player would answer here."""
        luck = self._advice.sample(range(len(self.cells)), len(self.cells))
        return str(players.PLAYERS[player](self.cells, MINE, THEIRS, self.lines, luck) + 1)

    def snapshot(self) -> dict[str, Any]:
        """The whole state, the opponent's luck included."""
        return {"cells": "".join(self.cells), "luck": self.luck, "is_policy_first": self.is_policy_first}

    def _ask(self) -> Turn:
        system = f"Tic-tac-toe. You are X. {self.win_length} in a row win. Answer with a free number."
        return {"seat": "player", "agent": AGENT, "system": system, "observation": self._board()}

    def _board(self) -> str:
        """Rows of cells; a free cell shows its number."""
        shown = [str(index + 1) if cell == FREE else cell for index, cell in enumerate(self.cells)]
        return "\n".join("|".join(shown[row : row + self.size]) for row in range(0, len(shown), self.size))

    def _opponent_moves(self) -> None:
        cell = players.PLAYERS[self.opponent](self.cells, THEIRS, MINE, self.lines, self.luck)
        self._put(cell, THEIRS, "opponent")

    def _put(self, cell: int, mark: str, seat: str) -> None:
        self.cells[cell] = mark
        self._note(seat, str(cell + 1), self._board())

    def _has_won(self, mark: str) -> bool:
        return any(all(self.cells[cell] == mark for cell in line) for line in self.lines)

    def _note(self, seat: str, text: str, note: str) -> None:
        self.record.append({"seat": seat, "text": text[:MAX_NOTED], "note": note})

    def _end(self, result: str) -> End:
        return {
            "rewards": {AGENT: rewards.REWARDS[result]},
            "outcome": "success" if result == "won" else "failure",
            "metrics": {name: float(name == result) for name in rewards.REWARDS},
            "record": self.record,
        }


def deck_of(game: Any) -> int:
    """The deck that a freshly dealt game belongs to: a checksum of all that chance decided in it."""
    return zlib.crc32(repr(game).encode()) % NUM_DECKS


def winning_lines(size: int, win_length: int) -> list[tuple[int, ...]]:
    """Every row, column and diagonal stretch of `win_length` cells."""
    lines = []
    for row in range(size):
        for column in range(size):
            for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
                last_row, last_column = row + down * (win_length - 1), column + right * (win_length - 1)
                if last_row < size and 0 <= last_column < size:
                    lines.append(tuple((row + down * k) * size + column + right * k for k in range(win_length)))
    return lines
