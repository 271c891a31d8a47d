"""What a command that shows runs says of those whose process has died."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from a3r.browsing import show_runs
from a3r.executor import supervise
from a3r.liveness import _is_let_go
from a3r.paths import Home
from experiments_db.engine import Database, open_database
from experiments_db.models import Job, JobState, Study, StudyKind, StudyStatus
from experiments_db.writes import begin_attempt, create_single_run, create_study, get, record_job, set_study_status
from vibe.run_folder import COMMAND_LOCK_FILE, locked

HOLD = """
import sys
from pathlib import Path
from vibe.run_folder import COMMAND_LOCK_FILE, locked
with locked(Path(sys.argv[1]), COMMAND_LOCK_FILE):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def database(home: Path) -> Iterator[Database]:
    with open_database(home=home) as opened:
        yield opened


def begin_run(database: Database, run_dir: Path) -> str:
    """A run that says it runs; returns its job."""
    with database.write() as session:
        run = create_single_run(session, StudyKind.VIBE, "nim", "nim", {}, key=str(run_dir), run_dir=str(run_dir))
        attempt = begin_attempt(session, run)
        for state in (JobState.SUBMITTED, JobState.RUNNING):
            record_job(session, attempt.job_id, state, fencing=attempt.fencing, host=socket.gethostname())
    return attempt.job_id


def shown(home: Path, capsys: pytest.CaptureFixture[str]) -> list[tuple[str, str | None]]:
    """Status and cause of each run, as `a3r runs --json` says."""
    show_runs(home, None, template=None, limit=10, as_json=True)
    runs: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["runs"]
    return [(run["status"], run["status_reason"]) for run in runs]


def test_a_killed_run_is_interrupted_and_a_living_one_runs(
    home: Path, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = home / "runs" / "one"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        job = begin_run(database, run_dir)
        assert shown(home, capsys) == [("running", None)]
        holder.kill()
    # Its number stands in the lock still, and may be another process's by now: what counts is the lock.
    (run_dir / COMMAND_LOCK_FILE).write_text(f"{os.getpid()}\n")
    ((status, cause),) = shown(home, capsys)
    assert (status, cause) == (
        "interrupted",
        "LOST: its process ended without a word: it was killed, or could not write any more",
    )
    with database.read() as session:
        assert get(session, Job, job).state is JobState.LOST
    with locked(run_dir, COMMAND_LOCK_FILE):  # looking has let it go again
        pass


def test_a_run_of_another_machine_is_left_alone(tmp_path: Path) -> None:
    lock = tmp_path / "command.lock"
    of_server = cast(Database, SimpleNamespace(engine=SimpleNamespace(dialect=SimpleNamespace(name="postgresql"))))
    here = socket.gethostname()
    assert not _is_let_go(of_server, lock, here), "its folder is not here"
    lock.touch()
    assert _is_let_go(of_server, lock, here)
    assert not _is_let_go(of_server, lock, f"not-{here}")
    assert not _is_let_go(of_server, lock, None), "nobody knows where it runs"


def test_a_study_that_nobody_works_on_says_how_it_goes_on(
    home: Path, database: Database, capsys: pytest.CaptureFixture[str]
) -> None:
    with database.write() as session:
        study = create_study(session, StudyKind.RESEARCH, "faster?")
        set_study_status(session, study, StudyStatus.RUNNING)
    folder = Home(home).study(study).root
    folder.mkdir(parents=True)
    held = supervise.lock(folder)
    assert held is not None
    with contextlib.closing(os.fdopen(held)):
        shown(home, capsys)
        assert status_of(database, study) == (StudyStatus.RUNNING, None)
    shown(home, capsys)
    status, reason = status_of(database, study)
    assert status is StudyStatus.PAUSED
    assert reason is not None
    assert reason.endswith(f"go on with: a3r resume {study}")


def status_of(database: Database, study: str) -> tuple[StudyStatus, str | None]:
    with database.read() as session:
        row = get(session, Study, study)
        return row.status, row.status_reason
