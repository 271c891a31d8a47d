"""Where a true mean may lie, from a handful of independent values. Pure.

The unit is what is independent: the held-out task within one run (its attempts are averaged first), the run over
several. Calls, tokens and attempts at one task never count as values of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its interval."""

    mean: float
    low: float | None
    """None where one value alone says nothing about the spread."""
    high: float | None
    n: int
    """Independent values behind it."""


def t_interval(values: Sequence[float], level: float = LEVEL) -> Interval | None:
    """Mean and Student's t-interval of independent values; None where there is no value.

    Values that all agree give an interval of no width: it tells of their spread, not of what was never seen. For few
    rewards that are only ever 0 or 1 it is too narrow near the ends.

    Args:
        values: one per independent unit, finite.
        level: coverage, in (0, 1).
    """
    if not values:
        return None
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, None, None, n)
    # Imported here: it takes longer than everything else that a listing does.
    from scipy.special import stdtrit

    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    half = float(stdtrit(n - 1, (1 + level) / 2)) * math.sqrt(variance / n)
    return Interval(mean, mean - half, mean + half, n)
