"""Clients of a swarm, sync and async, on httpx and dataclasses; importing them takes a moment, not a second.

with SwarmClient(url, token) as client, client.episode("task-1") as episode:
    reply = episode.chat([{"role": "user", "content": "Say yes."}])
    episode.end(reward=float("yes" in reply.text))
"""

from swarm_engine.client.aio import AsyncSwarmClient, Episode
from swarm_engine.client.errors import (
    AddressError,
    ClaimTimeoutError,
    ContextLengthError,
    EpisodeLostError,
    EpisodeNotEndedError,
    GroupSizeError,
    NoAnswerError,
    NotFiniteError,
    ReplayLimitError,
    SwarmError,
    SwarmProtocolError,
    SwarmRequestError,
    SwarmUnavailableError,
    TokenFileError,
)
from swarm_engine.client.sync import SwarmClient, SyncEpisode
from swarm_engine.client.wire import (
    ChatReply,
    Checkpoint,
    EpisodeResult,
    Event,
    PolicyStatus,
    PoolStatus,
    Status,
    Task,
    read_address,
    read_token,
)

__all__ = [
    "AddressError",
    "AsyncSwarmClient",
    "ChatReply",
    "Checkpoint",
    "ClaimTimeoutError",
    "ContextLengthError",
    "Episode",
    "EpisodeLostError",
    "EpisodeNotEndedError",
    "EpisodeResult",
    "Event",
    "GroupSizeError",
    "NoAnswerError",
    "NotFiniteError",
    "PolicyStatus",
    "PoolStatus",
    "ReplayLimitError",
    "Status",
    "SwarmClient",
    "SwarmError",
    "SwarmProtocolError",
    "SwarmRequestError",
    "SwarmUnavailableError",
    "SyncEpisode",
    "Task",
    "TokenFileError",
    "read_address",
    "read_token",
]
