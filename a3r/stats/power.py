"""What a design can tell apart: how large a difference S seeds see, given how much runs differ by their seed alone.

All of it is t-based and solved numerically: the normal approximation promises far too much at three seeds. The
noncentral t is integrated here, over the quantiles of chi-squared, because scipy's has no value for the few degrees of
freedom and large shifts that small studies live by.

scipy is imported where it is used, as in compare.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from experiments_db.intervals import LEVEL


@dataclass(frozen=True, slots=True)
class Spread:
    """Standard deviation of runs that differ in nothing but their seed, in the unit of the metric."""

    sd: float
    low: float
    """Lower end of its interval by chi-squared; with few seeds the interval is wide, and says so."""
    high: float
    """Infinite where all values agree, which normal theory has nothing to say of."""
    n: int


def spread(values: Sequence[float], level: float = LEVEL) -> Spread:
    """Standard deviation over seeds with its interval (normal theory).

    Raises:
        ValueError: fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(f"{len(values)} run has no spread; the noise floor needs at least 2 that finished")
    from scipy.special import chdtri

    df = len(values) - 1
    sd = float(np.std(values, ddof=1))
    low = sd * math.sqrt(df / float(chdtri(df, (1 - level) / 2)))
    high = sd * math.sqrt(df / float(chdtri(df, (1 + level) / 2))) if sd else math.inf
    return Spread(sd, low, high, len(values))


def power_of(difference: float, sd: float, seeds: int, *, alpha: float = 0.05) -> float:
    """Probability that a paired t over `seeds` finds a true difference.

    Args:
        difference: true difference between the arms.
        sd: deviation of one run by its seed. The two runs of a pair are taken as uncorrelated, so their difference
            deviates by sd * sqrt(2); equal seeds can only make it smaller.
        seeds: runs per arm, at least 2.
        alpha: two-sided.
    """
    if seeds < 2:
        raise ValueError(f"{seeds} seed has no spread; power needs at least 2")
    if sd == 0:
        return 1.0 if difference else alpha
    from scipy.special import ndtr, stdtrit

    df = seeds - 1
    critical = float(stdtrit(df, 1 - alpha / 2))
    shift = abs(difference) / (sd * math.sqrt(2 / seeds))
    scales = _scales(df)
    return float(np.mean(ndtr(shift - critical * scales) + ndtr(-shift - critical * scales)))


def smallest_difference(sd: float, seeds: int, *, alpha: float = 0.05, power: float = 0.8) -> float:
    """Smallest true difference that a paired t over `seeds` finds with probability `power`.

    Arguments as in `power_of`.

    Raises:
        ValueError: `sd` is 0, as that of few runs that happen to agree is: nobody could tell any difference by it; or
            `power` is not between alpha and 1.
    """
    if not alpha < power < 1:
        raise ValueError(f"a power of {power} must lie between alpha ({alpha}) and 1")
    if sd == 0:
        raise ValueError("a deviation of 0 between seeds says nothing of what can be told; take more seeds")
    from scipy.optimize import brentq

    unit = sd * math.sqrt(2 / seeds)
    top = unit
    while power_of(top, sd, seeds, alpha=alpha) < power:
        top *= 2
    return float(brentq(lambda difference: power_of(difference, sd, seeds, alpha=alpha) - power, 0.0, top, xtol=1e-9))


@lru_cache(maxsize=64)
def _scales(df: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Deviation that a sample shows, over the true one: sqrt(chi2 / df) at 4000 evenly spread probabilities."""
    from scipy.special import chdtri

    probabilities = (np.arange(4000) + 0.5) / 4000
    return np.sqrt(np.asarray(chdtri(df, 1 - probabilities), dtype=np.float64) / df)
