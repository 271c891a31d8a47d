"""A command that waits for the training it started, and a training that ends with its command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from vibe.errors import StoppedError
from vibe.project import SPEC_FILE, game_of, project_for
from vibe.training import watch
from vibe.writing import Request, Written

INTERRUPTS_ITS_PARENT = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {{signal.SIGINT}})
os.kill(os.getppid(), signal.SIGINT)
signal.sigwait({{signal.SIGINT}})
sys.exit({code})
"""


def watch_a_training_that_ends_with(code: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A3R_HOME", str(folder / "home"))
    (folder / "train.py").write_text(INTERRUPTS_ITS_PARENT.format(code=code), encoding="utf-8")
    spec = project_for(game_of("tictactoe"))
    watch(Request("tic-tac-toe", as_json=True), Written(spec, folder, "sha"), folder, "experiment")


def test_a_ctrl_c_that_comes_when_the_training_has_finished_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch_a_training_that_ends_with(0, tmp_path, monkeypatch)


def test_a_ctrl_c_that_ends_the_training_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoppedError, match="goes on from here"):
        watch_a_training_that_ends_with(130, tmp_path, monkeypatch)


TRAINS_IN_SILENCE = """
import asyncio, sys
from vibe.runtime import main
async def train(run):
    run.record.emit("phase", text="trains")
    await asyncio.sleep(300)
sys.exit(main(train, project_of=__file__))
"""
WATCHES = """
import sys
from pathlib import Path
from vibe.project import ProjectSpec
from vibe.training import watch
from vibe.writing import Request, Written
folder = Path(sys.argv[1])
watch(Request("tic-tac-toe", as_json=True), Written(ProjectSpec.load(folder), folder, "sha"), folder, "experiment")
"""


def start(folder: Path, *words: str, stdin: int) -> subprocess.Popen[str]:
    """Start a program, and wait until the project's training in it, which prints nothing more, has begun."""
    (folder / "train.py").write_text(TRAINS_IN_SILENCE, encoding="utf-8")
    (folder / SPEC_FILE).write_text(project_for(game_of("tictactoe")).to_json(), encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, *words], stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"A3R_HOME": str(folder / "home")},
    )  # fmt: skip
    assert process.stdout
    assert [json.loads(process.stdout.readline())["event"] for _ in range(2)] == ["begin", "phase"]
    return process


def train(folder: Path, *words: str, stdin: int) -> subprocess.Popen[str]:
    return start(folder, str(folder / "train.py"), "--run-dir", str(folder), "--json", *words, stdin=stdin)


def test_a_training_ends_with_a_command_that_is_killed(tmp_path: Path) -> None:
    command = start(tmp_path, "-c", WATCHES, str(tmp_path), stdin=subprocess.DEVNULL)
    (training,) = psutil.Process(command.pid).children()
    command.kill()
    command.communicate()
    assert not psutil.wait_procs([training], timeout=10)[1]
    assert "stopped by the end of its standard input" in (tmp_path / "train.log").read_text(encoding="utf-8")


def test_a_training_that_is_told_to_ends_with_its_standard_input(tmp_path: Path) -> None:
    training = train(tmp_path, "--exit-with-stdin", stdin=subprocess.PIPE)
    _, said = training.communicate("words that nobody reads\n", timeout=10)
    assert training.returncode == 130
    assert "goes on from here" in said


@pytest.mark.parametrize("stdin", [subprocess.DEVNULL, subprocess.PIPE])
def test_a_training_started_by_hand_needs_no_standard_input(stdin: int, tmp_path: Path) -> None:
    training = train(tmp_path, stdin=stdin)
    with pytest.raises(subprocess.TimeoutExpired):
        training.communicate(timeout=2)  # which closes the pipe
    training.terminate()
    training.communicate(timeout=10)
    assert training.returncode == 130
