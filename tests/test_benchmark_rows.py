"""What a benchmark prints of its rows."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ROWS = runpy.run_path(str(BENCHMARKS / "rows.py"))
RATIOS = runpy.run_path(str(BENCHMARKS / "ratios.py"))


@pytest.mark.parametrize(("n", "interval"), [(2, ""), (3, " [0.500, 1.500]")])
def test_an_interval_from_fewer_than_three_values_is_not_shown(n: int, interval: str) -> None:
    row = ROWS["Row"]("case", "metric", 1.0, "s", 0.5, 1.5, n, False)
    assert ROWS["show"](row).split(maxsplit=2)[2] == f"1.000{interval} s, n={n}"


def test_a_ratio_is_that_of_medians_and_its_interval_that_of_whole_repetitions() -> None:
    # The third repetition was three times as slow for both, which says nothing of their ratio.
    found = RATIOS["ratio_of_medians"]([2.0, 4.0, 12.0], [1.0, 1.0, 3.0])
    assert (found.mean, found.low, found.high, found.n) == (4.0, 2.0, 4.0, 3)
    # Where all agree they tell nothing of their spread.
    found = RATIOS["ratio_of_medians"]([2.0, 2.0, 6.0], [1.0, 1.0, 3.0])
    assert (found.mean, found.low, found.high, found.n) == (2.0, None, None, 3)
    # Medians 4 and 1; drawn again they are 2 to 8 over 1.
    found = RATIOS["ratio_of_medians"]([2.0, 4.0, 8.0], [1.0, 1.0, 1.0])
    assert (found.mean, found.low, found.high) == (4.0, 2.0, 8.0)


def test_a_ratio_of_two_repetitions_has_no_interval() -> None:
    found = RATIOS["ratio_of_medians"]([2.0, 4.0], [1.0, 1.0])
    assert (found.mean, found.low, found.high, found.n) == (3.0, None, None, 2)
