"""REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740).

Each sample's baseline is the mean reward of the others of its group, which leaves the gradient unbiased. No ratio and
no clip: advantage times the sum of the sample's log-probabilities, up to the constant `loss_length`. Off policy that is
the wrong gradient unless `off_policy` weighs it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from swarm_engine.config import Knobs
from swarm_engine.trainer.advantages import are_flat
from swarm_engine.trainer.algorithms.method import Method
from swarm_engine.trainer.loss import Objective, Tokens


def advantages(rewards: Sequence[float], _knobs: Knobs) -> list[float]:
    """Rewards, one a sample, each less the mean of the others."""
    if are_flat(rewards):
        return [0.0] * len(rewards)
    total = math.fsum(rewards)
    return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]


def objective(tokens: Tokens, _knobs: Knobs) -> Objective:
    """Advantage times log-probability; the ratio is only reported."""
    ratio_N = torch.exp(tokens.policy_N.detach() - tokens.old_N)
    return Objective(tokens.advantages_N * tokens.policy_N, ratio_N, torch.zeros_like(ratio_N, dtype=torch.bool))


RLOO = Method(advantages, objective)
