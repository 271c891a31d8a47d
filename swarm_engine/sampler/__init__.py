"""Turning prompts into tokens.

A sampler is a state machine without threads or clocks: requests come and go between two steps, and every step samples
at most one token for each running request. It speaks in the messages of `swarm_engine.protocol`, so that a worker only
passes them on. One that computes in another process gives what came from there, and wakes the worker when it comes.
"""

from __future__ import annotations

from typing import Protocol

from swarm_engine.protocol import Finished, Generate, Rejected, Sampled

Reply = Sampled | Finished | Rejected


class Sampler(Protocol):
    """What every backend does."""

    @property
    def is_idle(self) -> bool:
        """`step` would do nothing: no request waits or runs here, and no reply has come in."""
        ...

    def submit(self, request: Generate) -> list[Reply]:
        """Take a request, or reject it at once."""
        ...

    def cancel(self, request_id: str) -> list[Reply]:
        """Stop a request; nothing where it has ended or was never here."""
        ...

    def step(self) -> list[Reply]:
        """Sample the next token of every running request, and start waiting ones."""
        ...

    def weights_changed(self, version: int) -> list[Reply]:
        """The policy's weights are now those of `version`: forget everything computed from the old ones. Returns the
        tokens sampled under those and not reported yet."""
        ...

    def close(self) -> None:
        """End what runs outside this process; called once, last."""
        ...


class Sleeper(Protocol):
    """A sampler that can make room for a trainer on its card."""

    def begin_sleep(self) -> None:
        """Begin to free the card of weights, keys and values. Requests wait until `weights_changed`."""
        ...

    def wait_asleep(self) -> list[Reply]:
        """Wait until the card is free. Returns the tokens sampled before and not reported yet."""
        ...
