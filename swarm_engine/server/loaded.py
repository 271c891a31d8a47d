"""What a booted engine serves with."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_engine.config import EngineConfig
from swarm_engine.protocol import PolicyReady
from swarm_engine.server.pool import Pool
from swarm_engine.server.teacher import Teacher
from swarm_engine.server.worker_link import WorkerLink
from swarm_engine.tracker.codec import ChatCodec


@dataclass(slots=True)
class Loaded:
    """One boot's worth: everything that is there while episodes can run, and gone with the worker."""

    config: EngineConfig
    policy: PolicyReady
    codec: ChatCodec
    link: WorkerLink
    pool: Pool
    step: int
    """Updates in the weights; the policy_version that is served."""
    teacher: Teacher | None = None
    """Who is asked about a batch before it is trained."""
