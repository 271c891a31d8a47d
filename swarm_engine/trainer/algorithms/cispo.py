"""Clipped importance sampling policy optimization (MiniMax 2025, arXiv:2506.13585).

Advantage times log-probability, weighted by a ratio that is clipped from above and carries no gradient. Where PPO's
clip silences a token, here it only bounds its weight: rare tokens that turn an argument are kept.
"""

from __future__ import annotations

import torch

from swarm_engine.config import Knobs
from swarm_engine.trainer.algorithms import grpo
from swarm_engine.trainer.algorithms.method import Method
from swarm_engine.trainer.loss import Objective, Tokens


def objective(tokens: Tokens, knobs: Knobs) -> Objective:
    """min(ratio, 1 + clip_high) as a constant, times advantage times log-probability."""
    assert knobs.clip_high is not None
    ratio_N = torch.exp(tokens.policy_N - tokens.old_N).detach()
    bound = 1 + knobs.clip_high
    return Objective(ratio_N.clamp(max=bound) * tokens.advantages_N * tokens.policy_N, ratio_N, ratio_N > bound)


CISPO = Method(grpo.advantages, objective)
