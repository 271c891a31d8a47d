"""A project's workflow.py on AgentScope: every seat is an agent, which keeps its own conversation.

AgentScope tells its agents the time unless it is told not to: then no two runs ask the same questions, and none can be
repeated.
"""

from __future__ import annotations

from typing import Any, Protocol

from agentscope.agent import Agent, InjectionConfig
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from openai import DefaultAsyncHttpxClient
from pydantic import SecretStr

from swarm_engine.client import Episode
from swarm_engine.types import Outcome

HTTP = DefaultAsyncHttpxClient(timeout=None)
"""Shared, or every episode would open connections of its own."""
QUIET = InjectionConfig(inject_runtime_state=False)


class Env(Protocol):
    """The game, in a process of its own."""

    async def reset(self, seed: int) -> dict[str, Any]:
        """Start the game of a seed."""

    async def step(self, text: str) -> dict[str, Any]:
        """Play the reply of the seat to move."""


async def rollout(episode: Episode, env: Env, seed: int, *, temperature: float = 1.0, max_tokens: int = 8) -> None:
    """Play one game and report what it paid."""
    agents: dict[str, Agent] = {}
    turn = await env.reset(seed)
    while "rewards" not in turn:
        agent = agents.get(turn["seat"]) or Agent(
            turn["seat"],
            turn["system"],
            OpenAIChatModel(
                OpenAICredential(base_url=episode.base_url, api_key=SecretStr(episode.api_key)),
                f"policy@{turn['agent']}",
                OpenAIChatModel.Parameters(temperature=temperature, max_tokens=max_tokens),
                stream=False,
                client_kwargs={"http_client": HTTP},
            ),
            injection_config=QUIET,
        )
        agents[turn["seat"]] = agent
        reply = await agent.reply(UserMsg("game", turn["observation"]))
        turn = await env.step(reply.get_text_content("") or "")
    await episode.end(reward=turn["rewards"], outcome=Outcome(turn["outcome"]), metrics=turn["metrics"])
