"""Supervised fine-tuning on what went well: the negative log-likelihood of every sample with a reward above zero.

They weigh the same, whatever the reward and the group; all others count nowhere. `trainer.sft_weight` adds this loss to
that of any other algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm_engine.config import Knobs
from swarm_engine.trainer.algorithms import rloo
from swarm_engine.trainer.algorithms.method import Method, Scope


def is_worth_imitating(reward: float) -> bool:
    """Whether a sample of this reward is imitated."""
    return reward > 0


def advantages(rewards: Sequence[float], _knobs: Knobs) -> list[float]:
    """1 for what is imitated, 0 for the rest."""
    return [float(is_worth_imitating(reward)) for reward in rewards]


SFT = Method(advantages, rloo.objective, scope=Scope.ITSELF)
