"""What a token weighs whose sampling policy was not the one that the update began with.

Two things part them: older weights, and a sampler that computes otherwise than the trainer. Both are in one number, the
weight exp(proximal - sampling), where the proximal policy is the trainer's at the start of the update (the decoupled
objective: Hilton et al. 2022, arXiv:2110.00641; Fu et al. 2025, arXiv:2505.24298). The algorithm's ratio is then that
of policy and proximal policy; weighting a ratio of policy and sampling would correct twice. Weights are of tokens: over
a sample their product grows with its length, and 1000 tokens that differ by 0.005 nats would weigh 148 together.
"""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor

from swarm_engine.config import Knobs, OffPolicy


def correct(weights_N: Tensor, knobs: Knobs) -> tuple[Tensor, Tensor]:
    """Bound the weights of tokens.

    Returns:
        The weights that the loss uses, and where a bound changed them.
    """
    mode, low, high = knobs.off_policy, knobs.off_policy_low, knobs.off_policy_high
    match mode:
        case OffPolicy.NONE | None:
            return torch.ones_like(weights_N), torch.zeros_like(weights_N, dtype=torch.bool)
        case OffPolicy.TRUNCATED:
            assert high is not None
            return weights_N.clamp(max=high), weights_N > high
        case OffPolicy.MASKED:
            assert low is not None
            assert high is not None
            is_outside_N = (weights_N < low) | (weights_N > high)
            return weights_N.masked_fill(is_outside_N, 0.0), is_outside_N
        case _:
            assert_never(mode)
