"""A worker that samples while it trains: what it answers meanwhile, what is saved, and how it ends."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue

import pytest
from episodes import update
from forked import forked, forked_worker
from held_worker import Gate
from tiny_model import build_tiny_model
from worker_process import WorkerProcess

from swarm_engine.protocol import (
    Boot,
    Export,
    Failed,
    Finished,
    Generate,
    Sampled,
    Save,
    Saved,
    Stop,
    Updated,
)
from swarm_engine.types import SamplingParams
from swarm_engine.worker import Beside, Engine, Inbox

ASYNCHRONOUS = {"max_staleness": 1}


def weights_of(saved: Saved) -> str:
    """Of a checkpoint or of an export."""
    (file,) = Path(saved.path or "").rglob("model.safetensors")
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


def start(front: WorkerProcess, model: Path, tmp_path: Path) -> None:
    front.boot(model.parent, tmp_path / "checkpoints", model.name, trainer=ASYNCHRONOUS)


def ask(front: WorkerProcess, name: str) -> set[int]:
    """Policy versions of a whole reply."""
    front.send(Generate(name, "policy", (5, 6, 7), SamplingParams(4, seed=1)))
    versions = set()
    while isinstance(answer := front.receive(object), Sampled):
        assert answer.request_id == name
        versions.add(answer.policy_version)
    assert isinstance(answer, Finished), answer
    return versions


def test_replies_are_sampled_while_an_update_is_held_and_saves_wait_for_it(
    tiny_dir: Path, tmp_path: Path, gate: Gate
) -> None:
    with WorkerProcess(tmp_path, command=forked(*gate.command)) as front:
        start(front, tiny_dir, tmp_path)
        front.send(update(1), Save(), update(2), Export("policy", str(tmp_path / "two")))
        assert ask(front, "a") == {0}
        assert ask(front, "b") == {0}
        gate.open()
        assert front.receive(Updated).step == 1
        saved = front.receive(Saved)
        assert (saved.step, saved.error) == (1, None)
        assert ask(front, "c") == {1}
        gate.open()
        assert front.receive(Updated).step == 2
        exported = front.receive(Saved)
        assert (exported.step, exported.error) == (2, None)
        assert ask(front, "d") == {2}
    # The same batches without company, each saved behind its update.
    config = {"policies": {"policy": {"model": "tiny"}}, "num_threads": 1}
    plain = Engine.boot(Boot(config, str(tiny_dir.parent), str(tmp_path / "plain")))
    plain.update(update(1))
    assert weights_of(plain.save(Save())) == weights_of(saved)
    plain.update(update(2))
    assert weights_of(plain.save(Save())) == weights_of(exported)


def test_weights_that_are_trained_are_not_the_ones_that_are_sampled_from(tiny_dir: Path, tmp_path: Path) -> None:
    config = {"policies": {"policy": {"model": "tiny"}}, "num_threads": 1}
    boots = {
        limit: Boot({**config, "trainer": {"max_staleness": limit}}, str(tiny_dir.parent), str(tmp_path / str(limit)))
        for limit in (None, 0, 1)
    }
    engines = {limit: Engine.boot(boot) for limit, boot in boots.items()}
    assert [engine.is_asynchronous for engine in engines.values()] == [False, False, True]
    engine = engines[1]
    hosted = engine.policies["policy"]
    before = hosted.served.embedding.clone()
    engine.train(update(1))
    assert hosted.served.embedding.equal(before)
    assert not hosted.policy.model.embedding.equal(before)
    engine.serve_weights()
    assert hosted.served.embedding.equal(hosted.policy.model.embedding)
    frozen = {**config, "policies": {"policy": {"model": "tiny", "trainable": False}}, "trainer": ASYNCHRONOUS}
    assert not Engine.boot(Boot(frozen, str(tiny_dir.parent), str(tmp_path / "frozen"))).is_asynchronous


def test_a_copy_is_of_what_is_trained_alone(tiny_dir: Path, tmp_path: Path) -> None:
    config = {"policies": {"policy": {"model": "tiny", "lora": {}}}, "num_threads": 1, "trainer": ASYNCHRONOUS}
    engine = Engine.boot(Boot(config, str(tiny_dir.parent), str(tmp_path)))
    hosted = engine.policies["policy"]
    weights = [dict(model.named_parameters()) for model in (hosted.served, hosted.policy.model)]
    for step in (1, 2):  # at first B is zero, and A has no gradient
        engine.train(update(step))
    for name, served in weights[0].items():
        trained = weights[1][name]
        assert (served is trained) == (not trained.requires_grad), name
        assert served.equal(trained) == (not trained.requires_grad), name
    engine.serve_weights()
    assert all(served.equal(weights[1][name]) for name, served in weights[0].items())


def test_no_update_begins_before_the_sampler_has_the_weights_of_the_one_before(tiny_dir: Path, tmp_path: Path) -> None:
    config = {"policies": {"policy": {"model": "tiny"}}, "num_threads": 1, "trainer": ASYNCHRONOUS}
    engine = Engine.boot(Boot(config, str(tiny_dir.parent), str(tmp_path)))
    inbox: Inbox = SimpleQueue()
    beside = Beside(engine, inbox)
    for step in (1, 2):
        beside.take(update(step))
    for step in (1, 2):
        done = inbox.get(timeout=60)
        assert isinstance(done, Future)
        # It comes behind whatever the thread was given.
        assert beside._thread.submit(lambda: engine.step).result(60) == step
        beside.finish(done)


def test_a_reply_that_runs_goes_on_under_the_new_weights(tmp_path: Path, gate: Gate) -> None:
    never_ends = build_tiny_model(tmp_path / "models" / "never_ends", eos_token_id=10_000, max_position_embeddings=4096)
    with WorkerProcess(tmp_path, command=forked(*gate.command)) as front:
        start(front, never_ends, tmp_path)
        front.send(Generate("a", "policy", (5, 6, 7), SamplingParams(4000, seed=1)), update(1))
        assert front.receive(Sampled).policy_version == 0
        gate.open()
        versions = []
        while isinstance(answer := front.receive(object), Sampled):
            versions.append(answer.policy_version)
        assert isinstance(answer, Updated)
        after = [front.receive(Sampled).policy_version for _ in range(3)]
    assert set(versions) <= {0}
    assert after == [1, 1, 1]


def test_an_update_that_fails_ends_the_worker_with_its_reason(tiny_dir: Path, tmp_path: Path, gate: Gate) -> None:
    with WorkerProcess(tmp_path, command=forked(*gate.command)) as front:
        start(front, tiny_dir, tmp_path)
        front.send(update(1))
        gate.open("the moon is full")
        assert front.receive(Failed).reason == "RuntimeError: the moon is full"
        assert front.process.wait(30) == 1
    with WorkerProcess(tmp_path, command=forked_worker()) as front:
        start(front, tiny_dir, tmp_path)
        front.send(update(2))
        assert "batch 2 was given to weights of step 0" in front.receive(Failed).reason
        assert front.process.wait(30) == 1


@pytest.mark.parametrize("end", ["stop", "front gone"])
def test_no_update_keeps_a_worker_alive(tiny_dir: Path, tmp_path: Path, gate: Gate, end: str) -> None:
    with WorkerProcess(tmp_path, command=forked(*gate.command)) as front:
        start(front, tiny_dir, tmp_path)
        front.send(update(1))
        assert ask(front, "a") == {0}
        if end == "stop":
            front.send(Stop())
        else:
            front.line.close()
        assert front.process.wait(20) == 0
