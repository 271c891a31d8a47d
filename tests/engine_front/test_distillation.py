"""A teacher over HTTP: asked about every trained token, kept with the batch, and told apart from a wrong one."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Served, serve_thread, wait_until
from episodes import call, episode
from forked import forked_worker

from swarm_engine.client import Status, SwarmClient, SyncEpisode, Task
from swarm_engine.config import TeacherConfig
from swarm_engine.errors import TeacherError
from swarm_engine.models import resolve
from swarm_engine.models.decoder import attend_causally
from swarm_engine.models.loading import load_policy
from swarm_engine.server.teacher import Patience, Teacher
from swarm_engine.types import EngineState


class FakeVllm(ThreadingHTTPServer):
    """Completions with `prompt_logprobs`, as vLLM answers them, from a model of ours."""

    daemon_threads = True

    def __init__(self, model: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model = load_policy(resolve(model, Path("no-model-root"))).model
        self.seen: list[tuple[dict[str, Any], str | None]] = []
        """Bodies of the requests and their authorization."""
        self.faults: list[tuple[int, bytes]] = []
        """What the next requests get instead of an answer."""
        self.shift = 0.0
        """Taken off every log-probability."""
        self.decoded: str | None = None
        """What it calls every token."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def logprobs(self, tokens: list[int]) -> list[float]:
        """Of each token after the first."""
        with torch.no_grad():
            hidden = self.model.hidden(torch.tensor([tokens]), torch.arange(len(tokens)), attend_causally)
            table = self.model.logits(hidden)[0, :-1].log_softmax(-1)
        return [float(row[token]) - self.shift for row, token in zip(table, tokens[1:], strict=True)]


class _Handler(BaseHTTPRequestHandler):
    server: FakeVllm

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.seen.append((body, self.headers["authorization"]))
        status, answer = 200, b""
        if self.server.faults:
            status, answer = self.server.faults.pop(0)
        else:
            tokens = body["prompt"]
            named = {} if self.server.decoded is None else {"decoded_token": self.server.decoded}
            entries = [
                {str(token): {"logprob": logprob, "rank": 1, **named}, "0": {"logprob": -50.0, "rank": 9}}
                for token, logprob in zip(tokens[1:], self.server.logprobs(tokens), strict=True)
            ]
            answer = json.dumps({"choices": [{"text": "x", "prompt_logprobs": [None, *entries]}]}).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def teaching(model: str = "nano-spy") -> Iterator[FakeVllm]:
    with FakeVllm(model) as teacher:
        threading.Thread(target=teacher.serve_forever, daemon=True).start()
        yield teacher
        teacher.shutdown()


def config_with(teacher: FakeVllm, **changes: Any) -> dict[str, Any]:
    return {
        "seed": 3,
        "num_threads": 1,
        "trainer": {
            "group_size": 2,
            "tasks_per_update": 2,
            "checkpoint_every": 100,
            "teacher_weight": 1.0,
            "learning_rate": 0.001,
            "warmup_updates": 0,
        },
        "sampler": {"max_tokens": 8},
        "teacher": {"base_url": teacher.url, "model": "large", **changes},
    }


def play(client: SwarmClient) -> None:
    """The episodes of one update, all with one reward."""

    def rollout(episode: SyncEpisode, task: Task) -> None:
        episode.chat([{"role": "user", "content": task.task_id}])
        episode.end(reward=0.5)

    step = client.status().step
    client.run([Task(f"{step}-{number}") for number in range(2)], rollout, group_size=2, concurrency=4)


def settled(client: SwarmClient, step: int) -> Status:
    """The status once a step is reached or the engine has failed."""
    found = client.status()

    def is_settled() -> bool:
        nonlocal found
        found = client.status()
        is_there = found.step >= step and found.state is not EngineState.WEIGHT_SYNCING
        return is_there or found.state is EngineState.FAILED

    wait_until(is_settled, 60)
    return found


def metrics_of(client: SwarmClient) -> list[dict[str, Any]]:
    return [event.payload["metrics"] for event in client.events(follow=False) if event.kind == "step"]


def weights_of(run_dir: Path) -> bytes:
    (file,) = max((run_dir / "checkpoints").glob("step-*")).rglob("model.safetensors")
    return file.read_bytes()


@contextlib.contextmanager
def serving(run_dir: Path) -> Iterator[tuple[Served, SwarmClient]]:
    with serve_thread(run_dir, worker=forked_worker()) as served, served.client() as client:
        yield served, client


def test_a_policy_comes_closer_to_its_teacher_where_rewards_say_nothing_and_a_replay_does_not_ask_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A3R_TEACHER_API_KEY", "s3cret")
    run_dir = tmp_path / "run"
    with teaching() as teacher, serving(run_dir) as (_, client):
        client.start(config_with(teacher), wait=True)
        assert len(teacher.seen) == 1, "the probe"
        for step in range(8):
            play(client)
            assert settled(client, step + 1).state is EngineState.ROLLING
        asked = [body for body, _ in teacher.seen[1:]]
        assert {authorization for _, authorization in teacher.seen} == {"Bearer s3cret"}
        assert {(body["model"], body["max_tokens"]) for body in asked} == {("large", 1)}
        assert len(asked) == 8 * 4
        steps = metrics_of(client)
        assert not any(metrics["skipped"] for metrics in steps)
        distances = [metrics["kl_teacher"] for metrics in steps]
        assert sum(distances[-2:]) < 0.85 * sum(distances[:2])
        client.stop()
        trained = weights_of(run_dir)
        shutil.rmtree(run_dir / "checkpoints")
        teacher.shift = 5.0  # what it would say now
        client.start(wait=True)
        client.checkpoint()
        assert weights_of(run_dir) == trained
        assert len(teacher.seen) == 1 + 8 * 4 + 1, "only the probe"


def test_a_run_whose_teacher_had_a_password_in_its_url_goes_on_without_showing_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with teaching() as teacher:
        with serving(run_dir) as (_, client):
            client.start(config_with(teacher), wait=True)
            play(client)
            settled(client, 1)
        host = teacher.url.removeprefix("http://")
        with contextlib.closing(sqlite3.connect(run_dir / "journal.db")) as journal, journal:  # as it was written once
            for table, column in (("meta", "value"), ("events", "payload")):
                change = (f"//{host}", f"//me:p%40ss@{host}")
                journal.execute(f"UPDATE {table} SET {column} = replace({column}, ?, ?)", change)
        for start in (None, config_with(teacher), None):
            teacher.seen.clear()
            with serving(run_dir) as (_, client):
                assert client.start(start, wait=True).state is EngineState.ROLLING
                shown = json.dumps([event.payload for event in client.events(follow=False)])
            assert "p%40ss" not in shown
            assert teacher.url in shown
            basic = base64.b64encode(b"me:p@ss").decode()
            assert {authorization for _, authorization in teacher.seen} == {f"Basic {basic}"}


def test_what_a_teacher_said_is_its_log_probability_of_each_trained_token(tmp_path: Path) -> None:
    """On the first update the policy is that of the start, so the metric can be worked out here."""
    with teaching() as teacher, serving(tmp_path / "run") as (_, client):
        client.start(config_with(teacher), wait=True)
        play(client)
        settled(client, 1)
        (metrics,) = metrics_of(client)
        student, differences = FakeVllm("nano-tictactoe"), []
        student.server_close()
        for body, _ in teacher.seen[1:]:
            own, theirs = student.logprobs(body["prompt"]), teacher.logprobs(body["prompt"])
            differences.append([one - other for one, other in zip(own, theirs, strict=True)])
        ids = [event.payload["episode_id"] for event in client.events(follow=False) if event.kind == "episode"]
        replies = {}
        for episode_id in ids:
            (timeline,) = client.timelines(episode_id)
            tokens = tuple(token for block in timeline["blocks"] for token in block["token_ids"])
            replies[tokens] = len(timeline["blocks"][-1]["token_ids"])
        trained = [
            difference[len(difference) - replies[tuple(body["prompt"])] :]
            for difference, (body, _) in zip(differences, teacher.seen[1:], strict=True)
        ]
        flat = [one for some in trained for one in some]
        assert metrics["kl_teacher"] == pytest.approx(sum(flat) / len(flat), abs=1e-4)


def test_a_teacher_is_asked_about_what_trained_policies_said_alone(tmp_path: Path) -> None:
    policies = {"policy": {"model": "nano-tictactoe"}, "rival": {"model": "nano-tictactoe", "trainable": False}}

    def rollout(episode: SyncEpisode, task: Task) -> None:
        for name in policies:
            episode.chat([{"role": "user", "content": task.task_id}], agent=name, policy=name)
        episode.end(reward=0.5)

    with teaching() as teacher, serving(tmp_path / "run") as (_, client):
        client.start(config_with(teacher) | {"policies": policies}, wait=True)
        client.run([Task("a"), Task("b")], rollout, group_size=2, concurrency=4)
        assert settled(client, 1).state is EngineState.ROLLING
        assert len(teacher.seen) == 1 + 4, "the probe, and one call of each episode"
        (metrics,) = metrics_of(client)
        assert metrics["policy/kl_teacher"] > 0


def test_a_teacher_that_is_busy_is_asked_again(tmp_path: Path) -> None:
    with teaching() as teacher, serving(tmp_path / "run") as (_, client):
        client.start(config_with(teacher), wait=True)
        teacher.faults = [(503, b"loading"), (429, b"slow down")]
        play(client)
        assert settled(client, 1).state is EngineState.ROLLING
        assert len(teacher.seen) == 1 + 4 + 2


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ((404, b'{"message": "no model large"}'), 'answers 404: \'{"message": "no model large"}\''),
        ((200, b"<html>welcome</html>"), "no prompt_logprobs for every token"),
        ((200, b'{"choices": [{"text": "x"}]}'), "no prompt_logprobs for every token"),
    ],
)
def test_a_teacher_that_can_not_answer_fails_the_engine_with_the_reason_and_loses_nothing(
    tmp_path: Path, fault: tuple[int, bytes], said: str
) -> None:
    with teaching() as teacher, serving(tmp_path / "run") as (_, client):
        client.start(config_with(teacher), wait=True)
        teacher.faults = [fault] * 4
        play(client)
        status = settled(client, 1)
        assert (status.state, status.step) == (EngineState.FAILED, 0)
        assert said in (status.reason or "")
        teacher.faults = []
        client.start(wait=True)
        assert settled(client, 1).step == 1


def test_a_teacher_that_is_not_there_or_reads_other_tokens_is_told_at_the_start(tmp_path: Path) -> None:
    with teaching() as teacher, serving(tmp_path / "run") as (_, client):
        teacher.faults = [(404, b"no such route")]
        client.start(config_with(teacher))
        assert "answers 404" in (settled(client, 1).reason or "")
        teacher.decoded = "Ġother"
        client.start(config_with(teacher))
        assert "reads token" in (settled(client, 1).reason or "")


def test_a_teacher_that_is_down_is_given_up_after_its_pauses() -> None:
    teacher = Teacher(TeacherConfig(base_url="http://127.0.0.1:9/v1", model="large"), Patience(pauses_s=(0.0, 0.0)))
    batch = [episode("e", [call([5], [7])], 1.0)]
    with pytest.raises(TeacherError, match=r"at http://127.0.0.1:9/v1 can't be reached"):
        asyncio.run(teacher.judge(batch))
