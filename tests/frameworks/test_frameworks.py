"""Agents in every common framework, against a real server: what the sampler saw and returned is what is trained.

`make test-heavy` runs it in an environment of its own, which has the frameworks.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.append(str(HERE))
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

from framework_agents import AGENTS  # noqa: E402
from tiny_model import build_tiny_model  # noqa: E402

from swarm_engine.client import SwarmClient, SyncEpisode  # noqa: E402
from swarm_engine.types import Mode  # noqa: E402

pytestmark = [
    pytest.mark.heavy,
    # What the frameworks warn of is theirs to mend.
    pytest.mark.filterwarnings("ignore"),
]

CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
TEMPLATE = (HERE / "chat_template.jinja").read_text(encoding="utf-8")
CONFIG = {
    "seed": 5,
    "num_threads": 1,
    "policies": {"policy": {"model": "tiny"}},
    "trainer": {"group_size": 2, "tasks_per_update": 1},
    "sampler": {"backend": "scripted"},
}

REWRITES_HISTORY = {"smolagents_tool_calling"}
"""Frameworks that send an answer back as another text than it was."""


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


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    run_dir = tmp_path_factory.mktemp("frameworks") / "run"
    model = build_tiny_model(run_dir / "models" / "tiny", max_position_embeddings=16384, hidden_size=24, head_dim=8)
    (model / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
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


def script_of(name: str) -> list[str]:
    """What the policy says, call by call; smolagents' agents answer by a call too."""
    last = CALL % ("final_answer", '{"answer": "It is 5."}') if name.startswith("smolagents") else "It is 5."
    return ["Let me add.\n" + CALL % ("add", '{"a": 2, "b": 3}'), last]


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", AGENTS)
def test_what_the_sampler_saw_and_returned_is_recorded_and_trained_once(lab: Lab, name: str, is_stream: bool) -> None:
    script = script_of(name)
    task = f"{name}-{is_stream}"
    before = lab.client.status().step
    num_sampled = 0
    for reward in (0.0, 1.0):
        with lab.client.episode(task, mode=Mode.TRAIN, script=script) as episode:
            assert AGENTS[name](episode.base_url, episode.api_key, is_stream).strip() == "It is 5."
            num_sampled += check_record(lab, episode, is_one_context=name not in REWRITES_HISTORY)
            episode.end(reward=reward)
    (step,) = steps_after(lab.client, before)
    assert step["metrics"]["num_trained_tokens"] == num_sampled, "every sampled token is trained exactly once"
    assert step["drops"] == {}


def check_record(lab: Lab, episode: SyncEpisode, *, is_one_context: bool) -> int:
    """Compare the tracker's record with the sampler's; returns how many tokens were sampled."""
    timelines = lab.client.timelines(episode.episode_id)
    assert len(timelines) == 2
    num_sampled = 0
    contexts = []
    for timeline in timelines:
        (call_id,) = timeline["call_ids"]
        prompt, reply, logprobs = lab.sampler_record(call_id)
        ids = [token for block in timeline["blocks"] for token in block["token_ids"]]
        assert ids == prompt + reply
        mask = [flag for block in timeline["blocks"] for flag in block["loss_mask"]]
        assert mask == [False] * len(prompt) + [True] * len(reply)
        assert timeline["blocks"][-1]["logprobs"] == logprobs
        num_sampled += len(reply)
        contexts.append(ids)
    assert (contexts[1][: len(contexts[0])] == contexts[0]) == is_one_context
    assert len(lab.client.timelines(episode.episode_id, merge="token")) == (1 if is_one_context else 2)
    return num_sampled


def steps_after(client: SwarmClient, step: int) -> list[dict[str, Any]]:
    """Payloads of the updates after `step`, once there is one."""
    for event in client.events():
        if event.kind == "step" and event.payload["step"] > step:
            return [event.payload]
    raise AssertionError("the events ended")
