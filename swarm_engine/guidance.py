"""llguidance in a process of its own: what it makes of a user's schema ends that process at most, and one request.

Some schemas crash it, others take it minutes or gigabytes, and which ones is for nobody to list: so the code that
reads a user's schema is not run where others would go down with it. The process (`guidance_process`) is started with
the first question, takes 25 MB, and is started again where it ended. Questions are answered in order; the one it ended
over is known by having no answer, and those behind it are lost without being to blame, to be asked again.
"""

from __future__ import annotations

import contextlib
import json
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections import deque
from pathlib import Path

PROGRAM = Path(__file__).with_name("guidance_process.py")
FINE = b"+"
MAX_WAIT_S = 120.0
"""For an answer. The process ends itself after two seconds of computing; this is for one that can't even do that."""
RECEIVE_BYTES = 1 << 18
NUM_TRIES = 3
MAX_CPU_S, MAX_LOADING_CPU_S = 2.0, 60.0
"""As in `guidance_process`, which imports llguidance and so is not imported here."""
ENDED_BY = {
    signal.SIGABRT: "it takes more than 1 GiB of memory, or broke a promise of llguidance's own",
    signal.SIGSEGV: "llguidance crashed over it",
}
"""What the end of the process says of the question that it ended over, by the signal."""

Question = tuple[str | int | list[int], ...]
"""The name of a method of `guidance_process.Guidance`, and its arguments."""


class RefusedError(Exception):
    """llguidance refuses a question, or its process ended over it; says why."""

    def __init__(self, why: str, *, is_lasting: bool = True) -> None:
        super().__init__(why)
        self.is_lasting = is_lasting
        """Whether the same question gets the same answer again."""


class LostError(Exception):
    """The process ended over another question, and this one was behind it."""


class Asked:
    """A question on its way."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.answer: bytes | Exception | None = None


class GuidanceProcess:
    """One process, from its start to its end. Not thread-safe."""

    def __init__(self) -> None:
        """Start it.

        Raises:
            RefusedError: it can't be started.
        """
        self._waiting: deque[Asked] = deque()
        self._received = bytearray()
        self._line, theirs = socket.socketpair()
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(PROGRAM)],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    # A crash in native code prints what it was given, and no log is a place for a user's schema.
                    stderr=subprocess.DEVNULL,
                )
        except OSError as error:
            self._line.close()
            raise RefusedError(f"llguidance can't be started ({error.strerror})", is_lasting=False) from error
        self._line.setblocking(False)
        self._readiness = select.poll()
        self._is_stuck = False
        self.close = weakref.finalize(self, _end, self._process, self._line)
        """Ends it; at the latest when nobody asks it any more."""

    @property
    def has_ended(self) -> bool:
        return not self.close.alive

    def ask(self, *question: str | int | list[int]) -> Asked:
        """Put a question, without waiting."""
        asked = Asked(question)
        if self.has_ended:
            asked.answer = LostError()
            return asked
        self._waiting.append(asked)
        payload = json.dumps(question).encode()
        unsent = memoryview(struct.pack("!I", len(payload)) + payload)
        while unsent and not self.has_ended:
            try:
                unsent = unsent[self._line.send(unsent) :]
            except BlockingIOError:
                # It may itself wait for its answers to be read.
                self._receive(is_writer=True)
            except OSError:
                self._receive()
        return asked

    def answer(self, asked: Asked) -> bytes:
        """Wait for the answer to a question.

        Raises:
            RefusedError: there is none, because of the question itself.
            LostError: there is none, because of another one.
        """
        while asked.answer is None:
            self._receive()
        if isinstance(asked.answer, Exception):
            raise asked.answer
        return asked.answer

    def _receive(self, *, is_writer: bool = False) -> None:
        """Wait until something came, or may be sent again; sort the answers."""
        self._readiness.register(self._line, select.POLLIN | (select.POLLOUT if is_writer else 0))
        ready = self._readiness.poll(1000 * MAX_WAIT_S)
        if not ready:
            self._is_stuck = True
            self._process.kill()
            return
        if ready[0][1] == select.POLLOUT:
            return
        try:
            received = self._line.recv(RECEIVE_BYTES)
        except OSError:
            received = b""
        if not received:
            self._conclude()
        self._received += received
        while len(self._received) >= 4:
            end = 4 + struct.unpack_from("!I", self._received)[0]
            if len(self._received) < end:
                break
            answer = bytes(self._received[4:end])
            del self._received[:end]
            is_fine = answer[:1] == FINE
            self._waiting.popleft().answer = answer[1:] if is_fine else RefusedError(answer[1:].decode())

    def _conclude(self) -> None:
        """It has ended: the first question without an answer is to blame."""
        self.close()
        code = self._process.returncode
        blamed: Exception
        if self._is_stuck:
            blamed = RefusedError(f"llguidance gave no answer for {MAX_WAIT_S:.0f} s", is_lasting=False)
        elif code == -signal.SIGKILL:
            # By somebody else, for instance for the memory of the whole machine.
            blamed = LostError()
        elif code == -signal.SIGPROF:
            is_loading = bool(self._waiting) and self._waiting[0].question[0] == "tokenizer"
            limit_s = MAX_LOADING_CPU_S if is_loading else MAX_CPU_S
            blamed = RefusedError(f"it takes more than {limit_s:.0f} s of computing (SIGPROF)")
        elif code < 0:
            ended_by = signal.Signals(-code)
            blamed = RefusedError(f"{ENDED_BY.get(ended_by, 'llguidance ended over it')} ({ended_by.name})")
        else:
            blamed = RefusedError(f"llguidance broke over it (exit code {code})")
        for index, asked in enumerate(self._waiting):
            asked.answer = LostError() if index else blamed
        self._waiting.clear()


def _end(process: subprocess.Popen[bytes], line: socket.socket) -> None:
    with contextlib.suppress(OSError):
        line.close()
    # One that computes ends by its own limit, later than anybody should wait.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.1)
    process.kill()
    process.wait()


class Guidance:
    """A process that is there when it is asked. `ask` is thread-safe; `process`, and what it gives, are not."""

    def __init__(self, *first: Question) -> None:
        """Start nothing yet.

        Args:
            first: what every process is asked at its start.
        """
        self._first = first
        self._process: GuidanceProcess | None = None
        self._lock = threading.Lock()

    def process(self) -> GuidanceProcess:
        """The one that runs, ready for questions.

        Raises:
            RefusedError: none can be started, or it refuses what it is asked at its start.
            LostError: somebody else ended it then.
        """
        if self._process is None or self._process.has_ended:
            process = GuidanceProcess()
            for question in self._first:
                process.answer(process.ask(*question))
            self._process = process
        return self._process

    def ask(self, *question: str | int | list[int]) -> bytes:
        """Put a question and wait for its answer, as for those of all who asked before.

        Each takes `MAX_CPU_S` of computing at most, and a new process where it ended the last.

        Raises:
            RefusedError: it has none.
        """
        with self._lock:
            for _ in range(NUM_TRIES):
                process = self.process()
                with contextlib.suppress(LostError):
                    return process.answer(process.ask(*question))
        raise RefusedError("llguidance ended whenever it was asked", is_lasting=False)
