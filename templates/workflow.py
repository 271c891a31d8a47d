"""How a game becomes calls to the policy: ask, answer, until the game is over.

A seat's conversation only grows, so the engine computes its history once.
"""

from __future__ import annotations

from typing import Any, Protocol

from swarm_engine.client import Episode
from swarm_engine.types import Outcome


class Env(Protocol):
    """The game, in a process of its own."""

    async def reset(self, seed: int) -> dict[str, Any]:
        """Start the game of a seed."""

    async def step(self, text: str) -> dict[str, Any]:
        """Play the reply of the seat to move."""


async def rollout(episode: Episode, env: Env, seed: int, *, temperature: float = 1.0, max_tokens: int = 8) -> None:
    """Play one game and report what it paid."""
    talks: dict[str, list[dict[str, str]]] = {}
    turn = await env.reset(seed)
    while "rewards" not in turn:
        talk = talks.setdefault(turn["seat"], [{"role": "system", "content": turn["system"]}])
        talk.append({"role": "user", "content": turn["observation"]})
        reply = await episode.chat(talk, agent=turn["agent"], temperature=temperature, max_tokens=max_tokens)
        talk.append({"role": "assistant", "content": reply.text})
        turn = await env.step(reply.text)
    await episode.end(reward=turn["rewards"], outcome=Outcome(turn["outcome"]), metrics=turn["metrics"])
