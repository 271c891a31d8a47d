"""The swarm a project trains on: one of its own that dies with it, or one that runs already.

The child is `swarm serve --exit-with-stdin`: it ends when the pipe to its standard input closes,
so it outlives neither a Ctrl-C nor a SIGKILL of the program that started it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from swarm_engine import child
from swarm_engine.client import AddressError, read_address, read_token
from vibe.errors import SwarmFailedError, UsageError
from vibe.run_folder import make_folder

LISTEN_TIMEOUT_S = 60.0
"""Python has to start and import the server; on a busy machine that takes seconds."""
STOP_TIMEOUT_S = 20.0
"""A server that is asked to end closes its journal and its worker first."""
LOG_LINES = 15


@dataclass(frozen=True, slots=True)
class Swarm:
    """Where a swarm listens and what opens it."""

    url: str
    token: str
    run_dir: Path | None
    """Its folder, where it lies on this machine; None for one that was only named."""
    pid: int | None = None

    def explain(self, problem: str) -> SwarmFailedError:
        """The error for a swarm that failed, with the end of its logs where they can be read."""
        tails = [tail(self.run_dir / name) for name in ("worker.log", "server.log")] if self.run_dir else []
        return SwarmFailedError("\n".join([problem, *filter(None, tails)]))


def check_named(url: str | None, token_file: Path | None) -> None:
    """See that a swarm that runs already is named whole.

    Raises:
        UsageError: one of the two is missing, or the URL holds more than an address.
    """
    if (url is None) != (token_file is None):
        raise UsageError("--swarm and --token-file go together: the URL says where, the token opens it")
    try:
        read_address(url or "")
    except AddressError as error:
        raise UsageError(f"--swarm: {error}") from None


def tail(log: Path, lines: int = LOG_LINES) -> str:
    """The last lines of a log with its path, or an empty string where there is none."""
    try:
        end = log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
    except OSError:
        return ""
    return "\n".join([f"The end of {log}:", *(f"    {line}" for line in end)]) if end else ""


@contextlib.asynccontextmanager
async def embedded_swarm(run_dir: Path) -> AsyncIterator[Swarm]:
    """Start a swarm in `run_dir` and end it, worker and all, on the way out.

    Raises:
        UsageError: another server works in this folder.
        SwarmFailedError: it ended before it listened, or took too long.
    """
    make_folder(run_dir, 0o700)
    command = child.command("swarm_engine.cli", "serve", "--run-dir", str(run_dir), "--exit-with-stdin", "--json")
    with (run_dir / "server.log").open("ab") as log:
        # A session of its own: a Ctrl-C in the terminal reaches this program alone, which ends the server in order.
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    drain: asyncio.Task[None] | None = None
    try:
        listening = await _listening(process, run_dir)
        assert process.stdout
        drain = asyncio.create_task(_discard(process.stdout))
        token = read_token(Path(listening["token_file"]))
        yield Swarm(url=listening["url"], token=token, run_dir=run_dir, pid=process.pid)
    finally:
        await _end(process)
        if drain:
            await drain


async def _listening(process: asyncio.subprocess.Process, run_dir: Path) -> dict[str, str]:
    """The server's first line, which says where it listens."""
    assert process.stdout
    try:
        line = await asyncio.wait_for(process.stdout.readline(), LISTEN_TIMEOUT_S)
    except TimeoutError:
        raise SwarmFailedError(
            f"the swarm did not listen within {LISTEN_TIMEOUT_S:.0f} s; is the machine busy?\n"
            + tail(run_dir / "server.log")
        ) from None
    event: dict[str, str] = json.loads(line) if line else {}
    if event.get("event") == "listening":
        return event
    code = await process.wait()
    said = event.get("message") or tail(run_dir / "server.log")
    if code == UsageError.exit_code:
        raise UsageError(f"the swarm refused to start in {run_dir}.\n{said}")
    raise SwarmFailedError(f"the swarm ended with code {code} before it listened.\n{said}")


async def _discard(stream: asyncio.StreamReader) -> None:
    """Read what the server prints later, so that its pipe never fills."""
    while await stream.read(65536):
        pass


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ask by closing its input, then insist."""
    assert process.stdin
    process.stdin.close()
    for force in (None, signal.SIGTERM, signal.SIGKILL):
        if force is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, force)
        try:
            await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            continue
        return
