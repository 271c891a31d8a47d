"""Statistics of a study: numbers in, numbers out. No database, no clock, no language model.

The unit of inference is the training run, one per seed. Games and episodes make a run's value more precise; they never
count as runs.
"""

from a3r.stats.compare import Comparison, holm, mean_of, paired_t, welch_t
from a3r.stats.curves import Curve, Reached, area_under, episodes_to, final_reward
from a3r.stats.failures import Rate, failure_rate, with_worst
from a3r.stats.power import Spread, power_of, smallest_difference, spread

__all__ = [
    "Comparison",
    "Curve",
    "Rate",
    "Reached",
    "Spread",
    "area_under",
    "episodes_to",
    "failure_rate",
    "final_reward",
    "holm",
    "mean_of",
    "paired_t",
    "power_of",
    "smallest_difference",
    "spread",
    "welch_t",
    "with_worst",
]
