"""Group-relative policy optimization (Shao et al. 2024, arXiv:2402.03300).

The advantage is the reward less the group's mean, over the group's deviation; every token of the sample has it. Two
departures, both settings: the mean is over all tokens of the batch (the paper's is `aggregation: sequence_mean`), and
the upper clip is DAPO's 0.28 (the paper's is 0.2).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swarm_engine.config import Knobs
from swarm_engine.trainer.advantages import group_advantages
from swarm_engine.trainer.algorithms.method import Method
from swarm_engine.trainer.loss import Objective, Tokens, clipped_surrogate


def advantages(rewards: Sequence[float], knobs: Knobs) -> list[float]:
    """Rewards, one a sample, as distances from their mean, in deviations where `normalize_by_std` says so."""
    assert knobs.normalize_by_std is not None
    return group_advantages(rewards, normalize_by_std=knobs.normalize_by_std)


def objective(tokens: Tokens, knobs: Knobs) -> Objective:
    """The clipped surrogate of each token's ratio."""
    assert knobs.clip_low is not None
    assert knobs.clip_high is not None
    ratio_N = torch.exp(tokens.policy_N - tokens.old_N)
    return clipped_surrogate(ratio_N, tokens.advantages_N, knobs.clip_low, knobs.clip_high)


GRPO = Method(advantages, objective)
