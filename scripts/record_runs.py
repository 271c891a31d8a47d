"""Record the metrics of many short trainings, well and ill ones, for `swarm_engine.health` to be judged by.

    python scripts/record_runs.py tuning|test FILE.json.gz

Each run is a project's own train.py with its own server. `benchmarks/health.py` reads what was recorded for the test;
the runs for tuning are those that the rules were made with, and share neither seeds nor settings with it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from project_runs import train  # noqa: E402

from swarm_engine.health import METRICS  # noqa: E402
from vibe import library, render  # noqa: E402
from vibe.project import Training, game_of, project_for  # noqa: E402

DIGITS = 4
"""Of a recorded number."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A training to record."""

    game: str
    seed: int
    settings: Mapping[str, Any]
    """Of the trainer, beside the defaults."""
    updates: int = 24
    shuffles: bool = False
    """Rewards change hands."""

    @property
    def name(self) -> str:
        """What is special about it."""
        special = [f"{name}={value}" for name, value in self.settings.items()]
        return " ".join([self.game, f"seed={self.seed}", *special, *(["shuffled"] if self.shuffles else [])])


# Small batches learn more slowly and collapse as fast.
SMALL = {"group_size": 4}
COLD = {"warmup_updates": 0}
TUNING = (
    *(Recipe("nim", seed, SMALL | COLD) for seed in (0, 1, 2, 3)),
    *(Recipe("nim", seed, SMALL | COLD | {"learning_rate": 0.003}) for seed in (0, 1)),
    Recipe("nim", 2, SMALL | COLD | {"learning_rate": 0.01}),
    Recipe("nim", 3, {"group_size": 2} | COLD | {"learning_rate": 0.002}),
    Recipe("nim", 1, SMALL | {"warmup_updates": 5}),
    Recipe("tictactoe", 1, SMALL | {"warmup_updates": 5}),
    Recipe("tictactoe", 2, SMALL | COLD | {"learning_rate": 0.005}),
    Recipe("tictactoe", 3, SMALL | COLD | {"learning_rate": 0.02}),
    Recipe("tictactoe", 1, {"warmup_updates": 5}, shuffles=True),
    Recipe("spy", 1, {"warmup_updates": 5}),
    Recipe("spy", 2, SMALL | COLD | {"learning_rate": 0.005}),
    Recipe("gridwalk", 1, SMALL | {"warmup_updates": 5}),
    Recipe("gridwalk", 2, SMALL | COLD | {"learning_rate": 0.01}),
    Recipe("gridwalk", 3, SMALL | COLD | {"learning_rate": 0.003, "entropy_weight": 0.05}),
)
TEST = (
    Recipe("nim", 11, SMALL | COLD),
    Recipe("nim", 12, SMALL | COLD),
    Recipe("nim", 13, SMALL | {"warmup_updates": 5}),
    Recipe("nim", 14, SMALL | COLD | {"learning_rate": 0.004}),
    Recipe("nim", 15, SMALL | COLD | {"learning_rate": 0.008}),
    Recipe("nim", 16, {"group_size": 2} | COLD | {"learning_rate": 0.003, "algorithm": "dr_grpo"}),
    Recipe("nim", 17, COLD | {"learning_rate": 0.002, "algorithm": "rloo"}),
    Recipe("nim", 18, SMALL | COLD | {"learning_rate": 0.005, "algorithm": "gspo"}),
    Recipe("tictactoe", 11, {"warmup_updates": 5}),
    Recipe("tictactoe", 12, SMALL | COLD | {"learning_rate": 0.01}),
    Recipe("tictactoe", 13, SMALL | COLD | {"learning_rate": 0.003}),
    Recipe("tictactoe", 14, SMALL | {"warmup_updates": 5}, shuffles=True),
    Recipe("tictactoe", 15, SMALL | COLD | {"learning_rate": 0.002, "entropy_weight": 0.1}),
    Recipe("spy", 11, {"warmup_updates": 5}),
    Recipe("spy", 12, SMALL | COLD | {"learning_rate": 0.02}),
    Recipe("spy", 13, SMALL | COLD | {"learning_rate": 0.01}, shuffles=True),
    Recipe("gridwalk", 11, {"warmup_updates": 5}),
    Recipe("gridwalk", 12, SMALL | COLD | {"learning_rate": 0.006}),
    Recipe("gridwalk", 13, SMALL | COLD | {"learning_rate": 0.02}),
    Recipe("gridwalk", 14, SMALL | {"warmup_updates": 5, "algorithm": "cispo"}),
)
SETS: Mapping[str, Sequence[Recipe]] = {"tuning": TUNING, "test": TEST}


def record(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Run it to its end; what the health rules read, update by update."""
    project = folder / f"{recipe.game}-{recipe.updates}"
    if not project.exists():
        training = Training(updates=recipe.updates, eval_every=recipe.updates + 1, eval_games=2)
        render.write(render.render(project_for(game_of(recipe.game), training=training)), project)
    flags = [flag for name, value in recipe.settings.items() for flag in ("--set", f"trainer.{name}={value}")]
    flags += ["--shuffle-rewards"] if recipe.shuffles else []
    run = train(project, folder / recipe.name.replace(" ", "-"), recipe.seed, *flags)
    steps = [{name: rounded(step["metrics"].get(name)) for name in METRICS} for step in run.results["steps"]]
    return {
        "name": recipe.name,
        **asdict(recipe),
        "floor": library.load(recipe.game).module("rewards").LOWEST,
        "metrics": {name: [step[name] for step in steps] for name in METRICS},
    }


def rounded(value: float | None) -> float | None:
    """To a few digits, so that the file stays small."""
    return None if value is None else float(f"{value:.{DIGITS}g}")


def main() -> int:
    """Record one set."""
    parser = argparse.ArgumentParser(description="Record the metrics of many short trainings.")
    parser.add_argument("runs", choices=SETS)
    parser.add_argument("file", type=Path, metavar="FILE.json.gz")
    args = parser.parse_args()
    recorded = []
    with tempfile.TemporaryDirectory(prefix="runs-") as folder:
        for recipe in SETS[args.runs]:
            recorded.append(record(recipe, Path(folder)))
            print(recipe.name, recorded[-1]["metrics"]["reward_mean"], flush=True)
            args.file.write_bytes(gzip.compress(json.dumps(recorded).encode(), mtime=0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
