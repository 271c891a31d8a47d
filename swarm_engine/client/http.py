"""A small HTTP/1.1 client for JSON over plain connections, because each of a thousand calls a step pays for it.

Measured against httpx with 64 connections: a fifth of the CPU time a request, for httpx looks at every idle connection
each time. It knows what a swarm's control and inference routes need: one request a connection at a time, replies with a
length, in chunks, or up to the end. Streams and TLS go through httpx.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

CONNECT_TIMEOUT_S = 10.0
MAX_HEAD_BYTES = 65536


class HttpError(Exception):
    """The server could not be reached, or broke off, or does not speak HTTP."""


@dataclass(slots=True)
class _Reply:
    status: int
    length: int | None
    """None where the body ends with the connection or comes in chunks."""
    is_chunked: bool
    keeps_alive: bool
    body: bytearray = field(default_factory=bytearray)


class _Connection(asyncio.Protocol):
    """One connection that answers one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._reply: _Reply | None = None
        self._waiting: asyncio.Future[_Reply] | None = None
        self.is_open = True
        self.has_answered = False
        """Whether anything came back for the request that runs."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's transports are no subclasses

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        waiting, reply = self._waiting, self._reply
        if waiting is None or waiting.done():
            return
        if reply is not None and reply.length is None and not reply.is_chunked:
            waiting.set_result(reply)
        else:
            waiting.set_exception(HttpError(f"the connection broke off ({exc or 'closed by the server'})"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self.has_answered = True
        try:
            if self._reply is None:
                self._reply = self._read_head()
            if self._reply is not None:
                self._read_body(self._reply)
        except (ValueError, IndexError) as error:
            self._fail(HttpError(f"the answer is not HTTP ({error})"))

    def _read_head(self) -> _Reply | None:
        while True:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > MAX_HEAD_BYTES:
                    raise ValueError("its head is too long")
                return None
            lines = bytes(self._buffer[:end]).split(b"\r\n")
            del self._buffer[: end + 4]
            status = int(lines[0].split(b" ", 2)[1])
            if status >= 200:
                break
            # An interim answer (1xx) comes before the real one.
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])
        }
        length = headers.get(b"content-length")
        return _Reply(
            status=status,
            length=0 if status in (204, 304) else int(length) if length is not None else None,
            is_chunked=headers.get(b"transfer-encoding", b"").lower().endswith(b"chunked"),
            keeps_alive=headers.get(b"connection", b"").lower() != b"close" and not lines[0].startswith(b"HTTP/1.0"),
        )

    def _read_body(self, reply: _Reply) -> None:
        if reply.is_chunked:
            if self._read_chunks(reply):
                self._finish(reply)
            return
        reply.body += self._buffer
        self._buffer.clear()
        if reply.length is not None and len(reply.body) >= reply.length:
            self._finish(reply)

    def _read_chunks(self, reply: _Reply) -> bool:
        while True:
            end = self._buffer.find(b"\r\n")
            if end < 0:
                return False
            size = int(bytes(self._buffer[:end]).split(b";")[0], 16)
            if len(self._buffer) < end + 2 + size + 2:
                return False
            reply.body += self._buffer[end + 2 : end + 2 + size]
            del self._buffer[: end + 2 + size + 2]
            if size == 0:
                return True

    def _finish(self, reply: _Reply) -> None:
        self._reply = None
        if not reply.keeps_alive or self._buffer:
            self.close()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(reply)

    def _fail(self, error: HttpError) -> None:
        self.close()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)

    def close(self) -> None:
        """Hang up; the server sees its caller go."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    async def ask(self, request: bytes) -> _Reply:
        """Send a request and wait for its reply; a caller that is cancelled hangs up."""
        assert self._transport is not None
        self._waiting = asyncio.get_running_loop().create_future()
        self.has_answered = False
        self._transport.write(request)
        try:
            return await self._waiting
        except asyncio.CancelledError:
            self.close()
            raise


class HttpPool:
    """Keeps connections to the hosts it is asked about."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, int], list[_Connection]] = {}

    async def request(self, method: str, url: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Status and body of the answer.

        Raises:
            HttpError: there is none.
        """
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or 80
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        lines = [f"{method} {target} HTTP/1.1", f"host: {parts.netloc}", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        request = "\r\n".join([*lines, "", ""]).encode("latin-1") + body
        while True:
            connection, is_fresh = await self._connection(host, port)
            try:
                reply = await connection.ask(request)
            except HttpError:
                if is_fresh or connection.has_answered:
                    raise
                # The server had hung up while the connection was idle, before it read any of this.
                continue
            if connection.is_open:
                self._idle.setdefault((host, port), []).append(connection)
            return reply.status, bytes(reply.body)

    async def _connection(self, host: str, port: int) -> tuple[_Connection, bool]:
        """An open connection, and whether it is new."""
        idle = self._idle.get((host, port), [])
        while idle:
            connection = idle.pop()
            if connection.is_open:
                return connection, False
        loop = asyncio.get_running_loop()
        try:
            _, connection = await asyncio.wait_for(loop.create_connection(_Connection, host, port), CONNECT_TIMEOUT_S)
        except TimeoutError as error:
            raise HttpError(f"no connection to {host}:{port} within {CONNECT_TIMEOUT_S:g} s") from error
        except OSError as error:
            raise HttpError(error.strerror or str(error)) from error
        return connection, True

    def close(self) -> None:
        """Hang up everywhere."""
        for idle in self._idle.values():
            for connection in idle:
                connection.close()
        self._idle.clear()
