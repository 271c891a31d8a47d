"""What is computed at once: rows of alike length side by side, or rows that share prefixes laid over each other.

Both give the same scores and gradients; a unit bounds memory and says how many tokens it makes the model read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, assert_never

import numpy as np
import torch
from torch import Tensor

from swarm_engine.config import Merge
from swarm_engine.merger.trie import Ints, sorted_with_shared
from swarm_engine.models.decoder import Decoder
from swarm_engine.trainer.scoring import Row, Scores, plan_microbatches, score
from swarm_engine.trainer.tree import ChunkedTree, Tree, score_tree

CHUNKED_COST = 1.5
"""What a trie costs in chunks beside one pass, as a factor: each token goes forward twice. CPU time of a Qwen3 of
hidden size 256 and 6 layers on 2,580 tokens was 1.3 to 1.5 times that of one pass, in 2 to 8 chunks."""


class Scored(Protocol):
    """Scores, and the way back from a loss of them to the weights."""

    @property
    def scores(self) -> Scores:
        """Of the unit's rows, row after row."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a loss of the scores to that of the weights."""
        ...


class Unit(Protocol):
    """Some rows of a batch, computed together."""

    @property
    def places(self) -> Sequence[int]:
        """Which rows of the batch."""
        ...

    @property
    def num_computed(self) -> int:
        """Tokens that the model reads, padding left out."""
        ...

    def score(self, model: Decoder, *, entropy_has_gradient: bool = False) -> Scored:
        """Score the rows under a model."""
        ...


def plan_units(rows: Sequence[Row], how: Merge, max_tokens: int) -> list[Unit]:
    """Divide rows into units of at most `max_tokens` tokens at once, padding included."""
    match how:
        case Merge.NONE | Merge.TOKEN | Merge.TEXT:
            plan = plan_microbatches([row.num_computed for row in rows], max_tokens)
            return [SideBySide(tuple(places), [rows[place] for place in places]) for places in plan]
        case Merge.TREE:
            sequences = [np.array(row.tokens[: row.num_computed], np.int32) for row in rows]
            plan = plan_trees(sequences, max_tokens)
            return [Overlaid(tuple(places), Tree.of([rows[place] for place in places]), max_tokens) for places in plan]
        case _:
            assert_never(how)


def plan_trees(sequences: Sequence[Ints], max_tokens: int) -> list[list[int]]:
    """Which sequences to lay over each other, so that computing them all costs least.

    Neighbours in depth-first order share most, and a cut between two computes again what they share. A trie of more
    than `max_tokens` goes through in chunks and costs `CHUNKED_COST` for each of its tokens. Takes time quadratic in
    the number of sequences.
    """
    order, shared = sorted_with_shared(sequences)
    lengths = np.array([len(sequences[index]) for index in order], np.int64)
    # Tokens of the trie of ranks start to stop: what each adds to the one before it, and all of the first.
    added = np.concatenate(([0], np.cumsum(lengths - shared)))
    cheapest = np.zeros(len(order) + 1)
    starts = np.zeros(len(order) + 1, np.int64)
    for stop in range(1, len(order) + 1):
        sizes = added[stop] - added[:stop] + shared[:stop]
        costs = cheapest[:stop] + np.where(sizes <= max_tokens, sizes, CHUNKED_COST * sizes)
        starts[stop] = int(costs.argmin())  # of equal ones the largest trie
        cheapest[stop] = costs[starts[stop]]
    trees, stop = [], len(order)
    while stop:
        trees.append(order[starts[stop] : stop])
        stop = int(starts[stop])
    return trees[::-1]


@dataclass(frozen=True, slots=True)
class InOnePass:
    """Scores whose graph is there."""

    scores: Scores

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss)


@dataclass(frozen=True, slots=True)
class InChunks:
    """Scores that are leaves; what reaches them goes back chunk by chunk."""

    scores: Scores
    chunks: ChunkedTree

    def backward(self, loss: Tensor) -> None:
        torch.autograd.backward(loss)
        self.chunks.backward(self.scores)


@dataclass(frozen=True, slots=True)
class SideBySide:
    """A padded micro-batch."""

    places: tuple[int, ...]
    rows: Sequence[Row]

    @property
    def num_computed(self) -> int:
        return sum(row.num_computed for row in self.rows)

    def score(self, model: Decoder, *, entropy_has_gradient: bool = False) -> InOnePass:
        return InOnePass(score(model, self.rows, entropy_has_gradient=entropy_has_gradient))


@dataclass(frozen=True, slots=True)
class Overlaid:
    """Rows over one trie; in chunks where it is larger than what may be computed at once."""

    places: tuple[int, ...]
    tree: Tree
    max_places: int

    @property
    def num_computed(self) -> int:
        return len(self.tree.trie)

    def score(self, model: Decoder, *, entropy_has_gradient: bool = False) -> Scored:
        if self.num_computed <= self.max_places:
            return InOnePass(score_tree(model, self.tree, entropy_has_gradient=entropy_has_gradient))
        chunks = ChunkedTree(model, self.tree, self.max_places, entropy_has_gradient=entropy_has_gradient)
        return InChunks(chunks.score(), chunks)
