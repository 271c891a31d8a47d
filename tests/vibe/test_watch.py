"""A command that waits for the training it started."""

from __future__ import annotations

from pathlib import Path

import pytest

from vibe.errors import StoppedError
from vibe.project import game_of, project_for
from vibe.training import Request, Written, watch

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
