"""The examples of workflows are drop-in: whichever framework a project is written with, the training is the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from swarm_engine.folders import find_checkpoints
from vibe import render
from vibe.project import RESULTS_FILE, game_of, project_for

pytestmark = pytest.mark.heavy

WORKFLOWS = Path(__file__).parents[2] / "examples" / "workflows"
SMALL = [
    "--updates", "1", "--eval-games", "2",
    "--set", "lockstep=true", "--set", "trainer.group_size=2", "--set", "trainer.tasks_per_update=2",
]  # fmt: skip


def trained_weights(workflow: Path, folder: Path) -> bytes:
    """Train tic-tac-toe with this workflow.py; the checkpoint's weights."""
    project, run_dir = folder / f"project-{workflow.stem}", folder / f"run-{workflow.stem}"
    render.write(render.render(project_for(game_of("tictactoe"))), project)
    (project / "workflow.py").write_bytes(workflow.read_bytes())
    words = [sys.executable, project / "train.py", "--run-dir", run_dir, "--json", *SMALL]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    (step,) = json.loads((run_dir / RESULTS_FILE).read_text(encoding="utf-8"))["steps"]
    assert step["metrics"]["skipped"] == 0  # or the weights would be the same without having moved
    checkpoint = find_checkpoints(run_dir / "checkpoints")[-1]
    assert checkpoint.step == 1
    return (checkpoint.folder("policy") / "model.safetensors").read_bytes()


def test_every_workflow_trains_the_same_weights_to_the_last_bit(tmp_path: Path) -> None:
    weights = {path.stem: trained_weights(path, tmp_path) for path in sorted(WORKFLOWS.glob("*.py"))}
    assert set(weights) == {"openai_sdk", "raw_http", "with_agentscope", "with_langchain"}
    assert len(set(weights.values())) == 1
