"""What a benchmark writes: rows that a program can read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

MIN_FOR_INTERVAL = 3
"""Student's interval of two values is some nine times as wide as the two lie apart: it tells nobody anything."""


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


def show(row: Row) -> str:
    """A row for people."""
    interval = ""
    if row.ci_low is not None and row.ci_high is not None and row.n >= MIN_FOR_INTERVAL:
        interval = f" [{row.ci_low:.3f}, {row.ci_high:.3f}]"
    return f"{row.case:<30} {row.metric:<30} {row.value:10.3f}{interval} {row.unit}, n={row.n}"


def show_promises(promises: Iterable[tuple[bool, str]]) -> None:
    """What is promised, each with whether it was kept."""
    for is_kept, text in promises:
        print("kept  " if is_kept else "MISSED", text)


def write_rows(rows: Sequence[Row], file: Path) -> None:
    """Write the rows as a JSON list."""
    file.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


def report(rows: Sequence[Row], file: Path | None, promises: Iterable[tuple[bool, str]], legend: str = "") -> None:
    """Print the table under its legend, write it where a file was named, and say which promises a full run kept."""
    if legend:
        print(legend)
    for row in rows:
        print(show(row))
    if file:
        write_rows(rows, file)
    if not any(row.quick for row in rows):
        show_promises(promises)
