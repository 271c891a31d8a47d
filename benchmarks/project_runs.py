"""Trainings of a benchmark: a project's own train.py, run to its end, and what it came to."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments_db.intervals import Interval
from vibe.project import RESULTS_FILE
from vibe.runtime import MODELS


class TrainingError(Exception):
    """A training of the benchmark did not come to its end."""


def interval_of(event: dict[str, Any]) -> Interval:
    """The mean and interval of an evaluation or a level."""
    low, high = event["ci"]
    return Interval(event["mean"], low, high, event["n_groups"])


@dataclass(frozen=True, slots=True)
class Trained:
    """What one training came to."""

    run_dir: Path
    results: dict[str, Any]
    wall_s: float
    """From the start of the program to its end, servers and evaluations included."""

    def level(self, label: str, temperature: int) -> Interval:
        """Held-out reward, over games."""
        for event in self.results["evaluations"]:
            if (event["label"], event["temperature"]) == (label, temperature):
                return interval_of(event)
        raise KeyError(f"no evaluation {label!r} at temperature {temperature}")

    def rise(self, temperature: int) -> float:
        """After minus before."""
        return self.level("after", temperature).mean - self.level("before", temperature).mean


def train(project: Path, run_dir: Path, seed: int, *flags: str, models: Path | None = None) -> Trained:
    """Run a project's train.py to its end.

    Args:
        models: folder of start weights for its server, beside those that ship.
    Raises:
        TrainingError: it ended with an error.
    """
    if models:
        shutil.copytree(models, run_dir / MODELS)
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, project / "train.py", "--run-dir", run_dir, "--seed", str(seed), "--json", *flags],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode != 0:
        raise TrainingError(f"{run_dir.name} ended with code {done.returncode}: {done.stderr.strip()}")
    results = json.loads((run_dir / RESULTS_FILE).read_text(encoding="utf-8"))
    return Trained(run_dir, results, time.monotonic() - started)
