"""What does merging save where it counts? Whole trainings of a game of many turns, with the actor update timed.

    python benchmarks/actor_update.py [--quick] [--game gridwalk] [--seeds 3] [--updates 40] [--json FILE]

The same trainings with every way of merging: seconds of an update (merging, forward, backward and the optimizer;
sampling left out), tokens computed, and what was learned, which merging must not change. The ratio of times is of
medians over all updates of all seeds; rewards are compared over seeds, on the same held-out games.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from project_runs import Trained, TrainingError, train
from rows import Row, report

from a3r.stats.compare import paired_t
from experiments_db.intervals import t_interval
from swarm_engine.config import Merge
from vibe import library, render
from vibe.project import Training, game_of, project_for

REFERENCE = Merge.NONE
NUM_SEEDS, NUM_UPDATES = 3, 40
MIN_SPEEDUP = 1.5
"""Of tree over none, in time of the update."""


def steps_of(runs: Sequence[Trained]) -> Iterator[Mapping[str, Any]]:
    """Metrics of every update of some trainings."""
    for run in runs:
        for step in run.results["steps"]:
            yield step["metrics"]


def median_of(runs: Sequence[Trained], metric: str) -> float:
    """Over all updates."""
    return float(statistics.median(step[metric] for step in steps_of(runs)))


def rows_of(how: Merge, runs: Sequence[Trained], reference: Sequence[Trained], *, is_quick: bool) -> Iterator[Row]:
    """What one way of merging came to."""
    num_updates = sum(1 for _ in steps_of(runs))
    seconds, before = median_of(runs, "update_s"), median_of(reference, "update_s")
    yield Row(how, "update", seconds, "s", None, None, num_updates, is_quick)
    yield Row(how, "none / this, update", before / seconds, "", None, None, num_updates, is_quick)
    tokens = median_of(runs, "num_computed_tokens")
    yield Row(how, "computed tokens", tokens, "an update", None, None, num_updates, is_quick)
    yield Row(
        how, "tokens before / after merging", median_of(runs, "merge_ratio"), "", None, None, num_updates, is_quick
    )
    for label in ("before", "after"):
        level = t_interval([run.level(label, 1).mean for run in runs])
        assert level, "there is at least one seed"
        yield Row(how, f"reward {label}", level.mean, "reward", level.low, level.high, level.n, is_quick)
    if how is not REFERENCE:
        difference = paired_t(*([run.level("after", 1).mean for run in some] for some in (runs, reference)))
        low, high = difference.interval() if difference.se is not None else (None, None)
        yield Row(how, "reward after, less none's", difference.value, "reward", low, high, difference.n, is_quick)


def promises(rows: Sequence[Row]) -> Iterator[tuple[bool, str]]:
    """What is promised, each with whether it is kept."""
    for row in rows:
        if row.metric == "none / this, update" and row.case == Merge.TREE:
            yield (
                row.value >= MIN_SPEEDUP,
                f"an update by tree is {row.value:.2f} times as fast, at least {MIN_SPEEDUP}",
            )
        if row.metric == "reward after, less none's" and row.ci_low is not None and row.ci_high is not None:
            agrees = row.ci_low <= 0 <= row.ci_high
            yield (
                agrees,
                f"{row.case} learns what none learns: {row.value:+.3f} [{row.ci_low:+.3f}, {row.ci_high:+.3f}]",
            )


def main() -> int:
    """Run it; the exit code says whether every training came to its end, the last lines whether the promises hold."""
    parser = argparse.ArgumentParser(description="What does merging save where it counts?")
    parser.add_argument("--quick", action="store_true", help="show within a minute that it runs")
    parser.add_argument("--game", choices=library.names(), default="gridwalk")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS)
    parser.add_argument("--updates", type=int, default=NUM_UPDATES)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    args = parser.parse_args()
    num_seeds, updates, games = (1, 1, 2) if args.quick else (args.seeds, args.updates, 150)
    training = Training(updates=updates, eval_every=updates, eval_games=games)
    runs: dict[Merge, list[Trained]] = {how: [] for how in Merge}
    with tempfile.TemporaryDirectory(prefix="actor-update-") as name:
        project = Path(name) / "project"
        render.write(render.render(project_for(game_of(args.game), training=training)), project)
        for seed in range(num_seeds):
            for how in Merge:
                try:
                    run = train(project, Path(name) / f"{how}-{seed}", seed, "--set", f"trainer.merge={how}")
                except TrainingError as error:
                    print(f"FAILED {error}", flush=True)
                    return 1
                runs[how].append(run)
                print(f"{how}, seed {seed}: {run.wall_s:.0f} s", file=sys.stderr, flush=True)
    rows = [row for how in Merge for row in rows_of(how, runs[how], runs[REFERENCE], is_quick=args.quick)]
    report(rows, args.json, promises(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
