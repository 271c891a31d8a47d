"""Ranks as actors of a real Ray cluster on this machine: the same weights as local ones, and no less care at an end."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from episodes import conversations
from ray_actors import actors, no_actor_left
from tiny_model import build_tiny_model
from worker_process import WorkerProcess

from swarm_engine.client import SwarmClient, read_token
from swarm_engine.protocol import Boot, Failed, Save, Saved, Stop, Update, Updated
from swarm_engine.types import BatchRecord, EngineState

pytestmark = pytest.mark.heavy

TIMEOUT_S = 300.0
RAY: dict[str, Any] = {"num_workers": 2, "kind": "ray"}


def update(step: int) -> Update:
    batch = conversations(step)
    return Update(BatchRecord(step, tuple(episode.episode_id for episode in batch), step), tuple(batch))


def test_actors_train_the_weights_of_local_ranks_bit_for_bit(model_root: Path, tmp_path: Path) -> None:
    found = []
    for kind in ("local", "ray"):
        with no_actor_left(), WorkerProcess(tmp_path, TIMEOUT_S) as front:
            placement = {"num_workers": 2, "kind": kind}
            trainer = {"algorithm": "gspo", "kl_weight": 0.1, "microbatch_tokens": 96}
            front.boot(model_root, tmp_path / kind, "tiny", placement=placement, trainer=trainer)
            assert len(actors("RankActor")) == (kind == "ray")
            for step in (1, 2, 3):
                front.send(update(step))
                assert front.receive(Updated).step == step
            front.send(Save())
            path = Path(front.receive(Saved).path or "") / "policy"
            found.append([(path / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer")])
            front.send(Stop())
            assert front.process.wait(60) == 0
    assert found[0] == found[1]


def test_no_actor_outlives_a_worker_that_is_killed(model_root: Path, tmp_path: Path) -> None:
    with no_actor_left(), WorkerProcess(tmp_path, TIMEOUT_S) as front:
        front.boot(model_root, tmp_path / "checkpoints", "tiny", placement=RAY)
        front.send(*(update(step) for step in range(1, 9)))
        front.receive(Updated)
        assert len(actors("RankActor")) == 1
        front.kill()


def test_a_cluster_without_room_is_told_of(model_root: Path, tmp_path: Path) -> None:
    reserved = {"resources": {"CPU": 1, "GPU": 3}, "num_samplers": 2, "sampler_resources": {"GPU": 1}}
    placement = {**RAY, **reserved, "timeout_s": 2}
    config = {"policies": {"policy": {"model": "tiny"}}, "placement": placement, "sampler": {"backend": "vllm"}}
    with no_actor_left(), WorkerProcess(tmp_path, TIMEOUT_S) as front:
        front.send(Boot(config, str(model_root), str(tmp_path)))
        reason = front.receive(Failed).reason
    assert "no room for 1 ranks of {'CPU': 1.0, 'GPU': 3.0} and 2 vLLM engines of {'GPU': 1.0} within 2 s" in reason
    assert "lower in placement how many there are (num_workers, num_samplers) or what is reserved for each" in reason


def test_an_engine_updates_through_http_fails_with_an_actor_and_goes_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    build_tiny_model(run_dir / "models" / "tiny")
    config = {
        "num_threads": 1,
        "policies": {"policy": {"model": "tiny"}},
        "trainer": {"group_size": 2, "tasks_per_update": 1},
        "sampler": {"max_tokens": 6},
        "placement": RAY,
    }
    command = [sys.executable, "-m", "swarm_engine.cli", "serve", "--run-dir", str(run_dir), "--port", "0"]
    with no_actor_left(), subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            about = json.loads(server.stdout.readline())
            with SwarmClient(about["url"], read_token(Path(about["token_file"]))) as client:
                client.start(config, wait=True)
                play(client)
                wait_for(client, EngineState.ROLLING, step=1)
                (actor,) = actors("RankActor")
                actor.kill()
                wait_for(client, EngineState.FAILED, step=1)
                assert "trainer rank 1 of 2 was lost" in (client.status().reason or "")
                client.start(wait=True)
                assert client.status().step == 1
                play(client)
                wait_for(client, EngineState.ROLLING, step=2)
        finally:
            server.terminate()


def play(client: SwarmClient) -> None:
    """The two episodes of one update."""
    for reward in (0.0, 1.0):
        with client.episode("t") as episode:
            episode.chat([{"role": "user", "content": "Your move?"}])
            episode.end(reward=reward)


def wait_for(client: SwarmClient, state: EngineState, step: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while (status := client.status()).state is not state or status.step != step:
        assert time.monotonic() < deadline, status
        assert state is EngineState.FAILED or status.state is not EngineState.FAILED, status.reason
        time.sleep(0.1)
