"""vLLM beside a trainer of two ranks: what both put together is what two vLLM processes sample from."""

from __future__ import annotations

import re
from pathlib import Path

import psutil
import pytest
from children import children_with
from sampled_weights import assert_every_update_arrives
from tiny_model import build_tiny_model
from worker_process import WorkerProcess

from swarm_engine.protocol import Failed

pytestmark = pytest.mark.heavy

TIMEOUT_S = 300.0
NUM_UPDATES = 1


def test_updates_of_two_ranks_reach_both_processes_and_the_loss_of_one_ends_all(tmp_path: Path) -> None:
    model = build_tiny_model(tmp_path / "models" / "tiny")
    with WorkerProcess(tmp_path, TIMEOUT_S) as front:
        front.boot(
            model.parent,
            tmp_path / "checkpoints",
            "tiny",
            placement={"num_workers": 2, "num_samplers": 2},
            sampler={"backend": "vllm", "max_running": 4},
            trainer={"learning_rate": 0.01},
        )
        family = psutil.Process(front.process.pid).children()
        processes = children_with("--memory", front.process.pid)
        assert (len(family), len(processes)) == (3, 2)
        assert_every_update_arrives(front, NUM_UPDATES, len(processes), tmp_path)
        processes[1].kill()
        reason = front.receive(Failed).reason
        assert re.match(r"sampler [12] of 2: the vLLM process was killed by SIGKILL, .*worker.log", reason)
        assert front.process.wait(60) == 1
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not alive
