"""What earlier versions stored opens, goes on, and comes to what it came to then (tests/stored/keep.py made it)."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from a3r.report import bundle as bundles
from a3r.verify import verify
from experiments_db.models import StudyStatus
from vibe.record import RECORD_FILE, read

STORED = Path(__file__).parent / "stored"
VERSIONS = sorted(path.name for path in STORED.iterdir() if path.is_dir() and (path / "said.json").exists())
TOLERANCE = 1e-4
"""Relative, of a tensor's norm, on a machine that computes other bits."""

Opened = Callable[[str], tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def keep() -> ModuleType:
    """The program that stored them, for what it reads."""
    spec = importlib.util.spec_from_file_location("keep", STORED / "keep.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=VERSIONS)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Opened:
    """Unpacks what a version stored of a kind; returns its folder and what was said of it."""

    def unpack(kind: str) -> tuple[Path, dict[str, Any]]:
        version = STORED / request.param
        with tarfile.open(version / f"{kind}.tar.xz") as packed:
            packed.extractall(tmp_path, filter="data")
        said = json.loads((version / "said.json").read_text())
        return tmp_path / kind, said[kind] | {"machine": said["machine"]}

    return unpack


def assert_same_weights(keep: ModuleType, found: dict[str, Any], said: dict[str, Any]) -> None:
    if keep.machine() == said["machine"]:
        assert found == said["weights"]
    assert found["norms"] == pytest.approx(said["weights"]["norms"], rel=TOLERANCE)


@pytest.mark.slow
def test_a_killed_training_replays_to_its_weights_and_goes_on(opened: Opened, keep: ModuleType) -> None:
    folder, said = opened("training")
    before = list(read(folder / "run" / RECORD_FILE))
    assert_same_weights(keep, keep.weights_of_training(folder), said)
    command = [sys.executable, folder / "project" / "train.py", "--run-dir", folder / "run", "--json", *keep.TRAINING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    after = list(read(folder / "run" / RECORD_FILE))
    assert after[: len(before)] == before
    assert [event["step"] for event in after if event["event"] == "step"] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_killed_engine_says_what_it_said_and_replays_to_its_weights(opened: Opened, keep: ModuleType) -> None:
    folder, said = opened("swarm")
    found = keep.go_on_with_swarm(folder)
    assert found["events"] == said["events"]
    assert found["timelines"] == said["timelines"]
    assert_same_weights(keep, found["weights"], said)


@pytest.mark.slow
def test_an_answered_study_verifies_and_an_open_one_is_answered(opened: Opened, keep: ModuleType) -> None:
    home, said = opened("home")
    lab = keep.Lab(home, keep.EFFECT, processes=2)
    try:
        assert lab.go(said["open"]) is StudyStatus.DONE
        for study in (said["answered"], said["open"]):
            results = verify(lab.deps.database, study, lab.deps.home.study(study), "Tic-tac-toe")
            assert [result for result in results if not result.is_ok] == []
            assert bundles.load(lab.deps.database, study).leaf_of("group_size=8") == "superior"
    finally:
        lab.deps.database.close()
