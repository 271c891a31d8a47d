"""Means and differences of independent runs, by Student's t.

With equal seeds in both arms the difference is taken seed by seed (`paired_t`); `welch_t` is the cross-check that does
not use the pairing. Both work on one value per run. Equivalence is two one-sided tests (Schuirmann 1987): "no
difference" is a claim that needs evidence, and a large p-value is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from experiments_db.intervals import LEVEL, half_width, standard_error


@dataclass(frozen=True, slots=True)
class Comparison:
    """A mean, or a difference of means, with what Student's t says about it."""

    value: float
    se: float | None
    """Standard error; None where one value alone says nothing about the spread, 0 where all values agree."""
    df: float
    """Degrees of freedom; 0 where there is no standard error."""
    n: int
    """Runs behind it; for a paired difference, pairs."""

    @property
    def is_informative(self) -> bool:
        """Whether there is a spread to judge by: more than one value, and not all the same."""
        return self.se is not None and self.se > 0 and math.isfinite(self.value)

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Ends of the two-sided interval; infinite where there is no spread to judge by.

        Args:
            level: coverage, in (0, 1).
        """
        if not self.se:
            return (-math.inf, math.inf)
        half = half_width(self.se, self.df, level)
        return (self.value - half, self.value + half)

    def p_value(self) -> float:
        """Two-sided p of the hypothesis that the true value is zero; 1 where nothing can be said."""
        if not self.is_informative:
            return 1.0
        assert self.se is not None
        return 2 * _below(-abs(self.value) / self.se, self.df)

    def p_equivalent(self, margin: float) -> float:
        """P of the hypothesis that the true value lies outside ±margin; the larger of two one-sided tests.

        Args:
            margin: largest difference that does not matter, in the unit of the value; above 0.
        """
        if margin <= 0:
            raise ValueError(
                f"an equivalence margin of {margin} leaves nothing to be equivalent within; give one above 0"
            )
        if not self.is_informative:
            return 1.0
        assert self.se is not None
        above_low = _below(-(self.value + margin) / self.se, self.df)
        below_high = _below((self.value - margin) / self.se, self.df)
        return max(above_low, below_high)


def mean_of(values: Sequence[float]) -> Comparison:
    """Mean of independent values.

    Raises:
        ValueError: there is no value.
    """
    if not values:
        raise ValueError("the mean of no value does not exist; did every run fail?")
    n = len(values)
    return Comparison(math.fsum(values) / n, standard_error(values), n - 1, n)


def paired_t(treated: Sequence[float], reference: Sequence[float]) -> Comparison:
    """Mean difference `treated - reference` over runs that share their seed, place by place.

    Raises:
        ValueError: the arms differ in length, or are empty.
    """
    if len(treated) != len(reference):
        raise ValueError(
            f"pairs need equal numbers of runs, these arms have {len(treated)} and {len(reference)}; "
            "keep the seeds that both have, or use welch_t"
        )
    return mean_of([one - other for one, other in zip(treated, reference, strict=True)])


def welch_t(treated: Sequence[float], reference: Sequence[float]) -> Comparison:
    """Difference of two means that share neither seeds nor variance (Welch 1947, Satterthwaite's df).

    Raises:
        ValueError: an arm is empty.
    """
    one, other = mean_of(treated), mean_of(reference)
    value, n = one.value - other.value, one.n + other.n
    if one.se is None or other.se is None:
        return Comparison(value, None, 0, n)
    variance = one.se**2 + other.se**2
    if variance == 0:
        return Comparison(value, 0.0, n - 2, n)
    df = variance**2 / (one.se**4 / one.df + other.se**4 / other.df)
    return Comparison(value, math.sqrt(variance), df, n)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for being several (Holm 1979), in the order given: reject where at most alpha."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted = [1.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def _below(t: float, df: float) -> float:
    """Probability that Student's t lies below `t`."""
    # Imported here: a command that computes nothing, and they all import this module, has ended before scipy is there.
    from scipy.special import stdtr

    return float(stdtr(df, t))
