"""It learns, and in lockstep a run repeats itself to the last digit. benchmarks/learning.py measures how much."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vibe import render
from vibe.project import game_of, project_for

pytestmark = pytest.mark.slow

LOCKSTEP = ["--set", "lockstep=true"]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project") / "tictactoe"
    render.write(render.render(project_for(game_of("tictactoe"))), folder)
    return folder


def train(project: Path, run_dir: Path, *words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(project / "train.py"), "--run-dir", str(run_dir), "--json", *words],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads((run_dir / "results.json").read_text(encoding="utf-8"))
    return results


def without_clocks(value: Any) -> Any:
    """The same without what a clock has measured."""
    if isinstance(value, dict):
        clocks = ("seconds", "update_s")
        return {name: without_clocks(item) for name, item in value.items() if name not in clocks}
    return [without_clocks(item) for item in value] if isinstance(value, list) else value


def test_tic_tac_toe_rises_within_eight_updates(project: Path, tmp_path: Path) -> None:
    """With this seed; how much it rises with others, and over more updates, benchmarks/learning.py says."""
    results = train(project, tmp_path / "run", "--updates", "8", "--eval-games", "60")
    level = {event["label"]: event["mean"] for event in results["evaluations"] if event["temperature"] == 1}
    assert level["after"] - level["before"] > 0.1, level


def test_a_lockstep_run_repeats_itself(project: Path, tmp_path: Path) -> None:
    words = [*LOCKSTEP, "--eval-games", "6", "--set", "trainer.group_size=4", "--set", "trainer.tasks_per_update=2"]
    one, other = (train(project, tmp_path / name, "--updates", "2", *words) for name in ("one", "other"))
    assert without_clocks(one) == without_clocks(other)
    assert one["steps"][-1]["metrics"]["loss"] is not None
    third = train(project, tmp_path / "third", "--updates", "1", *words, "--seed", "1")
    assert without_clocks(third["steps"][0]) != without_clocks(one["steps"][0])
