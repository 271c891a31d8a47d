"""What is computed at once: rows of alike length side by side, or rows that share prefixes laid over each other.

Both give the same scores and gradients; a unit bounds memory and says how many tokens it makes the model read.

Ranks that hold one model's weights in shards go through it layer by layer together, so all of them have to make the
same passes, and each pass takes as long as its slowest. Hence units are dealt in rounds of one a rank, neighbours by
cost in the same round, which makes the sum of the rounds' largest costs least; a rank without a unit, or with a
shorter one, fills in passes over a token or two that nothing is learned from.
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
"""What a trie costs in chunks beside one pass, as a factor: each token goes forward twice. `benchmarks/merging.py`
measures it as `chunks / tree`."""


FINE_UNITS = 4
"""Units a rank from which on no finer division is tried."""
FINER = 0.75
"""The size of units that is tried next, as a share of the last one."""


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
    def row_indices(self) -> Sequence[int]:
        """Which rows of the batch."""
        ...

    @property
    def num_computed(self) -> int:
        """Tokens that the model reads, padding left out."""
        ...

    @property
    def num_chunks(self) -> int:
        """1 where `score` and `backward` go through the model once; otherwise `score` goes through it this many times
        without gradient, and `backward` forward and back as often."""
        ...

    @property
    def cost(self) -> float:
        """In tokens that go forward and back."""
        ...

    def score(self, model: Decoder, *, entropy_has_gradient: bool = False) -> Scored:
        """Score the rows under a model."""
        ...


def plan_units(rows: Sequence[Row], how: Merge, max_tokens: int, aim: int | None = None) -> list[Unit]:
    """Divide rows into units of at most `max_tokens` tokens at once, padding included.

    Args:
        aim: tokens that a unit should rather have at most; None for as many as it may.
    """
    aim = max_tokens if aim is None else min(aim, max_tokens)
    match how:
        case Merge.NONE | Merge.TOKEN | Merge.TEXT:
            plan = plan_microbatches([row.num_computed for row in rows], aim)
            return [PaddedUnit(tuple(some), [rows[index] for index in some]) for some in plan]
        case Merge.TREE:
            sequences = [np.array(row.tokens[: row.num_computed], np.int32) for row in rows]
            plan = plan_trees(sequences, aim)
            return [TreeUnit(tuple(some), Tree.of([rows[index] for index in some]), max_tokens) for some in plan]
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
class ScoredInStep:
    """Scores of a unit in step with those of other ranks."""

    scored: Scored
    model: Decoder
    num_fillers: int

    @property
    def scores(self) -> Scores:
        return self.scored.scores

    def backward(self, loss: Tensor) -> None:
        self.scored.backward(loss)
        for _ in range(self.num_fillers):
            torch.autograd.backward(0.0 * score(self.model, [FILLER]).logprobs_N.sum())


@dataclass(frozen=True, slots=True)
class PaddedUnit:
    """A padded micro-batch."""

    row_indices: tuple[int, ...]
    rows: Sequence[Row]

    @property
    def num_computed(self) -> int:
        return sum(row.num_computed for row in self.rows)

    @property
    def num_chunks(self) -> int:
        return 1

    @property
    def cost(self) -> float:
        return float(len(self.rows) * max(row.num_computed for row in self.rows))

    def score(self, model: Decoder, *, entropy_has_gradient: bool = False) -> InOnePass:
        return InOnePass(score(model, self.rows, entropy_has_gradient=entropy_has_gradient))


@dataclass(frozen=True, slots=True)
class TreeUnit:
    """Rows over one trie; in chunks where it is larger than what may be computed at once."""

    row_indices: tuple[int, ...]
    tree: Tree
    max_tokens: int

    @property
    def num_computed(self) -> int:
        return len(self.tree.trie)

    @property
    def num_chunks(self) -> int:
        return -(-self.num_computed // self.max_tokens)

    @property
    def cost(self) -> float:
        return self.num_computed * (1.0 if self.num_chunks == 1 else CHUNKED_COST)

    def score(self, model: Decoder, *, entropy_has_gradient: bool = False) -> Scored:
        if self.num_chunks == 1:
            return InOnePass(score_tree(model, self.tree, entropy_has_gradient=entropy_has_gradient))
        chunks = ChunkedTree(model, self.tree, self.max_tokens, entropy_has_gradient=entropy_has_gradient)
        return InChunks(chunks.score(), chunks)


@dataclass(frozen=True, slots=True)
class InStep:
    """A unit, and passes over a filler that make it as many as the round's longest unit has."""

    unit: Unit
    num_fillers: int

    @property
    def row_indices(self) -> Sequence[int]:
        return self.unit.row_indices

    @property
    def num_computed(self) -> int:
        return self.unit.num_computed

    @property
    def num_chunks(self) -> int:
        return self.unit.num_chunks + self.num_fillers

    @property
    def cost(self) -> float:
        return self.unit.cost

    def score(self, model: Decoder, *, entropy_has_gradient: bool = False) -> Scored:
        scored = self.unit.score(model, entropy_has_gradient=entropy_has_gradient)
        with torch.no_grad():
            for _ in range(self.num_fillers):
                score(model, [FILLER])
        return ScoredInStep(scored, model, self.num_fillers)


FILLER = Row((0, 0, 0), (2,), (1.0,))
"""Something to compute, of as few tokens as can be computed in two chunks."""


def idle_unit(*, is_chunked: bool) -> Unit:
    """A unit of no row of the batch, whose scores are a filler's and must carry no loss."""
    return TreeUnit((), Tree.of([FILLER]), 1) if is_chunked else PaddedUnit((), [FILLER])


def deal(units: Sequence[Unit], num_ranks: int) -> list[list[Unit]]:
    """Rounds of one unit a rank, in which every rank makes the same passes over the model."""
    rounds: list[list[Unit]] = []
    for is_chunked in (True, False):
        alike = sorted((unit for unit in units if (unit.num_chunks > 1) == is_chunked), key=lambda unit: -unit.cost)
        for start in range(0, len(alike), num_ranks):
            some = alike[start : start + num_ranks]
            some += [idle_unit(is_chunked=is_chunked)] * (num_ranks - len(some))
            longest = max(unit.num_chunks for unit in some)
            rounds.append([InStep(unit, longest - unit.num_chunks) for unit in some])
    return rounds


def plan_rounds(rows: Sequence[Row], how: Merge, max_tokens: int, num_ranks: int) -> list[list[Unit]]:
    """Divide rows into rounds of one unit a rank, of at most `max_tokens` tokens at once, padding included.

    Smaller units are tried too where there are few, for a rank without one only waits. They compute more tokens, for
    what contexts share is cut; the cheapest rounds win.
    """
    units = plan_units(rows, how, max_tokens)
    plans = [deal(units, num_ranks)]
    longest = max(row.num_computed for row in rows)
    aim = max(unit.cost for unit in units) * FINER
    while len(units) < min(len(rows), FINE_UNITS * num_ranks) and longest <= aim:
        units = plan_units(rows, how, max_tokens, int(aim))
        plans.append(deal(units, num_ranks))
        aim *= FINER
    return min(plans, key=lambda rounds: sum(max(unit.cost for unit in some) for some in rounds))
