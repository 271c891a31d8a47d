"""A project's workflow.py on LangChain's chat model; inside a LangGraph node it is used the same way."""

from __future__ import annotations

from typing import Any, Protocol

from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from openai import DefaultAsyncHttpxClient
from pydantic import SecretStr

from swarm_engine.client import Episode
from swarm_engine.types import Outcome

HTTP = DefaultAsyncHttpxClient(timeout=None)
"""Shared, or every episode would open connections of its own."""


class Env(Protocol):
    """The game, in a process of its own."""

    async def reset(self, seed: int) -> dict[str, Any]:
        """Start the game of a seed."""

    async def step(self, text: str) -> dict[str, Any]:
        """Play the reply of the seat to move."""


async def rollout(episode: Episode, env: Env, seed: int, *, temperature: float = 1.0, max_tokens: int = 8) -> None:
    """Play one game and report what it paid."""
    players: dict[str, ChatOpenAI] = {}
    talks: dict[str, list[BaseMessage]] = {}
    turn = await env.reset(seed)
    while "rewards" not in turn:
        player = players.get(turn["agent"]) or ChatOpenAI(
            base_url=episode.base_url,
            api_key=SecretStr(episode.api_key),
            model=f"policy@{turn['agent']}",
            temperature=temperature,
            max_completion_tokens=max_tokens,
            http_async_client=HTTP,
        )
        players[turn["agent"]] = player
        talk = talks.setdefault(turn["seat"], [SystemMessage(turn["system"])])
        talk.append(HumanMessage(turn["observation"]))
        reply = await player.ainvoke(talk)
        talk.append(reply)
        turn = await env.step(reply.text)
    await episode.end(reward=turn["rewards"], outcome=Outcome(turn["outcome"]), metrics=turn["metrics"])
