"""The front's end of the line to the engine worker: starts the process, asks, sorts the answers.

Frames are written together once per turn of the event loop, for a batch of requests should cost one system call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, assert_never, cast

from pydantic import TypeAdapter, ValidationError

from swarm_engine import child
from swarm_engine.errors import BadRequestError, InternalError, WorkerDiedError
from swarm_engine.protocol import (
    Boot,
    Booted,
    Cancel,
    Export,
    Failed,
    Finished,
    Generate,
    Rejected,
    Sampled,
    Save,
    Saved,
    Stop,
    Update,
    Updated,
    frame,
    from_worker,
    unframe,
)
from swarm_engine.types import FinishReason

WORKER_COMMAND = child.command("swarm_engine.worker")
SOCKETS = "worker-*.sock"
"""Names of the sockets that workers are told; a front that is killed leaves its own."""
MAX_SOCKET_PATH = 100
"""Bytes; the kernel's limit for a Unix socket's path is 104 to 108."""
CONNECT_TIMEOUT_S = 120.0
"""The worker imports torch before it connects; a busy machine takes its time."""
STOP_TIMEOUT_S = 10.0

Question = Boot | Generate | Cancel | Update | Save | Export | Stop
Answer = TypeVar("Answer", Booted, Updated, Saved)

log = logging.getLogger(__name__)

_adapters: dict[type, TypeAdapter[Question]] = {
    kind: TypeAdapter(kind) for kind in (Boot, Generate, Cancel, Update, Save, Export, Stop)
}


class Generation:
    """One reply while it is sampled."""

    def __init__(self, request_id: str, on_tokens: Callable[[Generation, Sequence[int]], None]) -> None:
        self.request_id = request_id
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.policy_versions: list[int] = []
        self.top: list[tuple[tuple[int, float], ...]] = []
        """The likeliest tokens at the place of each token; empty where none were asked for."""
        self.done: asyncio.Future[FinishReason] = asyncio.get_running_loop().create_future()
        """Why sampling ended; raises BadRequestError where the worker refused, WorkerDiedError where it is gone."""
        self._on_tokens = on_tokens

    def add(self, sampled: Sampled) -> None:
        """Take the next tokens."""
        self.token_ids.extend(sampled.token_ids)
        self.logprobs.extend(sampled.logprobs)
        self.policy_versions.extend([sampled.policy_version] * len(sampled.token_ids))
        self.top.extend(sampled.top or ())
        self._on_tokens(self, sampled.token_ids)

    def cut(self, num_tokens: int) -> None:
        """Forget the tokens past these: behind a stop string, before the sampler had the order, or not to be read."""
        for values in (self.token_ids, self.logprobs, self.policy_versions, self.top):
            del values[num_tokens:]

    def finish(self, reason: FinishReason) -> None:
        """No token follows."""
        if not self.done.done():
            self.done.set_result(reason)

    def fail(self, error: Exception) -> None:
        """There will be no reply."""
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()


class WorkerLink(asyncio.Protocol):
    """A running worker. `start` makes one."""

    def __init__(self, on_death: Callable[[str], None]) -> None:
        self._on_death = on_death
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._unsent: list[bytes] = []
        self._generations: dict[str, Generation] = {}
        self._waiting: dict[type, list[asyncio.Future[object]]] = {Booted: [], Updated: [], Saved: []}
        self._connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._failure: str | None = None
        """What the worker itself, or a broken message of it, gave as the reason of its end."""
        self._death: str | None = None
        """Why the worker is gone; None while it is there."""
        self._is_stopping = False
        self._log: Path | None = None
        self._log_start = 0

    @staticmethod
    async def start(
        run_dir: Path, on_death: Callable[[str], None], command: Sequence[str] = WORKER_COMMAND
    ) -> WorkerLink:
        """Start a worker and wait until it has connected.

        Args:
            run_dir: holds the socket and `worker.log`.
            on_death: called with the reason when the worker gives up or ends without having been asked to.
            command: the worker's program; `--socket ADDRESS` is appended.

        Raises:
            WorkerDiedError: it ended, or did not connect in time.
        """
        link = WorkerLink(on_death)
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as cleanup:
            server, address = await _listen(loop, link, run_dir, cleanup)
            cleanup.callback(server.close)
            link._log = run_dir / "worker.log"
            with link._log.open("ab") as log:
                link._log_start = log.tell()
                # A session of its own: a Ctrl-C in the terminal reaches the front alone, which ends it in order.
                link._process = await asyncio.create_subprocess_exec(
                    *command,
                    "--socket",
                    address,
                    # Nothing is written to it: it ends with the front, however that ends.
                    stdin=asyncio.subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    cwd=run_dir,  # the current folder may be removed, and torch does not load from one that was
                    start_new_session=True,
                )
            link._watch = asyncio.create_task(link._watch_process())
            try:
                await asyncio.wait_for(asyncio.shield(link._connected), CONNECT_TIMEOUT_S)
            except TimeoutError:
                await link.kill()
                raise WorkerDiedError(
                    f"the engine worker did not connect within {CONNECT_TIMEOUT_S:.0f} s",
                    f"is the machine out of memory? {link._log} may say",
                ) from None
            except asyncio.CancelledError:
                await link.kill()
                raise
        return link

    @property
    def has_connected(self) -> bool:
        """Whether the worker is or was on the line."""
        return self._transport is not None

    @property
    def pid(self) -> int | None:
        """Process id of the worker."""
        return self._process.pid if self._process else None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The worker has connected."""
        self._transport = cast(asyncio.Transport, transport)
        if not self._connected.done():
            self._connected.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Sort the answers that have come in."""
        self._buffer += data
        try:
            for message in unframe(self._buffer):
                self._take(message)
        except ValidationError as error:
            self._failure = f"the worker sent a message that fits no type of the protocol ({error})"
            self._on_death(self._failure)
            self._abort()

    def connection_lost(self, _exc: Exception | None) -> None:
        """The worker is gone or going; `_watch_process` finds out why and tells everybody who waits."""
        if self._process is not None and self._process.returncode is None and not self._is_stopping:
            # Not the process's own `kill`: that looks for the exit first, and would take it from `_watch_process`.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    # Asking

    def generate(self, question: Generate, on_tokens: Callable[[Generation, Sequence[int]], None]) -> Generation:
        """Ask for a reply; `on_tokens` is called with every new stretch of it."""
        generation = Generation(question.request_id, on_tokens)
        self._generations[question.request_id] = generation
        self._send(question)
        return generation

    def cancel(self, request_id: str) -> None:
        """Nobody wants the rest of a reply: what was sampled so far is all there is."""
        if generation := self._generations.pop(request_id, None):
            self._send(Cancel(request_id))
            generation.finish(FinishReason.CANCELLED)

    async def boot(self, question: Boot) -> Booted:
        """Load the policies."""
        return await self._ask(question, Booted)

    async def update(self, question: Update) -> Updated:
        """Train on a batch."""
        return await self._ask(question, Updated)

    async def save(self, question: Save) -> Saved:
        """Write a checkpoint."""
        return await self._ask(question, Saved)

    async def export(self, question: Export) -> Saved:
        """Write the policy in the Hugging Face layout."""
        return await self._ask(question, Saved)

    async def stop(self) -> None:
        """End the worker: asked first, killed where it doesn't listen."""
        self._is_stopping = True
        self._send(Stop())
        self._flush()
        if self._watch is not None:
            try:
                await asyncio.wait_for(asyncio.shield(self._watch), STOP_TIMEOUT_S)
            except TimeoutError:
                await self.kill()

    async def kill(self) -> None:
        """End the worker now."""
        self._is_stopping = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._abort()
        if self._watch is not None:
            await asyncio.shield(self._watch)

    async def _ask(self, question: Question, kind: type[Answer]) -> Answer:
        # The worker answers questions of one kind in the order they were asked.
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._waiting[kind].append(answer)
        self._send(question)
        found = await answer
        assert isinstance(found, kind)
        return found

    def _send(self, question: Question) -> None:
        if self._death is not None:
            self._fail_all(self._death)
            return
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(frame(_adapters[type(question)].dump_json(question)))

    def _flush(self) -> None:
        if self._unsent and self._transport is not None and not self._transport.is_closing():
            self._transport.writelines(self._unsent)
        self._unsent.clear()

    def _take(self, message: bytes) -> None:
        answer = from_worker.validate_json(message)
        match answer:
            case Sampled():
                if generation := self._generations.get(answer.request_id):
                    self._add(generation, answer)
            case Finished():
                if generation := self._generations.pop(answer.request_id, None):
                    generation.finish(answer.finish_reason)
            case Rejected():
                if generation := self._generations.pop(answer.request_id, None):
                    generation.fail(BadRequestError(answer.message, code="rejected", param=answer.param))
            case Booted() | Updated() | Saved():
                waiting = self._waiting[type(answer)]
                assert waiting, f"the worker sent {answer.type} without being asked"
                future = waiting.pop(0)
                if not future.done():
                    future.set_result(answer)
            case Failed():
                self._failure = answer.reason
                self._fail_all(answer.reason)
                self._on_death(answer.reason)
            case _:
                assert_never(answer)

    def _add(self, generation: Generation, sampled: Sampled) -> None:
        num_read = len(generation.token_ids)
        try:
            generation.add(sampled)
        except Exception:
            # A reply that can't be read must not end the line, and every episode with it.
            log.exception("the reply to call %s could not be read", generation.request_id)
            generation.cut(num_read)
            generation.fail(InternalError())
            self.cancel(generation.request_id)

    def _fail_all(self, reason: str) -> None:
        error = WorkerDiedError(reason, "start the engine again; completed episodes are in the journal")
        for generation in list(self._generations.values()):
            generation.fail(error)
        self._generations.clear()
        for waiting in self._waiting.values():
            for future in waiting:
                if not future.done():
                    future.set_exception(error)
                    future.exception()
            waiting.clear()

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def _watch_process(self) -> None:
        assert self._process is not None
        code = await self._process.wait()
        self._death = reason = self._failure or self._explain_exit(code)
        self._abort()
        self._fail_all(reason)
        if not self._connected.done():
            self._connected.set_exception(WorkerDiedError(reason, "see worker.log in the run folder"))
            self._connected.exception()
        elif not self._is_stopping and self._failure is None:
            self._on_death(reason)

    def _explain_exit(self, code: int) -> str:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        reason = f"the engine worker {how}"
        if code == -signal.SIGKILL:
            reason += ", perhaps by the system for want of memory"
        if self._log is not None and (said := _last_line(self._log, self._log_start)):
            reason += f"; its last words: {said}"
        return reason


class _Refusal(asyncio.Protocol):
    """What a second connection gets."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Hang up."""
        cast(asyncio.Transport, transport).abort()


async def _listen(
    loop: asyncio.AbstractEventLoop, link: WorkerLink, run_dir: Path, cleanup: contextlib.ExitStack
) -> tuple[asyncio.Server, str]:
    """A listening socket for one worker, and the address it is told.

    No other start has this address, so the worker of a front that was killed here can't pass for this one's.
    """

    def protocol() -> asyncio.Protocol:
        return _Refusal() if link.has_connected else link

    if not hasattr(socket, "AF_UNIX"):
        server = await loop.create_server(protocol, "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()[:2]
        return server, f"{host}:{port}"
    for left in run_dir.glob(SOCKETS):
        left.unlink(missing_ok=True)
    name = SOCKETS.replace("*", secrets.token_hex(8))
    path = run_dir.resolve() / name
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        # A folder of its own, for the parent of all temporary files is open to everybody.
        path = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="swarm-"))) / name
    cleanup.callback(path.unlink, missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    # Whoever can write to the socket can pass for the worker; the run folder may be one that others can enter.
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(mask)
    return await loop.create_unix_server(protocol, sock=listener), str(path)


def _last_line(log: Path, start: int) -> str:
    """The last line a process wrote to a log after `start` bytes, or an empty text."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start, size - 4096))
        lines = file.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1].strip() if lines else ""
