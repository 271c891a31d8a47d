"""A fresh database for each test, a run to hang rows under, and a server of events that breaks off on demand."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url, text

from experiments_db.engine import Database, open_database
from experiments_db.home import FILE_NAME
from experiments_db.ulid import new_ulid
from experiments_db.writes import create_single_run


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database file with every table and no row; a copy is made sooner than the migrations run."""
    home = tmp_path_factory.mktemp("migrated")
    open_database(home=home).close()
    return home / FILE_NAME


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.heavy)])
def database(request: pytest.FixtureRequest, tmp_path: Path, migrated: Path) -> Iterator[Database]:
    """A new one, of each kind; PostgreSQL where A3R_TEST_POSTGRES names a server that may make databases."""
    if request.param == "sqlite":
        (tmp_path / "home").mkdir()
        shutil.copy(migrated, tmp_path / "home")
        with open_database(home=tmp_path / "home") as opened:
            yield opened
    else:
        with new_postgres() as url, open_database(url) as opened:
            yield opened


@contextlib.contextmanager
def new_postgres() -> Iterator[str]:
    """URL of a new database on the server of A3R_TEST_POSTGRES, dropped at the end."""
    server = os.environ.get("A3R_TEST_POSTGRES")
    if not server:
        pytest.skip("A3R_TEST_POSTGRES names no server: postgresql://USER@HOST:PORT/postgres")
    url = make_url(server).set(drivername="postgresql+psycopg")
    name = f"test_{new_ulid().lower()}"
    control = create_engine(url, isolation_level="AUTOCOMMIT")
    with control.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
        yield url.set(database=name).render_as_string(hide_password=False)
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    control.dispose()


@pytest.fixture
def postgres_url() -> Iterator[str]:
    with new_postgres() as url:
        yield url


@pytest.fixture
def experiment_id(database: Database) -> str:
    with database.write() as session:
        return create_single_run(session, "vibe", "Play tic-tac-toe", "tictactoe", {"trainer.group_size": 8})


@dataclass
class FakeSwarm:
    """A server of numbered events over real HTTP, whose connections break off where a test wants them to."""

    token: str = "secret"
    events: list[dict[str, Any]] = field(default_factory=list)
    cuts: Iterator[int | None] = field(default_factory=lambda: repeat(None))
    """For each connection: after how many bytes of the body it breaks off; None is never."""
    status: int = 200
    first_seq: int = 1
    """Older events are pruned."""
    asked_for: list[int] = field(default_factory=list)
    """`after` of every request, answered or refused."""
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _server: ThreadingHTTPServer | None = None
    _is_closing: bool = False

    def tell(self, kind: str, at: float | None = None, **payload: Any) -> int:
        """Append an event; returns its number."""
        with self._changed:
            seq = len(self.events) + 1
            self.events.append({"seq": seq, "at": 1000.0 + seq if at is None else at, "kind": kind, "payload": payload})
            self._changed.notify_all()
        return seq

    def start(self, port: int = 0) -> None:
        self._is_closing = False
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        assert self._server
        self._server.shutdown()
        self._server.server_close()

    @property
    def port(self) -> int:
        assert self._server
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _handler(fake) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                path, _, query = self.path.partition("?")
                after = int(dict(pair.split("=") for pair in query.split("&"))["after"])
                fake.asked_for.append(after)
                is_known = self.headers["Authorization"] == f"Bearer {fake.token}"
                status = 404 if path != "/swarm/v1/events" else 401 if not is_known else fake.status
                self.send_response(status)
                if status != 200:
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.close_connection = True
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self._stream(after, next(fake.cuts))

            def _stream(self, after: int, left: int | None) -> None:
                while True:
                    with fake._changed:
                        fake._changed.wait_for(lambda seen=after: len(fake.events) > seen or fake._is_closing, 10)
                        if fake._is_closing:
                            return
                        new = [event for event in fake.events[after:] if event["seq"] >= fake.first_seq]
                        after = len(fake.events)
                    text = "".join(
                        f"id: {event['seq']}\nevent: {event['kind']}\ndata: {json.dumps(event)}\n\n" for event in new
                    )
                    raw = (text or ": nothing new\n\n").encode()
                    if left is not None:
                        raw, left = raw[:left], left - len(raw)
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(raw), raw) if raw else b"")
                    self.wfile.flush()
                    if left is not None and left <= 0:
                        return

        return Handler


@pytest.fixture
def swarm() -> Iterator[FakeSwarm]:
    fake = FakeSwarm()
    fake.tell("server", server_id="s1", version="0.1.0")
    fake.start()
    yield fake
    fake.close()
