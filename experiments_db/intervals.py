"""Where a true mean may lie, from a handful of independent values. Pure.

The unit is what is independent: the held-out task within one run (its attempts are averaged first), the run over
several. Calls, tokens and attempts at one task never count as values of their own.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

LEVEL = 0.95
"""Coverage of every interval but those that a locked plan sets."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its interval."""

    mean: float
    low: float | None
    """None where the values say nothing about the spread: one alone, or several that all agree."""
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

    Values that all agree give none: their spread of zero would tell of what was never seen. It may reach beyond values
    that are possible at all; where these have bounds, see `likelihood_interval`.

    Args:
        values: one per independent unit, finite.
        level: coverage, in (0, 1).
    """
    if not values:
        return None
    n = len(values)
    mean = math.fsum(values) / n
    se = standard_error(values)
    if not se:
        return Interval(mean, None, None, n)
    half = half_width(se, n - 1, level)
    return Interval(mean, mean - half, mean + half, n)


def likelihood_interval(
    values: Sequence[float], level: float = LEVEL, *, bounds: tuple[float, float] | None = None
) -> Interval | None:
    """Mean and empirical-likelihood interval of independent values that have bounds, such as rewards of games.

    It never reaches beyond the values seen, so never beyond a bound, and is lopsided near one; of zeros and ones it is
    the binomial likelihood-ratio interval. Calibrated by Student's t as `t_interval` is. Of a handful of values it
    is too narrow, for it knows no bound that was not seen.

    Values that all agree show no spread, but a share of others that n of them leave room for: that of Clopper and
    Pearson, up to 1 - ((1 - level) / 2)^(1 / n). The interval is where the mean is if so many lie at a bound. Without
    bounds there is none.

    Args:
        values: one per independent unit, finite.
        level: coverage, in (0, 1).
        bounds: least and greatest value that is possible, where known.
    Source: Owen 1988, doi:10.1093/biomet/75.2.237; Clopper and Pearson 1934, doi:10.1093/biomet/26.4.404.
    """
    found = t_interval(values, level)
    if found is None:
        return None
    if found.low is None:
        if bounds is None:
            return found
        share = 1 - ((1 - level) / 2) ** (1 / found.n)
        low, high = min(bounds[0], found.mean), max(bounds[1], found.mean)
        return Interval(
            found.mean, found.mean - share * (found.mean - low), found.mean + share * (high - found.mean), found.n
        )
    # From the mean on: values that hardly differ would lose their differences to rounding.
    counts = Counter(value - found.mean for value in values)
    limit = half_width(1.0, len(values) - 1, level) ** 2
    low, high = (
        bound if (end := _end(counts, bound - found.mean, limit)) is None else found.mean + end
        for bound in (min(values), max(values))
    )
    return Interval(found.mean, low, high, found.n)


def _end(counts: Mapping[float, int], bound: float, limit: float) -> float | None:
    """The mean between 0, that of the values, and `bound` that is just as unlikely as the limit allows; None where even
    the bound is not."""
    nearest = bound * (1 - 1e-9)
    if _unlikeliness(counts, nearest) <= limit:
        return None
    return _root(lambda mu: _unlikeliness(counts, mu) - limit, nearest, 0.0)


def _unlikeliness(counts: Mapping[float, int], mu: float) -> float:
    """Minus twice the log of the likelihood that the values' weights lose when their mean has to be `mu`."""
    n = sum(counts.values())
    gaps = [(value - mu, count) for value, count in counts.items()]
    most = 1 - 1 / n
    # Weights are 1 / (n (1 + tilt gap)); none of them exceeds 1, which bounds the tilt.
    tilt = _root(
        lambda tilt: math.fsum(count * gap / (1 + tilt * gap) for gap, count in gaps),
        -most / max(gaps)[0],
        -most / min(gaps)[0],
    )
    return 2 * math.fsum(count * math.log1p(tilt * gap) for gap, count in gaps)


def _root(function: Callable[[float], float], one: float, other: float) -> float:
    # Imported here: it takes longer than everything else that a listing does.
    from scipy.optimize import brentq

    close = 1e-14 * abs(other - one)
    return float(brentq(function, one, other, xtol=max(close, sys.float_info.min)))
