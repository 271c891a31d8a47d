"""What vibe needs to know about this game: its knobs, and the words by which people mean it and them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAME = "tictactoe"
VERSION = "1"
TITLE = "Tic-tac-toe"
START_WEIGHTS = "nano-tictactoe"
WARM_UP_SHARE = 0.3
"""Share of scripted play in the games that start weights are cloned from; the rest is random legal play."""
WARM_UP_UPDATES = 500
"""Updates of cloning that leave them legal mostly and far from good."""

KNOBS: dict[str, dict[str, Any]] = {
    "size": {
        "kind": "int",
        "default": 3,
        "low": 3,
        "high": 4,
        "unit": "cells a side",
        "is_size": True,
        "meaning": "the board has this many rows and columns",
        "words": ["board", "grid", "size", "square"],
    },
    "win_length": {
        "kind": "int",
        "default": 3,
        "low": 3,
        "high": 4,
        "unit": "in a row",
        "meaning": "this many marks in a row, column or diagonal win; at most the board's size",
        "words": ["in a row", "in a line", "in row", "connected", "consecutive"],
    },
    "opponent": {
        "kind": "choice",
        "default": "random",
        "choices": {
            "random": ["random", "at random", "randomly", "weak", "any cell"],
            "scripted": ["scripted", "strong", "good", "smart", "blocks", "blocking", "heuristic"],
        },
        "unit": "",
        "meaning": "how the other player moves: any free cell, or win if it can, else block, else any free cell",
        "words": ["opponent", "against", "someone", "other player"],
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
        "meaning": "who makes the first move",
        "words": ["first", "second", "start"],
    },
}

KEYWORDS = {
    "tic tac toe": 5.0,
    "tic-tac-toe": 5.0,
    "tictactoe": 5.0,
    "noughts": 4.0,
    "crosses": 3.0,
    "three in a row": 3.0,
    "three in a line": 3.0,
    "in a line": 2.0,
    "xoxo": 3.0,
    "in a row": 2.0,
    "diagonal": 1.5,
    "x and o": 3.0,
    "xs and os": 3.0,
    "column": 1.0,
    "marks": 0.5,
    "board": 0.5,
}
"""Phrases in lower case that speak for this game, and how strongly."""

ALWAYS = {"players": 2}
"""What the game has this many of under every rule."""

OTHERWISE = {
    r"3-?d|three[- ]dimensional": "here the board is flat",
    r"row loses|mis[eè]re": "here a row wins",
}
"""Patterns for what people may ask of this game and it does otherwise, with what it does."""

EXAMPLES = (
    "Play tic-tac-toe against a random opponent.",
    "Noughts and crosses on a four by four board, four in a row wins, the opponent blocks.",
    "Two players put X and O on a board in turn; three in a row wins.",
)


def summary(rules: Mapping[str, Any]) -> str:
    """The game under these rules, in a sentence."""
    opponent = {
        "random": "an opponent that moves at random",
        "scripted": "an opponent that wins and blocks when it can",
    }
    size, win_length = rules["size"], rules["win_length"]
    return f"Tic-tac-toe on a {size}x{size} board, {win_length} in a row win, against {opponent[rules['opponent']]}."


def agents(_rules: Mapping[str, Any]) -> tuple[str, ...]:
    """Every agent that the policy may play, one reward each."""
    return ("player",)
