"""A real server whose worker samples with vLLM: episodes over HTTP, updates, kills."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from children import children_with

from swarm_engine.client import SwarmClient, SyncEpisode, Task
from swarm_engine.types import EngineState, Mode

pytestmark = pytest.mark.heavy

CONFIG: dict[str, Any] = {
    "seed": 3,
    "num_threads": 1,
    "policies": {"policy": {"model": "nano-tictactoe"}},
    "trainer": {"group_size": 2, "tasks_per_update": 2, "checkpoint_every": 1, "learning_rate": 0.01},
    "sampler": {"backend": "vllm", "max_tokens": 12, "max_running": 8},
}
HI: list[Any] = [{"role": "user", "content": "Your move?"}]
BOOT_S = 300.0


@dataclass
class Served:
    """A server with its engine rolling, as a process."""

    client: SwarmClient
    process: subprocess.Popen[str]
    log: Path

    def family(self) -> list[psutil.Process]:
        """The worker and whatever runs below it; the front's own process for grammars outlives them."""
        workers = children_with("swarm_engine.worker", self.process.pid)
        return [one for worker in workers for one in (worker, *worker.children(recursive=True))]

    def vllm(self) -> psutil.Process:
        """The process that runs vLLM: the worker's only child."""
        (found,) = self.family()[0].children()
        return found

    def wait_for(self, holds: Callable[[], bool], limit_s: float = 60.0) -> None:
        deadline = time.monotonic() + limit_s
        while not holds():
            assert time.monotonic() < deadline, f"it did not come to hold: {self.client.status()}"
            time.sleep(0.05)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "run", CONFIG) as served:
        yield served


@contextmanager
def serving(run_dir: Path, settings: dict[str, Any]) -> Iterator[Served]:
    config = run_dir.with_name("config.json")
    config.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "swarm_engine.cli", "serve", "--run-dir", str(run_dir), "--start"]
    with subprocess.Popen([*command, "--config", str(config)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        about = json.loads(process.stdout.readline())
        token = json.loads(Path(about["token_file"]).read_text(encoding="utf-8"))["operator"]
        with SwarmClient(about["url"], token) as client:
            served = Served(client, process, run_dir / "worker.log")
            served.wait_for(lambda: client.status().state is not EngineState.BOOTING, BOOT_S)
            assert client.status().state is EngineState.ROLLING, client.status().reason
            yield served
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(30)


def play(served: Served) -> None:
    """The episodes of one update."""
    client, start = served.client, served.client.status().step

    def rollout(episode: SyncEpisode, task: Task) -> None:
        reply = episode.chat([{"role": "user", "content": task.task_id}])
        episode.chat([{"role": "user", "content": task.task_id}, dict(reply.message), *HI])
        episode.end(reward=float(len(set(reply.text))))

    tasks = [Task(f"{start}-{number}") for number in range(2)]
    client.run(tasks, rollout, group_size=2, concurrency=4)
    served.wait_for(lambda: client.status().step == start + 1 and client.status().state is EngineState.ROLLING)


def agreements(log: Path) -> list[str]:
    """What the worker found at each comparison of vLLM with its trainer."""
    return [line for line in log.read_text().splitlines() if "vLLM and the trainer differ by" in line]


def test_episodes_are_served_and_trained_and_nothing_outlives_a_kill(served: Served) -> None:
    client = served.client
    with client.episode("looked-at", mode=Mode.EVAL) as episode:
        api = openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key, max_retries=0)
        whole = api.chat.completions.create(model="policy", messages=HI, seed=1, logprobs=True)
        chunks = list(api.chat.completions.create(model="policy", messages=HI, seed=1, stream=True))
        form: Any = {"type": "json_schema", "json_schema": {"name": "cell", "schema": {"enum": [1, 2, 3]}}}
        formed = api.chat.completions.create(model="policy", messages=HI, response_format=form)
        episode.end(reward=0.0)
        blocks = [one["blocks"][-1] for one in client.timelines(episode.episode_id)]
    assert whole.choices[0].logprobs is not None
    assert [entry.logprob for entry in whole.choices[0].logprobs.content or []] == blocks[0]["logprobs"]
    assert blocks[1]["token_ids"] == blocks[0]["token_ids"]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert sum(bool(chunk.choices[0].delta.content) for chunk in chunks) > 1 or len(blocks[0]["token_ids"]) <= 2
    assert json.loads(formed.choices[0].message.content or "") in (1, 2, 3)

    play(served)
    play(served)
    steps = [event.payload for event in client.events(follow=False) if event.kind == "step"]
    assert [step["metrics"]["skipped"] for step in steps] == [0, 0]
    # Once at the boot, once after each update.
    assert len(agreements(served.log)) == 3
    with client.episode("again", mode=Mode.EVAL) as episode:
        episode.chat(HI)
        episode.end(reward=0.0)
        (timeline,) = client.timelines(episode.episode_id)
    assert timeline["blocks"][-1]["policy_version"] == 2

    served.vllm().kill()
    served.wait_for(lambda: client.status().state is EngineState.FAILED)
    assert "the vLLM process was killed by SIGKILL" in (client.status().reason or "")
    served.wait_for(lambda: not served.family())

    client.start()
    served.wait_for(lambda: client.status().state is EngineState.ROLLING, BOOT_S)
    assert client.status().step == 2
    assert len(served.family()) == 2
    family = psutil.Process(served.process.pid).children(recursive=True)
    served.process.kill()
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
