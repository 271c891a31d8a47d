"""Runs that failed: counted, never dropped (intention to treat).

A setting under which runs crash is a worse setting; to compare only the survivors would hide exactly that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from experiments_db.intervals import LEVEL


@dataclass(frozen=True, slots=True)
class Rate:
    """A share of runs with its exact interval (Clopper and Pearson 1934)."""

    value: float
    low: float
    high: float
    n: int


def with_worst(values: Sequence[float | None], worst: float) -> list[float]:
    """The values with `worst`, declared before any run, in place of every run that has none or no finite one."""
    return [value if value is not None and math.isfinite(value) else worst for value in values]


def failure_rate(failed: int, runs: int, level: float = LEVEL) -> Rate:
    """Share of runs that failed.

    Raises:
        ValueError: there is no run, or more failures than runs.
    """
    if not 0 <= failed <= runs or runs == 0:
        raise ValueError(f"{failed} of {runs} runs failed: there must be a run, and no more failures than runs")
    # Imported here, as in compare.py.
    from scipy.special import betaincinv

    tail = (1 - level) / 2
    low = 0.0 if failed == 0 else float(betaincinv(failed, runs - failed + 1, tail))
    high = 1.0 if failed == runs else float(betaincinv(failed + 1, runs - failed, 1 - tail))
    return Rate(failed / runs, low, high, runs)
