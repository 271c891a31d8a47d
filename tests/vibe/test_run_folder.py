"""One training at a time in a run's folder."""

from __future__ import annotations

import asyncio
import errno
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from experiments_db.engine import open_database
from experiments_db.errors import FullError
from experiments_db.models import MetricPoint
from vibe.embedded import embedded_swarm
from vibe.errors import TrainingFailedError, UsageError
from vibe.project import RESULTS_FILE, game_of, project_for
from vibe.record import RECORD_FILE
from vibe.render import render, write
from vibe.run_folder import locked, make_folder, refuse_if_taken
from vibe.runtime import Run, main
from vibe.training import begin, going_on_in
from vibe.writing import Request, take, write_from_words

HOLDER = """
import sys
from pathlib import Path
from vibe.run_folder import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_training_in_the_folder_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match=rf"process {holder.pid}\).*--run-dir"), locked(tmp_path):
            pass
        holder.kill()
        holder.wait()
        with locked(tmp_path):
            pass


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), FullError("no room left")])
def test_a_full_disk_names_the_command_that_goes_on(tmp_path: Path, error: Exception) -> None:
    with (
        pytest.raises(TrainingFailedError, match=rf"(?i)no (space|room) left.*with --run-dir {tmp_path} goes on"),
        going_on_in(tmp_path),
    ):
        raise error


def test_a_training_that_finds_the_disk_full_names_the_command_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(render(project_for(game_of("nim"))), tmp_path / "nim")

    async def train(_: Run) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "argv", ["train.py", "--run-dir", str(tmp_path / "run")])
    assert main(train, project_of=str(tmp_path / "nim" / "train.py")) == 1
    said = capsys.readouterr().err
    assert "No space left on device; make room" in said
    assert f"the same command with --run-dir {tmp_path / 'run'} goes on from here" in said


def test_a_finished_run_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / RESULTS_FILE).write_text("{}", encoding="utf-8")
    with pytest.raises(UsageError, match="finished"), locked(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UsageError, match="can't be used"), locked(tmp_path / "file" / "run"):
        pass


def mode_of(folder: Path) -> int:
    return stat.S_IMODE(folder.stat().st_mode)


def test_the_home_is_its_owners_alone_whatever_is_made_in_it_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, make in enumerate(
        (
            lambda home: refuse_if_taken(home / "runs" / "one"),
            lambda home: write({"spec.json": "{}"}, home / "projects" / "one"),
            lambda home: make_folder(home / "models"),
        )
    ):
        home = tmp_path / str(number) / "home"
        monkeypatch.setenv("A3R_HOME", str(home))
        make(home)
        assert mode_of(home) == 0o700


def test_a_folder_outside_the_home_is_made_as_the_system_makes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A3R_HOME", str(tmp_path / "home"))
    (tmp_path / "usual").mkdir()
    make_folder(tmp_path / "projects")
    assert mode_of(tmp_path / "projects") == mode_of(tmp_path / "usual")
    assert not (tmp_path / "home").exists()


def test_a_folder_that_was_removed_and_named_again_begins_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A3R_HOME", str(tmp_path / "home"))
    request = Request("Play tic-tac-toe against a random opponent", as_json=True)
    run_dir = tmp_path / "run"
    with open_database() as database:

        def begun() -> str:
            run_dir.mkdir(exist_ok=True)
            return begin(database, request, write_from_words(request), run_dir)[0]

        first = begun()
        assert begun() == first, "the command was killed before it measured anything"
        with database.write() as session:
            session.add(MetricPoint(experiment_id=first, name="reward_mean", step=1, wall_s=1.0, value=0.5))
        (run_dir / RECORD_FILE).write_text('{"event": "begin"}\n')
        assert begun() == first
        shutil.rmtree(run_dir)
        second = begun()
        assert second != first
        (run_dir / RECORD_FILE).write_text('{"event": "begin"}\n')
        assert begun() == second


def test_a_run_whose_project_was_moved_goes_on_under_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A3R_HOME", str(tmp_path / "home"))
    write(render(project_for(game_of("tictactoe"))), tmp_path / "project")
    request = Request("", project=tmp_path / "project", as_json=True)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with open_database() as database:
        first, _ = begin(database, request, take(request, tmp_path / "project"), run_dir)
        moved = (tmp_path / "project").rename(tmp_path / "elsewhere")
        again, _ = begin(database, request, take(request, moved), run_dir)
    assert again == first


def test_a_swarm_that_refuses_its_folder_says_why(tmp_path: Path) -> None:
    (tmp_path / "journal.db").write_text("no journal")

    async def start() -> None:
        async with embedded_swarm(tmp_path):
            pass

    with pytest.raises(UsageError, match=r"refused to start in .*\n.*journal.db"):
        asyncio.run(start())
