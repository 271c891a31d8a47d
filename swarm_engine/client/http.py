"""What both clients share of HTTP: connections, timeouts, and when a request that nobody answered is sent again."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import httpx

from swarm_engine.client.errors import NoAnswerError, SwarmUnavailableError

KEPT_S = 60.0
"""Seconds that a connection is kept for the next request; the server hangs up after twice as many."""
TIMEOUT = httpx.Timeout(connect=10.0, read=None, write=60.0, pool=None)
"""Replies may take minutes on a small machine, and long polls and event streams are quiet by design."""
PROBE_AFTER_S, PROBE_EVERY_S, NUM_PROBES = 30, 10, 3
"""Seconds of silence, or between two, after which TCP asks whether the server is there, and how often before the
connection is given up. One that lost its power or its network says no word, and replies have no timeout."""
RECONNECT_S = 60.0
"""A lost server is waited for so long, unless a client is told otherwise."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
"""Between two tries; each pause is twice the one before."""
AWAY_CODES = ("server_closing", "too_many_connections")
"""Of answers by a server that takes nothing in for now."""
LOCKED_CODE = "journal_locked"
OFFLINE_CODE = "engine_offline"

Transport = TypeVar("Transport")


class TransportPool(Generic[Transport]):
    """As many connections as requests run side by side, each in a transport of its own.

    In one pool every request looks at every connection: with 64 of them it costs twice to three times the CPU time.
    """

    def __init__(self, transport: Callable[..., Transport]) -> None:
        """Begin without any.

        Args:
            transport: httpx's, sync or async.
        """
        self._transport = transport
        self._tls: ssl.SSLContext | None = None
        self.made: list[Transport] = []
        """All there are."""
        self._idle: list[Transport] = []

    def make(self) -> Transport:
        """A transport that reaches servers directly: proxies of the environment are for the world outside."""
        if self._tls is None:
            self._tls = httpx.create_ssl_context()  # with SSL_CERT_FILE, as other clients; it takes 20 ms
        limits = httpx.Limits(keepalive_expiry=KEPT_S)
        return self._transport(verify=self._tls, limits=limits, socket_options=socket_options())

    @contextlib.contextmanager
    def borrow(self) -> Iterator[Transport]:
        """A transport that nobody else uses inside the block."""
        try:
            transport = self._idle.pop()
        except IndexError:
            transport = self.make()
            self.made.append(transport)
        try:
            yield transport
        finally:
            self._idle.append(transport)


def socket_options() -> list[tuple[int, int, int]]:
    """Options of a connection by which the system ends it where the other end has vanished, as far as it has them."""
    silence_s = PROBE_AFTER_S + NUM_PROBES * PROBE_EVERY_S
    wanted = {
        "TCP_KEEPIDLE": PROBE_AFTER_S,
        "TCP_KEEPALIVE": PROBE_AFTER_S,  # as macOS calls it
        "TCP_KEEPINTVL": PROBE_EVERY_S,
        "TCP_KEEPCNT": NUM_PROBES,
        "TCP_USER_TIMEOUT": 1000 * silence_s,  # of a request that was sent and never arrived
    }
    there = [(getattr(socket, name), value) for name, value in wanted.items() if hasattr(socket, name)]
    return [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *((socket.IPPROTO_TCP, name, value) for name, value in there)]


def request_of(method: str, url: str, body: Any, headers: Mapping[str, str]) -> httpx.Request:
    """A request with a JSON body, or with none where it is None."""
    content = None if body is None else json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    headers = {**headers, "content-type": "application/json"}
    return httpx.Request(method, url, content=content, headers=headers, extensions={"timeout": TIMEOUT.as_dict()})


def no_answer(url: str, error: httpx.TransportError) -> SwarmUnavailableError:
    """The error for a request that got no answer."""
    message = f"no answer from {url} ({type(error).__name__}: {error}); is the swarm running?"
    if isinstance(error, httpx.UnsupportedProtocol | httpx.LocalProtocolError):
        return SwarmUnavailableError(message)
    return NoAnswerError(message, is_sent=not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout))


class Reconnection:
    """How long a client waits for a server that it has lost: one clock for all its requests.

    It begins with the first request that nobody answers, and an answer sets it back. A server that never answered is
    not waited for: its address is wrong, or it was never started. One that says that it is going down, has no room or
    can't use its journal for now counts as gone, and an engine that is off after its server was gone as not back yet.
    """

    def __init__(self, reconnect_s: float) -> None:
        """Begin with a server that has not answered yet.

        Raises:
            ValueError: reconnect_s is no time.
        """
        if not reconnect_s >= 0:
            raise ValueError(f"reconnect_s is {reconnect_s!r}; it must be seconds, 0 to wait for no server")
        self.reconnect_s = reconnect_s
        self._has_answered = False
        self._is_lost = False
        self._lost_at = float("-inf")
        """When it was lost last."""

    def heard(self) -> None:
        """The server has answered."""
        self._has_answered, self._is_lost = True, False

    def pause_s(self, error: SwarmUnavailableError, *, is_repeatable: bool, num_tries: int, now: float) -> float:
        """Seconds to wait before a request that failed is sent again.

        Args:
            is_repeatable: sent twice it does what it does sent once, so it may be sent again though it may have
                reached the server.
            num_tries: how often it was sent again before.
            now: seconds of a clock that only goes forward.
        Raises:
            SwarmUnavailableError: it is not sent again: the error itself, or that the limit is reached.
        """
        if isinstance(error, NoAnswerError) or error.code in (*AWAY_CODES, LOCKED_CODE):
            if not self._is_lost:
                self._is_lost, self._lost_at = True, now
            is_unsent = not error.is_sent if isinstance(error, NoAnswerError) else error.code in AWAY_CODES
            is_awaited = is_repeatable or is_unsent
        else:
            self.heard()
            is_awaited = error.code == OFFLINE_CODE
        left_s = self._lost_at + self.reconnect_s - now
        if not self._has_answered or not is_awaited or (left_s <= 0 and not num_tries):
            raise error
        if left_s <= 0:
            message = f"{error} It was waited for {self.reconnect_s:g} s (reconnect_s)"
            if isinstance(error, NoAnswerError):
                raise NoAnswerError(message, is_sent=error.is_sent) from error
            raise SwarmUnavailableError(message, error.code) from error
        return min(FIRST_PAUSE_S * 2.0 ** min(num_tries, 10), LONGEST_PAUSE_S, left_s)
