"""Agents in every common framework, against a real server: what the sampler saw and returned is what is trained.

`make test-heavy` runs it in an environment of its own, which has the frameworks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

from framework_agents import AGENTS
from lab import CALL, Lab, open_lab

from swarm_engine.types import Mode

pytestmark = [
    pytest.mark.heavy,
    # What the frameworks warn of is theirs to mend.
    pytest.mark.filterwarnings("ignore"),
]

REWRITES_HISTORY = {"smolagents_tool_calling"}
"""Frameworks that send an answer back as another text than it was."""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    folder = tmp_path_factory.mktemp("frameworks") / "run"
    with open_lab(folder, max_position_embeddings=16384, hidden_size=24, head_dim=8) as lab:
        yield lab


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
            num_sampled += lab.check_record(episode, len(script), is_one_context=name not in REWRITES_HISTORY)
            episode.end(reward=reward)
    step = lab.step_after(before)
    assert step["metrics"]["num_trained_tokens"] == num_sampled, "every sampled token is trained exactly once"
    assert step["drops"] == {}
