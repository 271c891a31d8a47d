"""Where a true mean may lie, from a handful of independent values. Pure.

The unit is what is independent: the held-out task within one run (its attempts are averaged first), the run over
several. Calls, tokens and attempts at one task never count as values of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.95
"""Coverage of every interval but those that a locked plan sets."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its interval."""

    mean: float
    low: float | None
    """None where one value alone says nothing about the spread."""
    high: float | None
    n: int
    """Independent values behind it."""


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean of independent values; None where fewer than two say nothing about the spread.

    Values that all agree have none at all: rounding of their mean would leave a crumb of one.
    """
    n = len(values)
    if n < 2:
        return None
    if max(values) - min(values) <= 1e-12 * max(1.0, *map(abs, values)):
        return 0.0
    mean = math.fsum(values) / n
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1) / n)


def half_width(se: float, df: float, level: float = LEVEL) -> float:
    """Half of Student's interval around an estimate.

    Args:
        se: standard error, in the unit of the estimate.
        df: degrees of freedom, above 0.
        level: coverage, in (0, 1).
    """
    # Imported here: it takes longer than everything else that a listing does.
    from scipy.special import stdtrit

    return float(stdtrit(df, (1 + level) / 2)) * se


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
    se = standard_error(values)
    if se is None:
        return Interval(mean, None, None, n)
    half = half_width(se, n - 1, level)
    return Interval(mean, mean - half, mean + half, n)
