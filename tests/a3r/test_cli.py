"""The command: what it prints, where, and with which exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from a3r.cli import main
from a3r.prereg.plan import StageKind
from a3r.progress import JsonReporter
from experiments_db.engine import open_database
from experiments_db.models import EvalRun, MetricPoint
from experiments_db.writes import create_single_run

EXAMPLE = "Does a group size of 8 learn tic-tac-toe faster than 4 at the same number of episodes?"


class Ended(NamedTuple):
    """How a command ended, and what it said."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def a3r(tmp_path, monkeypatch, capsys) -> Callable[..., Ended]:
    """Runs the command in this process, in this test's folder: what a start of Python adds is tested once a kind."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["a3r", *words])
        capsys.readouterr()
        return Ended(main(), *capsys.readouterr())

    return run


def a3r_process(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
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
def test_a_question_it_can_not_read_is_exit_code_2_and_leaves_nothing_behind(tmp_path, a3r, question):
    done = a3r("research", "--yes", question)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "I read questions of the form" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_without_a_terminal_it_asks_for_yes_and_starts_nothing(tmp_path):
    done = a3r_process(tmp_path, "research", EXAMPLE)
    assert done.returncode == 2
    assert "--yes" in done.stderr
    assert "--dry-run" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_rules_that_do_not_go_together_are_refused_before_anything_is_written(tmp_path, a3r):
    done = a3r("research", "--yes", "Does a win length of 4 change the final reward on tictactoe against 3?")
    assert done.returncode == 2
    assert "win_length is 4" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_budget_that_is_too_small_is_refused_before_anything_is_written(tmp_path, a3r):
    done = a3r("research", "--yes", "--minutes", "1", "--jobs", "1", EXAMPLE)
    assert done.returncode == 2
    assert "raise --minutes" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_shows_the_plan_and_writes_nothing(tmp_path):
    done = a3r_process(tmp_path, "research", "--dry-run", "--jobs", "2", EXAMPLE)
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


def test_json_is_one_event_a_line(a3r):
    done = a3r("research", "--dry-run", "--json", "--jobs", "2", EXAMPLE)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["event"] for event in events] == ["scope", "checked", "result"]
    assert events[2]["plan_sha256"] == events[1]["plan_sha256"]
    assert events[1]["plan"]["seeds"] == [1, 2, 3]
    assert all(check["is_ok"] for check in events[1]["checks"])


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("research", "--yes", "Does 8 beat 4 at chess?"), 2, "names no template"),
        (("research", "--yes", "--seeds", "1", EXAMPLE), 2, "--seeds"),
        (("research", "--yes", "--no-such-flag", EXAMPLE), 2, "--no-such-flag"),
        (("verify", "01NOSUCHSTUDY"), 2, "is no study here"),
        (("research", "--yes", "--minutes", "inf", EXAMPLE), 2, "--minutes"),
        (("research", "--yes", "--eval-games", "1000000", EXAMPLE), 2, "less than or equal to 100000"),
        (("research", "--yes", f"{EXAMPLE} With 1000000 updates"), 2, "less than or equal to 100000"),
        (("compare", "01NOSUCHRUN"), 1, "there is no run"),
    ],
)
def test_an_error_is_a_json_line_where_json_is_asked_for(a3r, words, code, said):
    done = a3r(*words, "--json")
    assert done.returncode == code
    (event,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert event["event"] == "error"
    assert said in event["message"]


def test_a_word_that_is_no_text_is_said_as_a_json_line(tmp_path):
    done = a3r_process(tmp_path, "verify", "\udcff", "--json")
    assert done.returncode == 2
    assert "not valid UTF-8" in json.loads(done.stdout)["message"]


def test_a_run_and_its_picture_are_json_lines_with_the_result_last(tmp_path, a3r):
    with open_database(home=tmp_path / "home") as database, database.write() as session:
        runs = [create_single_run(session, "vibe", "Play nim", "nim", {"size": size}) for size in (3, 4)]
        for run in runs:
            session.add(MetricPoint(experiment_id=run, name="loss", step=1, value=0.5))
            session.add(EvalRun(experiment_id=run, step=0, split_name="heldout"))
    home = ("--home", str(tmp_path / "home"), "--json")

    def events(*words: str) -> list[dict[str, object]]:
        done = a3r(*words, *home)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    (listed,) = events("runs")
    assert listed["event"] == "result"
    assert len(listed["runs"]) == 2
    for words in (("show", runs[0]), ("compare", *runs, "--metric", "loss")):
        (result,) = events(*words)
        curves, again = events(*words, "--plot", str(tmp_path / "c.png"))
        assert curves == {"event": "curves", "path": str(tmp_path / "c.png")}
        assert again == result
        assert result["event"] == "result"
    done = a3r("show", runs[0], "--home", str(tmp_path / "home"), "--plot", str(tmp_path / "no" / "c.png"))
    assert done.returncode == 2
    assert f"there is no folder {tmp_path / 'no'}; make it" in done.stderr
    assert not (tmp_path / "no").exists()


ODD = "[/red] [bold]x[/bold]"
"""Text of a user, which is no markup."""


def test_the_database_may_lie_elsewhere(tmp_path, a3r):
    url = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    with open_database(url) as database, database.write() as session:
        runs = [create_single_run(session, "vibe", f"Play {ODD}", "nim", {"size": size}) for size in (3, 4)]
    for words in (("runs",), ("show", runs[0]), ("compare", *runs)):
        done = a3r(*words, "--db", url, "--json")
        assert runs[0] in done.stdout, done.stderr
    assert ODD in a3r("show", runs[0], "--db", url).stdout
    done = a3r("resume", "01NOSUCHSTUDY", "--db", "mysql://here/there")
    assert (done.returncode, "mysql is not supported" in done.stderr) == (1, True)
    assert not (tmp_path / ".a3r").exists()


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_is_explained(as_json):
    code = (
        "import sys, a3r.asking\n"
        "def interrupted(*_, **__): raise KeyboardInterrupt\n"
        "a3r.asking.understand = interrupted\n"
        "from a3r.cli import main\n"
        "sys.exit(main())\n"
    )
    words = ["research", EXAMPLE, *(["--json"] if as_json else [])]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 130
    assert done.stderr.startswith("error: stopped before this command watched a job.")
    assert bool(done.stdout) is as_json


@pytest.mark.parametrize("command", ["resume", "verify"])
def test_an_unknown_study_is_exit_code_2_and_says_which_there_are(a3r, command):
    done = a3r(command, "01NOSUCHSTUDY")
    assert done.returncode == 2
    assert "is no study here" in done.stderr


def test_a_home_that_can_not_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    done = a3r_process(tmp_path, "research", "--yes", "--home", str(tmp_path / "file" / "home"), EXAMPLE)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


def test_runs_of_an_empty_home_say_how_to_make_one(a3r):
    done = a3r("runs")
    assert done.returncode == 0
    assert "No runs yet" in done.stdout


def test_runs_of_a_template_that_has_none_say_which_have_some(tmp_path, a3r):
    with open_database(home=tmp_path / ".a3r") as database, database.write() as session:
        for template in ("tictactoe", "nim", "tictactoe"):
            create_single_run(session, "vibe", "Play", template, {})
    done = a3r("runs", "--template", "nope")
    assert done.stdout == "No run is of the template 'nope'. These have runs: nim (1), tictactoe (2)\n"
    assert json.loads(a3r("runs", "--template", "nope", "--json").stdout)["runs"] == []


def test_comparing_one_run_is_refused(a3r):
    done = a3r("compare", "01NOSUCHRUN")
    assert done.returncode != 0
    assert "there is no run" in done.stderr


def test_vibe_is_passed_through(tmp_path):
    done = a3r_process(tmp_path, "vibe", "templates")
    assert done.returncode == 0
    assert "tictactoe" in done.stdout


def test_a_wrong_flag_is_exit_code_2(tmp_path):
    done = a3r_process(tmp_path, "research", "--seeds", "1", EXAMPLE)
    assert done.returncode == 2
    assert "--seeds" in done.stderr


def test_an_event_may_say_of_what_kind_it_is(capsys):
    JsonReporter().tell("stage", n=0, kind=StageKind.NOISE_FLOOR, arms=["a"], seeds=[1])
    assert json.loads(capsys.readouterr().out)["kind"] == "noise_floor"


def test_what_runs_no_study_loads_no_langgraph_and_what_computes_nothing_no_scipy():
    code = (
        "import sys, a3r.research, a3r.verify, a3r.browsing\n"
        "print([name for name in ('langgraph', 'scipy') if name in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout == "[]\n"
