"""One training at a time in a run's folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vibe.errors import UsageError
from vibe.project import RESULTS_FILE
from vibe.run_folder import locked

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
