"""vLLM engines that Ray places: they sample from the weights of each update, and none outlives its worker.

The cluster's nodes have A3R_VLLM_PYTHON from whoever started it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import psutil
import pytest
from driven_sampler import ask
from episodes import update
from ray_actors import actors, no_actor_left
from sampled_weights import assert_samples_from_its_weights
from worker_process import WorkerProcess

from swarm_engine.protocol import Failed, Sampled, Updated

pytestmark = pytest.mark.heavy

TIMEOUT_S = 300.0
VLLM = {"backend": "vllm", "max_running": 4}
NUM_UPDATES = 2


@pytest.fixture(autouse=True, scope="module")
def _vllm_is_there() -> None:
    assert os.environ.get("A3R_VLLM_PYTHON"), "A3R_VLLM_PYTHON names no interpreter; `make test-heavy` makes one"


def vllm_processes() -> list[psutil.Process]:
    """What the actors have started."""
    return [process for actor in actors("VllmActor") for process in actor.children()]


def test_two_engines_beside_two_ranks_get_every_update_and_fail_with_one(model_root: Path, tmp_path: Path) -> None:
    with no_actor_left(), WorkerProcess(tmp_path, TIMEOUT_S) as front:
        front.boot(
            model_root,
            tmp_path / "checkpoints",
            "tiny",
            placement={"num_workers": 2, "num_samplers": 2, "kind": "ray"},
            sampler=VLLM,
            trainer={"learning_rate": 0.01},
        )
        processes = vllm_processes()
        assert (len(actors("RankActor")), len(processes)) == (1, 2)
        assert psutil.Process(front.process.pid).children() == []
        assert_samples_from_its_weights(front, 0, tmp_path)
        for step in range(1, NUM_UPDATES + 1):
            front.send(update(step))
            assert front.receive(Updated).step == step
            assert_samples_from_its_weights(front, step, tmp_path)
        log = (tmp_path / "worker.log").read_text()
        assert log.count("vLLM and the trainer differ by") == len(processes) * (NUM_UPDATES + 1)
        processes[1].kill()
        reason = front.receive(Failed).reason
        assert re.match(r"sampler [12] of 2: on [\d.]+ the vLLM process was killed by SIGKILL, .*worker.log", reason)
        assert front.process.wait(60) == 1
        _, alive = psutil.wait_procs(processes, timeout=60)
        assert not alive


def test_no_engine_outlives_a_worker_that_is_killed(model_root: Path, tmp_path: Path) -> None:
    with no_actor_left(), WorkerProcess(tmp_path, TIMEOUT_S) as front:
        front.boot(model_root, tmp_path / "checkpoints", "tiny", placement={"kind": "ray"}, sampler=VLLM)
        processes = vllm_processes()
        assert len(processes) == 1
        front.send(ask("long", 400))
        front.receive(Sampled)
        front.kill()
        _, alive = psutil.wait_procs(processes, timeout=60)
        assert not alive
