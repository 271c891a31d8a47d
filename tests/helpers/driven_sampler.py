"""The worker's loop around a vLLM sampler, with the test as its front."""

from __future__ import annotations

import queue
from collections.abc import Callable
from functools import partial
from typing import Any

from swarm_engine.config import SamplerConfig
from swarm_engine.models.loading import LoadedPolicy
from swarm_engine.protocol import Finished, Generate, Rejected
from swarm_engine.sampler import Reply
from swarm_engine.sampler.vllm_link import LocalLinks
from swarm_engine.sampler.vllm_sampler import start_vllm
from swarm_engine.types import SamplingParams

WAIT_S = 60.0


class Driven:
    """The vLLM processes of a policy on this machine, and the worker's loop around them."""

    def __init__(self, policy: LoadedPolicy, config: SamplerConfig, count: int = 1) -> None:
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        reach = partial(LocalLinks, count=count, num_threads=1, wake=lambda: self._wakes.put(None))
        self.sampler = start_vllm(policy, config, reach, version=0)

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
