"""Nim with one heap: in turn, take some stones; whoever takes the last one wins.

Everything that chance decides is drawn at `reset`, so the episodes of one seed meet the same opponent with the same
luck. A reply that is no allowed number loses the game at once and costs more than losing: see rewards.py.
"""

from __future__ import annotations

import random
import zlib
from typing import Any, TypedDict

from . import players, rewards

AGENT = "player"
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

    def __init__(self, stones: int = 15, max_take: int = 3, opponent: str = "random", first: str = "random") -> None:
        if not 4 <= stones <= 60:
            raise ValueError(f"stones is {stones}, a heap holds 4 to 60; choose a number between")
        if not 2 <= max_take <= 9 or max_take >= stones:
            raise ValueError(f"max_take is {max_take}, it goes from 2 to {min(9, stones - 1)} with {stones} stones")
        if opponent not in players.PLAYERS:
            raise ValueError(f"opponent is {opponent!r}, known are {', '.join(players.PLAYERS)}; choose one of these")
        if first not in ("random", "policy", "opponent"):
            raise ValueError(f"first is {first!r}, it can be random, policy or opponent; choose one of these")
        self.stones = stones
        self.max_take = max_take
        self.opponent = opponent
        self.first = first

    def reset(self, seed: int) -> Turn | End:
        """Start the game of this seed."""
        rng = random.Random(seed)
        for _ in range(MAX_DEALS):
            self.luck = [rng.randint(1, min(self.max_take, left)) for left in range(1, self.stones + 1)]
            """What the opponent takes from 1, 2, 3 … stones where it takes any number."""
            self.is_policy_first = {"policy": True, "opponent": False}.get(self.first, rng.random() < 0.5)
            if deck_of((self.luck, self.is_policy_first)) == seed % NUM_DECKS:
                break
        self.left = self.stones
        self.record: list[dict[str, str]] = []
        self._advice = random.Random(rng.random())
        if self.is_policy_first:
            return self._ask("You start.")
        return self._ask(f"They take {self._opponent_moves()}.")

    def legal(self) -> list[str]:
        """How many stones can be taken."""
        return [str(count) for count in range(1, min(self.max_take, self.left) + 1)]

    def step(self, text: str) -> Turn | End:
        """Play the policy's reply, then the opponent's."""
        answer = text.strip()
        if answer not in self.legal():
            self._note("player", text, "not a number that can be taken: the game is lost")
            return self._end("illegal")
        self._take(int(answer), "player")
        if self.left == 0:
            return self._end("won")
        count = self._opponent_moves()
        if self.left == 0:
            return self._end("lost")
        return self._ask(f"They take {count}.")

    def suggest(self, player: str) -> str:
        """What a scripted player would answer here."""
        luck = self._advice.randint(1, min(self.max_take, self.left))
        return str(players.PLAYERS[player](self.left, self.max_take, luck))

    def snapshot(self) -> dict[str, Any]:
        """The whole state, the opponent's luck included."""
        return {"left": self.left, "luck": self.luck, "is_policy_first": self.is_policy_first}

    def _ask(self, news: str) -> Turn:
        system = (
            f"Nim. Take 1 to {self.max_take} stones in turn. Whoever takes the last stone wins. Answer with a number."
        )
        return {"seat": "player", "agent": AGENT, "system": system, "observation": f"{news} {self.left} left."}

    def _opponent_moves(self) -> int:
        count = players.PLAYERS[self.opponent](self.left, self.max_take, self.luck[self.left - 1])
        self._take(count, "opponent")
        return count

    def _take(self, count: int, seat: str) -> None:
        self.left -= count
        self._note(seat, str(count), f"{self.left} left")

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
