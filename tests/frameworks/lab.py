"""A server whose tiny policy plays scripts, and the sampler's own record to compare what is trained with."""

from __future__ import annotations

import contextlib
import itertools
import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny_model import build_tiny_model

from swarm_engine.client import SwarmClient, SyncEpisode

HERE = Path(__file__).parent

CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
TEMPLATE = (HERE / "chat_template.jinja").read_text(encoding="utf-8")
CONFIG = {
    "seed": 5,
    "num_threads": 1,
    "policies": {"policy": {"model": "tiny"}},
    "trainer": {"group_size": 2, "tasks_per_update": 1},
    "sampler": {"backend": "scripted"},
}


@dataclass(frozen=True)
class Lab:
    """A server with a tiny policy that plays scripts, and the sampler's own record."""

    client: SwarmClient
    log: Path

    def sampler_record(self, call_id: str) -> tuple[list[int], list[int], list[float]]:
        """Prompt, reply and log-probabilities of a call, as the sampler had them."""
        lines = [json.loads(line) for line in self.log.read_text(encoding="utf-8").splitlines()]
        mine = [line for line in lines if line["request_id"] == call_id]
        (prompt,) = [line["prompt_ids"] for line in mine if "prompt_ids" in line]
        pieces = [line for line in mine if "token_ids" in line]
        return (
            prompt,
            [token for piece in pieces for token in piece["token_ids"]],
            [logprob for piece in pieces for logprob in piece["logprobs"]],
        )

    def check_record(self, episode: SyncEpisode, num_calls: int, *, is_one_context: bool) -> int:
        """Compare the tracker's record with the sampler's; returns how many tokens were sampled."""
        timelines = self.client.timelines(episode.episode_id)
        assert len(timelines) == num_calls
        num_sampled = 0
        contexts = []
        for timeline in timelines:
            (call_id,) = timeline["call_ids"]
            prompt, reply, logprobs = self.sampler_record(call_id)
            ids = [token for block in timeline["blocks"] for token in block["token_ids"]]
            assert ids == prompt + reply
            mask = [flag for block in timeline["blocks"] for flag in block["loss_mask"]]
            assert mask == [False] * len(prompt) + [True] * len(reply)
            assert timeline["blocks"][-1]["logprobs"] == logprobs
            num_sampled += len(reply)
            contexts.append(ids)
        for before, after in itertools.pairwise(contexts):
            assert (after[: len(before)] == before) == is_one_context
        merged = self.client.timelines(episode.episode_id, merge="token")
        assert len(merged) == (1 if is_one_context else num_calls)
        return num_sampled

    def step_after(self, step: int) -> dict[str, Any]:
        """Payload of the first update after `step`, once there is one."""
        for event in self.client.events():
            if event.kind == "step" and event.payload["step"] > step:
                return event.payload
        raise AssertionError("the events ended")


@contextlib.contextmanager
def open_lab(run_dir: Path, **model: Any) -> Iterator[Lab]:
    """Serve a tiny policy of this config until the block is left; the template is one that shows tools."""
    folder = build_tiny_model(run_dir / "models" / "tiny", **model)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    log = run_dir / "sampler.jsonl"
    worker = [sys.executable, str(HERE / "logged_worker.py"), "--log", str(log)]
    command = [sys.executable, "-m", "swarm_engine.cli", "serve", "--run-dir", str(run_dir), "--exit-with-stdin"]
    serving = subprocess.Popen(
        [*command, "--worker", shlex.join(worker)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert serving.stdin
    assert serving.stdout
    listening = json.loads(serving.stdout.readline())
    token = json.loads(Path(listening["token_file"]).read_text(encoding="utf-8"))["operator"]
    with SwarmClient(listening["url"], token) as client:
        client.start(CONFIG, wait=True)
        yield Lab(client, log)
    serving.send_signal(signal.SIGTERM)
    assert serving.wait(30) == 0
    serving.stdin.close()
    serving.stdout.close()
