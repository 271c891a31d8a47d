"""What a benchmark writes: rows that a program can read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """One number of the record."""

    case: str
    metric: str
    value: float
    unit: str
    ci_low: float | None
    ci_high: float | None
    n: int
    """What the interval is over; the benchmark says what."""
    quick: bool


def write_rows(rows: Sequence[Row], file: Path) -> None:
    """Write the rows as a JSON list."""
    file.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
