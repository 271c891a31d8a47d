"""The server's end of an HTTP connection: uvicorn's, where callers of a model need more of it.

A caller that goes away is noticed though more of its requests wait on the connection. A request that offers to go on in
another protocol (`Upgrade: h2c` of `curl --http2` and of Java's client) is answered in HTTP/1.1, its body read. And the
application can hang up on a caller that reads no more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

EXTENSION = "swarm"
"""Of a request's scope: holds its `connection`."""
MAX_WAITING = 16
"""Requests sent ahead on a connection that is still watched; past them nothing is read until one is answered."""

BAD_REQUEST = "Invalid HTTP request received."


class Connection(HttpToolsProtocol):
    """One connection."""

    _answering: RequestResponseCycle | None = None
    """The request that is being answered; uvicorn itself knows the newest one only."""

    @property
    def is_lost(self) -> bool:
        """Whether the caller left; known from the first write that fails, before the request is told."""
        return bool(self.transport.is_closing())

    def hang_up(self) -> None:
        """End it at once; what was not sent yet is lost."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request that is being answered too."""
        if self._answering is not None and not self._answering.response_complete:
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline(data[offer.args[0] :])
        except httptools.HttpParserError:
            self.logger.warning(BAD_REQUEST)
            self.send_400_response(BAD_REQUEST)

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
        self.scope["extensions"] = {EXTENSION: {"connection": self}}

    def on_headers_complete(self) -> None:
        """Answer it, or let it wait for its turn."""
        if self.parser.should_upgrade():
            return
        super().on_headers_complete()
        if 0 < len(self.pipeline) <= MAX_WAITING:
            # Who does not read does not notice the end of the connection.
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        """Its body is there."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Callable[..., Any]) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)
