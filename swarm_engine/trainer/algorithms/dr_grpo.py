"""GRPO done right (Liu et al. 2025, arXiv:2503.20783): GRPO without its two biases.

Dividing by the group's deviation favours tasks that are nearly always or never solved, and dividing by a sample's
length favours long failures. So advantages are rewards less their mean, and each sample's sum over tokens is divided by
one constant, `loss_length`.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm_engine.config import Knobs
from swarm_engine.trainer.advantages import group_advantages
from swarm_engine.trainer.algorithms import grpo
from swarm_engine.trainer.algorithms.method import Method


def advantages(rewards: Sequence[float], _knobs: Knobs) -> list[float]:
    """Rewards, one a sample, less their mean."""
    return group_advantages(rewards, normalize_by_std=False)


DR_GRPO = Method(advantages, grpo.objective)
