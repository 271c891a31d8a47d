"""One number per run: what a held-out learning curve comes to.

A curve is a mean reward at some numbers of training episodes, the first before any training. Nothing here looks for the
best point of a curve: a maximum over noise is not a result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Curve:
    """Held-out reward along a training run."""

    episodes: tuple[int, ...]
    """Training episodes seen before each evaluation, rising."""
    rewards: tuple[float, ...]
    """Mean held-out reward at each."""

    def __post_init__(self) -> None:
        if len(self.episodes) != len(self.rewards) or not self.episodes:
            raise ValueError(
                f"a curve pairs episodes with rewards; these are {len(self.episodes)} and {len(self.rewards)}"
            )
        if any(one >= other for one, other in pairwise(self.episodes)):
            raise ValueError(f"evaluations must come in order of episodes, each once; these are at {self.episodes}")
        if not all(math.isfinite(reward) for reward in self.rewards):
            raise ValueError("a curve with a reward that is no finite number is a failed run, not a curve")

    @classmethod
    def of(cls, points: Iterable[tuple[int, float]]) -> Curve:
        """A curve from (episodes, reward) pairs in any order."""
        ordered = sorted(points)
        return cls(tuple(episodes for episodes, _ in ordered), tuple(reward for _, reward in ordered))


@dataclass(frozen=True, slots=True)
class Reached:
    """When a curve first got to a level."""

    episodes: float
    """Where it never did: the episodes it was watched for."""
    is_censored: bool
    """It never did; the true number is larger."""


def area_under(curve: Curve) -> float:
    """Mean height of the curve by the trapezoid rule: area divided by the span of episodes, so its unit is reward.

    Raises:
        ValueError: a single evaluation spans nothing.
    """
    if len(curve.episodes) < 2:
        raise ValueError("the area under a curve needs at least 2 evaluations; lower eval_every or train longer")
    area = math.fsum(
        (later - earlier) * (low + high) / 2
        for (earlier, later), (low, high) in zip(pairwise(curve.episodes), pairwise(curve.rewards), strict=True)
    )
    return area / (curve.episodes[-1] - curve.episodes[0])


def episodes_to(curve: Curve, threshold: float) -> Reached:
    """Episodes until the curve first reaches `threshold`, on straight lines between evaluations."""
    if curve.rewards[0] >= threshold:
        return Reached(float(curve.episodes[0]), is_censored=False)
    for (earlier, later), (low, high) in zip(pairwise(curve.episodes), pairwise(curve.rewards), strict=True):
        if high >= threshold:
            return Reached(earlier + (later - earlier) * (threshold - low) / (high - low), is_censored=False)
    return Reached(float(curve.episodes[-1]), is_censored=True)


def final_reward(curve: Curve) -> float:
    """The last evaluation, wherever the best one was."""
    return curve.rewards[-1]
