"""A run whose home was moved goes on under the rows that it has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from sqlmodel import select

from experiments_db.engine import open_database
from experiments_db.models import Blueprint, Experiment, Job, JobState
from vibe.training import begin
from vibe.writing import Request, write_from_words

SENTENCE = "Play tic-tac-toe against a random opponent"


@pytest.mark.parametrize("is_of_an_earlier_version", [True, False])
def test_a_run_goes_on_under_its_rows_in_a_home_that_was_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_of_an_earlier_version: bool
) -> None:
    old, new = tmp_path / "old home", tmp_path / "new home"
    monkeypatch.setenv("A3R_HOME", str(old))
    request = Request(SENTENCE, as_json=True)
    written = write_from_words(request)
    run_dir = old / "runs" / "01RUN"
    run_dir.mkdir(parents=True)
    with open_database() as database:
        first, _ = begin(database, request, written, run_dir)
        with database.write() as session:
            run, blueprint = session.exec(select(Experiment)).one(), session.exec(select(Blueprint)).one()
            project = f"projects/{written.folder.name}/train.py"
            assert blueprint.command == ["python", project, "--run-dir", "runs/01RUN", "--json"]
            assert (run.key, run.run_dir) == ("single:runs/01RUN", "runs/01RUN")
            assert session.exec(select(Job)).one().log_path == "runs/01RUN/train.log"
            if is_of_an_earlier_version:
                run.run_dir = str(run_dir)
                blueprint.command = [sys.executable, f"{old}/{project}", "--run-dir", str(run_dir), "--json"]
    old.rename(new)
    monkeypatch.setenv("A3R_HOME", str(new))
    with open_database() as database:
        again, attempt = begin(database, request, write_from_words(request), new / "runs" / "01RUN")
        assert again == first
        assert attempt.attempt == 2
        with database.read() as session:
            jobs = session.exec(select(Job).order_by(Job.attempt)).all()
            assert [job.state for job in jobs] == [JobState.LOST, JobState.SUBMITTED]
        elsewhere = tmp_path / "elsewhere" / "runs" / "01RUN"
        elsewhere.mkdir(parents=True)
        other, _ = begin(database, request, write_from_words(request), elsewhere)
        assert other != first
        with database.read() as session:
            assert session.get_one(Experiment, other).run_dir == str(elsewhere)
