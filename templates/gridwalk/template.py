"""What vibe needs to know about this game: its knobs, and the words by which people mean it and them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAME = "gridwalk"
VERSION = "1"
TITLE = "Grid walk"
START_WEIGHTS = "nano-gridwalk"
WARM_UP_SHARE = 0.3
"""Share of scripted play in the games that start weights are cloned from; the rest is random legal play."""
WARM_UP_UPDATES = 600
"""Updates of cloning that leave them legal mostly and far from good."""

KNOBS: dict[str, dict[str, Any]] = {
    "size": {
        "kind": "int",
        "default": 3,
        "low": 3,
        "high": 8,
        "unit": "cells a side",
        "is_size": True,
        "meaning": "the grid has this many rows and columns",
        "words": ["grid", "lake", "map", "board", "cells", "maze", "size"],
    },
    "holes": {
        "kind": "int",
        "default": 2,
        "low": 0,
        "high": 21,
        "unit": "holes",
        "meaning": "this many cells end the walk; at most a third of the grid",
        "words": ["holes", "hole", "pits", "pit", "traps", "trap"],
    },
    "moves": {
        "kind": "int",
        "default": 6,
        "low": 1,
        "high": 40,
        "unit": "moves",
        "meaning": "a walk ends after this many moves",
        "words": ["moves", "move", "steps", "step", "turns"],
    },
    "start": {
        "kind": "choice",
        "default": "random",
        "choices": {
            "random": ["random cell", "anywhere", "random place"],
            "corner": ["corner", "top left", "upper left"],
        },
        "unit": "",
        "meaning": "where the walk starts: any cell, or the top left corner",
        "words": ["starts", "start", "begins"],
    },
}

KEYWORDS = {
    "grid": 2.0,
    "frozen lake": 4.0,
    "lake": 1.5,
    "holes": 2.0,
    "pit": 2.0,
    "pits": 2.0,
    "goal": 1.5,
    "exit": 1.5,
    "walk": 2.0,
    "walker": 2.0,
    "robot": 1.5,
    "maze": 3.0,
    "navigation": 1.5,
    "direction": 1.0,
    "map": 1.0,
    "flag": 0.5,
    "treasure": 1.5,
    "traps": 2.0,
    "steps": 0.5,
    "path": 0.5,
    "avoid": 0.5,
}
"""Phrases in lower case that speak for this game, and how strongly."""

ALWAYS = {"robots": 1, "walkers": 1, "agents": 1, "goals": 1, "exits": 1}
"""What the game has this many of under every rule."""

OTHERWISE = {
    r"slip(?:s|pery|ping)?|slid(?:e|es|ing)": "here a step goes where it is told",
    r"diagonal(?:ly|s)?": "here steps go up, down, left or right",
    r"enem(?:y|ies)|monsters?|keys?|doors?|walls?": "here the grid holds a goal and holes, nothing else",
}
"""Patterns for what people may ask of this game and it does otherwise, with what it does."""

EXAMPLES = (
    "A robot walks across a 3x3 grid to the goal and must not step into holes.",
    "Walk over a frozen lake of four by four cells to the goal; avoid the holes.",
    "Find the exit of a small maze with three pits in at most 8 moves.",
)


def summary(rules: Mapping[str, Any]) -> str:
    """The game under these rules, in a sentence."""
    size = rules["size"]
    return (
        f"A walk to the goal over a {size}x{size} grid with {rules['holes']} holes, in at most {rules['moves']} moves."
    )


def agents(_rules: Mapping[str, Any]) -> tuple[str, ...]:
    """Every agent that the policy may play, one reward each."""
    return ("walker",)
