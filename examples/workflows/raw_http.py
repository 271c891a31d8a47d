"""A project's workflow.py without any framework: every turn is one HTTP request."""

from __future__ import annotations

from typing import Any, Protocol

import httpx

from swarm_engine.client import Episode
from swarm_engine.types import Outcome

HTTP = httpx.AsyncClient(timeout=None)


class Env(Protocol):
    """The game, in a process of its own."""

    async def reset(self, seed: int) -> dict[str, Any]:
        """Start the game of a seed."""

    async def step(self, text: str) -> dict[str, Any]:
        """Play the reply of the seat to move."""


async def rollout(episode: Episode, env: Env, seed: int, *, temperature: float = 1.0, max_tokens: int = 8) -> None:
    """Play one game and report what it paid."""
    url, headers = f"{episode.base_url}/chat/completions", {"authorization": f"Bearer {episode.api_key}"}
    settings = {"temperature": temperature, "max_tokens": max_tokens}
    talks: dict[str, list[dict[str, str]]] = {}
    turn = await env.reset(seed)
    while "rewards" not in turn:
        talk = talks.setdefault(turn["seat"], [{"role": "system", "content": turn["system"]}])
        talk.append({"role": "user", "content": turn["observation"]})
        question = {"model": f"policy@{turn['agent']}", "messages": talk, **settings}
        answer = (await HTTP.post(url, headers=headers, json=question)).raise_for_status().json()
        reply = answer["choices"][0]["message"]
        talk.append(reply)
        turn = await env.step(reply["content"])
    await episode.end(reward=turn["rewards"], outcome=Outcome(turn["outcome"]), metrics=turn["metrics"])
