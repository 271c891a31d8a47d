"""What the server asks of an API that it speaks.

A request is parsed into a `CallRequest`; its reply is written whole, or as server-sent events while it is sampled. All
of it by hand, on plain dicts: the hot path makes no models of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from swarm_engine.errors import SwarmEngineError
from swarm_engine.server.episodes import CallRequest, LiveEpisode, News, RunningAsk, RunningCall


class EventWriter(Protocol):
    """Writes the reply to one request as events. Every method returns what goes over the wire next."""

    def start(self) -> bytes:
        """Before the first token."""

    def more(self, call: RunningCall, news: News, /) -> bytes:
        """What came of one choice."""

    def finish(self, call: RunningCall, /) -> bytes:
        """A choice is complete; `more` has told all of it."""

    def end(self) -> bytes:
        """Every choice is complete."""

    def fail(self, error: SwarmEngineError) -> bytes:
        """Nothing more comes, because of an error."""


class Request(Protocol):
    """A request of some API, parsed and checked."""

    @property
    def model(self) -> str:
        """As it was sent; empty where it was left out."""

    @property
    def call(self) -> CallRequest:
        """What it asks for."""

    @property
    def is_stream(self) -> bool:
        """Whether the reply goes out as events."""

    def whole(self, ask: RunningAsk) -> Mapping[str, Any]:
        """The body of the complete reply."""

    def writer(self, ask: RunningAsk) -> EventWriter:
        """Writes the reply as events."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """One API."""

    parse: Callable[[Mapping[str, Any], LiveEpisode], Request]
    """Raises BadRequestError for what is malformed, UnsupportedError for what this server doesn't take."""
