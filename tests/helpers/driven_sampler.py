"""The worker's loop around a vLLM sampler, with the test as its front."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

from swarm_engine.config import SamplerConfig
from swarm_engine.models.loading import LoadedPolicy
from swarm_engine.protocol import Finished, Generate, Rejected
from swarm_engine.sampler import Reply
from swarm_engine.sampler.vllm_link import VllmSampler
from swarm_engine.types import SamplingParams

WAIT_S = 60.0


class Driven:
    """A vLLM sampler and the worker's loop around it."""

    def __init__(self, policy: LoadedPolicy, config: SamplerConfig, version: int = 0) -> None:
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.sampler = VllmSampler.start(policy, config, version=version, wake=lambda: self._wakes.put(None))

    def until(self, is_enough: Callable[[list[Reply]], bool]) -> list[Reply]:
        """Steps, each after a wake, until their replies are enough."""
        replies: list[Reply] = []
        while not is_enough(replies):
            if self.sampler.is_idle:
                self._wakes.get(timeout=WAIT_S)
            replies += self.sampler.step()
        return replies

    def run(self, *requests: Generate) -> list[Reply]:
        """Everything about some requests, until each has ended."""
        refused = [reply for request in requests for reply in self.sampler.submit(request)]
        return refused + self.until(lambda replies: num_ended(refused + replies) == len(requests))


def num_ended(replies: list[Reply]) -> int:
    return sum(isinstance(reply, Finished | Rejected) for reply in replies)


def ask(name: str, max_tokens: int = 6, **fields: Any) -> Generate:
    params = {key: fields.pop(key) for key in ("temperature", "seed", "top_logprobs") if key in fields}
    return Generate(name, "policy", (5, 6, 7), SamplingParams(max_tokens, **{"seed": 1} | params), **fields)
