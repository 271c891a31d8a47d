"""Group sequence policy optimization (Zheng et al. 2025, arXiv:2507.18071).

One ratio for a whole sample, the geometric mean of its tokens' ratios, for the reward is of the whole too. All trained
tokens of one agent in one episode share it, whatever calls, timelines or micro-batches they came in.

In the paper's form for tokens (GSPO-token, section 4.3): the shared ratio is a number, and each token's gradient is
that of its own log-probability. Where a sample's tokens have one advantage the gradient is the same; where a step's
reward or a teacher tells tokens apart, each is moved by its own.
"""

from __future__ import annotations

import torch

from swarm_engine.config import Knobs
from swarm_engine.trainer.algorithms import grpo
from swarm_engine.trainer.algorithms.method import Method
from swarm_engine.trainer.loss import Objective, Tokens, clipped_surrogate


def objective(tokens: Tokens, knobs: Knobs) -> Objective:
    """The clipped surrogate at each token of the sample's ratio, with the gradient of the token's own log-probability;
    `tokens` holds whole samples."""
    assert knobs.clip_low is not None
    assert knobs.clip_high is not None
    difference_N = tokens.policy_N - tokens.old_N
    num_samples = int(tokens.samples_N.max()) + 1
    totals_S = difference_N.new_zeros(num_samples).index_add(0, tokens.samples_N, difference_N)
    counts_S = torch.bincount(tokens.samples_N, minlength=num_samples)
    shared_N = torch.exp(totals_S / counts_S.clamp(min=1))[tokens.samples_N].detach()
    ratio_N = shared_N * torch.exp(tokens.policy_N - tokens.policy_N.detach())
    return clipped_surrogate(ratio_N, tokens.advantages_N, knobs.clip_low, knobs.clip_high)


GSPO = Method(grpo.advantages, objective, needs_whole_samples=True)
