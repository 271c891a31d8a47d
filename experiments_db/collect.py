"""Follows a swarm server's numbered events and writes rows from them, each exactly once.

    collector = Collector(server_url, token, db_url, experiment_id)
    with collector.run_in_thread():
        ...                                  # train
        collector.drain(last_seq)            # everything up to there is in the database

An event and the rows that follow from it are one transaction, and the event's row is unique by (server, number), so the
collector may be killed at any moment, run twice, or start late: it asks for what is after the last number it has. The
server keeps its events on disk, so nothing is lost while nobody follows. As a command, for a server elsewhere:

    python -P -m experiments_db.collect --server URL --token-file FILE --experiment ID [--db URL]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import httpx
from pydantic import ValidationError
from sqlalchemy import func
from sqlmodel import col, select

from experiments_db.derive import Event, event_adapter, store
from experiments_db.engine import Database, open_database
from experiments_db.errors import CollectorError, ConflictError, ExperimentsDbError, NotFoundError, UnavailableError
from experiments_db.models import EngineEvent, Experiment
from experiments_db.sse import Parser

log = logging.getLogger(__name__)

EVENTS = "/swarm/v1/events"
BATCH_S = 0.25
"""Events that arrive within this time share a transaction, for each one costs a sync of the disk."""
MAX_BATCH = 500
"""Events in one transaction, so that others get their turn at the database."""
CONNECT_TIMEOUT_S = 10.0
QUIET_S = 60.0
"""A connection that says nothing for this long is taken for dead and made anew."""
RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
"""Waits between attempts that bring nothing, the last one again and again: a server that restarts needs a while."""
MAX_SAID = 500
"""Bytes of a server's error that are repeated."""
REFUSALS = {
    401: "the server does not know this token; take the one from the server's own token file",
    403: "the token may not read events; an observer's may",
    404: "there are no events at this address; is it a swarm server?",
}


class _BrokenStreamError(Exception):
    """A connection that did not hold what it promised; another one may."""


class Collector:
    """Keeps one run's rows up with one server's events. It runs once; any thread may drain and stop it."""

    def __init__(self, server_url: str, token: str, db_url: str | None, experiment_id: str) -> None:
        """Nothing is opened before it runs.

        Args:
            token: of the server; an observer's is enough.
            db_url: None is the database of the home folder.
            experiment_id: the run that the events belong to.
        Raises:
            CollectorError: the server's URL holds more than its address, and is printed.
        """
        if "@" in urlsplit(server_url).netloc or "?" in server_url:
            raise CollectorError(
                "the swarm's URL holds a user name, a password or a query, which it has no use for; a token opens it"
            )
        self._url = server_url.rstrip("/") + EVENTS
        self._token = token
        self._db_url = db_url
        self._experiment_id = experiment_id
        self._changed = threading.Condition()
        self._following: tuple[asyncio.AbstractEventLoop, asyncio.Task[None]] | None = None
        self._is_stopped = False
        self._has_ended = False
        self._server_id: str | None = None
        self._stored_seq = 0
        self._trouble: ExperimentsDbError | None = None
        """What keeps it from going on; None while it goes on."""

    @property
    def stored_seq(self) -> int:
        """Number of the last event that is in the database with everything that follows from it; 0 before the first."""
        return self._stored_seq

    def run(self) -> None:
        """Follow the server until `stop`; it may come and go meanwhile.

        Raises:
            CollectorError: the server refuses, or is not one that can be followed.
            ExperimentsDbError: the database can't be opened, or the run is not in it.
        """
        try:
            with open_database(self._db_url) as database:
                with database.read() as session:
                    if session.get(Experiment, self._experiment_id) is None:
                        raise NotFoundError(
                            f"there is no run {self._experiment_id!r} in {database.name}; create it first"
                        )
                asyncio.run(self._until_stopped(database))
        except ExperimentsDbError as error:
            self._trouble = error
            raise
        finally:
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    @contextlib.contextmanager
    def run_in_thread(self) -> Iterator[Self]:
        """Follow beside the work of this block, and stop after it. Without a `drain` the last events come next time."""

        def work() -> None:
            try:
                self.run()
            except ExperimentsDbError as error:
                log.error("the collector has ended: %s", error)  # drain() raises it for those who wait

        thread = threading.Thread(target=work, name="collector", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.stop()
            thread.join()

    def drain(self, until_seq: int, timeout_s: float = 90.0) -> None:
        """Return when every event up to `until_seq` is in the database.

        Raises:
            CollectorError: the collector has ended, or is not there in time; it says how far it came and what is wrong.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._stored_seq >= until_seq or self._has_ended, timeout_s)
            if self._stored_seq >= until_seq:
                return
            state = "has ended" if self._has_ended else f"was given {timeout_s:g} s and is"
            why = f" ({self._trouble})" if self._trouble else ""
            raise CollectorError(
                f"the collector {state} at event {self._stored_seq} of {until_seq}{why}; the server keeps its events: "
                "start the collector again and they come"
            ) from self._trouble

    def stop(self) -> None:
        """Stop following. What was received is written first; what was not is still with the server."""
        with self._changed:
            self._is_stopped = True
            if self._following is not None:
                loop, task = self._following
                loop.call_soon_threadsafe(task.cancel)

    async def _until_stopped(self, database: Database) -> None:
        """Follow until cancelled by `stop`."""
        task = asyncio.ensure_future(self._follow(database))
        with self._changed:
            self._following = asyncio.get_running_loop(), task
            if self._is_stopped:
                task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            if not self._is_stopped:
                raise
        finally:
            with self._changed:
                self._following = None

    async def _follow(self, database: Database) -> None:
        """Follow connection after connection."""
        async with httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self._token}", "Accept": "text/event-stream"},
            timeout=httpx.Timeout(QUIET_S, connect=CONNECT_TIMEOUT_S),
            trust_env=False,
        ) as client:
            failures = 0
            while True:
                before = self._stored_seq
                try:
                    await self._follow_once(client, database)
                except (httpx.TransportError, _BrokenStreamError) as error:
                    self._trouble = CollectorError(f"{self._url}: {error or type(error).__name__}")
                except ConflictError as error:
                    # Another collector of this run wrote the same events in the same moment. It is asked what it left.
                    self._trouble = error
                except UnavailableError as error:
                    if str(error) != str(self._trouble):
                        log.warning("%s (the collector tries again)", error)
                    self._trouble = error
                if self._is_stopped:
                    return  # the last write failed, and its error came in place of the cancellation
                failures = 0 if self._stored_seq > before else failures + 1
                await asyncio.sleep(RETRY_S[min(failures, len(RETRY_S) - 1)])

    async def _follow_once(self, client: httpx.AsyncClient, database: Database) -> None:
        """Follow one connection to its end, and write what it brings, a batch at a time."""
        if self._server_id is None:
            self._server_id = await self._ask_for_server_id(client, database)
        self._have_stored(_last_stored(database, self._server_id))
        async with self._stream(client, after=self._stored_seq) as chunks:
            parser = Parser()
            waiting: list[Event] = []
            due = 0.0
            more = asyncio.ensure_future(_next(chunks))
            try:
                while True:
                    await asyncio.wait({more}, timeout=max(0.0, due - time.monotonic()) if waiting else None)
                    if more.done():
                        chunk = more.result()
                        if chunk is None:
                            self._write(database, waiting)
                            return
                        if not waiting:
                            due = time.monotonic() + BATCH_S
                        waiting += [_event(message.data) for message in parser.feed(chunk)]
                        more = asyncio.ensure_future(_next(chunks))
                    if len(waiting) >= MAX_BATCH or time.monotonic() >= due:
                        self._write(database, waiting)
                        waiting = []
            except (asyncio.CancelledError, httpx.TransportError, _BrokenStreamError):
                # What came whole is kept, or a connection that never lasts would bring nothing.
                self._write(database, waiting)
                raise
            finally:
                more.cancel()
                # A stream can be closed only when nobody reads from it.
                await asyncio.wait({more})

    @contextlib.asynccontextmanager
    async def _stream(self, client: httpx.AsyncClient, after: int) -> AsyncIterator[AsyncIterator[bytes]]:
        """The bytes of a connection that brings the events after a number."""
        async with client.stream("GET", self._url, params={"after": after}) as response:
            if response.status_code in REFUSALS:
                raise CollectorError(f"{self._url} answers {response.status_code}: {REFUSALS[response.status_code]}")
            if response.status_code != httpx.codes.OK:
                said = (await response.aread())[:MAX_SAID].decode(errors="replace")
                raise _BrokenStreamError(f"the server answers {response.status_code}: {said}")
            yield response.aiter_bytes()

    async def _ask_for_server_id(self, client: httpx.AsyncClient, database: Database) -> str:
        """The server's name for itself, from its first event; where that is pruned, the one followed before."""
        parser = Parser()
        async with self._stream(client, after=0) as chunks:
            while (chunk := await _next(chunks)) is not None:
                for message in parser.feed(chunk):
                    first = _event(message.data)
                    if first.kind == "server" and isinstance(server_id := first.payload.get("server_id"), str):
                        return server_id
                    return self._server_followed_before(database, first)
        raise _BrokenStreamError("the stream ended before its first event")

    def _server_followed_before(self, database: Database, first: Event) -> str:
        with database.read() as session:
            known = session.exec(
                select(EngineEvent.server_id)
                .where(EngineEvent.experiment_id == self._experiment_id)
                .order_by(col(EngineEvent.at).desc())
            ).first()
        if known is None:
            raise CollectorError(
                f"{self._url} begins with event {first.seq} ({first.kind}), which does not say what server it is; "
                "start the server again, it then does"
            )
        return known

    def _write(self, database: Database, events: Sequence[Event]) -> None:
        """Store events, in order."""
        assert self._server_id is not None
        for start in range(0, len(events), MAX_BATCH):
            batch = events[start : start + MAX_BATCH]
            with database.write() as session:
                store(session, self._experiment_id, self._server_id, batch)
            self._have_stored(batch[-1].seq)

    def _have_stored(self, seq: int) -> None:
        with self._changed:
            self._stored_seq = max(self._stored_seq, seq)
            self._trouble = None
            self._changed.notify_all()


async def _next(chunks: AsyncIterator[bytes]) -> bytes | None:
    """The next piece of a stream, or None at its end."""
    return await anext(chunks, None)


def _event(data: str) -> Event:
    """The event that a message of the stream holds.

    Raises:
        _BrokenStreamError: it holds none. Skipping it would lose it, so the connection is given up.
    """
    try:
        return event_adapter.validate_python(json.loads(data))
    except (json.JSONDecodeError, ValidationError) as error:
        raise _BrokenStreamError(f"this is no event: {data[:200]!r}") from error


def _last_stored(database: Database, server_id: str) -> int:
    """Number of the server's last event that is in the database, whichever run it belongs to."""
    with database.read() as session:
        last = session.exec(select(func.max(EngineEvent.seq)).where(EngineEvent.server_id == server_id)).one()
    return last or 0


def main(argv: Sequence[str] | None = None) -> int:
    """Follow a server until interrupted; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -P -m experiments_db.collect", description="Write a swarm's events as rows."
    )
    parser.add_argument("--server", required=True, metavar="URL", help="the swarm server")
    parser.add_argument("--token-file", required=True, type=Path, help="its token.json; the observer's token is used")
    parser.add_argument("--experiment", required=True, metavar="ID", help="the run that the events belong to")
    parser.add_argument("--db", metavar="URL", help="the database; A3R_HOME's by default")
    args = parser.parse_args(argv)
    try:
        if not args.token_file.is_file():  # a pipe would be waited for without end
            raise ValueError("it is no regular file")
        token = json.loads(args.token_file.read_text(encoding="utf-8"))["observer"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        print(
            f"error: {args.token_file} holds no observer token ({error}); it is in the server's folder", file=sys.stderr
        )
        return 2
    collector = Collector(args.server, token, args.db, args.experiment)
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)  # Windows knows no SIGHUP
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:  # nohup has it ignored
            signal.signal(number, lambda *_: collector.stop())
    try:
        collector.run()
    except ExperimentsDbError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
