"""The objective of one update, over the trained tokens alone: no padding, no mask, no mean over an empty set.

Axis N: trained tokens, of any samples in any order. The result is a weighted sum whose weights already hold the
denominators of the whole batch, so the losses of micro-batches add up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The loss, and what it was made of."""

    loss: Tensor
    """Scalar; this micro-batch's share of the batch's loss."""
    ratio_N: Tensor
    """exp(policy - sampling) log-probability, detached."""
    is_clipped_N: Tensor
    """Where the clipped branch was the smaller, so that the token has no gradient of its own."""


def policy_loss(
    policy_logprobs_N: Tensor,
    sampling_logprobs_N: Tensor,
    advantages_N: Tensor,
    weights_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> LossTerms:
    """PPO's clipped surrogate (Schulman et al. 2017, arXiv:1707.06347) with an upper bound of its own.

    Args:
        policy_logprobs_N: in nats, of the weights being trained, at the temperature that sampled.
        sampling_logprobs_N: in nats, as the sampler reported them.
        weights_N: see `samples.token_weight`.
    """
    ratio_N = torch.exp(policy_logprobs_N - sampling_logprobs_N)
    free_N = ratio_N * advantages_N
    bounded_N = ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N
    loss = -(weights_N * torch.minimum(free_N, bounded_N)).sum()
    return LossTerms(loss, ratio_N.detach(), (bounded_N < free_N).detach())


def kl_penalty(policy_logprobs_N: Tensor, reference_logprobs_N: Tensor) -> Tensor:
    """Estimate of KL(policy || reference) at each token, never negative: k3 of Schulman's note on approximating KL."""
    difference_N = reference_logprobs_N - policy_logprobs_N
    return torch.exp(difference_N) - difference_N - 1


def entropy(logits_N_V: Tensor) -> Tensor:
    """Entropy in nats of softmax(logits), shape (N,); a token whose logit is -inf adds nothing, nor to the gradient."""
    finite_N_V = logits_N_V.masked_fill(logits_N_V == -torch.inf, 0.0)
    return logits_N_V.logsumexp(-1) - (logits_N_V.softmax(-1) * finite_N_V).sum(-1)
