"""What the sampler recorded is what the trainer computes, for every backend, temperature and way to reuse a prefix."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from episodes import call, episode

from swarm_engine.config import Merge, SamplerBackend, TrainerConfig
from swarm_engine.models import resolve
from swarm_engine.models.loading import LoadedPolicy, load_policy
from swarm_engine.protocol import Finished, Generate, Sampled
from swarm_engine.sampler import Reply
from swarm_engine.sampler.slots import SlotSampler
from swarm_engine.trainer.samples import make_samples
from swarm_engine.trainer.scoring import score
from swarm_engine.trainer.trainer import Trainer
from swarm_engine.types import Call, Episode, FinishReason, SamplingParams

NUM_GROUPS, GROUP_SIZE, NUM_TURNS, REPLY_TOKENS = 2, 4, 3, 9
NO_END = (10_000,)
SAMPLERS = {
    "torch": {},
    "torch, two slots": {"max_running": 2},
    "scripted": {"backend": SamplerBackend.SCRIPTED},
    "lockstep": {"is_lockstep": True},
}


@dataclass(frozen=True)
class Played:
    episodes: list[Episode]
    num_prompt_tokens: int
    num_prefilled: int


def play(policy: LoadedPolicy, sampler: SlotSampler, temperature: float, is_scripted: bool) -> Played:
    """Groups that share their openings, every member a conversation that goes on from its own replies."""
    draw = random.Random(7)

    def words(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, policy.model.config.vocab_size) for _ in range(count))

    openings = [words(40) for _ in range(NUM_GROUPS)]
    contexts = {(g, i): openings[g] for g in range(NUM_GROUPS) for i in range(GROUP_SIZE)}
    calls: dict[tuple[int, int], list[Call]] = {seat: [] for seat in contexts}
    num_prompt_tokens = 0
    for turn in range(NUM_TURNS):
        asked: dict[str, tuple[int, int]] = {}
        replies: list[Reply] = []
        for (group, index), prompt in contexts.items():
            name = f"{group}-{index}-{turn}"
            asked[name] = (group, index)
            num_prompt_tokens += len(prompt)
            replies += sampler.submit(
                Generate(
                    name,
                    "policy",
                    prompt,
                    SamplingParams(REPLY_TOKENS, temperature=temperature, seed=100 * group + 10 * index + turn),
                    script=words(REPLY_TOKENS) if is_scripted else None,
                )
            )
        while not sampler.is_idle:
            replies += sampler.step()
        sampled: dict[str, list[tuple[int, float]]] = {name: [] for name in asked}
        for reply in replies:
            if isinstance(reply, Sampled):
                sampled[reply.request_id] += zip(reply.token_ids, reply.logprobs, strict=True)
            else:
                assert reply == Finished(reply.request_id, FinishReason.LENGTH)
        for name, seat in asked.items():
            ids, logprobs = zip(*sampled[name], strict=True)
            calls[seat].append(call(contexts[seat], ids, logprobs, call_id=name, index=turn, temperature=temperature))
            contexts[seat] = (*contexts[seat], *ids, *words(6))
    episodes = [
        episode(f"{group}-{index}", calls[group, index], float(index), group_id=f"g{group}", index=index)
        for group, index in contexts
    ]
    return Played(episodes, num_prompt_tokens, sampler.num_prefilled)


@pytest.fixture(scope="module", params=["random weights", "nano-tictactoe"])
def policy(request: pytest.FixtureRequest, tiny_dir: Path) -> LoadedPolicy:
    return load_policy(tiny_dir if request.param == "random weights" else resolve(request.param, "no-root"))


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.5, 2.0])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_recorded_logprobs_are_the_trainers(policy: LoadedPolicy, kind: str, temperature: float) -> None:
    sampler = SlotSampler(policy.model, NO_END, **SAMPLERS[kind])  # type: ignore[arg-type]
    played = play(policy, sampler, temperature, kind == "scripted")
    if kind == "lockstep":
        assert played.num_prefilled == played.num_prompt_tokens
    elif kind != "torch, two slots":
        # An opening once a group, its last token once more for the others, then what a turn added to each context.
        num_seats = NUM_GROUPS * GROUP_SIZE
        assert played.num_prefilled == NUM_GROUPS * (40 + GROUP_SIZE - 1) + num_seats * (NUM_TURNS - 1) * (1 + 6)
    trainer = Trainer(policy.model, TrainerConfig())
    for merge in (Merge.NONE, Merge.TOKEN):
        rows = trainer.rows(make_samples(played.episodes, TrainerConfig(merge=merge), version=0))
        recorded = torch.tensor([logprob for row in rows for logprob in row.sampling_logprobs])
        assert len(recorded) == NUM_GROUPS * GROUP_SIZE * NUM_TURNS * REPLY_TOKENS
        assert len(rows) == NUM_GROUPS * GROUP_SIZE * (NUM_TURNS if merge is Merge.NONE else 1)
        with torch.no_grad():
            computed = score(policy.model, [row.row for row in rows]).logprobs_N
        assert float((recorded - computed).abs().max()) < 1e-4
