"""Decoupled clip and dynamic sampling policy optimization (Yu et al. 2025, arXiv:2503.14476).

GRPO with an upper clip of its own, a mean over tokens, no group whose rewards are all the same, and a punishment of
what is nearly too long. The paper samples until enough groups differ; here such groups are left out of loss,
denominators and regularizers, and the batch is smaller. They are told by the reward as it was given: the punishment
must not bring a solved task back.
"""

from __future__ import annotations

from swarm_engine.trainer.algorithms import grpo
from swarm_engine.trainer.algorithms.method import Method


def overlong_punishment(num_tokens: int, limit: int, margin: int) -> float:
    """What length adds to a reward: 0 up to `limit - margin` tokens, -1 from `limit` on, a line in between."""
    return -min(1.0, max(0.0, (num_tokens - (limit - margin)) / margin))


DAPO = Method(grpo.advantages, grpo.objective, counts_flat_groups=False)
