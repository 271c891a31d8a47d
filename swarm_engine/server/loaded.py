"""What a booted engine serves with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from swarm_engine.config import EngineConfig, History
from swarm_engine.errors import NotFoundError
from swarm_engine.protocol import PolicyReady
from swarm_engine.server.pool import Pool
from swarm_engine.server.teacher import Teacher
from swarm_engine.server.worker_link import WorkerLink
from swarm_engine.tracker.codec import ChatCodec


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """A policy as the front speaks for it."""

    ready: PolicyReady
    codec: ChatCodec
    history: History

    @staticmethod
    def load(ready: PolicyReady, history: History, created: datetime) -> ServedPolicy:
        """Read its tokenizer and template; takes long, so not on the event loop."""
        return ServedPolicy(ready, ChatCodec.load(Path(ready.tokenizer_dir), ready.end_ids, created), history)

    @property
    def max_context(self) -> int:
        """Tokens of prompt and reply together."""
        return self.ready.max_context


@dataclass(slots=True)
class Loaded:
    """One boot's worth: everything that is there while episodes can run, and gone with the worker."""

    config: EngineConfig
    policies: Mapping[str, ServedPolicy]
    link: WorkerLink
    pool: Pool
    step: int
    """Updates in the weights; the version of every policy that is trained."""
    teacher: Teacher | None = None
    """Who is asked about a batch before it is trained."""

    def choose(self, names: Sequence[str]) -> dict[str, ServedPolicy]:
        """The policies of an episode: those that its claim names, or all.

        Raises:
            NotFoundError: one of them is not served.
        """
        if unknown := [name for name in names if name not in self.policies]:
            there = ", ".join(map(repr, self.policies))
            raise NotFoundError(
                f"policy {unknown[0]!r} is not served here", f"this server has {there}", code="unknown_policy"
            )
        return {name: policy for name, policy in self.policies.items() if name in names or not names}

    def versions(self) -> dict[str, dict[str, int | bool | float | None]]:
        """Every policy as the status shows it."""
        return {
            name: {
                "version": self.version(policy),
                "trainable": policy.ready.trainable,
                "learning_rate": policy.ready.learning_rate,
            }
            for name, policy in self.policies.items()
        }

    def version(self, policy: ServedPolicy) -> int:
        """The policy_version that is served; a frozen policy keeps its own."""
        return self.step if policy.ready.trainable else policy.ready.version
