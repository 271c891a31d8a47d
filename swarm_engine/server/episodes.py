"""Episodes that run: their keys, leases and open calls."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from dataclasses import dataclass, field

from swarm_engine.server.pool import Seat
from swarm_engine.server.worker_link import Generation
from swarm_engine.tracker.codec import ReplyText
from swarm_engine.tracker.tracker import Draft, EpisodeTracker
from swarm_engine.types import FinishReason, Mode, SamplingParams


class KeyRing:
    """Ids and keys that this run folder gave out, told from others without a list of them.

    So an episode that was running when the server was killed is known as lost, not as unknown.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()

    def _mac(self, purpose: str, text: str, length: int) -> str:
        return hmac.new(self._secret, f"{purpose}:{text}".encode(), hashlib.sha256).hexdigest()[:length]

    def new_episode_id(self) -> str:
        """An id nobody can guess."""
        body = secrets.token_hex(8)
        return f"e{body}{self._mac('id', body, 8)}"

    def is_ours(self, episode_id: str) -> bool:
        """Whether this run folder gave the id out, at whatever time."""
        body, mac = episode_id[1:17], episode_id[17:]
        return episode_id[:1] == "e" and hmac.compare_digest(self._mac("id", body, 8).encode(), mac.encode())

    def key_of(self, episode_id: str) -> str:
        """The key that opens an episode's inference routes."""
        return f"sk-{self._mac('key', episode_id, 40)}"


@dataclass(slots=True, eq=False)
class RunningCall:
    """A call whose reply is being sampled."""

    draft: Draft
    params: SamplingParams
    generation: Generation
    reply: ReplyText
    has_news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when tokens come in or sampling ends; the one who streams clears it."""
    finish_reason: FinishReason | None = None
    """None until it is recorded."""
    is_closed: bool = False
    """Whether its caller, its episode or the sampler ended it before it was complete."""


@dataclass(slots=True, eq=False)
class LiveEpisode:
    """An episode between its claim and its end."""

    episode_id: str
    api_key: str
    seat: Seat
    mode: Mode
    tags: dict[str, str]
    client_id: str
    agents: tuple[str, ...]
    """Agents the claim named; empty where any may speak."""
    policy_version: int
    lease_s: float
    started_at: float
    """Seconds, monotonic."""
    deadline: float
    """Seconds, monotonic; after it the episode ends as timeout."""
    tracker: EpisodeTracker
    running: dict[str, RunningCall] = field(default_factory=dict)
    lease_until: float = 0.0
    timer: asyncio.TimerHandle | None = None
    ending: str | None = None
    """The normalised `end` request that is being committed; None before."""
    ended: asyncio.Future[None] | None = None

    def touch(self, now: float) -> None:
        """Its client is alive."""
        self.lease_until = now + self.lease_s


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """A client's wish for an episode."""

    client_id: str
    task_id: str
    mode: Mode = Mode.TRAIN
    group_id: str | None = None
    policies: tuple[str, ...] = ()
    agents: tuple[str, ...] = ()
    lease_s: float | None = None
    code_version: str | None = None
    tags: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CallRequest:
    """An inference request, parsed and checked."""

    messages: tuple[dict[str, object], ...]
    max_tokens: int | None
    """None takes the server's limit."""
    temperature: float
    seed: int | None
    stop: tuple[str, ...]
