"""Scoring rows that share prefixes: every distinct prefix is computed once, the loss stays that of the rows.

What a model computes at a token depends on the tokens before it alone, so all rows that begin alike can use one
computation. Its log-probabilities are handed to each row that asked for them, the loss is taken row by row as ever,
and automatic differentiation sums what comes back: with logprob_u shared by the copies c in C(u),

    dL/dtheta = sum over u of ( sum over c in C(u) of dL/dlogprob_c ) dlogprob_u/dtheta

which holds for any loss of the log-probabilities, whatever each copy's advantage, ratio or weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from swarm_engine.merger.trie import Ints, Trie, build_trie
from swarm_engine.models.decoder import Decoder
from swarm_engine.trainer.scoring import Row, Scores, Targets, read_scores
from swarm_engine.trainer.tree_attention import Memory, TreeAttention


@dataclass(frozen=True, slots=True)
class Tree:
    """Rows over one trie."""

    trie: Trie
    targets: Targets
    """Of the rows, row after row; their predictors are places of the trie."""

    @staticmethod
    def of(rows: Sequence[Row], build: Callable[[Sequence[Ints]], Trie] = build_trie) -> Tree:
        """Lay rows over each other, or as `build` lays them."""
        trie = build([np.array(row.tokens[: row.num_computed], np.int32) for row in rows])
        predictors = [places[np.array(row.targets) - 1] for row, places in zip(rows, trie.places, strict=True)]
        return Tree(trie, Targets.of(rows, np.concatenate(predictors).astype(np.int64)))


def score_tree(model: Decoder, tree: Tree, *, entropy_has_gradient: bool = False) -> Scores:
    """Score the rows of a tree in one pass."""
    hidden_U_C = _hidden(model, tree.trie, 0, len(tree.trie), None)
    return read_scores(model, hidden_U_C, tree.targets, entropy_has_gradient=entropy_has_gradient)


class ChunkedTree:
    """The rows of a tree, scored and differentiated chunk by chunk, holding the activations of one chunk at a time.

    Keys and values of the whole tree are kept, and their gradients on the way back. Each token goes forward twice and
    backward once, which is what activation checkpointing costs.
    """

    def __init__(self, model: Decoder, tree: Tree, max_places: int, *, entropy_has_gradient: bool = False) -> None:
        self._model = model
        self._tree = tree
        self._entropy_has_gradient = entropy_has_gradient
        self._memory = Memory(len(tree.trie))
        starts = range(0, len(tree.trie), max_places)
        self._chunks = [self._chunk(start, min(start + max_places, len(tree.trie))) for start in starts]

    def score(self) -> Scores:
        """Score the rows; the result is a leaf, whose gradient `backward` hands on to the weights."""
        num_targets = len(self._tree.targets.labels_N)
        parts = []
        with torch.no_grad():
            for chunk in self._chunks:
                hidden_T_C = self._hidden(chunk)
                if chunk.targets is not None:
                    parts.append(read_scores(self._model, hidden_T_C, chunk.targets))
        like = parts[0].logprobs_N
        logprobs_N, entropies_N = like.new_empty(num_targets), like.new_empty(num_targets)
        for chunk, part in zip([chunk for chunk in self._chunks if chunk.targets is not None], parts, strict=True):
            logprobs_N[chunk.places_N], entropies_N[chunk.places_N] = part.logprobs_N, part.entropies_N
        is_trained = torch.is_grad_enabled()  # a reference policy is scored without
        return Scores(
            logprobs_N.requires_grad_(is_trained),
            entropies_N.requires_grad_(is_trained and self._entropy_has_gradient),
        )

    def backward(self, scores: Scores) -> None:
        """Add the gradient that has reached the scores to that of the weights."""
        grad_logprobs_N, grad_entropies_N = scores.logprobs_N.grad, scores.entropies_N.grad
        for chunk in reversed(self._chunks):
            hidden_T_C = self._hidden(chunk)
            # Zeros from the top let a chunk without a loss of its own hand on what reached its keys and values.
            heads, grads = [hidden_T_C], [torch.zeros_like(hidden_T_C)]
            if chunk.targets is not None:
                part = read_scores(
                    self._model, hidden_T_C, chunk.targets, entropy_has_gradient=self._entropy_has_gradient
                )
                if grad_logprobs_N is not None:
                    heads.append(part.logprobs_N)
                    grads.append(grad_logprobs_N[chunk.places_N])
                if grad_entropies_N is not None:
                    heads.append(part.entropies_N)
                    grads.append(grad_entropies_N[chunk.places_N])
            torch.autograd.backward(heads, grads)

    def _chunk(self, start: int, stop: int) -> _Chunk:
        targets = self._tree.targets
        places_N = ((targets.predictors_N >= start) & (targets.predictors_N < stop)).nonzero().squeeze(1)
        if len(places_N) == 0:
            return _Chunk(start, stop, places_N, None)
        own = Targets(
            targets.predictors_N[places_N] - start, targets.labels_N[places_N], targets.temperatures_N[places_N]
        )
        return _Chunk(start, stop, places_N, own)

    def _hidden(self, chunk: _Chunk) -> Tensor:
        return _hidden(self._model, self._tree.trie, chunk.start, chunk.stop, self._memory)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Consecutive places of a tree."""

    start: int
    stop: int
    places_N: Tensor
    """Which of the tree's targets are predicted here."""
    targets: Targets | None
    """Those, predicted by places of the chunk."""


def _hidden(model: Decoder, trie: Trie, start: int, stop: int, memory: Memory | None) -> Tensor:
    """Hidden states of some places, shape (T, C)."""
    tokens = torch.from_numpy(trie.tokens_U[start:stop].astype(np.int64)).to(model.device)
    depths = torch.from_numpy(trie.depths_U[start:stop].astype(np.int64)).to(model.device)
    attend = TreeAttention(trie, start, stop, memory)
    return model.hidden(tokens.unsqueeze(0), depths, attend).squeeze(0)
