"""How many times as much of something one thing takes as another, measured in turn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments_db.intervals import Interval

MIN_FOR_RATIO, NUM_DRAWS = 3, 4000
"""For an interval: from how many repetitions on, and how often they are drawn again."""


def ratio_of_medians(those: Sequence[float], these: Sequence[float]) -> Interval:
    """The median of `those` over that of `these`, with a 95% bootstrap interval.

    The two were measured in turn, so what is drawn again is the repetition, with both of its values.
    """
    pairs_R_2 = np.array([those, these]).T
    num = len(pairs_R_2)
    ratio = float(np.divide(*np.median(pairs_R_2, axis=0)))
    if num < MIN_FOR_RATIO:
        return Interval(ratio, None, None, num)
    drawn = np.random.default_rng(0).integers(num, size=(NUM_DRAWS, num))
    medians_D_2 = np.median(pairs_R_2[drawn], axis=1)
    low, high = np.quantile(medians_D_2[:, 0] / medians_D_2[:, 1], (0.025, 0.975))
    if low == high:  # repetitions that all agree
        return Interval(ratio, None, None, num)
    return Interval(ratio, float(low), float(high), num)
