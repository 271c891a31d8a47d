"""Does the engine see a collapse in time, and stop where nothing can be learned any more, and only there?

    python benchmarks/health.py [--quick] [--runs FILE.json.gz] [--json FILE]

Replays the recorded histories of 20 short trainings, well and ill, that the rules were not made with
(scripts/record_runs.py). What a collapse is, is said without the rules and with what they can't know, the rest of the
run and the lowest reward that the game pays: from some update to the end, 8 at least, the mean reward stays at the
run's lowest, give or take a tenth of the first update's height above it; and of the first update's height above what
the game pays at least, more than half is lost.

Two limits. These runs all train the embedded model's own weights, so nothing is shown of LoRA or of published models.
And the definition above was widened after these runs had been seen: the rules were not made with them, what counts as a
collapse was, so the counts are no test on runs unseen.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rows import Row, show_promises, write_rows

from swarm_engine.health import WarningKind, warnings_of

RUNS = Path(__file__).parents[1] / "tests" / "engine_worker" / "recorded_runs.json.gz"
MIN_UPDATES, HEIGHT = 8, 0.1
IN_TIME = 2
"""Updates after the first collapsed one."""
MIN_SEEN, MAX_FALSE_STOPS = 0.9, 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """One run, by updates from 1; None where there is no such."""

    name: str
    collapse: int | None
    """The first collapsed one."""
    seen: int | None
    """The first whose warnings hold a collapse, from the update before the run's own on: an earlier dip is another."""
    stop: int | None
    """After which training would have stopped."""
    num_flat: int
    """Updates that warned of a reward that does not rise."""

    @property
    def is_in_time(self) -> bool:
        """Whether a collapse was seen in time."""
        return self.collapse is not None and self.seen is not None and self.seen <= self.collapse + IN_TIME

    @property
    def is_false_stop(self) -> bool:
        """Whether a run that had not collapsed would have been stopped."""
        return self.stop is not None and (self.collapse is None or self.stop < self.collapse)


def histories(file: Path) -> Iterator[tuple[Mapping[str, Any], list[dict[str, float | None]]]]:
    """What was recorded, each run with its metrics update by update."""
    for run in json.loads(gzip.decompress(file.read_bytes())):
        columns = run["metrics"]
        rows = zip(*columns.values(), strict=True)
        yield run, [dict(zip(columns, row, strict=True)) for row in rows]


def first_collapsed(rewards: Sequence[float], floor: float) -> int | None:
    """The update from which on the mean reward stays at its lowest.

    Args:
        floor: the lowest reward that the game pays.
    """
    lowest = min(rewards)
    if lowest - floor >= (rewards[0] - floor) / 2:
        return None
    limit = lowest + HEIGHT * (rewards[0] - lowest)
    first = len(rewards)
    while first and rewards[first - 1] <= limit:
        first -= 1
    return first + 1 if len(rewards) - first >= MIN_UPDATES else None


def judge(run: Mapping[str, Any], history: Sequence[Mapping[str, float | None]]) -> Verdict:
    """What the engine would have said after each update."""
    rewards = [reward if (reward := metrics["reward_mean"]) is not None else run["floor"] for metrics in history]
    collapse = first_collapsed(rewards, run["floor"])
    said = {step: {one.kind for one in warnings_of(history[:step])} for step in range(1, len(history) + 1)}
    seen = [step for step, kinds in said.items() if WarningKind.COLLAPSE in kinds and step >= (collapse or 1)]
    stops = [step for step, kinds in said.items() if WarningKind.STUCK in kinds]
    num_flat = sum(WarningKind.REWARD_FLAT in kinds for kinds in said.values())
    return Verdict(run["name"], collapse, min(seen, default=None), min(stops, default=None), num_flat)


def rows_of(verdicts: Sequence[Verdict], *, is_quick: bool) -> list[Row]:
    """The numbers of the promises."""
    collapsed = [one for one in verdicts if one.collapse is not None]
    counts = {
        "collapsed": (len(collapsed), len(verdicts)),
        "collapses seen in time": (sum(one.is_in_time for one in collapsed), len(collapsed)),
        "collapses stopped": (sum(one.stop is not None for one in collapsed), len(collapsed)),
        "false stops": (sum(one.is_false_stop for one in verdicts), len(verdicts)),
    }
    return [Row("recorded runs", name, n, "runs", None, None, of, is_quick) for name, (n, of) in counts.items()]


def promises(rows: Sequence[Row]) -> Iterator[tuple[bool, str]]:
    """What is promised, each with whether these rows keep it."""
    found = {row.metric: row for row in rows}
    seen, stops = found["collapses seen in time"], found["false stops"]
    yield seen.value >= MIN_SEEN * seen.n, f"{seen.value:g} of {seen.n} collapses seen within {IN_TIME} updates"
    yield stops.value <= MAX_FALSE_STOPS, f"{stops.value:g} false stops, at most {MAX_FALSE_STOPS}"


def main() -> int:
    """Print a line a run, then the promises."""
    parser = argparse.ArgumentParser(description="Does the engine see a collapse in time?")
    parser.add_argument("--quick", action="store_true", help="three runs")
    parser.add_argument("--runs", type=Path, default=RUNS, metavar="FILE.json.gz", help="other recorded runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    args = parser.parse_args()
    verdicts = [judge(*one) for one in list(histories(args.runs))[: 3 if args.quick else None]]
    width = max(len(one.name) for one in verdicts)
    print(f"{'run':<{width}}  collapsed  seen  stopped  flat, in updates")
    for one in verdicts:
        cells = ("–" if value is None else str(value) for value in (one.collapse, one.seen, one.stop))
        print(f"{one.name:<{width}}  {next(cells):>9}  {next(cells):>4}  {next(cells):>7}  {one.num_flat:>4}")
    rows = rows_of(verdicts, is_quick=args.quick)
    if args.json:
        write_rows(rows, args.json)
    if not args.quick:
        show_promises(promises(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
