"""Games in a process of their own, driven from here.

One child serves many games at once; `vibe.envhost` is its side. It has a cleared environment, a session and a scratch
folder of its own, and limits on time, memory and files. A game that runs too long, floods the pipe or dies takes its
process group with it: whoever waits gets an error, and the next request starts a new child.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import tempfile
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from swarm_engine.child import command
from vibe import turns
from vibe.errors import EnvError, UsageError
from vibe.project import code_of, refuse_if_edited
from vibe.spec import RuleValue
from vibe.turns import About

HOST = Path(__file__).with_name("envhost.py")
MAX_LINE_BYTES = 1 << 21
"""Longer than any reply that the child lets through."""
KEPT_STDERR_BYTES = 4000
"""The end of what the game printed, for the error message."""
MAX_STDERR_BYTES = 10_000_000
"""A game that prints more than this is ended."""


class EnvTimeoutError(EnvError):
    """The game took too long; its process was ended."""


class EnvCrashedError(EnvError):
    """The game's process died, or was ended for another game's fault; play this one again."""


class RulesError(EnvError, UsageError):
    """The game refuses the rules it was given."""

    exit_code = UsageError.exit_code


@dataclass(frozen=True, slots=True)
class Limits:
    """What one child may use."""

    wall_s: float = 10.0
    """For one request, from the moment it is the child's turn to answer it."""
    start_s: float = 30.0
    """Until the child's first word; a busy machine starts an interpreter slowly."""
    cpu_s: int = 5
    """Processor seconds for one request."""
    memory_bytes: int = 1 << 29
    file_bytes: int = 1 << 20
    """Size of any file that the game writes."""
    open_files: int = 64

    def as_json(self) -> str:
        """As the child reads them."""
        return json.dumps(
            {
                "cpu_seconds": self.cpu_s,
                "memory_bytes": self.memory_bytes,
                "file_bytes": self.file_bytes,
                "open_files": self.open_files,
            }
        )


class EnvHost:
    """The games of one project under one set of rules.

    Use as `async with EnvHost(project, rules) as host: env = host.env()`.
    """

    def __init__(
        self,
        project: Path,
        rules: Mapping[str, RuleValue],
        limits: Limits | None = None,
        *,
        code: Mapping[str, str] | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            code: what `code_of` said of the project when the run began. A process that is started later, in the place
                of one that died, would load what was edited since. None takes whatever is there.
        """
        self._project = Path(project).resolve()
        self._rules = dict(rules)
        self._limits = limits or Limits()
        self._code = code
        self._about: About | None = None
        self._names = itertools.count(1)
        self._child: _Child | None = None
        self._starting = asyncio.Lock()
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    async def __aenter__(self) -> Self:
        self._scratch = tempfile.TemporaryDirectory(prefix="vibe-env-")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._child:
            await self._child.end(EnvCrashedError("the games are closed"))
        assert self._scratch
        self._scratch.cleanup()

    def env(self) -> Env:
        """A game, in the state before its first reset."""
        return Env(self, f"e{next(self._names)}")

    @property
    def pid(self) -> int | None:
        """Process id of the child; None before the first request and after a crash."""
        return self._child.pid if self._child and self._child.is_alive else None

    async def about(self) -> About:
        """What the game says of itself.

        Raises:
            EnvError: its code can't be loaded, or says what makes no sense.
        """
        if self._about is None:
            child = await self.child()
            self._about = turns.check_about(await child.ask({"op": "about"}))
        return self._about

    async def child(self) -> _Child:
        """The child that runs now; a new one where there is none.

        Raises:
            EditedError: the project's code is no longer what it was.
        """
        if self._child is None or not self._child.is_alive:
            async with self._starting:
                if self._child is None or not self._child.is_alive:
                    assert self._scratch, "use it in `async with`"
                    if self._code is not None:
                        refuse_if_edited(self._code, code_of(self._project), f"the run that plays in {self._project}")
                    if self._child is not None:
                        await self._child.end(EnvCrashedError("another process takes over"))
                    self._child = await _Child.start(self._project, self._limits, self._scratch.name)
        return self._child

    @property
    def rules(self) -> dict[str, RuleValue]:
        """The rules of every game here."""
        return self._rules


class Env:
    """One game at a time; `reset` starts the next. A dict with `rewards` ends it, any other asks a seat to move.

    Whatever the game answers is checked: see `vibe.turns`.
    """

    def __init__(self, host: EnvHost, name: str) -> None:
        self._host = host
        self._name = name
        self._child: _Child | None = None
        """The child that knows this game's state."""
        self._about = About()
        self._agents: set[str] = set()
        """Those that this game has asked."""
        self._num_turns = 0
        """Replies that it has asked for."""

    async def reset(self, seed: int) -> dict[str, Any]:
        """Start the game of a seed.

        Raises:
            RulesError: the game refuses its rules.
            EnvError: its code failed, took too long or died, or its answer is none.
        """
        self._about = await self._host.about()
        self._child = await self._host.child()
        self._agents.clear()
        self._num_turns = 0
        return self._checked("reset", await self._ask("reset", seed=seed, rules=self._host.rules))

    async def step(self, text: str) -> dict[str, Any]:
        """Play the reply of the seat to move, as the policy gave it.

        Raises:
            EnvError: as for `reset`; or the game has asked for more replies than it may.
        """
        return self._checked("step", await self._ask("step", text=text))

    async def legal(self) -> list[str]:
        """The replies allowed to the seat to move."""
        return turns.check_legal(await self._ask("legal"))

    async def suggest(self, player: str) -> str:
        """What a scripted player would answer here."""
        return turns.check_suggested(player, await self._ask("suggest", player=player))

    async def snapshot(self) -> dict[str, Any]:
        """The whole state, secrets included."""
        return turns.check_snapshot(await self._ask("snapshot"))

    async def close(self) -> None:
        """Forget the game."""
        if self._child and self._child.is_alive:
            await self._ask("close")
        self._child = None

    def _checked(self, op: str, reply: object) -> dict[str, Any]:
        turn = turns.check_turn(op, reply, self._about, sorted(self._agents))
        if "rewards" not in turn:
            if self._num_turns == self._about.max_turns:
                raise turns.too_long(self._about)
            self._num_turns += 1
            self._agents.add(turn["agent"])
        return turn

    async def _ask(self, op: str, **arguments: Any) -> Any:
        if self._child is None:
            raise EnvError("this game has not begun; call reset first")
        return await self._child.ask({"op": op, "env": self._name, **arguments})


class _Child:
    """One process and the requests that wait for it. It answers in order, so the oldest is the one it works on."""

    def __init__(self, process: asyncio.subprocess.Process, limits: Limits) -> None:
        self._process = process
        self._limits = limits
        self._ids = itertools.count(1)
        self._waiting: deque[tuple[int, asyncio.Future[Any]]] = deque()
        self._watchdog: asyncio.TimerHandle | None = None
        self._stderr = bytearray()
        self._fault: EnvError | None = None
        """Why it can't be used any more."""
        self._readers: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, project: Path, limits: Limits, scratch: str) -> Self:
        """Start a child and wait for its first word."""
        process = await asyncio.create_subprocess_exec(
            *command(str(HOST), str(project), limits.as_json(), flags=("-I", "-S", "-B")),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES,
            cwd=scratch,
            env={"HOME": scratch, "TMPDIR": scratch, "PATH": "/nonexistent", "PYTHONHASHSEED": "0"},
            start_new_session=True,
        )
        child = cls(process, limits)
        child._readers.append(asyncio.create_task(child._keep_stderr()))
        assert process.stdout
        try:
            ready = await asyncio.wait_for(process.stdout.readline(), limits.start_s)
            if not ready:
                raise EnvCrashedError(f"the game's process ended before its first word{child._said()}")
        except (TimeoutError, asyncio.CancelledError, EnvCrashedError) as error:
            fault = (
                error if isinstance(error, EnvCrashedError) else EnvTimeoutError("the game's process does not start")
            )
            await child.end(fault)
            if isinstance(error, TimeoutError):
                raise fault from error
            raise
        child._readers.append(asyncio.create_task(child._answer()))
        return child

    @property
    def pid(self) -> int:
        """Its process id, which is also its process group's."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it takes requests."""
        return self._fault is None

    async def ask(self, request: dict[str, Any]) -> Any:
        """Send one request and wait for its reply."""
        if self._fault:
            raise (
                type(self._fault)(str(self._fault))
                if isinstance(self._fault, EnvCrashedError)
                else EnvCrashedError(f"its process was ended meanwhile: {self._fault}")
            )
        number = next(self._ids)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((number, future))
        if self._watchdog is None:
            self._watch()
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"id": number, **request}).encode() + b"\n")
        return await future

    def _watch(self) -> None:
        """Give the oldest request its time, or stop watching where none waits."""
        if self._watchdog:
            self._watchdog.cancel()
        self._watchdog = None
        if self._waiting:
            self._watchdog = asyncio.get_running_loop().call_later(self._limits.wall_s, self._too_slow)

    def _too_slow(self) -> None:
        fault = EnvTimeoutError(f"the game took longer than {self._limits.wall_s:g} s for one request{self._said()}")
        self._fail(fault)

    async def _answer(self) -> None:
        """Hand out replies until the child ends."""
        assert self._process.stdout
        try:
            while line := await self._process.stdout.readline():
                reply = json.loads(line)
                number, future = self._waiting[0]
                if reply["id"] != number:
                    raise ValueError(f"reply {reply['id']!r} to request {number}")
                self._waiting.popleft()
                self._watch()
                if not future.done():  # its caller may have gone away
                    self._settle(future, reply)
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            self._fail(EnvCrashedError(f"the game's process broke the protocol ({error}){self._said()}"))
            return
        code = await self._process.wait()
        await asyncio.wait(self._readers[:1], timeout=1.0)
        # A signal may be the kernel's or a user's, an exit is the game's own doing.
        what = "the game's process ended" if code < 0 else "the environment is at fault: it ended its process"
        self._fail(EnvCrashedError(f"{what} with {_exit_text(code)}{self._said()}"))

    def _settle(self, future: asyncio.Future[Any], reply: dict[str, Any]) -> None:
        if "ok" in reply:
            future.set_result(reply["ok"])
            return
        code, message = reply["error"]["code"], reply["error"]["message"]
        if code == "bad_rules":
            future.set_exception(RulesError(message))
        else:
            future.set_exception(turns.fault(message))

    async def _keep_stderr(self) -> None:
        """Keep the end of what the game prints."""
        assert self._process.stderr
        total = 0
        while chunk := await self._process.stderr.read(65536):
            total += len(chunk)
            self._stderr = (self._stderr + chunk)[-KEPT_STDERR_BYTES:]
            if total > MAX_STDERR_BYTES:
                self._fail(EnvCrashedError(f"the game printed more than {MAX_STDERR_BYTES} bytes{self._said()}"))
                return

    def _said(self) -> str:
        text = self._stderr.decode(errors="replace").strip()
        return f"; it said: {text}" if text else ""

    def _fail(self, fault: EnvError) -> None:
        """End the process group now; the request it worked on gets the fault, those behind it a crash."""
        if self._fault is None:
            self._fault = fault
            _kill_group(self.pid)  # once: later its number may be another's
        if self._watchdog:
            self._watchdog.cancel()
            self._watchdog = None
        waiting, self._waiting = self._waiting, deque()
        for index, (_, future) in enumerate(waiting):
            if not future.done():
                other = EnvCrashedError(f"another game ended the process: {self._fault}")
                future.set_exception(self._fault if index == 0 else other)

    async def end(self, fault: EnvError) -> None:
        """End the process group and wait until it is gone."""
        self._fail(fault)
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        assert self._process.stdin
        self._process.stdin.close()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            await self._process.stdin.wait_closed()
        await self._process.wait()


def _kill_group(pid: int) -> None:
    """End a process and everything it started in its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _exit_text(code: int) -> str:
    """An exit code for people."""
    if code == -signal.SIGXCPU:
        return "its processor time used up"
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
