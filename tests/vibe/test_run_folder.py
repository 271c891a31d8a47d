"""One training at a time in a run's folder."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

from vibe.errors import UsageError
from vibe.project import RESULTS_FILE
from vibe.render import write
from vibe.run_folder import locked, make_folder, refuse_if_taken

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
