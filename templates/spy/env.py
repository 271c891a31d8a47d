"""Who is the spy: everyone gets a word, one player a similar one; all give clues, then all vote.

The civilians are the policy, each seat an agent of its own with its own reward. The spy is scripted and knows no more
than they do: nobody is told who has the other word. A clue is one of the words listed for one's own word. The clues of
a round are given at the same time, like the votes: a player hears them when all are in. A vote names the clue that
does not fit, and counts against every other player who gave it. Everything that chance decides is drawn at `reset`, so
the episodes of one seed have the same words and the same spy.

A reply that is no allowed clue or vote counts as none and costs something; one that says the secret word, in whatever
spelling, costs everything and the player is out. See rewards.py.
"""

from __future__ import annotations

import random
import unicodedata
import zlib
from typing import Any, TypedDict

from . import rewards
from .players import PLAYERS

WORDS = {
    "apple": "cider core crisp fruit pie red",
    "pear": "bell fruit green juicy soft stem",
    "cat": "claw milk mouse nap pet purr",
    "dog": "bark bone loyal pet tail walk",
    "tea": "bag drink leaf mint pot spoon",
    "coffee": "bean black dark drink mug roast",
    "sun": "bright day gold hot noon sky",
    "moon": "night pale silver sky tide wolf",
    "boat": "dock oar sail sea travel wave",
    "train": "rail steam ticket track travel tunnel",
    "king": "castle crown gold heir rule throne",
    "knight": "armor brave castle horse shield sword",
}
"""Each word with its clues. Neighbours are a pair of similar words and share exactly one clue."""

NO_CLUE = "-"
NUM_DECKS = 4
"""Games lie in disjoint decks, seed % NUM_DECKS says in which; so a held-out game is never trained on."""
MAX_DEALS = 1000
"""Rules under which a deck is empty, for there are only a few different games, share what there is."""
MAX_NOTED = 80
"""Characters of a reply that the record keeps."""


class Turn(TypedDict):
    """A civilian is to give a clue or to vote."""

    seat: str
    agent: str
    system: str
    observation: str
    """The new user message for this seat."""


class End(TypedDict):
    """The votes are counted."""

    rewards: dict[str, float]
    outcome: str
    metrics: dict[str, float]
    record: list[dict[str, str]]
    """What was said, in order: seat, text, note."""


class Game:
    """One game at a time; `reset` starts the next. Seats count from 1."""

    def __init__(self, players: int = 4, rounds: int = 1, spy: str = "scripted") -> None:
        if not 3 <= players <= 8:
            raise ValueError(f"players is {players}, 3 to 8 can play; choose a number between")
        if not 1 <= rounds <= 3:
            raise ValueError(f"rounds is {rounds}, there are 1 to 3 rounds of clues; choose a number between")
        if spy not in PLAYERS:
            raise ValueError(f"spy is {spy!r}, known are {', '.join(PLAYERS)}; choose one of these")
        self.seats = range(1, players + 1)
        self.rounds = rounds
        self.spy = spy

    def reset(self, seed: int) -> Turn | End:
        """Start the game of this seed."""
        rng = random.Random(seed)
        words = list(WORDS)
        for _ in range(MAX_DEALS):
            index = rng.randrange(len(words))
            self.word, self.spy_word = words[index], words[index ^ 1]
            self.spy_seat = rng.choice(self.seats)
            clues = clues_of(self.spy_word)
            self.luck = {"clues": rng.sample(clues, len(clues)), "votes": rng.sample(self.seats, len(self.seats))}
            """The spy's orders of preference among its clues and among players."""
            if deck_of((self.word, self.spy_seat, self.luck)) == seed % NUM_DECKS:
                break
        self.said: list[tuple[int, str]] = []
        """Every clue of the rounds that are over, with its seat, in order."""
        self.unheard: list[tuple[int, str]] = []
        """The clues of this round."""
        self.votes: dict[int, str] = {}
        """The clue that each seat voted for."""
        self.heard = dict.fromkeys(self.seats, 0)
        """How many of `said` a seat has been told."""
        self.num_illegal = dict.fromkeys(self.seats, 0)
        self.out: set[int] = set()
        """Seats that said their word."""
        self.record: list[dict[str, str]] = []
        self._advice = random.Random(rng.random())
        self.round = 1
        """The round of clues that runs; one more than there are when the vote runs."""
        self.queue = [(number, seat) for number in range(1, self.rounds + 2) for seat in self.seats]
        """Who is to move, in which round."""
        return self._next()

    def legal(self) -> list[str]:
        """The clues or votes allowed to the seat to move."""
        _, seat = self.queue[0]
        if self.is_vote:
            return list(dict.fromkeys(clue for other, clue in self.said if other != seat))
        return clues_of(self.word_of(seat))

    def step(self, text: str) -> Turn | End:
        """Take the reply of the seat to move."""
        _, seat = self.queue[0]
        answer = text.strip().casefold()
        if answer in self.legal():
            self._take(answer, text)
        elif says(self.word_of(seat), text):
            self.out.add(seat)
            self._take(None, text, "says the secret word: the player is out")
        else:
            self.num_illegal[seat] += 1
            self._take(None, text, "not allowed: counts as nothing")
        return self._next()

    def suggest(self, player: str) -> str:
        """What a scripted player would answer here."""
        clues = clues_of(self.word_of(self.queue[0][1]))
        luck = {
            "clues": self._advice.sample(clues, len(clues)),
            "votes": self._advice.sample(self.seats, len(self.seats)),
        }
        return self._scripted(player, luck)

    def snapshot(self) -> dict[str, Any]:
        """The whole state, every secret and the spy's luck included."""
        return {
            "word": self.word,
            "spy_word": self.spy_word,
            "spy_seat": self.spy_seat,
            "luck": self.luck,
            "said": self.said,
            "unheard": self.unheard,
            "votes": {str(seat): vote for seat, vote in self.votes.items()},
            "num_illegal": {str(seat): count for seat, count in self.num_illegal.items()},
            "out": sorted(self.out),
            "queue": self.queue,
        }

    @property
    def is_vote(self) -> bool:
        """Whether all clues are in."""
        return self.round > self.rounds

    def word_of(self, seat: int) -> str:
        """The secret word of a seat."""
        return self.spy_word if seat == self.spy_seat else self.word

    def _next(self) -> Turn | End:
        """Play the spy until a civilian is to move or the game is over."""
        while self.queue:
            number, seat = self.queue[0]
            if number != self.round:
                self.round = number
                self.said += self.unheard
                self.unheard = []
            if seat in self.out:
                self.queue.pop(0)
            elif seat == self.spy_seat:
                answer = self._scripted(self.spy, self.luck)
                self._take(answer, answer)
            else:
                return self._ask()
        return self._end()

    def _scripted(self, player: str, luck: dict[str, list[Any]]) -> str:
        _, seat = self.queue[0]
        script = PLAYERS[player]
        if self.is_vote:
            return script.vote(seat, clues_of(self.word_of(seat)), self.said, luck["votes"])
        return script.clue(luck["clues"][self.round - 1 :])

    def _take(self, answer: str | None, text: str, fault: str = "") -> None:
        """Enter a clue or a vote; None is neither."""
        _, seat = self.queue.pop(0)
        note = fault
        if not self.is_vote:
            self.unheard.append((seat, answer or NO_CLUE))
            note = fault or "gives a clue"
        elif answer is not None:
            self.votes[seat] = answer
            note = f"votes against {' and '.join(f'seat-{other}' for other in self._accused(seat))}"
        who = ", the spy" if seat == self.spy_seat else ""
        self.record.append({"seat": f"seat-{seat}", "text": text[:MAX_NOTED], "note": note + who})

    def _accused(self, seat: int) -> list[int]:
        """The players that a seat's vote counts against."""
        vote = self.votes.get(seat)
        return sorted({other for other, clue in self.said if other != seat and clue == vote})

    def _ask(self) -> Turn:
        _, seat = self.queue[0]
        word = self.word_of(seat)
        news = [clue for other, clue in self.said[self.heard[seat] :] if other != seat]
        self.heard[seat] = len(self.said)
        system = (
            f"Your word is {word}, one of {len(self.seats)} players has another word. "
            f"Your clues: {'/'.join(clues_of(word))}. Give one. Vote for the clue that does not fit your word."
        )
        observation = "\n".join(["/".join(news)] * bool(news) + ["vote?" if self.is_vote else "clue?"])
        return {"seat": f"seat-{seat}", "agent": f"seat-{seat}", "system": system, "observation": observation}

    def _end(self) -> End:
        counts = [sum(seat in self._accused(voter) for voter in self.seats) for seat in self.seats]
        most = max(counts)
        is_spy_out = counts[self.spy_seat - 1] == most and counts.count(most) == 1
        civilians = [seat for seat in self.seats if seat != self.spy_seat]
        paid = {
            f"seat-{seat}": rewards.pay(
                is_spy_out=is_spy_out,
                has_found_spy=self.spy_seat in self._accused(seat),
                num_illegal=self.num_illegal[seat],
                said_word=seat in self.out,
            )
            for seat in civilians
        }
        found = sum(self.spy_seat in self._accused(seat) for seat in civilians)
        return {
            "rewards": paid,
            "outcome": "success" if is_spy_out else "failure",
            "metrics": {
                "won": float(is_spy_out),
                "found": found / len(civilians),
                "illegal": float(sum(self.num_illegal.values())),
                "fouls": float(len(self.out)),
            },
            "record": self.record,
        }


def deck_of(game: Any) -> int:
    """The deck that a freshly dealt game belongs to: a checksum of all that chance decided in it."""
    return zlib.crc32(repr(game).encode()) % NUM_DECKS


def clues_of(word: str) -> list[str]:
    """The clues for a word."""
    return WORDS[word].split()


def says(word: str, text: str) -> bool:
    """Whether the letters of a reply hold the word: plain, plural, in a sentence, spelled with dashes or accents."""
    letters = "".join(char for char in unicodedata.normalize("NFKD", text[:10_000]).casefold() if char.isalpha())
    return word in letters
