"""The command: what it prints, what it refuses, what it leaves behind."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlmodel import func, select

from experiments_db.engine import open_database
from experiments_db.models import Blueprint, EpisodeRow, EvalItem, Experiment, Job, JobState, MetricPoint
from vibe import cli, render
from vibe.errors import ProjectError
from vibe.project import ProjectSpec, game_of, project_for
from vibe.record import Record
from vibe.runtime import Settings, begin
from vibe.writing import project_named

SENTENCE = "Play tic-tac-toe against a random opponent"
TINY = ["--set", "trainer.group_size=2", "--set", "trainer.tasks_per_update=2", "--eval-games", "4"]

Vibe = Callable[..., tuple[int, str, str]]


def start(home: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "vibe", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"A3R_HOME": str(home), "OMP_NUM_THREADS": "1", "COLUMNS": "120"},
    )  # fmt: skip


def run(home: Path, *words: str) -> tuple[int, str, str]:
    """The command in a process of its own: its exit code, output and errors."""
    process = start(home, *words)
    out, said = process.communicate(timeout=180)
    return process.returncode, out, said


@pytest.fixture
def vibe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Vibe:
    """The command in this process, for what trains nothing: its exit code, output and errors."""

    def answer(home: Path, *words: str) -> tuple[int, str, str]:
        monkeypatch.setenv("A3R_HOME", str(home))
        monkeypatch.setenv("COLUMNS", "120")
        monkeypatch.setattr(sys, "argv", ["vibe", *words])
        code = cli.main()
        out, said = capsys.readouterr()
        return code, out, said

    return answer


def rows(home: Path, table: Any) -> list[Any]:
    with open_database(home=home) as database, database.read() as session:
        return list(session.exec(select(table)).all())


def test_new_writes_a_project_and_says_what_became_of_the_words(tmp_path: Path) -> None:
    code, out, said = run(tmp_path, "new", "Nim with 21 stones and 5 referees", "--out", str(tmp_path / "nim"))
    assert code == 0, said
    assert "stones = 21" in out
    assert "5 referees" in out
    assert "not used" in out
    assert json.loads((tmp_path / "nim" / "spec.json").read_text(encoding="utf-8"))["rules"]["stones"] == 21


def test_new_with_json_prints_the_spec_and_the_project(vibe: Vibe, tmp_path: Path) -> None:
    code, out, said = vibe(tmp_path, "new", SENTENCE, "--json")
    assert code == 0, said
    spec, project = map(json.loads, out.splitlines())
    assert spec["event"] == "spec"
    assert spec["template"] == "tictactoe"
    assert (Path(project["path"]) / "train.py").is_file()
    assert Path(project["path"]).is_relative_to(tmp_path)


def test_templates_lists_every_game_with_its_rules(vibe: Vibe, tmp_path: Path) -> None:
    code, out, _ = vibe(tmp_path, "templates", "--json")
    assert code == 0
    found = {event["name"]: event["rules"] for event in map(json.loads, out.splitlines())}
    assert found.keys() == {"gridwalk", "nim", "spy", "tictactoe"}
    assert found["spy"]["players"] == {
        "default": 4, "low": 3, "high": 8, "meaning": "this many play, one of them is the spy",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", ""], "says nothing"),
        (["train", "poker with six players"], "names poker"),
        (["new", "the of and"], "describe one of them"),
        (["train", SENTENCE, "--set", "trainer.group_sise=4"], "group_size"),
        (["train", SENTENCE, "--set", "trainer.group_size"], "PATH=VALUE"),
        (["train", SENTENCE, "--swarm", "http://127.0.0.1:9"], "--token-file go together"),
        (["train", SENTENCE, "--swarm", "http://me:pw@host", "--token-file", "t"], "--swarm: the address of the swarm"),
        (["train", SENTENCE, "--brain", "oracle"], "offline"),
        (["train", SENTENCE, "--updates", "-3"], "greater than or equal to 0"),
        (["train", "./nowhere"], "./nowhere is not there; name the folder of a project, or describe the game"),
        (["train", "no/where"], "no/where is not there"),
        (["train", "."], ". holds no project, spec.json is missing"),
        (["train", __file__], "is a file"),
        (["play", SENTENCE], "play"),
    ],
)
def test_bad_input_is_refused_in_words(words: list[str], said: str, vibe: Vibe, tmp_path: Path) -> None:
    code, _, error = vibe(tmp_path, *words)
    assert code == 2
    assert said in error
    assert "Traceback" not in error
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of tic-tac-toe."""
    folder = tmp_path / "project"
    render.write(render.render(project_for(game_of("tictactoe"))), folder)
    return folder


def test_a_text_is_a_folder_where_it_is_written_as_one_or_a_project_is_there(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nim").mkdir()
    for text in ("nim", "tictactoe", SENTENCE, "take 1/2 of the stones", "nim\0", "x" * 5000, "~15 stones"):
        assert project_named(text) is None
    for text in ("project", "./project", str(project), "nim/../project"):
        assert project_named(text) == Path(text)
    (project / "env.py").unlink()
    for text in ("project", "./project"):
        with pytest.raises(ProjectError, match=r"holds no project, env\.py is missing"):
            project_named(text)


def test_a_project_that_is_there_takes_no_flags_of_a_description(vibe: Vibe, project: Path, tmp_path: Path) -> None:
    code, _, said = vibe(tmp_path, "train", str(project), "--out", str(tmp_path / "other"))
    assert (code, "--out goes with a description" in said) == (2, True)
    code, _, said = vibe(tmp_path, "train", str(project), "--force")
    assert (code, "--force goes with a description" in said) == (2, True)


def test_a_run_folder_of_other_code_is_refused_before_a_row_is_written(
    vibe: Vibe, project: Path, tmp_path: Path
) -> None:
    record = Record(tmp_path, as_json=True, out=io.StringIO())
    begin(Settings(project, ProjectSpec.load(project), tmp_path), record)
    (project / "rewards.py").write_text("REWARDS = {}\n", encoding="utf-8")
    code, out, said = vibe(tmp_path, "train", str(project), "--run-dir", str(tmp_path))
    assert code == 2
    assert "not as its template has it: rewards.py" in out
    assert said.startswith("error: rewards.py changed since the run in ")
    assert rows(tmp_path, Experiment) == []


def test_brackets_of_a_user_are_no_markup(vibe: Vibe, tmp_path: Path) -> None:
    odd = "[/red] [bold]x[/bold] [link=a]"
    code, out, said = vibe(tmp_path, "new", f"{SENTENCE}. {odd}", "--out", str(tmp_path / "game"))
    assert code == 0, said
    assert odd in out


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_reader_that_leaves_is_no_error_and_a_full_disk_is_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vibe", "templates"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("error: [Errno 28] No space left on device; make room")
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as pipe:
        done = subprocess.run(command, cwd=tmp_path, stdout=pipe, stderr=subprocess.PIPE, text=True, check=False)
    assert done.stderr == ""


def test_what_is_refused_ends_the_process_with_its_code(tmp_path: Path) -> None:
    code, out, said = run(tmp_path, "train", "")
    assert (code, out) == (2, "")
    assert said.startswith("error: the description says nothing")
    assert "Traceback" not in said


def test_a_home_that_no_database_can_be_in_is_refused_before_anything_is_written(vibe: Vibe, tmp_path: Path) -> None:
    code, out, said = vibe(tmp_path / "really?", "new", SENTENCE)
    assert code == 1
    assert out == ""
    assert "really? holds a question mark; set A3R_HOME to a folder without one" in said
    assert list(tmp_path.iterdir()) == []


@dataclass(frozen=True, slots=True)
class Finished:
    """A training that has ended, and what the commands around it said."""

    home: Path
    pid: int
    code: int
    out: str
    said: str
    refused: tuple[int, str, str] | None = None
    """What a second command got that was given the same folder while the training ran."""


def wait_for_line(process: subprocess.Popen[str], begins: str) -> None:
    """Read on until a line of the output begins like this."""
    assert process.stdout
    assert any(line.startswith(begins) for line in process.stdout), f"{begins!r} never came"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A training from beginning to end, whose folder a second command was given meanwhile."""
    home = tmp_path_factory.mktemp("whole")
    words = ["train", SENTENCE, "--updates", "2", *TINY, "--json", "--run-dir", str(home / "run")]
    first = start(home, *words)
    while not (home / "run" / "command.lock").exists():
        assert first.poll() is None
        time.sleep(0.02)
    first.send_signal(signal.SIGSTOP)  # so that it can't end before the second one looks
    refused = run(home, *words)
    first.send_signal(signal.SIGCONT)
    out, said = first.communicate(timeout=180)
    return Finished(home, first.pid, first.returncode, out, said, refused)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A training of an edited project whose command was killed with SIGKILL after an update and typed again, for people
    both times."""
    home = tmp_path_factory.mktemp("resumed")
    folder = home / "edited"
    render.write(render.render(project_for(game_of("tictactoe"))), folder)
    rewards = folder / "rewards.py"
    rewards.write_text(rewards.read_text(encoding="utf-8").replace('"drawn": 0.5', '"drawn": 0.25'), encoding="utf-8")
    words = ["train", str(folder), "--updates", "2", *TINY, "--run-dir", str(home / "run")]
    killed = start(home, *words)
    wait_for_line(killed, "step")
    children = psutil.Process(killed.pid).children(recursive=True)
    killed.kill()
    killed.communicate(timeout=60)
    assert not psutil.wait_procs(children, timeout=60)[1]
    again = start(home, *words)
    out, said = again.communicate(timeout=180)
    return Finished(home, again.pid, again.returncode, out, said)


@pytest.mark.slow
@pytest.mark.xdist_group("vibe-whole")
def test_train_ends_with_its_result_and_rows_for_everything(whole: Finished) -> None:
    assert whole.code == 0, whole.said
    events = [json.loads(line) for line in whole.out.splitlines()]
    result = events[-1]
    assert result["event"] == "result"
    assert [event["event"] for event in events].count("result") == 1
    assert Path(result["curve"]).read_bytes().startswith(b"\x89PNG")
    assert {(event["label"], event["temperature"]) for event in result["evaluations"]} == {
        ("before", 1), ("before", 0), ("after", 1), ("after", 0),
    }  # fmt: skip
    (experiment,) = rows(whole.home, Experiment)
    assert experiment.id == result["run"]
    (job,) = rows(whole.home, Job)
    assert (job.state, job.exit_code) == (JobState.SUCCEEDED, 0)
    rewards = {point.step: point.value for point in rows(whole.home, MetricPoint) if point.name == "reward_mean"}
    assert rewards == {event["step"]: event["metrics"]["reward_mean"] for event in events if event["event"] == "step"}
    with open_database(home=whole.home) as database, database.read() as session:
        assert session.exec(select(func.count()).select_from(EvalItem)).one() == 4 * 4
        assert session.exec(select(func.count()).select_from(EpisodeRow)).one() >= 2 * 4 + 4 * 4


@pytest.mark.slow
@pytest.mark.xdist_group("vibe-whole")
def test_a_second_command_in_a_folder_is_refused_and_the_first_goes_on(whole: Finished) -> None:
    assert whole.refused
    code, _, said = whole.refused
    assert code == 2
    assert f"process {whole.pid}" in said
    assert whole.code == 0, whole.said
    assert [job.state for job in rows(whole.home, Job)] == [JobState.SUCCEEDED]


@pytest.mark.slow
@pytest.mark.xdist_group("vibe-resumed")
def test_after_a_kill_the_same_command_goes_on(resumed: Finished) -> None:
    assert resumed.code == 0, resumed.said
    assert [job.state for job in rows(resumed.home, Job)] == [JobState.LOST, JobState.SUCCEEDED]
    steps = [point.step for point in rows(resumed.home, MetricPoint) if point.name == "reward_mean"]
    assert sorted(steps) == [1, 2]


@pytest.mark.slow
@pytest.mark.xdist_group("vibe-resumed")
def test_a_folder_is_trained_as_it_is_and_its_runs_are_told_from_the_templates(resumed: Finished) -> None:
    assert f"Training the project in {resumed.home / 'edited'} (Tic-tac-toe)" in resumed.out
    assert (resumed.home / "run" / "curve.png").is_file()
    (blueprint,) = rows(resumed.home, Blueprint)
    assert blueprint.controls["training"]["updates"] == 2
    assert list(blueprint.controls["edited"]) == ["rewards.py"]
    assert not (resumed.home / "projects").exists()


@pytest.mark.slow
@pytest.mark.xdist_group("vibe-resumed")
def test_a_terminal_gets_tables_games_and_where_everything_is(resumed: Finished) -> None:
    for shown in ("held-out game 3", "temperature 1", "random legal play", "curve.png", "project"):
        assert shown in resumed.out


@pytest.mark.slow
def test_ctrl_c_ends_everything_and_says_how_to_go_on(vibe: Vibe, tmp_path: Path) -> None:
    words = ["train", SENTENCE, "--updates", "3", *TINY, "--json"]
    process = start(tmp_path, *words)
    wait_for_line(process, '{"event": "step"')
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) >= 4, "train.py, the swarm's front, its worker and the game's process"
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert not psutil.wait_procs(children, timeout=30)[1]
    run_dir = said.split("--run-dir ")[1].split(" goes on")[0]
    (job,) = rows(tmp_path, Job)
    assert job.state is JobState.CANCELLED

    code, out, said = run(tmp_path, *words, "--run-dir", run_dir)
    assert code == 0, said
    assert json.loads(out.splitlines()[-1])["event"] == "result"
    assert [job.state for job in rows(tmp_path, Job)] == [JobState.CANCELLED, JobState.SUCCEEDED]
    assert len(rows(tmp_path, Experiment)) == 1
    steps = [point.step for point in rows(tmp_path, MetricPoint) if point.name == "reward_mean"]
    assert sorted(steps) == [1, 2, 3]

    code, _, said = vibe(tmp_path, *words, "--run-dir", run_dir)
    assert code == 2
    assert "finished" in said
