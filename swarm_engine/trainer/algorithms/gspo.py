"""Group sequence policy optimization (Zheng et al. 2025, arXiv:2507.18071).

One ratio for a whole sample, the geometric mean of its tokens' ratios, for the reward is of the whole too. All trained
tokens of one agent in one episode share it, whatever calls, timelines or micro-batches they came in.
"""

from __future__ import annotations

import torch

from swarm_engine.config import Knobs
from swarm_engine.trainer.algorithms import grpo
from swarm_engine.trainer.algorithms.method import Method
from swarm_engine.trainer.loss import Objective, Tokens, clipped_surrogate


def objective(tokens: Tokens, knobs: Knobs) -> Objective:
    """The clipped surrogate of the sample's ratio, at each of its tokens; `tokens` holds whole samples."""
    assert knobs.clip_low is not None
    assert knobs.clip_high is not None
    difference_N = tokens.policy_N - tokens.old_N
    num_samples = int(tokens.samples_N.max()) + 1
    totals_S = difference_N.new_zeros(num_samples).index_add(0, tokens.samples_N, difference_N)
    counts_S = torch.bincount(tokens.samples_N, minlength=num_samples)
    ratio_N = torch.exp(totals_S / counts_S.clamp(min=1))[tokens.samples_N]
    return clipped_surrogate(ratio_N, tokens.advantages_N, knobs.clip_low, knobs.clip_high)


GSPO = Method(grpo.advantages, objective, needs_whole_samples=True)
