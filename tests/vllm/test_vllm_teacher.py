"""vLLM's own OpenAI server as a teacher, which says of every trained token how likely its model finds it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from test_vllm_engine import serving
from tiny_model import build_tiny_model

from swarm_engine.client import SyncEpisode, Task
from swarm_engine.models.decoder import Decoder, attend_causally
from swarm_engine.models.loading import load_policy
from swarm_engine.sampler.vllm_link import ENVIRONMENT, PYTHON_VARIABLE
from swarm_engine.types import EngineState

pytestmark = pytest.mark.heavy

BOOT_S = 300.0
ROLLING = EngineState.ROLLING


@pytest.fixture
def teacher(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """URL of a vLLM server, and the folder of the model that it serves as `large`."""
    folder = build_tiny_model(tmp_path / "large", seed=1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [os.environ[PYTHON_VARIABLE], "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", "large", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8"]
    environment = os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    del environment["VLLM_ENABLE_V1_MULTIPROCESSING"]  # its server needs two processes
    log = tmp_path / "teacher.log"
    with (
        log.open("w") as out,
        subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True) as process,
    ):
        try:
            deadline = time.monotonic() + BOOT_S
            while not answers(f"http://127.0.0.1:{port}/health"):
                assert process.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < deadline, log.read_text()[-4000:]
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}/v1", folder
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.TransportError:
        return False


def logprobs(model: Decoder, tokens: list[int]) -> list[float]:
    """Of each token after the first, in nats."""
    with torch.no_grad():
        hidden = model.hidden(torch.tensor([tokens]), torch.arange(len(tokens)), attend_causally)
        table = model.logits(hidden)[0, :-1].log_softmax(-1)
    return [float(row[token]) for row, token in zip(table, tokens[1:], strict=True)]


def test_a_policy_learns_from_what_vllm_thinks_of_its_replies(tmp_path: Path, teacher: tuple[str, Path]) -> None:
    """With one reward for all. What vLLM says of the first batch is worked out again from both models."""
    url, large = teacher
    small = build_tiny_model(tmp_path / "run" / "models" / "small")
    config: dict[str, Any] = {
        "seed": 3,
        "num_threads": 1,
        "policies": {"policy": {"model": "small"}},
        "trainer": {"group_size": 2, "tasks_per_update": 2, "learning_rate": 0.01, "teacher_weight": 1.0},
        "sampler": {"max_tokens": 8},
        "teacher": {"base_url": url, "model": "large"},
    }

    def rollout(episode: SyncEpisode, task: Task) -> None:
        episode.chat([{"role": "user", "content": task.task_id}])
        episode.end(reward=0.5)

    with serving(tmp_path / "run", config) as served:
        client = served.client
        for step in range(6):
            client.run([Task(f"{step}-{number}") for number in range(2)], rollout, group_size=2, concurrency=4)
            served.wait_for(lambda step=step: client.status().step > step and client.status().state is ROLLING)
        events = list(client.events(follow=False))
        steps = [event.payload["metrics"] for event in events if event.kind == "step"]
        first = next(event.payload["episode_ids"] for event in events if event.kind == "batch")
        lines = [line for episode_id in first for line in client.timelines(episode_id)]
    assert [metrics["skipped"] for metrics in steps] == [0] * 6
    ours, theirs = load_policy(small).model, load_policy(large).model
    differences: list[float] = []
    for line in lines:
        tokens = [token for block in line["blocks"] for token in block["token_ids"]]
        length = len(line["blocks"][-1]["token_ids"])
        pairs = zip(logprobs(ours, tokens), logprobs(theirs, tokens), strict=True)
        differences += [one - other for one, other in list(pairs)[-length:]]
    assert steps[0]["kl_teacher"] == pytest.approx(sum(differences) / len(differences), abs=1e-4)
    distances = [metrics["kl_teacher"] for metrics in steps]
    assert sum(distances[-2:]) < 0.9 * sum(distances[:2]), distances
