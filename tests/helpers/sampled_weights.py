"""Whether what a worker samples from is what it has trained: its replies beside a plain forward of its export."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from episodes import update
from worker_process import WorkerProcess

from swarm_engine.models.decoder import attend_causally
from swarm_engine.models.loading import LoadedPolicy, load_policy
from swarm_engine.protocol import Export, Finished, Generate, Sampled, Saved, Updated
from swarm_engine.types import SamplingParams

NUM_PROMPTS = 2
"""At once, so that of two idle samplers each takes one."""


def prompt_of(number: int, length: int = 40) -> tuple[int, ...]:
    draw = torch.Generator().manual_seed(number)
    return tuple(torch.randint(3, 900, (length,), generator=draw).tolist())


def exported(front: WorkerProcess, folder: Path) -> LoadedPolicy:
    front.send(Export("policy", str(folder)))
    saved = front.receive(Saved)
    assert saved.error is None
    return load_policy(folder)


def logprobs_of(policy: LoadedPolicy, prompt: tuple[int, ...], reply: tuple[int, ...]) -> list[float]:
    """Those of a reply at temperature 1, by one plain forward."""
    tokens = torch.tensor([prompt + reply])
    with torch.no_grad():
        hidden = policy.model.hidden(tokens, torch.arange(tokens.shape[1]), attend_causally)
        found_T_V = policy.model.logits(hidden)[0].double().log_softmax(-1)
    return [found_T_V[len(prompt) - 1 + place, token].item() for place, token in enumerate(reply)]


def assert_every_update_arrives(front: WorkerProcess, num_updates: int, num_samplers: int, folder: Path) -> None:
    """Before the first update and after each, what samples has the worker's weights, and every vLLM was probed."""
    assert_samples_from_its_weights(front, 0, folder)
    for step in range(1, num_updates + 1):
        front.send(update(step))
        assert front.receive(Updated).step == step
        assert_samples_from_its_weights(front, step, folder)
    log = (folder / "worker.log").read_text()
    assert log.count("vLLM and the trainer differ by") == num_samplers * (num_updates + 1)


def assert_samples_from_its_weights(front: WorkerProcess, version: int, folder: Path) -> None:
    """Replies, which have to be of this version, have the log-probabilities of the worker's export, and no others."""
    policy = exported(front, folder / f"export-{version}")
    prompts = {f"{version}-{number}": prompt_of(number) for number in range(NUM_PROMPTS)}
    front.send(
        *(
            Generate(name, "policy", prompt, SamplingParams(12, seed=1), is_streamed=False)
            for name, prompt in prompts.items()
        )
    )
    num_open = NUM_PROMPTS
    while num_open:
        answer = front.receive(object)
        if isinstance(answer, Finished):
            num_open -= 1
            continue
        assert isinstance(answer, Sampled), answer
        assert answer.policy_version == version
        prompt = prompts[answer.request_id]
        assert answer.logprobs == pytest.approx(logprobs_of(policy, prompt, answer.token_ids), abs=1e-4)
        if version:
            before = load_policy(folder / f"export-{version - 1}")
            others = logprobs_of(before, prompt, answer.token_ids)
            assert answer.logprobs != pytest.approx(others, abs=1e-3)
