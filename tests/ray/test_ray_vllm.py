"""vLLM engines that Ray places: they sample from the weights of each update, and none outlives its worker.

The interpreter is the cluster's: that of A3R_VLLM_PYTHON, or the fake's where vLLM itself does not matter.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from driven_sampler import ask
from episodes import update
from fake_vllm import fake_vllm
from ray_actors import actors, no_actor_left
from sampled_weights import assert_every_update_arrives
from worker_process import WorkerProcess

from swarm_engine.protocol import Failed, Sampled, Stop, Updated
from swarm_engine.sampler.vllm_link import PYTHON_VARIABLE

pytestmark = pytest.mark.heavy

TIMEOUT_S = 300.0
VLLM = {"backend": "vllm", "max_running": 4}
NUM_UPDATES = 1


@pytest.fixture(autouse=True, scope="module")
def _vllm_is_there() -> None:
    assert os.environ.get(PYTHON_VARIABLE), f"{PYTHON_VARIABLE} names no interpreter; `make test-heavy` makes one"


@pytest.fixture
def _fake(interpreter: Path, tmp_path: Path) -> Iterator[None]:
    """The cluster's vLLM is the fake."""
    before = interpreter.read_text()
    interpreter.write_text(str(fake_vllm(tmp_path / "fake")))
    yield
    interpreter.write_text(before)


def vllm_processes() -> list[psutil.Process]:
    """What the actors have started."""
    return [process for actor in actors("VllmActor") for process in actor.children()]


def test_two_engines_beside_two_ranks_get_every_update_and_do_not_outlive_the_worker(
    model_root: Path, tmp_path: Path
) -> None:
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
        assert_every_update_arrives(front, NUM_UPDATES, len(processes), tmp_path)
        front.send(ask("long", 400))
        front.receive(Sampled)
        front.kill()
        _, alive = psutil.wait_procs(processes, timeout=60)
        assert not alive


LOST = r"the vLLM engine on [\d.]+ was lost: The actor died"
KILLED = r"on [\d.]+ the vLLM process was killed by SIGKILL, .*worker.log"


@pytest.mark.usefixtures("_fake")
@pytest.mark.parametrize(
    ("lost", "reason"), [("actor", LOST), ("process", KILLED), (None, None)], ids=["actor", "process", "stop"]
)
def test_the_loss_of_an_engine_is_told_and_no_end_leaves_one(
    model_root: Path, tmp_path: Path, lost: str | None, reason: str | None
) -> None:
    with no_actor_left(), WorkerProcess(tmp_path, TIMEOUT_S) as front:
        front.boot(model_root, tmp_path / "checkpoints", "tiny", placement={"kind": "ray"}, sampler=VLLM)
        processes = vllm_processes()
        assert len(processes) == 1
        front.send(update(1))
        assert front.receive(Updated).step == 1
        if reason is None:
            front.send(Stop())
        else:
            (actors("VllmActor") if lost == "actor" else processes)[0].kill()
            assert re.match(reason, front.receive(Failed).reason)
        assert front.process.wait(60) == (reason is not None)
        _, alive = psutil.wait_procs(processes, timeout=60)
        assert not alive
