"""Episodes for tests of the trainer, short to write."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from swarm_engine.config import Merge
from swarm_engine.models.decoder import Decoder
from swarm_engine.protocol import Update
from swarm_engine.trainer.rows import row_of
from swarm_engine.trainer.scoring import score
from swarm_engine.types import BatchRecord, Call, Episode, FinishReason, Mode, Outcome

EXACT_MERGES = (Merge.NONE, Merge.TOKEN, Merge.TREE)
"""Those that leave the loss as it is."""


def call(prompt: Sequence[int], reply: Sequence[int], logprobs: Sequence[float] | None = None, **changes: Any) -> Call:
    """One call of the agent `main`, sampled at temperature 1 by version 0."""
    values: dict[str, Any] = {
        "call_id": f"call-{random.getrandbits(64):x}",
        "index": 0,
        "policy": "policy",
        "agent": "main",
        "prompt_ids": tuple(prompt),
        "completion_ids": tuple(reply),
        "logprobs": tuple(logprobs if logprobs is not None else [-1.0] * len(reply)),
        "policy_versions": (0,) * len(reply),
        "temperature": 1.0,
        "finish_reason": FinishReason.STOP,
    }
    return Call(**values | changes)


def episode(
    name: str, calls: Sequence[Call], rewards: Mapping[str, float | None] | float | None, **changes: Any
) -> Episode:
    """One train episode of group `g`; a bare reward goes to every agent that called."""
    if not isinstance(rewards, Mapping):
        rewards = {call.agent: rewards for call in calls}
    values: dict[str, Any] = {
        "episode_id": name,
        "task_id": "task",
        "group_id": "g",
        "index": 0,
        "mode": Mode.TRAIN,
        "policy_version": 0,
        "calls": tuple(calls),
        "rewards": rewards,
        "outcome": Outcome.SUCCESS,
    }
    return Episode(**values | changes)


def conversations(seed: int, num_groups: int = 2, group_size: int = 4, num_turns: int = 3) -> list[Episode]:
    """Multi-turn episodes of two agents: histories that merge, some that branch, replies and rewards at random."""
    draw = random.Random(seed)

    def tokens(least: int, most: int) -> tuple[int, ...]:
        return tuple(draw.randrange(3, 900) for _ in range(draw.randint(least, most)))

    episodes = []
    for group in range(num_groups):
        openings = {agent: tokens(5, 12) for agent in ("left", "right")}
        for index in range(group_size):
            contexts = dict(openings)
            calls = []
            for turn in range(num_turns):
                for agent in openings:
                    reply = tokens(1, 4)
                    logprobs = [draw.uniform(-8.0, -5.0) for _ in reply]
                    name = f"{group}-{index}-{agent}-{turn}"
                    temperature = draw.choice((0.7, 1.0))
                    calls.append(
                        call(contexts[agent], reply, logprobs, call_id=name, agent=agent, temperature=temperature)
                    )
                    history = contexts[agent] + reply
                    if draw.random() < 0.2:  # a template that rewrites history
                        history = history[:-1]
                    contexts[agent] = history + tokens(1, 5)
            rewards = {agent: draw.random() for agent in openings}
            episodes.append(
                episode(f"e{group}-{index}", calls, rewards, group_id=f"g{group}", index=index, task_id=f"t{group}")
            )
    return episodes


def update(step: int) -> Update:
    """An update on such conversations, others at each step."""
    batch = conversations(step)
    return Update(BatchRecord(step, tuple(episode.episode_id for episode in batch), step), tuple(batch))


def own_logprobs(model: Decoder, one: Call) -> list[float]:
    """What the model gives the reply of a call, each token in nats."""
    row = row_of(one.timeline())
    with torch.no_grad():
        found: list[float] = score(model, [row]).logprobs_N.tolist()
    return found
