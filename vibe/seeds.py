"""Which games are for what: training, tests and building start weights never meet.

Seeds of different purposes are derived from different names, and their last digits differ: a template deals its games
from disjoint decks, and `seed % NUM_DECKS` says from which. So not only the seeds are apart but the games they stand
for.
"""

from __future__ import annotations

from enum import IntEnum

from swarm_engine.seeding import derive_seed

NUM_DECKS = 4
"""As in every template's env.py."""


class Deck(IntEnum):
    """What a game may be used for. The fourth deck is training's too, which needs the most games."""

    HELD_OUT = 0
    BUILD = 1
    TRAIN = 2
    MORE_TRAIN = 3


def train_seed(run_seed: int, *place: int | str) -> int:
    """Seed of a train game; `place` says which of the run's games it is."""
    seed = derive_seed("train", run_seed, *place)
    return _in_deck(seed, Deck.MORE_TRAIN if seed & NUM_DECKS else Deck.TRAIN)


def held_out_seed(index: int) -> int:
    """Seed of a held-out game. Every run is measured on the same ones."""
    return _in_deck(derive_seed("heldout", index), Deck.HELD_OUT)


def build_seed(*place: int | str) -> int:
    """Seed of a game for start weights: shipped ones and warm-ups."""
    return _in_deck(derive_seed("build", *place), Deck.BUILD)


def shuffle_seed(run_seed: int, step: int) -> int:
    """Seed of the shuffled-reward control's order at one update."""
    return derive_seed("shuffle", run_seed, step)


def _in_deck(seed: int, deck: Deck) -> int:
    """The seed with its place in the decks set."""
    return seed - seed % NUM_DECKS + deck
