"""The server's end of an HTTP connection: uvicorn's, where callers of a model need more of it.

A caller that goes away is noticed though more of its requests wait on the connection. A request that offers to go on in
another protocol (`Upgrade: h2c` of `curl --http2` and of Java's client) is answered in HTTP/1.1, its body read. The
application can hang up on a caller that reads no more, and answer one whose body it does not want. And a connection has
its place among the others, which are only so many.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from swarm_engine.server.crowd import Crowd

EXTENSION = "swarm"
"""Of a request's scope: holds its `connection`."""
MAX_WAITING = 16
"""Requests sent ahead on a connection that is still watched; past them nothing is read until one is answered."""
MAX_HEAD_BYTES = 64 * 1024
"""Of a request line with its headers, and of what stands between and behind chunks of a body, as trailers do; the
parser itself takes any number, and keeps them all."""
UNWANTED_BODY_S = 1.0
"""A caller whose request is answered before its body was read may send this long, unheard; most read only then."""

BAD_REQUEST = "Invalid HTTP request received."
LONG_HEAD = f"The request line and its headers, or its trailers, have more than {MAX_HEAD_BYTES} bytes."


class Connection(HttpToolsProtocol):
    """One connection."""

    _answering: RequestResponseCycle | None = None
    """The request that is being answered; uvicorn itself knows the newest one only."""
    _head_bytes: int | None = None
    """That came since the last part of a request that was whole, or a piece of its body; None between requests."""
    _has_moved = False
    """Whether such a part came in what is being read; all of it is not counted then."""

    def __init__(self, *, crowd: Crowd, **given: Any) -> None:
        super().__init__(**given)
        self.is_spare = False
        self.idle_since = time.monotonic()
        self._crowd = crowd

    @property
    def is_idle(self) -> bool:
        """Whether it is open and has no request that is being answered; a head that is not whole is none yet."""
        return not self.is_lost and (self.cycle is None or self.cycle.response_complete)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It begins."""
        super().connection_made(transport)  # type: ignore[arg-type]  # as uvicorn narrows it
        others = (one for one in self.connections if isinstance(one, Connection))
        self._crowd.admit(self, others, len(self.connections))

    @property
    def is_lost(self) -> bool:
        """Whether the caller left; known from the first write that fails, before the request is told."""
        return bool(self.transport.is_closing())

    def hang_up(self) -> None:
        """End it at once; what was not sent yet is lost."""
        self.transport.abort()

    def make_room(self) -> None:
        """End it when what was written is sent."""
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request that is being answered too."""
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on."""
        self._unset_keepalive_if_required()
        self._has_moved = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline(data[offer.args[0] :])
        except httptools.HttpParserError:
            self.logger.warning(BAD_REQUEST)
            self.send_400_response(BAD_REQUEST)
        else:
            if self._head_bytes is not None and not self._has_moved:
                self._head_bytes += len(data)
                if self._head_bytes > MAX_HEAD_BYTES:
                    self.logger.warning(LONG_HEAD)
                    self.send_400_response(LONG_HEAD)

    def _decline(self, rest: bytes) -> None:
        """Read a request again without its offer of another protocol; the parser takes no body of one with it."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self.send_400_response("CONNECT is not served here.")
            return
        head = [method, b" ", self.url, b" HTTP/1.1\r\n"]
        for name, value in self.headers:
            head += [] if name == b"upgrade" else [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"".join(head) + b"\r\n" + rest)

    # Of the parser

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._head_bytes, self._has_moved = 0, True
        self.scope["extensions"] = {EXTENSION: {"connection": self}}

    def on_headers_complete(self) -> None:
        """Answer it, or let it wait for its turn."""
        self._head_bytes, self._has_moved = 0, True
        if self.parser.should_upgrade():
            return
        super().on_headers_complete()
        if 0 < len(self.pipeline) <= MAX_WAITING:
            # Who does not read does not notice the end of the connection.
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """A piece of its body."""
        self._head_bytes, self._has_moved = 0, True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Its body is there."""
        self._head_bytes = None
        if not self.parser.should_upgrade():
            super().on_message_complete()
            self.cycle.more_body = False

    def on_response_complete(self) -> None:
        """It is answered; what still comes of its body is read and dropped for a while, then the caller is cut off."""
        self.idle_since = time.monotonic()
        cycle = self._answering
        if cycle is not None and cycle.more_body:
            self.loop.call_later(UNWANTED_BODY_S, lambda: self.hang_up() if cycle.more_body else None)
        super().on_response_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Callable[..., Any]) -> None:
        self._answering = cycle
        cycle.keep_alive = cycle.keep_alive and not self.is_spare
        super()._start_asgi_task(cycle, app)
