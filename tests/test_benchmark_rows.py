"""What a benchmark prints of its rows."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROWS = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "rows.py"))


@pytest.mark.parametrize(("n", "interval"), [(2, ""), (3, " [0.500, 1.500]")])
def test_an_interval_from_fewer_than_three_values_is_not_shown(n: int, interval: str) -> None:
    row = ROWS["Row"]("case", "metric", 1.0, "s", 0.5, 1.5, n, False)
    assert ROWS["show"](row).split(maxsplit=2)[2] == f"1.000{interval} s, n={n}"
