"""What does merging save where it counts? Whole trainings of a game of many turns, with the actor update timed.

    python benchmarks/actor_update.py [--quick] [--game gridwalk] [--seeds 3] [--updates 40] [--modes none tree …]
                                      [--json FILE]

The same trainings with several ways of merging, in lockstep, so that they begin with the same episodes: seconds of an
update (merging, forward, backward and the optimizer; sampling left out), tokens computed, calls of an update, and what
was learned, which merging must not change. Times are compared by seed, medians over a training's updates, and a seed's
trainings run one after the other in an order that changes from seed to seed. Rewards are on the same held-out games.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from project_runs import Trained, TrainingError, train
from rows import Row, report

from a3r.stats.compare import mean_of, paired_t
from experiments_db.intervals import Interval, t_interval
from swarm_engine.config import Merge
from vibe import library, render
from vibe.project import Training, game_of, project_for

REFERENCE = Merge.NONE
NUM_SEEDS, NUM_UPDATES = 3, 40
NUM_PARTS = 4
"""In which the learning curve is shown."""
MIN_SPEEDUP = 1.5
"""Of tree over none, in time of the update; the lower end of its interval."""
MARGIN, LEVEL = 0.1, 0.05
"""Largest difference in reward that does not matter, and the level of the test that it is smaller."""
MAX_FIRST_DIFFERENCE = 1e-3
"""Of the first update's loss and gradient norm, relative: the same episodes, computed in another order in float32."""
LEGEND = "A line is: mode, what was measured, value [95% interval over seeds] unit, n behind it."


def updates_of(run: Trained) -> list[Mapping[str, Any]]:
    """Metrics of every update of a training that moved the weights."""
    return [step["metrics"] for step in run.results["steps"] if not step["metrics"]["skipped"]]


def median_of(run: Trained, metric: str) -> float:
    """Over the updates of a training."""
    return float(statistics.median(update[metric] for update in updates_of(run)))


def over_seeds(values: Sequence[float]) -> Interval:
    """Mean of one value a seed, with its interval."""
    found = t_interval(values)
    assert found, "there is at least one seed"
    return found


def speedup(runs: Sequence[Trained], reference: Sequence[Trained]) -> Interval:
    """How many times as fast an update is: geometric mean over seeds, with the interval of the logarithm."""
    logs = [math.log(median_of(b, "update_s") / median_of(a, "update_s")) for a, b in zip(runs, reference, strict=True)]
    found = over_seeds(logs)
    low, high = (None if end is None else math.exp(end) for end in (found.low, found.high))
    return Interval(math.exp(found.mean), low, high, found.n)


def curve_of(run: Trained) -> list[float]:
    """Mean reward of a training's episodes, part by part."""
    rewards = [step["metrics"]["reward_mean"] for step in run.results["steps"]]
    size = math.ceil(len(rewards) / NUM_PARTS)
    return [statistics.fmean(rewards[start : start + size]) for start in range(0, len(rewards), size)]


def rows_of(how: Merge, runs: Sequence[Trained], reference: Sequence[Trained], *, is_quick: bool) -> Iterator[Row]:
    """What one way of merging came to."""

    def row(metric: str, found: Interval, unit: str) -> Row:
        return Row(how, metric, found.mean, unit, found.low, found.high, found.n, is_quick)

    for metric, name, unit in (
        ("update", "update_s", "s"),
        ("computed tokens", "num_computed_tokens", "an update"),
        ("tokens before / after merging", "merge_ratio", ""),
        ("calls", "num_calls", "an update"),
    ):
        yield row(metric, over_seeds([median_of(run, name) for run in runs]), unit)
    yield row("none / this, update", speedup(runs, reference), "")
    for part, rewards in enumerate(zip(*map(curve_of, runs), strict=True)):
        yield row(f"reward in training, part {part + 1} of {NUM_PARTS}", over_seeds(rewards), "reward")
    for label in ("before", "after"):
        yield row(f"reward {label}", over_seeds([run.level(label, 1).mean for run in runs]), "reward")
    if how is not REFERENCE:
        difference = paired_t(*([run.level("after", 1).mean for run in some] for some in (runs, reference)))
        low, high = difference.interval() if difference.se is not None else (None, None)
        yield Row(how, "reward after, less none's", difference.value, "reward", low, high, difference.n, is_quick)


def promises(how: Merge, runs: Sequence[Trained], reference: Sequence[Trained]) -> Iterator[tuple[bool, str]]:
    """What is promised of a way of merging that leaves the loss alone, each with whether it is kept."""
    first = max(
        abs(updates_of(one)[0][name] / updates_of(other)[0][name] - 1)
        for name in ("loss", "grad_norm")
        for one, other in zip(runs, reference, strict=True)
    )
    yield (
        first <= MAX_FIRST_DIFFERENCE,
        f"{how}: loss and gradient norm of the first update differ by {first:.1e}, at most {MAX_FIRST_DIFFERENCE:.0e}",
    )
    differences = [
        one.level("after", 1).mean - other.level("after", 1).mean for one, other in zip(runs, reference, strict=True)
    ]
    p = 0.0 if not any(differences) else mean_of(differences).p_equivalent(MARGIN)
    yield p < LEVEL, f"{how} learns what none learns, within {MARGIN} reward: p {p:.3g}, below {LEVEL}"
    if how is Merge.TREE:
        found = speedup(runs, reference)
        low = found.mean if found.low is None else found.low
        yield low >= MIN_SPEEDUP, f"an update by tree is at least {low:.2f} times as fast, at least {MIN_SPEEDUP}"


def main() -> int:
    """Run it; the exit code says whether every training came to its end, the last lines whether the promises hold."""
    parser = argparse.ArgumentParser(description="What does merging save where it counts?")
    parser.add_argument("--quick", action="store_true", help="show within a minute that it runs")
    parser.add_argument("--game", choices=library.names(), default="gridwalk")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS)
    parser.add_argument("--updates", type=int, default=NUM_UPDATES)
    parser.add_argument(
        "--modes", nargs="+", choices=tuple(Merge), default=(REFERENCE, Merge.TREE), help="none is always among them"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    args = parser.parse_args()
    num_seeds, updates, games = (1, 1, 2) if args.quick else (args.seeds, args.updates, 150)
    training = Training(updates=updates, eval_every=updates, eval_games=games)
    modes = [how for how in Merge if how in {REFERENCE, *args.modes}]
    runs: dict[Merge, list[Trained]] = {how: [] for how in modes}
    with tempfile.TemporaryDirectory(prefix="actor-update-") as name:
        project = Path(name) / "project"
        render.write(render.render(project_for(game_of(args.game), training=training)), project)
        for seed in range(num_seeds):
            for how in (*modes[seed % len(modes) :], *modes[: seed % len(modes)]):
                flags = ("--set", "lockstep=true", "--set", f"trainer.merge={how}")
                try:
                    run = train(project, Path(name) / f"{how}-{seed}", seed, *flags)
                except TrainingError as error:
                    print(f"FAILED {error}", flush=True)
                    return 1
                runs[how].append(run)
                print(f"{how}, seed {seed}: {run.wall_s:.0f} s", file=sys.stderr, flush=True)
    rows = [row for how in modes for row in rows_of(how, runs[how], runs[REFERENCE], is_quick=args.quick)]
    exact = [how for how in modes if how not in (REFERENCE, Merge.TEXT)]
    report(rows, args.json, [kept for how in exact for kept in promises(how, runs[how], runs[REFERENCE])], LEGEND)
    return 0


if __name__ == "__main__":
    sys.exit(main())
