"""What vibe needs to know about this game: its knobs, and the words by which people mean it and them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAME = "nim"
VERSION = "1"
TITLE = "Nim"
START_WEIGHTS = "nano-nim"
WARM_UP_SHARE = 0.1
"""Share of scripted play in the games that start weights are cloned from; the rest is random legal play."""
WARM_UP_UPDATES = 300
"""Updates of cloning that leave them legal mostly and far from good."""

KNOBS: dict[str, dict[str, Any]] = {
    "stones": {
        "kind": "int",
        "default": 15,
        "low": 4,
        "high": 60,
        "unit": "stones",
        "meaning": "the heap holds this many stones at the start",
        "words": [
            "stones",
            "stone",
            "coins",
            "coin",
            "matchsticks",
            "matches",
            "sticks",
            "objects",
            "heap of",
            "pile of",
        ],
    },
    "max_take": {
        "kind": "int",
        "default": 3,
        "low": 2,
        "high": 9,
        "unit": "stones a turn",
        "meaning": "a player takes one to this many stones; fewer than the heap holds",
        "words": [
            "take",
            "takes",
            "taking",
            "remove",
            "removes",
            "removing",
            "grab",
            "grabs",
            "up to",
            "per turn",
            "at most",
        ],
    },
    "opponent": {
        "kind": "choice",
        "default": "random",
        "choices": {
            "random": ["random", "at random", "randomly", "weak"],
            "greedy": ["greedy"],
            "scripted": ["scripted", "strong", "good", "smart", "perfect", "perfectly", "optimal"],
        },
        "unit": "",
        "meaning": "how the other player takes: any number, all when it can else any, or perfectly",
        "words": ["opponent", "against", "other player"],
    },
    "first": {
        "kind": "choice",
        "default": "random",
        "choices": {
            "random": ["coin toss", "random start", "toss a coin", "either"],
            "policy": [
                "goes first",
                "moves first",
                "go first",
                "move first",
                "we start",
                "agent starts",
                "model starts",
                "player starts",
            ],
            "opponent": [
                "goes second",
                "moves second",
                "go second",
                "move second",
                "opponent * starts",
                "opponent * first",
            ],
        },
        "unit": "",
        "meaning": "who takes first",
        "words": ["first", "second", "start"],
    },
}

KEYWORDS = {
    "nim": 5.0,
    "last stone": 3.0,
    "last coin": 3.0,
    "last one": 2.0,
    "last match": 3.0,
    "last matchstick": 3.0,
    "final coin": 3.0,
    "heap": 2.0,
    "pile": 2.0,
    "stones": 2.0,
    "matchsticks": 2.5,
    "coins": 1.5,
    "matches": 1.0,
    "pebbles": 2.0,
    "sticks": 1.5,
    "take": 0.5,
    "removing": 1.0,
    "remove": 1.0,
    "empties": 1.0,
}
"""Phrases in lower case that speak for this game, and how strongly."""

ALWAYS = {"players": 2, "heaps": 1, "piles": 1}
"""What the game has this many of under every rule."""

OTHERWISE = {
    r"last (?:\w+ )?loses|loses? .*\blast\b|mis[eè]re": "here whoever takes the last stone wins",
}
"""Patterns for what people may ask of this game and it does otherwise, with what it does."""

EXAMPLES = (
    "Nim with a heap of 15 stones, taking the last stone wins.",
    "Take turns removing one to three matchsticks from a pile; whoever takes the last one wins.",
    "There are eleven coins; each player takes up to four, and the last coin wins.",
)


def summary(rules: Mapping[str, Any]) -> str:
    """The game under these rules, in a sentence."""
    opponent = {
        "random": "an opponent that takes any number",
        "greedy": "an opponent that takes all when it can",
        "scripted": "a perfect opponent",
    }
    return (
        f"Nim with a heap of {rules['stones']} stones, one to {rules['max_take']} a turn, the last stone wins, "
        f"against {opponent[rules['opponent']]}."
    )


def agents(_rules: Mapping[str, Any]) -> tuple[str, ...]:
    """Every agent that the policy may play, one reward each."""
    return ("player",)
