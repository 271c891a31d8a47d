"""Means with intervals, over things that are independent of each other and over nothing else.

Episodes of one game share its start, so the unit is the game, never the episode or the call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and where the true one may lie, by Student's t."""

    mean: float
    low: float
    """`-inf` where one value alone says nothing about the spread."""
    high: float
    """`inf` in the same case."""
    n: int
    """Independent values behind it."""

    @property
    def half_width(self) -> float:
        """Distance from the mean to either end."""
        return self.high - self.mean

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def t_interval(values: Sequence[float], level: float = LEVEL) -> Interval:
    """Mean and t-interval of independent values.

    Args:
        values: one per independent unit (a game, a seed).
        level: coverage, in (0, 1).
    Raises:
        ValueError: there is no value.
    """
    if not values:
        raise ValueError("the mean of no value does not exist; were all episodes dropped?")
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, -math.inf, math.inf, n)
    # Imported here because it takes longer than everything else a command does before it answers.
    from scipy.stats import t

    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    half = float(t.ppf((1 + level) / 2, n - 1)) * math.sqrt(variance / n)
    return Interval(mean, mean - half, mean + half, n)


def group_means(rewards_by_group: Sequence[Sequence[float]]) -> list[float]:
    """One value a group: the mean of its episodes, which depend on each other. Empty groups are left out."""
    return [math.fsum(rewards) / len(rewards) for rewards in rewards_by_group if rewards]


def share_with_variance(rewards_by_group: Sequence[Sequence[float]]) -> float:
    """Share of groups whose rewards differ at all: only these can move a policy that learns from comparison.

    Raises:
        ValueError: there is no group.
    """
    if not rewards_by_group:
        raise ValueError("no group was played; were all episodes dropped?")
    return sum(len(set(rewards)) > 1 for rewards in rewards_by_group) / len(rewards_by_group)
