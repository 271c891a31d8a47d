"""Runs a front in a run folder: one server a folder, a socket, signals, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn

from swarm_engine import locks
from swarm_engine.child import outlive_parent
from swarm_engine.client.wire import SERVER_FILE, read_server
from swarm_engine.config import EngineConfig
from swarm_engine.errors import InvalidError, JournalError, RunDirError, shown
from swarm_engine.server.app import FrontApp
from swarm_engine.server.auth import HostCheck, Tokens
from swarm_engine.server.connection import Connection
from swarm_engine.server.crowd import Crowd, connection_limit, raise_file_limit
from swarm_engine.server.engine import Engine
from swarm_engine.server.worker_link import WORKER_COMMAND
from swarm_engine.signals import ending_signals, leave_dead_terminal
from swarm_engine.types import well_formed

BACKLOG = 2048
SWITCH_S = 0.001
"""A thread that reads a long body gives the interpreter up this often, and the event loop waits no longer for it."""
GRACE_S = 3.0
"""Replies that are on their way when the server ends have this long; then it hangs up."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `swarm serve` was asked for."""

    run_dir: Path
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    config: EngineConfig | None = None
    """None goes on with the run folder's last one."""
    is_started: bool = False
    """Start the engine at once."""
    exits_with_stdin: bool = False
    """End when the standard input closes, so that a server dies with the program that embeds it."""
    allowed_hosts: tuple[str, ...] = ()
    public_url: str | None = None
    """Where agents reach it, through whatever stands before it; None where that is the address that a claim came by."""
    tls_cert: Path | None = None
    """PEM file of the certificate, with those between it and its root; None serves without TLS."""
    tls_key: Path | None = None
    """PEM file of its key; None where it is in the same file."""
    worker_command: tuple[str, ...] = WORKER_COMMAND


class RunDirLock:
    """Holds a run folder for one server; the system lets go of it when the process ends, however it ends."""

    def __init__(self, run_dir: Path) -> None:
        """Take the folder.

        Raises:
            RunDirError: another server has it, or it can't be made.
        """
        try:
            _make_private(run_dir)
            descriptor = locks.hold(run_dir / "server.lock")
        except OSError as error:
            raise RunDirError(f"the run folder {run_dir} can't be used ({error.strerror})", "choose another") from error
        if descriptor is None:
            raise RunDirError(
                f"another server runs in {run_dir}{_whose(run_dir)}",
                "stop it (`swarm stop` or Ctrl-C in its terminal), or choose another --run-dir",
                code="run_dir_taken",
            )
        self._descriptor = descriptor

    def release(self) -> None:
        """Give the folder back."""
        os.close(self._descriptor)


def _make_private(folder: Path) -> None:
    """Make a folder and what is missing above it for their owner alone; `mkdir` gives a mode to the last one only."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)


def _whose(run_dir: Path) -> str:
    try:
        server = read_server(run_dir)
    except (OSError, ValueError):
        # It has only just started, or its file is damaged; the lock alone decides.
        return ""
    return f" at {server.url}, process {server.pid}"


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        RunDirError: the address can't be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if sys.platform != "win32":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise RunDirError(
            f"{host} port {port} can't be bound ({error.strerror or error})",
            "choose another --port, or 0 for a free one",
            code="port_taken",
        ) from error
    listener.setblocking(False)
    return listener


def read_public_url(text: str) -> tuple[str, str]:
    """A public URL without the slash at its end, and its host.

    Raises:
        InvalidError: it is none that a path can follow.
    """
    try:
        parts = urlsplit(text)
        is_good = parts.scheme in ("http", "https") and text.isascii() and text.isprintable() and " " not in text
        is_good = is_good and not (parts.query or parts.fragment or "@" in parts.netloc) and parts.port != 0
    except ValueError:  # of a port that is no number, or brackets that do not close
        is_good = False
    if not is_good or not parts.hostname:
        raise InvalidError(
            f"public URL {'with a user name' if '@' in text else shown(text)} can't be given to agents",
            "name http or https, the host, and the port and the path where there are any: https://HOST/PATH",
        )
    return text.rstrip("/"), parts.hostname


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers; `serve` has its own, which stop the engine first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def _load_certificate(config: uvicorn.Config, options: ServeOptions) -> None:
    """Read the certificate now, while there is somebody to tell.

    Raises:
        InvalidError: it can't be used.
    """
    try:
        config.load()
    except OSError as error:  # those of ssl are some too
        raise InvalidError(
            f"the certificate {options.tls_cert} with the key {options.tls_key or 'in it'} can't be used ({error})",
            "name PEM files that belong together, the key without a passphrase",
        ) from error


@contextlib.asynccontextmanager
async def listening(options: ServeOptions) -> AsyncIterator[Front]:
    """A front that answers requests inside the block, and ends in order after it.

    Raises:
        InvalidError: the public URL is none, or the certificate can't be used.
        RunDirError: the folder or the address is taken, or the folder is nowhere.
        JournalError: the folder's journal can't be opened.
    """
    public_url, names = options.public_url, options.allowed_hosts
    if public_url is not None:
        public_url, public_host = read_public_url(public_url)
        names = (*names, public_host)
    try:
        run_dir = options.run_dir.resolve()
    except FileNotFoundError:
        raise RunDirError(
            f"the current folder was removed, so {options.run_dir} is nowhere",
            "go to a folder that is there, or name a run folder by its whole path",
        ) from None
    if well_formed(str(run_dir)) != str(run_dir):
        # Its name stands in answers, events and the files beside it.
        raise RunDirError(f"the run folder's name {str(run_dir)!r} is not valid UTF-8", "choose another")
    lock = RunDirLock(run_dir)
    server_file = run_dir / SERVER_FILE
    try:
        token_file = run_dir / "token.json"
        tokens = Tokens.load(token_file)
        engine = Engine(run_dir, options.worker_command)
        crowd = Crowd(connection_limit())
        app = FrontApp(engine, tokens, HostCheck(options.host, names), crowd, public_url)
        config = uvicorn.Config(
            app,
            http=partial(Connection, crowd=crowd),  # type: ignore[arg-type]  # whatever makes a protocol
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=120,
            timeout_graceful_shutdown=int(2 * GRACE_S),
            ssl_certfile=options.tls_cert,
            ssl_keyfile=options.tls_key,
        )
        _load_certificate(config, options)
        listener = bind(options.host, options.port)
        try:
            await engine.open()
        except JournalError:
            listener.close()
            raise
        host, port = listener.getsockname()[:2]
        scheme = "http" if options.tls_cert is None else "https"
        url = f"{scheme}://{_reachable(options.host, host)}:{port}"
        server = _Server(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        front = Front(engine, url, run_dir, token_file, serving)
        try:
            if options.is_started:
                engine.start(options.config)
            _write_whole(server_file, json.dumps(front.about()))
            yield front
        finally:
            await engine.close(front.ends_because)
            server.should_exit = True
            await asyncio.wait({serving}, timeout=GRACE_S)
            for connection in server.server_state.connections.copy():
                # Not left to uvicorn, which cancels the requests and writes a traceback for each.
                if isinstance(connection, Connection):
                    connection.hang_up()
            await serving
    finally:
        server_file.unlink(missing_ok=True)
        lock.release()


@dataclass(slots=True)
class Front:
    """A front that listens."""

    engine: Engine
    url: str
    run_dir: Path
    token_file: Path
    serving: asyncio.Task[None]
    """Ends before its time only where the HTTP server broke."""
    ends_because: str = "the HTTP server ended"

    def about(self) -> dict[str, Any]:
        """How to reach it."""
        return {
            "url": self.url,
            "run_dir": str(self.run_dir),
            "token_file": str(self.token_file),
            "pid": os.getpid(),
            "server_id": self.engine.server_id,
        }


async def serve(options: ServeOptions, on_listening: Callable[[dict[str, Any]], None]) -> None:
    """Serve until a signal or the end of the standard input.

    Args:
        on_listening: called with url, run_dir, token_file and pid once requests are answered.

    Raises:
        InvalidError, RunDirError, JournalError: see `listening`.
    """
    ending = _watch_for_end(options.exits_with_stdin)
    async with listening(options) as front:
        on_listening(front.about())
        both: set[asyncio.Future[Any]] = {ending, front.serving}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            front.ends_because = ending.result()


def _reachable(asked: str, bound: str) -> str:
    """The host that clients are told: the one asked for, or where that means all of them, this machine's name."""
    host = socket.gethostname() if asked in ("0.0.0.0", "::", "") else bound
    return f"[{host}]" if ":" in host else host


def _write_whole(path: Path, text: str) -> None:
    """Write a file that readers see whole or not at all."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


def _watch_for_end(with_stdin: bool) -> asyncio.Future[str]:
    """Done with the cause when the server should end; a second signal ends the process at once."""
    loop = asyncio.get_running_loop()
    ending: asyncio.Future[str] = loop.create_future()

    def end(cause: str) -> None:
        if not ending.done():
            ending.set_result(cause)

    def on_signal(number: signal.Signals) -> None:
        if ending.done():
            # The journal is safe at any moment, and the worker ends with its socket.
            os._exit(128 + number)
        leave_dead_terminal()
        end(f"{number.name}")

    for number in ending_signals():
        if sys.platform == "win32":
            signal.signal(number, lambda got, _: loop.call_soon_threadsafe(on_signal, signal.Signals(got)))
        else:
            loop.add_signal_handler(number, on_signal, number)
    if with_stdin:

        def wait_for_stdin() -> None:
            while os.read(0, 4096):
                pass
            loop.call_soon_threadsafe(end, "the standard input closed")

        threading.Thread(target=wait_for_stdin, name="stdin", daemon=True).start()
        # Until here the end of the parent was the end of this process; from here on it ends in order.
        outlive_parent()
    return ending


def run(options: ServeOptions, on_listening: Callable[[dict[str, Any]], None]) -> None:
    """`serve` on the fastest event loop there is.

    Raises:
        InvalidError, RunDirError, JournalError: as `serve`.
    """
    raise_file_limit()
    sys.setswitchinterval(SWITCH_S)
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    if sys.platform != "win32":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(options, on_listening))
