"""What vibe needs to know about this game: its knobs, and the words by which people mean it and them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAME = "spy"
VERSION = "1"
TITLE = "Who is the spy"
START_WEIGHTS = "nano-spy"
WARM_UP_SHARE = 0.3
"""Share of scripted play in the games that start weights are cloned from; the rest is random legal play."""
WARM_UP_UPDATES = 1600
"""Updates of cloning that leave them legal mostly and far from good."""

KNOBS: dict[str, dict[str, Any]] = {
    "players": {
        "kind": "int",
        "default": 4,
        "low": 3,
        "high": 8,
        "unit": "players",
        "meaning": "this many play, one of them is the spy",
        "words": ["players", "player", "people", "friends", "persons", "participants", "of us"],
    },
    "rounds": {
        "kind": "int",
        "default": 1,
        "low": 1,
        "high": 3,
        "unit": "rounds",
        "meaning": "everyone gives this many clues before the vote",
        "words": ["rounds", "round"],
    },
    "spy": {
        "kind": "choice",
        "default": "scripted",
        "choices": {
            "scripted": ["clever spy", "smart spy", "strong spy"],
            "random": ["random spy", "weak spy"],
        },
        "unit": "",
        "meaning": "how the spy votes: for a player whose clue does not fit its word, or for anyone",
        "words": ["spy"],
    },
}

KEYWORDS = {
    "who is the spy": 5.0,
    "who's the spy": 5.0,
    "spy": 3.0,
    "undercover": 5.0,
    "impostor": 3.0,
    "hidden identities": 2.0,
    "odd one out": 2.0,
    "civilians": 2.0,
    "secret word": 2.5,
    "similar word": 2.5,
    "different word": 2.5,
    "social deduction": 2.0,
    "other word": 1.5,
    "clue": 1.5,
    "hints": 1.0,
    "describe": 1.0,
    "describes": 1.0,
    "vote": 1.5,
    "votes": 1.5,
    "suspect": 1.0,
}
"""Phrases in lower case that speak for this game, and how strongly."""

ALWAYS = {"spies": 1, "impostors": 1, "undercovers": 1}
"""What the game has this many of under every rule."""

OTHERWISE = {
    r"spy (?:knows|is told)": "here nobody is told who has the other word",
    r"eliminated players?|until (?:one|two|only) .*\b(?:left|remain)": "here the game ends with the vote",
}
"""Patterns for what people may ask of this game and it does otherwise, with what it does."""

EXAMPLES = (
    "Who is the spy: four players get a word, one of them a similar one; everyone describes it, then all vote.",
    "Undercover with five people: one has a slightly different word; after two rounds of clues they vote.",
    "Everyone gets a secret word, the impostor a related one. Give a clue each, then vote the impostor out.",
)


def summary(rules: Mapping[str, Any]) -> str:
    """The game under these rules, in a sentence."""
    rounds = "one round" if rules["rounds"] == 1 else f"{rules['rounds']} rounds"
    return f"Who is the spy with {rules['players']} players: {rounds} of clues, then a vote; the civilians are trained."


def agents(rules: Mapping[str, Any]) -> tuple[str, ...]:
    """Every agent that the policy may play, one reward each; in a game, the spy's seat is none of them."""
    return tuple(f"seat-{seat}" for seat in range(1, rules["players"] + 1))
