"""The engine worker with a second rank: what it answers, what a kill leaves of it, and that nothing outlives it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from episodes import update
from pydantic import ValidationError
from safetensors.torch import load_file
from worker_process import WorkerProcess

from swarm_engine.config import EngineConfig
from swarm_engine.protocol import (
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

TWO: dict[str, Any] = {"placement": {"num_workers": 2}, "trainer": {"kl_weight": 0.1, "microbatch_tokens": 96}}
ONE: dict[str, Any] = {"trainer": TWO["trainer"]}

TIMEOUT_S = 300.0
"""Importing what shards a model takes seconds of CPU time on each rank, and tests share the cores."""


def trained(front: WorkerProcess, *steps: int) -> Path:
    """Where the policy is in the checkpoint after these batches."""
    for step in steps:
        front.send(update(step))
        assert front.receive(Updated).step == step
    front.send(Save())
    path = front.receive(Saved).path
    assert path is not None
    return Path(path) / "policy"


def assert_close(one: Path, other: Path) -> None:
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = load_file(one / name), load_file(other / name)
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            torch.testing.assert_close(value, theirs[key], rtol=1e-3, atol=1e-5)


@contextmanager
def ends_with_it(front: WorkerProcess) -> Iterator[psutil.Process]:
    """The worker's second rank, which has to be gone soon after what is done to either."""
    (rank,) = psutil.Process(front.process.pid).children()
    yield rank
    psutil.wait_procs([rank], timeout=60)
    assert not rank.is_running()


@pytest.mark.slow
def test_two_ranks_sample_train_save_and_go_on_as_one_does(tiny_dir: Path, tmp_path: Path) -> None:
    """Also from the checkpoint of a worker that had no second rank, and back."""
    straight = tmp_path / "straight"
    with WorkerProcess(tmp_path, TIMEOUT_S) as front:
        front.boot(tiny_dir.parent, straight, "tiny", **ONE)
        first, last = trained(front, 1, 2), trained(front, 3, 4, 5, 6)
        front.send(Generate("a", "policy", (5, 6, 7), SamplingParams(4, seed=1), is_streamed=False))
        expected = front.receive(Sampled)
    turned = tmp_path / "turned"
    with WorkerProcess(tmp_path, TIMEOUT_S) as front:
        front.boot(tiny_dir.parent, turned, "tiny", **TWO)
        with ends_with_it(front):
            assert_close(trained(front, 1, 2), first)
            front.send(Stop())
            assert front.process.wait(60) == 0
    with WorkerProcess(tmp_path, TIMEOUT_S) as front:
        assert front.boot(tiny_dir.parent, turned, "tiny", **ONE).step == 2
        trained(front, 3, 4)
    with WorkerProcess(tmp_path, TIMEOUT_S) as front:
        assert front.boot(tiny_dir.parent, turned, "tiny", **TWO).step == 4
        path = trained(front, 5, 6)
        assert_close(path, last)
        front.send(Export("policy", str(tmp_path / "out")))
        front.receive(Saved)
        assert (tmp_path / "out" / "model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()
        front.send(Generate("a", "policy", (5, 6, 7), SamplingParams(4, seed=1), is_streamed=False))
        sampled = front.receive(Sampled)
        assert (sampled.token_ids, sampled.policy_version) == (expected.token_ids, 6)
        assert sampled.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        front.receive(Finished)
        with ends_with_it(front):
            front.send(Stop())
            assert front.process.wait(60) == 0


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["idle", "in an update"])
def test_a_killed_rank_fails_the_worker_with_the_reason(tiny_dir: Path, tmp_path: Path, moment: str) -> None:
    with WorkerProcess(tmp_path, TIMEOUT_S) as front:
        front.boot(tiny_dir.parent, tmp_path / "checkpoints", "tiny", **TWO)
        with ends_with_it(front) as rank:
            if moment == "in an update":
                front.send(*(update(step) for step in range(1, 9)))
                front.receive(Updated)
            rank.kill()
            while isinstance(answer := front.receive(object), Updated):
                pass
            assert answer == Failed("trainer rank 1 of 2 was killed by SIGKILL")
            assert front.process.wait(60) == 1


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["idle", "in an update"])
def test_no_rank_outlives_a_worker_that_is_killed(tiny_dir: Path, tmp_path: Path, moment: str) -> None:
    with WorkerProcess(tmp_path, TIMEOUT_S) as front:
        front.boot(tiny_dir.parent, tmp_path / "checkpoints", "tiny", **TWO)
        with ends_with_it(front):
            if moment == "in an update":
                front.send(*(update(step) for step in range(1, 9)))
                front.receive(Updated)
            front.kill()


@pytest.mark.parametrize(
    ("placement", "reason"),
    [
        ({"kind": "ray"}, "num_workers is 1 and sampler.backend is torch, so all runs in the engine's own process"),
        ({"num_workers": 2, "resources": {"GPU": 1}}, "placement.resources are Ray's, but placement.kind is local"),
        ({"num_workers": 2, "kind": "ray", "resources": {"GPU": 0}}, "placement.resources.GPU is 0.0; leave out"),
        ({"kind": "ray", "resources": {"GPU": 1}}, "beside the first, but placement.num_workers is 1; raise"),
        ({"num_samplers": 2}, "placement.num_samplers is 2, but sampler.backend is torch, which samples in the"),
        ({"sampler_resources": {"GPU": 1}}, "placement.sampler_resources are Ray's, but placement.kind is local"),
        ({"timeout_s": 5}, "placement.timeout_s is Ray's, but placement.kind is local"),
        (
            {"num_workers": 2, "kind": "ray", "sampler_resources": {"GPU": 1}},
            r"placement.sampler_resources is {'GPU': 1.0}, but sampler.backend is torch, .*leave sampler_resources out",
        ),
        ({"kind": "ray", "sampler_resources": {"GPU": -1}}, "placement.sampler_resources.GPU is -1.0; leave out"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(placement: dict[str, object], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        EngineConfig.model_validate({"placement": placement})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"policies": {"one": {"trainable": False}}}, "0 policies are trainable and ranks train exactly 1"),
        ({"policies": {"one": {}, "other": {}}}, "2 policies are trainable"),
        ({"policies": {"one": {"lora": {}}}}, "has lora, whose branches are not sharded"),
        ({"trainer": {"max_staleness": 1}}, "trainer.max_staleness is 1, and ranks train between episodes only"),
    ],
)
def test_what_ranks_do_not_train_is_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=f"num_workers is 2, but .*{reason}"):
        EngineConfig.model_validate(config | {"placement": {"num_workers": 2}})


def test_ranks_train_one_policy_beside_frozen_ones() -> None:
    policies = {"one": {}, "other": {"trainable": False}}
    EngineConfig.model_validate({"policies": policies, "placement": {"num_workers": 2}})


def test_vllm_samples_beside_ranks_and_alone_in_a_cluster() -> None:
    vllm = {"sampler": {"backend": "vllm"}}
    for placement in ({"num_workers": 2}, {"num_samplers": 2}, {"kind": "ray", "sampler_resources": {"GPU": 1}}):
        EngineConfig.model_validate({**vllm, "placement": placement})
    EngineConfig.model_validate({**vllm, "placement": {"kind": "ray"}, "device": "cuda"})
    with pytest.raises(ValidationError, match=r"placement\.resources are for the ranks beside the first"):
        EngineConfig.model_validate({**vllm, "placement": {"kind": "ray", "resources": {"GPU": 1}}})
