"""Does the embedded model learn? Trains the built-in games through the real HTTP endpoint, with controls beside them.

    python benchmarks/learning.py [--quick] [--games tictactoe spy] [--seeds 3] [--json FILE]

For each game and seed: held-out reward before and after, sampled and greedy, with 95% intervals over held-out games;
over the seeds, the mean rise with its t-interval. Beside it what random legal play and the template's script earn, and
two controls: the same training with every reward given to a random episode of its update, and as many updates
of cloning the data that the start weights were made of. Every training is a project's own train.py with its own server.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from project_runs import Trained, TrainingError, interval_of, train
from rows import Row, show, show_promises, write_rows

from experiments_db.intervals import Interval, t_interval
from swarm_engine.config import ModelKind
from swarm_engine.models import resolve
from swarm_engine.models.loading import load_policy, save_policy
from swarm_engine.trainer.cloning import ClonedText, Recipe, clone, encode
from vibe import library, render, warmup
from vibe.project import ProjectSpec, Training, game_of, project_for

GAMES = ("tictactoe", "spy")
NUM_SEEDS = 5
MIN_RISE, MIN_RISE_OVER_SEEDS, MAX_SHUFFLED_RISE, MAX_WALL_S = 0.2, 0.1, 0.05, 180.0
"""What is promised: in every seed, at the lower end over the seeds, at most with shuffled rewards, for one run."""
LEGEND = """\
game, what, value [95% interval] unit, n. Of one seed and of play: held-out reward, over n games; of a rise (after
less before) and a level: over n seeds."""
NOWHERE = Path("no-model-root")
"""Shipped weights need none."""


def over_seeds(values: Sequence[float]) -> Interval:
    """The mean of one value a seed."""
    interval = t_interval(values)
    assert interval, "there is at least one seed"
    return interval


@dataclass(frozen=True, slots=True)
class Bench:
    """What to run, and where."""

    folder: Path
    training: Training
    seeds: range
    is_quick: bool

    def project(self, game: str, start_weights: str | None = None) -> tuple[ProjectSpec, Path]:
        """A project of a game on its default rules, written."""
        spec = project_for(game_of(game), training=self.training)
        if start_weights:
            spec = spec.model_copy(update={"start_weights": start_weights})
        path = self.folder / f"{game}-{start_weights or 'shipped'}"
        render.write(render.render(spec), path)
        return spec, path

    def train(self, project: Path, name: str, seed: int, *flags: str, models: Path | None = None) -> Trained:
        """Run a project's train.py to its end."""
        return train(project, self.folder / f"run-{name}-{seed}", seed, *flags, models=models)

    def row(self, case: str, metric: str, value: float | Interval, unit: str = "reward", n: int = 1) -> Row:
        """A number, or a mean with its interval, as a row."""
        if isinstance(value, Interval):
            return Row(case, metric, value.mean, unit, value.low, value.high, value.n, self.is_quick)
        return Row(case, metric, value, unit, None, None, n, self.is_quick)


def learning(bench: Bench, game: str) -> Iterator[Row]:
    """Training as a user gets it."""
    _, project = bench.project(game)
    runs: list[Trained] = []
    for seed in bench.seeds:
        run = bench.train(project, game, seed)
        runs.append(run)
        case = f"{game}, seed {seed}"
        for temperature, how in ((1, "temperature 1"), (0, "greedy")):
            for label in ("before", "after"):
                yield bench.row(case, f"{label}, {how}", run.level(label, temperature))
        yield bench.row(case, "wall time", run.wall_s, "s")
    for event in runs[0].results["levels"]:
        yield bench.row(game, f"{event['player']} play", interval_of(event))
    for temperature, how in ((1, "temperature 1"), (0, "greedy")):
        yield bench.row(game, f"rise, {how}", over_seeds([run.rise(temperature) for run in runs]))


def shuffled(bench: Bench, game: str) -> Iterator[Row]:
    """The control: the same rewards in other hands, to the last update, whatever becomes of the policy."""
    _, project = bench.project(game)
    runs = [bench.train(project, f"{game}-shuffled", seed, "--shuffle-rewards", "--go-on") for seed in bench.seeds]
    for temperature, how in ((1, "temperature 1"), (0, "greedy")):
        rises = [run.rise(temperature) for run in runs]
        yield bench.row(f"{game}, shuffled rewards", f"rise, {how}", over_seeds(rises))


def cloning(bench: Bench, game: str) -> Iterator[Row]:
    """The control: as many updates of as many games, cloning the data that the start weights were made of."""
    name = f"cloned-on-{game}"
    spec, project = bench.project(game, start_weights=name)
    data = warm_up_samples(spec)
    runs = []
    for seed in bench.seeds:
        models = bench.folder / f"models-{game}-{seed}"
        clone_on(spec, data, seed, models / name)
        # Without updates, "before" is the cloned policy on the same held-out games.
        runs.append(bench.train(project, name, seed, "--updates", "0", models=models))
    for temperature, how in ((1, "temperature 1"), (0, "greedy")):
        levels = [run.level("before", temperature).mean for run in runs]
        yield bench.row(f"{game}, cloning on", f"level, {how}", over_seeds(levels))


def warm_up_samples(spec: ProjectSpec) -> list[ClonedText]:
    """The conversations that the shipped start weights were cloned from, as token ids."""
    template = library.load(spec.template)
    plan = warmup.shipped_card(template).plan
    conversations = asyncio.run(
        warmup.demonstrations(template, spec.rules, share=plan.share, num_episodes=plan.num_episodes, seed=plan.seed)
    )
    codec = warmup.codec_of(load_policy(resolve(template.start_weights, NOWHERE)))
    return [sample for conversation in conversations for sample in encode(codec, conversation)]


def clone_on(spec: ProjectSpec, data: Sequence[ClonedText], seed: int, folder: Path) -> None:
    """Clone for as many updates as the training makes, from the shipped start weights, and save what comes out."""
    policy = load_policy(resolve(library.load(spec.template).start_weights, NOWHERE))
    trainer = spec.config.trainer.resolved(ModelKind.EMBEDDED, has_lora=False)
    assert trainer.learning_rate is not None
    assert trainer.warmup_updates is not None
    recipe = Recipe(
        num_updates=spec.training.updates,
        batch_size=trainer.group_size * trainer.tasks_per_update,
        learning_rate=trainer.learning_rate,
        num_warmup_updates=trainer.warmup_updates,
        weight_decay=trainer.weight_decay,
    )
    clone(policy.model, data, recipe, seed)
    folder.mkdir(parents=True)
    save_policy(policy, folder)


def promises(rows: Sequence[Row], games: Sequence[str]) -> Iterator[tuple[bool, str]]:
    """What is promised of these games, each with whether these rows keep it."""
    found = {(row.case, row.metric): row for row in rows}
    for game in games:
        for (case, metric), before in found.items():
            if not case.startswith(f"{game}, seed") or metric != "before, temperature 1":
                continue
            after = found[case, "after, temperature 1"]
            rise = after.value - before.value
            yield rise >= MIN_RISE, f"{case}: rises by {rise:.3f}, at least {MIN_RISE}"
            high, low = before.ci_high, after.ci_low
            apart = high is not None and low is not None and high < low
            yield apart, f"{case}: intervals before and after do not overlap"
            seconds = found[case, "wall time"].value
            yield seconds <= MAX_WALL_S, f"{case}: {seconds:.0f} s, at most {MAX_WALL_S:.0f} s"
        mean = found[game, "rise, temperature 1"]
        low = mean.ci_low if mean.ci_low is not None else float("-inf")
        yield (
            low > MIN_RISE_OVER_SEEDS,
            f"{game}: t-interval of the mean rise starts at {low:.3f}, above {MIN_RISE_OVER_SEEDS}",
        )
        greedy = found[game, "rise, greedy"].value
        yield greedy > 0, f"{game}: greedy rises by {greedy:.3f}"
        control = found[f"{game}, shuffled rewards", "rise, temperature 1"].value
        yield control < MAX_SHUFFLED_RISE, f"{game}: shuffled rewards rise by {control:.3f}, below {MAX_SHUFFLED_RISE}"


def main() -> int:
    """Run it; the exit code says whether every training came to its end, the last lines whether the promises hold."""
    parser = argparse.ArgumentParser(description="Does the embedded model learn?")
    parser.add_argument("--quick", action="store_true", help="show within a minute that it runs")
    parser.add_argument("--games", nargs="+", choices=library.names(), help=f"default: {' '.join(GAMES)}")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help="trainings of each kind")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    training = Training(updates=2, eval_every=2, eval_games=16) if args.quick else Training()
    games = args.games or (GAMES[:1] if args.quick else GAMES)
    rows: list[Row] = []
    failures: list[str] = []
    print(LEGEND, flush=True)
    with tempfile.TemporaryDirectory(prefix="learning-") as folder:
        bench = Bench(Path(folder), training, range(1 if args.quick else args.seeds), args.quick)
        for game in games:
            for part in (learning, shuffled, cloning):
                try:
                    for row in part(bench, game):
                        rows.append(row)
                        print(show(row), flush=True)
                except TrainingError as error:
                    failures.append(str(error))
                    print(f"FAILED {error}", flush=True)
                if args.json:
                    write_rows(rows, args.json)
    if not args.quick and not failures:
        show_promises(promises(rows, games))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
