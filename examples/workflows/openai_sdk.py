"""A project's workflow.py on OpenAI's SDK: one client, its URL and key set for each episode."""

from __future__ import annotations

from typing import Any, Protocol

from openai import AsyncOpenAI

from swarm_engine.client import Episode
from swarm_engine.types import Outcome

OPENAI = AsyncOpenAI(base_url="http://set-by-the-episode", api_key="set-by-the-episode", timeout=None)


class Env(Protocol):
    """The game, in a process of its own."""

    async def reset(self, seed: int) -> dict[str, Any]:
        """Start the game of a seed."""

    async def step(self, text: str) -> dict[str, Any]:
        """Play the reply of the seat to move."""


async def rollout(episode: Episode, env: Env, seed: int, *, temperature: float = 1.0, max_tokens: int = 8) -> None:
    """Play one game and report what it paid."""
    client = OPENAI.with_options(base_url=episode.base_url, api_key=episode.api_key)
    talks: dict[str, list[Any]] = {}
    turn = await env.reset(seed)
    while "rewards" not in turn:
        talk = talks.setdefault(turn["seat"], [{"role": "system", "content": turn["system"]}])
        talk.append({"role": "user", "content": turn["observation"]})
        answer = await client.chat.completions.create(
            model=f"policy@{turn['agent']}", messages=talk, temperature=temperature, max_completion_tokens=max_tokens
        )
        reply = answer.choices[0].message
        talk.append(reply.model_dump(exclude_none=True))
        turn = await env.step(reply.content or "")
    await episode.end(reward=turn["rewards"], outcome=Outcome(turn["outcome"]), metrics=turn["metrics"])
