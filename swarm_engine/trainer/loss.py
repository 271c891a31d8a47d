"""The pieces that objectives are made of, over the trained tokens alone: no padding, no mask, no mean of an empty set.

Axis N: trained tokens, of any samples in any order. Objectives are per token and to be raised; the trainer's loss is
their weighted sum with the sign changed, and the weights hold the denominators of the whole batch, so that the losses
of micro-batches add up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tokens:
    """What an objective is made of."""

    policy_N: Tensor
    """Log-probabilities in nats under the weights being trained, at the temperature that sampled; with gradient."""
    old_N: Tensor
    """The same of the policy that the ratio is taken to: the sampling policy, or the proximal one (`off_policy`)."""
    advantages_N: Tensor
    samples_N: Tensor
    """Number of the sample that each token belongs to, from 0."""


@dataclass(frozen=True, slots=True)
class Objective:
    """What a batch of tokens is worth under an algorithm."""

    values_N: Tensor
    """Before denominators and correction weights."""
    ratio_N: Tensor
    """Policy over old policy, detached."""
    is_clipped_N: Tensor
    """Where a bound of the ratio took effect."""


def clipped_surrogate(ratio_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float) -> Objective:
    """PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347) with an upper bound of its own: the smaller of
    ratio * advantage with the ratio free and with it clipped, so that a clipped token has no gradient."""
    free_N = ratio_N * advantages_N
    bounded_N = ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    return Objective(torch.minimum(free_N, bounded_N), ratio_N.detach(), (bounded_N < free_N).detach())


def k3(policy_logprobs_N: Tensor, other_logprobs_N: Tensor) -> Tensor:
    """Estimate of KL(policy || other) at each token, never negative: k3 of Schulman's note on approximating KL."""
    difference_N = other_logprobs_N - policy_logprobs_N
    return torch.exp(difference_N) - difference_N - 1


MAX_PENALTY = 10.0
"""Nats of a token, and with it no gradient beyond: without a bound one token that the reference finds e^30 times as
likely has a gradient of 1e13, and clipping its norm would leave nothing of all others. verl's bound."""
MAX_DIFFERENCE = 20.0
"""Nats, far beyond where a penalty ends on either side."""


def kl_penalty(policy_logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """`k3` as a term of a loss: nats, shape (N,), at most `MAX_PENALTY` a token.

    Differences are bounded before they are exponentiated, for an infinite value would have a gradient of NaN.
    """
    bounded_N = (reference_logprobs_N - policy_logprobs_N).clamp(-MAX_DIFFERENCE, MAX_DIFFERENCE)
    return (torch.exp(bounded_N) - bounded_N - 1).clamp(max=MAX_PENALTY)


def entropy(logits_N_V: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits), shape (N,); a token whose logit is -inf adds nothing, nor to the gradient."""
    finite_N_V = logits_N_V.masked_fill(logits_N_V == -torch.inf, 0.0)
    return logits_N_V.logsumexp(-1) - (logits_N_V.softmax(-1) * finite_N_V).sum(-1)
