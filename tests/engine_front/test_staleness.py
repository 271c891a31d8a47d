"""An engine that goes on while it trains: calls, claims, saves, stops and kills during updates that a gate holds."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from conftest import Served, serve_process, serve_thread, wait_until
from episodes import own_logprobs
from forked import forked
from held_worker import Gate
from test_kills import saved_from_journal, trained_from_journal
from test_lifecycle import read_journal, wait_for_state
from tiny_model import build_tiny_model

from swarm_engine.client import ClaimTimeoutError, SwarmClient
from swarm_engine.models.loading import load_policy
from swarm_engine.server import engine as front_engine
from swarm_engine.server.engine import Engine
from swarm_engine.server.roster import episode_records
from swarm_engine.types import EngineState

HI: list[Any] = [{"role": "user", "content": "Your move?"}]
CONFIG: dict[str, Any] = {
    "seed": 3,
    "num_threads": 1,
    "policies": {"policy": {"model": "tiny"}},
    "trainer": {
        "group_size": 2,
        "tasks_per_update": 1,
        "max_staleness": 2,
        "checkpoint_every": 100,
        "learning_rate": 0.001,
        "warmup_updates": 0,
    },
    "sampler": {"max_tokens": 6},
}
"""With weights of version v served, the groups of batches v + 1 to v + 3 may be claimed, one each."""


@contextmanager
def held(folder: Path, **changes: Any) -> Iterator[tuple[Served, SwarmClient, Gate]]:
    """A server that has started, whose updates wait at a gate."""
    build_tiny_model(folder / "run" / "models" / "tiny", max_position_embeddings=4096)
    gate = Gate(folder / "gate")
    with serve_thread(folder / "run", worker=forked(*gate.command)) as served, served.client() as client:
        client.start(CONFIG | changes, wait=True)
        yield served, client, gate


def engine_of(served: Served) -> Engine:
    assert served.front is not None
    return served.front.engine


def play(client: SwarmClient, task: str, *rewards: float) -> list[str]:
    """End an episode with each of the rewards; returns their ids."""
    ids = []
    for reward in rewards or (0.0, 1.0):
        with client.episode(task, wait_s=60) as episode:
            episode.chat(HI)
            episode.end(reward=reward)
            ids.append(episode.episode_id)
    return ids


def wait_for_update(client: SwarmClient, step: int) -> None:
    wait_until(lambda: (client.status().update or {}).get("step") == step, 60)


def wait_for_step(client: SwarmClient, step: int) -> None:
    wait_until(lambda: client.status().step >= step, 60)


def payloads(client: SwarmClient, kind: str) -> list[Any]:
    return [event.payload for event in client.events(follow=False) if event.kind == kind]


def test_calls_are_answered_while_an_update_runs_and_one_holds_tokens_of_two_versions(tmp_path: Path) -> None:
    """Under each version the model gives its tokens the log-probabilities that were recorded."""
    long = " ".join(f"row {number} of {number % 7}" for number in range(200))
    with held(tmp_path, sampler={"backend": "scripted", "max_tokens": 4000}) as (_, client, gate):
        for reward in (0.0, 1.0):
            with client.episode("a", script=["1 2 3"]) as episode:
                episode.chat(HI)
                episode.end(reward=reward)
        wait_for_update(client, 1)
        with client.episode("b", script=["north", long]) as episode:
            assert episode.chat(HI).text == "north"
            api = openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0)
            stream = iter(api.chat.completions.create(model="policy", messages=HI, stream=True))
            next(stream)
            status = client.status()
            assert (status.state, status.step, (status.update or {})["step"]) == (EngineState.ROLLING, 0, 1)
            gate.open()
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            assert text == long
            episode.end(reward=0.0)
        trained = client.export("policy", "one")
    _, _, records = read_journal(tmp_path / "run")
    short, call = episode_records.validate_json(records[episode.episode_id]).episode.calls
    assert set(short.policy_versions) == {0}
    assert set(call.policy_versions) == {0, 1}
    assert list(call.policy_versions) == sorted(call.policy_versions)
    by_version = [
        own_logprobs(load_policy(folder).model, call) for folder in (tmp_path / "run" / "models" / "tiny", trained)
    ]
    errors, confused = [], []
    for place, (version, logprob) in enumerate(zip(call.policy_versions, call.logprobs, strict=True)):
        errors.append(abs(by_version[version][place] - logprob))
        confused.append(abs(by_version[1 - version][place] - logprob))
    print(f"{len(errors)} tokens, at most {max(errors):.1e} nats; under the other version {max(confused):.1e}")
    assert max(errors) < 1e-4
    assert max(confused) > 1e-2


def test_batches_are_claimed_ahead_as_far_as_the_staleness_allows_and_wait_complete(tmp_path: Path) -> None:
    every = {"trainer": {**CONFIG["trainer"], "checkpoint_every": 1}}
    with held(tmp_path, **every) as (_, client, gate):
        started = time.monotonic()
        batches = [play(client, task) for task in ("a", "b", "c")]
        wait_for_update(client, 1)
        with pytest.raises(ClaimTimeoutError, match="quota"):
            client.episode("d", wait_s=0)
        assert (client.status().pool.tasks, client.status().pool.targets["tasks"]) == (2, 1)
        gate.open()
        wait_for_update(client, 2)
        batches.append(play(client, "d"))
        with pytest.raises(ClaimTimeoutError, match="quota"):
            client.episode("e", wait_s=0)
        for step in (2, 3, 4):
            gate.open()
            wait_for_step(client, step)
        wait_until(lambda: len(payloads(client, "checkpoint")) == 4)
        steps = payloads(client, "step")
        assert sum(step["seconds"] for step in steps) < time.monotonic() - started
        # d was sampled by version 1 and trained by the update that began with version 3.
        assert [step["metrics"]["staleness_max"] for step in steps] == [0, 1, 2, 2]
        assert [step["drops"] for step in steps] == [{}] * 4
        assert [one["step"] for one in payloads(client, "checkpoint")] == [1, 2, 3, 4]
        assert [batch["episode_ids"] for batch in payloads(client, "batch")] == batches
        assert [one["to"] for one in payloads(client, "state")] == ["BOOTING", "ROLLING"]
        assert client.status().update is None


def test_saves_and_exports_during_an_update_hold_the_weights_after_it(tmp_path: Path) -> None:
    with held(tmp_path) as (served, client, gate), ThreadPoolExecutor(2) as pool:
        play(client, "a")
        wait_for_update(client, 1)
        saving = pool.submit(client.checkpoint)
        exporting = pool.submit(client.export, "policy", "one")
        wait_until(engine_of(served)._folders.locked)
        play(client, "b", 1.0)
        assert not saving.done()
        assert not exporting.done()
        gate.open()
        saved, exported = Path(saving.result(60)), Path(exporting.result(60))
    assert saved.name == "step-000001"
    weights = [(folder / "model.safetensors").read_bytes() for folder in (saved / "policy", exported)]
    assert weights == [trained_from_journal(tmp_path / "run", tmp_path / "aside", CONFIG)[1]] * 2


def after_a_kill(served: Served, killed: str, gate: Gate) -> Served:
    """The server that runs once the worker or the front was killed."""
    if killed == "front":
        workers = psutil.Process(served.pid).children()
        served.stop(signal.SIGKILL)
        assert not psutil.wait_procs(workers, timeout=60)[1], "the next opening would let its update pass"
        return serve_process(served.run_dir, worker=gate.command)
    (worker,) = psutil.Process(served.pid).children()
    worker.kill()
    assert not psutil.wait_procs([worker], timeout=60)[1], "the next opening would let its update pass"
    with served.client() as client:
        wait_for_state(client, EngineState.FAILED)
    return served


@pytest.mark.parametrize("killed", ["worker", "front"])
def test_episodes_that_wait_for_a_later_batch_survive_a_kill_during_an_update(tmp_path: Path, killed: str) -> None:
    run_dir = tmp_path / "run"
    build_tiny_model(run_dir / "models" / "tiny")
    gate = Gate(tmp_path / "gate")
    served = serve_process(run_dir, worker=gate.command)
    try:
        with served.client() as client:
            client.start(CONFIG, wait=True)
            first, second, (third,) = play(client, "a"), play(client, "b"), play(client, "c", 1.0)
            wait_for_update(client, 1)
            client.episode("c")  # runs, so it is lost
        served = after_a_kill(served, killed, gate)
        with served.client() as client:
            client.start()
            gate.open()  # the batch whose update was killed
            wait_for_update(client, 2)
            assert client.status().step == 1
            # The update is announced a moment before its batch leaves the pool.
            wait_until(lambda: client.status().pool.episodes == 1)
            (fourth,) = play(client, "c", 0.0)
            for step in (2, 3):
                gate.open()
                wait_for_step(client, step)
            saved = Path(client.checkpoint())
            batches = [batch["episode_ids"] for batch in payloads(client, "batch")]
            assert [step["step"] for step in payloads(client, "step")] == [1, 2, 3]
        assert batches == [first, second, [third, fourth]]
        weights = (saved / "policy" / "model.safetensors").read_bytes()
        assert trained_from_journal(run_dir, tmp_path / "aside", CONFIG) == (3, weights)
    finally:
        served.stop(signal.SIGKILL)


TWO: dict[str, Any] = {"left": {"model": "tiny", "lora": {"rank": 2}}, "right": {"model": "tiny"}}


def play_both(client: SwarmClient, task: str, least: float = 0.0) -> list[str]:
    """Two episodes in which an adapter and a policy with weights of its own speak; rewards from `least` on."""
    ids = []
    for reward in (0.0, 1.0):
        with client.episode(task, wait_s=60) as episode:
            for agent, policy in (("a", "left"), ("b", "right")):
                episode.chat(HI, agent=agent, policy=policy)
            episode.end(reward={"a": least + reward, "b": least + 1 - reward})
            ids.append(episode.episode_id)
    return ids


@pytest.mark.parametrize("killed", ["worker", "front"])
def test_several_policies_are_trained_ahead_and_survive_a_kill_bit_for_bit(tmp_path: Path, killed: str) -> None:
    """Killed in the second update, with a checkpoint of the first; every policy then has the journal's weights."""
    run_dir = tmp_path / "run"
    build_tiny_model(run_dir / "models" / "tiny")
    config = {**CONFIG, "policies": TWO, "trainer": {**CONFIG["trainer"], "checkpoint_every": 1}}
    gate = Gate(tmp_path / "gate")
    served = serve_process(run_dir, worker=gate.command)
    try:
        with served.client() as client:
            client.start(config, wait=True)
            batches = [play_both(client, task) for task in ("a", "b", "c")]
            wait_for_update(client, 1)
            with pytest.raises(ClaimTimeoutError, match="quota"):
                client.episode("d", wait_s=0)
            gate.open()
            wait_for_update(client, 2)
            assert {name: one.version for name, one in client.status().policies.items()} == {"left": 1, "right": 1}
            batches.append(play_both(client, "d", 1.0))
            wait_until(lambda: any(one.step == 1 for one in client.checkpoints()), 60)
        served = after_a_kill(served, killed, gate)
        with served.client() as client:
            client.start()
            for step in (2, 3, 4):
                gate.open()
                wait_for_step(client, step)
            saved = Path(client.checkpoint())
            steps = payloads(client, "step")
            # What the batch of `d` earned is to the credit of the weights that played it, not of the update's own.
            earned = {one.step: one.reward for one in client.checkpoints()}
            assert (earned[1], earned[3]) == (1.5, None)
            assert [batch["episode_ids"] for batch in payloads(client, "batch")] == batches
        _, _, records = read_journal(run_dir)
        for version, batch in ((0, batches[0]), (0, batches[2]), (1, batches[3])):
            for name in batch:
                calls = episode_records.validate_json(records[name]).episode.calls
                assert [(call.policy, set(call.policy_versions)) for call in calls] == [
                    ("left", {version}),
                    ("right", {version}),
                ]
        assert [step["step"] for step in steps] == [1, 2, 3, 4]
        for name in ("left/staleness_max", "right/staleness_max", "staleness_max", "staleness_mean"):
            assert [step["metrics"][name] for step in steps] == [0, 1, 2, 2], name
        assert [step["metrics"]["skipped"] for step in steps] == [0] * 4
        assert [step["drops"] for step in steps] == [{}] * 4
        step, aside = saved_from_journal(run_dir, tmp_path / "aside", config)
        assert step == 4
        for file in ("left/adapter_model.safetensors", "right/model.safetensors", "right/optimizer.safetensors"):
            assert (saved / file).read_bytes() == (aside / file).read_bytes(), file
    finally:
        served.stop(signal.SIGKILL)


def test_a_stop_lets_the_update_finish_and_begins_no_other(tmp_path: Path) -> None:
    with held(tmp_path) as (served, client, gate), ThreadPoolExecutor(1) as pool:
        play(client, "a")
        play(client, "b")
        wait_for_update(client, 1)
        stop = pool.submit(client.stop)
        wait_until(lambda: engine_of(served)._is_stopping)
        gate.open()
        assert (stop.result(60).state, stop.result().step) == (EngineState.OFFLINE, 1)
        assert stop.result().pool.episodes == 2
        assert [one["step"] for one in payloads(client, "checkpoint")] == [1]
        client.start(wait=True)
        gate.open()
        wait_for_step(client, 2)


def test_a_server_that_goes_down_waits_for_no_update_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_engine, "CLOSE_TIMEOUT_S", 0.2)
    with held(tmp_path) as (_, client, gate):
        play(client, "a")
        wait_for_update(client, 1)
        started = time.monotonic()
    assert time.monotonic() - started < 8
    with serve_thread(tmp_path / "run", worker=forked(*gate.command)) as again, again.client() as client:
        client.start()
        gate.open()
        wait_for_step(client, 1)


def test_an_update_that_fails_fails_the_engine_and_the_next_start_trains_it(tmp_path: Path) -> None:
    with held(tmp_path) as (_, client, gate):
        play(client, "a")
        play(client, "b", 1.0)
        gate.open("the moon is full")
        wait_for_state(client, EngineState.FAILED)
        assert client.status().reason == "RuntimeError: the moon is full"
        client.start()
        gate.open()
        wait_for_step(client, 1)
        assert client.status().pool.episodes == 1
