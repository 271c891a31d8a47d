"""Log-probabilities of chosen tokens under the weights: the forward pass that every kind of training shares.

Rows are padded on the right and attention is causal, so no row sees its padding and none needs a mask. Logits are
computed at the scored places only, some at a time.

Wherever the model is, what is asked of it and the scores are on the CPU: a number a token is little, and all that is
made of scores need then not know where they come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from swarm_engine.models.decoder import Decoder, attend_causally
from swarm_engine.trainer.loss import entropy

MAX_LOGITS = 1 << 24
"""Logits held at once: 64 MiB in float32. Where there are more they are computed again for the backward pass."""


@dataclass(frozen=True, slots=True)
class Row:
    """One context and the tokens of it to be scored."""

    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    """Places of the scored tokens, each at least 1: token p is predicted at place p - 1."""
    temperatures: tuple[float, ...]
    """At which each was sampled, and is scored; 1 for text that nobody sampled."""

    def __post_init__(self) -> None:
        assert min(self.targets, default=0) >= 1, "a row scores something, and its first token has nothing before it"

    @property
    def num_computed(self) -> int:
        """Tokens the model has to read: the last scored one and what follows predict nothing."""
        return max(self.targets)


@dataclass(frozen=True, slots=True)
class Scores:
    """Of the scored tokens of some rows, row after row, as shape (N,), on the CPU."""

    logprobs_N: Tensor
    """In nats, under softmax(logits / temperature)."""
    entropies_N: Tensor
    """In nats, of the same distribution."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Scored tokens of some rows, row after row, as shape (N,)."""

    predictors_N: Tensor
    """Where among the hidden states each is predicted; several may share one."""
    labels_N: Tensor
    temperatures_N: Tensor

    @staticmethod
    def of(rows: Sequence[Row], predictors: NDArray[np.int64]) -> Targets:
        """The targets of some rows, given where each is predicted."""
        return Targets(
            torch.from_numpy(predictors),
            torch.tensor([row.tokens[target] for row in rows for target in row.targets]),
            torch.tensor([temperature for row in rows for temperature in row.temperatures], dtype=torch.float64),
        )


def plan_microbatches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Places of `lengths` in micro-batches of at most `max_tokens`, padding included, one row at least.

    Alike lengths come together: 64 rows of mixed lengths at once were measured at 5.2k tokens per CPU-second, sorted
    batches of 16 at 9.0k.
    """
    batches: list[list[int]] = []
    longest = 0
    for row_index in sorted(range(len(lengths)), key=lambda row_index: (-lengths[row_index], row_index)):
        if batches and longest * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(row_index)
        else:
            batches.append([row_index])
            longest = lengths[row_index]
    return batches


def score(model: Decoder, rows: Sequence[Row], *, entropy_has_gradient: bool = False) -> Scores:
    """Score the targets of one micro-batch of rows."""
    counts_B = [row.num_computed for row in rows]
    width = max(counts_B)
    tokens_B_T: NDArray[np.int64] = np.zeros((len(rows), width), np.int64)
    for row_index, (row, count) in enumerate(zip(rows, counts_B, strict=True)):
        tokens_B_T[row_index, :count] = row.tokens[:count]
    predictors = [row_index * width + target - 1 for row_index, row in enumerate(rows) for target in row.targets]
    targets = Targets.of(rows, np.array(predictors, np.int64))
    tokens, positions = torch.from_numpy(tokens_B_T).to(model.device), torch.arange(width, device=model.device)
    hidden_B_T_C = model.hidden(tokens, positions, attend_causally)
    return read_scores(model, hidden_B_T_C.flatten(0, 1), targets, entropy_has_gradient=entropy_has_gradient)


def read_scores(model: Decoder, hidden_U_C: Tensor, targets: Targets, *, entropy_has_gradient: bool = False) -> Scores:
    """Score targets from hidden states, shape (U, C). Targets with one predictor and temperature share its logits."""
    asked = torch.stack((targets.predictors_N.to(torch.float64), targets.temperatures_N), dim=1)
    asked_P_2, slots_N = torch.unique(asked, dim=0, return_inverse=True)
    order_N = torch.argsort(slots_N, stable=True)
    predictors_P, temperatures_P = asked_P_2[:, 0].long(), asked_P_2[:, 1]
    step = max(1, MAX_LOGITS // model.config.vocab_size)
    bounds = torch.searchsorted(slots_N[order_N], torch.arange(0, len(asked_P_2) + step, step))
    parts: list[tuple[Tensor, Tensor]] = []
    for number, first in enumerate(range(0, len(asked_P_2), step)):
        some_N = order_N[bounds[number] : bounds[number + 1]]
        asked_here = (
            predictors_P[first : first + step],
            temperatures_P[first : first + step],
            slots_N[some_N] - first,
            targets.labels_N[some_N],
        )
        places, temperatures, slots, labels = (one.to(hidden_U_C.device) for one in asked_here)
        rest = (temperatures, slots, labels)
        hidden = hidden_U_C[places]
        if len(asked_P_2) > step and torch.is_grad_enabled():
            parts.append(checkpoint(_read, model, hidden, *rest, entropy_has_gradient, use_reentrant=False))
        else:
            parts.append(_read(model, hidden, *rest, entropy_has_gradient))
    back_N = torch.argsort(order_N)
    logprobs, entropies = (torch.cat(some).cpu()[back_N] for some in zip(*parts, strict=True))
    return Scores(logprobs, entropies)


def _read(
    model: Decoder, hidden_P_C: Tensor, temperatures_P: Tensor, slots_N: Tensor, labels_N: Tensor, has_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of labels and entropies of their distributions, both of shape (N,)."""
    logits_P_V = model.logits(hidden_P_C)
    logits_P_V = logits_P_V.to(torch.promote_types(logits_P_V.dtype, torch.float32))
    logits_P_V = logits_P_V / temperatures_P.to(logits_P_V.dtype).unsqueeze(1)
    logprobs_N = logits_P_V[slots_N, labels_N] - logits_P_V.logsumexp(-1)[slots_N]
    with torch.set_grad_enabled(has_gradient and torch.is_grad_enabled()):
        entropies_P = entropy(logits_P_V)
    return logprobs_N, entropies_P[slots_N]
