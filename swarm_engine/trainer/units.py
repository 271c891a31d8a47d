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
from swarm_engine.merger.trie import plan_trees
from swarm_engine.models.decoder import Decoder
from swarm_engine.trainer.scoring import Row, Scores, plan_microbatches, score
from swarm_engine.trainer.tree import ChunkedTree, Tree, score_tree


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
