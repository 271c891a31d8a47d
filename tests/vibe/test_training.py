"""A project trains through a swarm of its own: whole, interrupted, with a worker that dies, beside another run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from children import children_with

from vibe import render
from vibe.project import ProjectSpec, Training, game_of, project_for
from vibe.record import RECORD_FILE, read
from vibe.runtime import differences, parse

TINY = [
    "--set",
    "trainer.group_size=2",
    "--set",
    "trainer.tasks_per_update=2",
    "--eval-games",
    "4",
    "--eval-every",
    "2",
]

Finished = tuple[int, list[dict[str, Any]], str]
"""Exit code, events and errors of a training."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project") / "tictactoe"
    render.write(render.render(project_for(game_of("tictactoe"))), folder)
    return folder


def train(project: Path, run_dir: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(project / "train.py"), "--run-dir", str(run_dir), "--json", *TINY, *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def events_of(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout
    yield from map(json.loads, process.stdout)


def until(process: subprocess.Popen[str], holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    return next(event for event in events_of(process) if holds(event))


def finish(process: subprocess.Popen[str]) -> Finished:
    out, said = process.communicate(timeout=120)
    return process.returncode, [json.loads(line) for line in out.splitlines()], said


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def are_gone(processes: Sequence[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=30)
    return not alive


@dataclass(frozen=True, slots=True)
class Whole:
    """A training from beginning to end, and what two others got that were started in its folder."""

    run_dir: Path
    pid: int
    finished: Finished
    meanwhile: Finished
    afterwards: Finished


@pytest.fixture(scope="module")
def whole(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    words = ["--updates", "3"]
    first = train(project, run_dir, *words)
    seen: list[dict[str, Any]] = []
    for event in events_of(first):
        seen.append(event)
        if event["event"] == "evaluation":
            break
    first.send_signal(signal.SIGSTOP)  # so that it can't end before the second one looks
    meanwhile = finish(train(project, run_dir, *words))
    first.send_signal(signal.SIGCONT)
    code, events, said = finish(first)
    return Whole(run_dir, first.pid, (code, seen + events, said), meanwhile, finish(train(project, run_dir, *words)))


@pytest.mark.xdist_group("training-whole")
def test_a_run_measures_learns_and_measures_again(whole: Whole) -> None:
    code, events, said = whole.finished
    assert code == 0, said
    kinds = [event["event"] for event in events]
    assert kinds[0] == "begin"
    assert kinds[-1] == "result"
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3]
    measured = [
        (event["label"], event["step"], event["temperature"], event["n_groups"])
        for event in events
        if event["event"] == "evaluation"
    ]
    assert measured == [
        ("before", 0, 1, 4), ("before", 0, 0, 4), ("during", 2, 1, 4), ("after", 3, 1, 4), ("after", 3, 0, 4),
    ]  # fmt: skip
    results = json.loads((whole.run_dir / "results.json").read_text(encoding="utf-8"))
    assert [level["player"] for level in results["levels"]] == ["random", "scripted"]
    assert len(results["steps"]) == 3
    assert all(len(event["samples"]) == 3 for event in results["evaluations"])


@pytest.mark.xdist_group("training-whole")
def test_a_second_run_in_the_folder_is_refused_and_the_first_goes_on(whole: Whole) -> None:
    code, _, said = whole.meanwhile
    assert code == 2
    assert f"process {whole.pid}" in said
    assert whole.finished[0] == 0, whole.finished[2]


@pytest.mark.xdist_group("training-whole")
def test_a_finished_run_is_not_run_again(whole: Whole) -> None:
    code, _, said = whole.afterwards
    assert code == 2
    assert "finished" in said
    assert "--run-dir" in said


def test_a_closed_terminal_leaves_no_process_and_only_the_same_command_goes_on(project: Path, tmp_path: Path) -> None:
    first = train(project, tmp_path / "run", "--updates", "4")
    until(first, lambda event: event["event"] == "step" and event["step"] == 2)
    children = family(first)
    assert len(children) >= 3, "the swarm's front, its worker and the game's process"
    first.send_signal(signal.SIGHUP)
    code, _, said = finish(first)
    assert code == 130
    assert "stopped by SIGHUP" in said
    assert f"the same command with --run-dir {tmp_path / 'run'} goes on" in said
    assert are_gone(children)
    code, _, said = finish(train(project, tmp_path / "run", "--updates", "4", "--seed", "5"))
    assert code == 2
    assert "config.seed" in said
    code, events, said = finish(train(project, tmp_path / "run", "--updates", "4"))
    assert code == 0, said
    assert [event["step"] for event in events if event["event"] == "step"] in ([3, 4], [4])
    record = list(read(tmp_path / "run" / RECORD_FILE))
    assert [event["step"] for event in record if event["event"] == "step"] == [1, 2, 3, 4]
    assert len([event for event in record if event["event"] == "evaluation" and event["label"] == "before"]) == 2


def test_a_killed_run_leaves_no_process_and_loses_nothing(project: Path, tmp_path: Path) -> None:
    first = train(project, tmp_path / "run", "--updates", "3")
    until(first, lambda event: event["event"] == "step" and event["step"] == 1)
    children = family(first)
    first.kill()
    first.communicate()
    assert are_gone(children)
    code, _, said = finish(train(project, tmp_path / "run", "--updates", "3"))
    assert code == 0, said
    record = list(read(tmp_path / "run" / RECORD_FILE))
    assert [event["step"] for event in record if event["event"] == "step"] == [1, 2, 3]


def test_a_worker_that_dies_is_started_again_once(project: Path, tmp_path: Path) -> None:
    process = train(project, tmp_path / "run", "--updates", "4")
    until(process, lambda event: event["event"] == "step" and event["step"] == 1)
    kill_worker(process)
    until(process, lambda event: event["event"] == "step" and event["step"] == 3)
    kill_worker(process)
    code, _, said = finish(process)
    assert code == 1
    assert "failed again after a new start" in said
    code, _, said = finish(train(project, tmp_path / "run", "--updates", "4"))
    assert code == 0, said


def kill_worker(process: subprocess.Popen[str]) -> None:
    (worker,) = children_with("swarm_engine.worker", process.pid, recursive=True)
    worker.kill()


@contextlib.contextmanager
def serving(run_dir: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """A swarm server, which ends with its standard input, and where it says that it listens."""
    with subprocess.Popen(
        [sys.executable, "-m", "swarm_engine.cli", "serve", "--run-dir", str(run_dir), "--exit-with-stdin", *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as server:  # fmt: skip
        assert server.stdout
        yield server, json.loads(server.stdout.readline())


def end(server: subprocess.Popen[str]) -> None:
    assert server.stdin
    server.stdin.close()
    assert server.wait(timeout=30) == 0


def test_a_run_trains_on_a_swarm_that_is_there(project: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "swarm") as (server, listening):
        swarm = ["--swarm", listening["url"], "--token-file", listening["token_file"]]
        code, events, said = finish(train(project, tmp_path / "run", "--updates", "1", *swarm))
        assert code == 0, said
        assert [event["step"] for event in events if event["event"] == "step"] == [1]
        code, _, said = finish(train(project, tmp_path / "other", "--updates", "1", *swarm))
        assert code == 2
        assert "1 updates already" in said or "other settings" in said
        end(server)


def test_a_run_outlives_the_server_that_it_trains_on(project: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "swarm") as (server, listening):
        swarm = ["--swarm", listening["url"], "--token-file", listening["token_file"]]
        process = train(project, tmp_path / "run", "--updates", "4", *swarm)
        until(process, lambda event: event["event"] == "step" and event["step"] == 1)
        server.kill()
    port = ["--port", listening["url"].rpartition(":")[2]]
    with serving(tmp_path / "swarm", *port) as (server, again):
        assert again["url"] == listening["url"]
        until(process, lambda event: event["event"] == "step" and event["step"] == 3)
        end(server)  # in order, its engine stopped
    with serving(tmp_path / "swarm", *port) as (server, _):
        code, _, said = finish(process)
        assert code == 0, said
        end(server)
    steps = [event["step"] for event in read(tmp_path / "run" / RECORD_FILE) if event["event"] == "step"]
    assert steps == [1, 2, 3, 4]


def test_a_swarm_that_is_not_there_is_an_error_in_words(project: Path, tmp_path: Path) -> None:
    (tmp_path / "token.json").write_text('{"operator": "secret"}', encoding="utf-8")
    swarm = ["--swarm", "http://127.0.0.1:9", "--token-file", str(tmp_path / "token.json")]
    started = time.monotonic()
    code, _, said = finish(train(project, tmp_path / "run", *swarm))
    assert code == 1
    assert "http://127.0.0.1:9" in said
    assert "Traceback" not in said
    assert time.monotonic() - started < 30


def test_settings_come_from_the_project_and_the_command_line(project: Path, tmp_path: Path) -> None:
    words = ["--run-dir", str(tmp_path), "--seed", "7", "--updates", "5", "--set", "trainer.learning_rate=0.003"]
    settings = parse(words, project)
    spec = ProjectSpec.load(project)
    assert settings.spec.training == spec.training.model_copy(update={"updates": 5})
    assert settings.spec.config.seed == 7
    assert settings.spec.config.trainer.learning_rate == 0.003
    assert Training() == spec.training


def test_the_settings_that_differ_are_named_by_their_paths() -> None:
    now = {"spec": {"config": {"seed": 1, "lockstep": False}}, "shuffle_rewards": False}
    then = {"spec": {"config": {"seed": 2, "lockstep": False}}, "shuffle_rewards": True}
    assert sorted(differences(now, then)) == ["shuffle_rewards", "spec.config.seed"]
