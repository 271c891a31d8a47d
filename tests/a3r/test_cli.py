"""The command: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = "Does a group size of 8 learn tic-tac-toe faster than 4 at the same number of episodes?"


def a3r(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "a3r", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        timeout=120,
    )


@pytest.mark.parametrize("question", ["", "  ", "colourless green ideas sleep", "Does 8 beat 4 at chess?"])
def test_a_question_it_can_not_read_is_exit_code_2_and_leaves_nothing_behind(tmp_path, question):
    done = a3r(tmp_path, "research", "--yes", question)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "I read questions of the form" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_without_a_terminal_it_asks_for_yes_and_starts_nothing(tmp_path):
    done = a3r(tmp_path, "research", EXAMPLE)
    assert done.returncode == 2
    assert "--yes" in done.stderr
    assert "--dry-run" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_rules_that_do_not_go_together_are_refused_before_anything_is_written(tmp_path):
    done = a3r(tmp_path, "research", "--yes", "Does a win length of 4 change the final reward on tictactoe against 3?")
    assert done.returncode == 2
    assert "win_length is 4" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_budget_that_is_too_small_is_refused_before_anything_is_written(tmp_path):
    done = a3r(tmp_path, "research", "--yes", "--minutes", "1", "--jobs", "1", EXAMPLE)
    assert done.returncode == 2
    assert "raise --minutes" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_shows_the_plan_and_writes_nothing(tmp_path):
    done = a3r(tmp_path, "research", "--dry-run", "--jobs", "2", EXAMPLE)
    assert done.returncode == 0
    for words in (
        "trainer.group_size",
        "1600 episodes, 64 in each update",
        "no effect",
        "first true node decides",
        "6 runs",
    ):
        assert words in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_json_is_one_event_a_line(tmp_path):
    done = a3r(tmp_path, "research", "--dry-run", "--json", "--jobs", "2", EXAMPLE)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["event"] for event in events] == ["scope", "checked"]
    assert events[1]["plan"]["seeds"] == [1, 2, 3]
    assert all(check["is_ok"] for check in events[1]["checks"])


@pytest.mark.parametrize("command", ["resume", "verify"])
def test_an_unknown_study_is_exit_code_2_and_says_which_there_are(tmp_path, command):
    done = a3r(tmp_path, command, "01NOSUCHSTUDY")
    assert done.returncode == 2
    assert "is no study here" in done.stderr


def test_a_home_that_can_not_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    done = a3r(tmp_path, "research", "--yes", "--home", str(tmp_path / "file" / "home"), EXAMPLE)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_runs_of_an_empty_home_say_how_to_make_one(tmp_path):
    done = a3r(tmp_path, "runs")
    assert done.returncode == 0
    assert "No runs yet" in done.stdout


def test_comparing_one_run_is_refused(tmp_path):
    done = a3r(tmp_path, "compare", "01NOSUCHRUN")
    assert done.returncode != 0
    assert "there is no run" in done.stderr


def test_vibe_is_passed_through(tmp_path):
    done = a3r(tmp_path, "vibe", "templates")
    assert done.returncode == 0
    assert "tictactoe" in done.stdout


def test_a_wrong_flag_is_exit_code_2(tmp_path):
    done = a3r(tmp_path, "research", "--seeds", "1", EXAMPLE)
    assert done.returncode == 2
    assert "--seeds" in done.stderr
