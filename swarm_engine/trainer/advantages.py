"""What samples were worth, compared with each other: the baseline that most algorithms share."""

from __future__ import annotations

import math
from collections.abc import Sequence

NOISE = 1e-6
"""Rewards closer than this are equal, relative to the largest where one is over 1: dividing by their deviation would
train on rounding."""


def are_flat(rewards: Sequence[float]) -> bool:
    """Whether rewards are all the same, up to rounding, or too few to be compared."""
    return not rewards or max(rewards) - min(rewards) <= NOISE * max(1.0, *(abs(reward) for reward in rewards))


def group_advantages(rewards: Sequence[float], *, normalize_by_std: bool) -> list[float]:
    """Reward minus the group's mean, divided by its population deviation where asked.

    Args:
        rewards: one per judged episode of one group and agent. An episode counts once, however many calls it made.
    Returns:
        As many numbers, summing to zero. All zero for a group of one, which has nothing to be compared with, and for a
        group whose rewards are all the same.
    """
    if are_flat(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if not normalize_by_std:
        return centred
    deviation = math.sqrt(math.fsum(value * value for value in centred) / len(centred))
    return [value / deviation for value in centred]
