"""How the vLLM processes of a policy are reached: a line to each for messages, and one piece of memory for the weights.

vLLM goes on sampling while the worker trains. What it answers waits in a queue that a thread fills, and each answer
wakes the worker, which then takes what is there: nobody polls. On this machine the worker starts the processes itself;
on others an actor does, see `swarm_engine.sampler.ray_links`.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

import swarm_engine
from swarm_engine.errors import WorkerError
from swarm_engine.protocol import Cancel, Failed, Finished, Generate, Rejected, Sampled, frame, read_frames
from swarm_engine.sampler.shared_weights import mapped, new_memory
from swarm_engine.sampler.vllm_messages import (
    Asleep,
    FromVllm,
    LoadModel,
    LoadWeights,
    Sleep,
    ToVllm,
    WeightsLoaded,
    from_vllm,
    to_vllm,
)

STOP_TIMEOUT_S = 5.0

PYTHON_VARIABLE = "A3R_VLLM_PYTHON"
"""Names the interpreter of vLLM's environment. No key of the config does, for that comes over HTTP and names no
programs."""

LAUNCH = (
    "import sys; sys.path.insert(0, sys.argv[1]); import swarm_engine; del sys.path[0];"
    "from swarm_engine.child import end_with_parent; end_with_parent();"
    "from swarm_engine.sampler.vllm_process import main; sys.exit(main(sys.argv[2:]))"
)
"""This very package in the other environment: its folder is on the path for one import only, for what lies beside it
here (torch, transformers) must not take the place of what is installed there."""

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The other model runner has another interface for logits processors.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""One process, which calls nobody up; its threads are this engine's to count."""

Wake = Callable[[], None]
"""Called from another thread whenever something has come in."""

log = logging.getLogger(__name__)


class Link(Protocol):
    """One vLLM process."""

    @property
    def has_message(self) -> bool:
        """`receive` would not wait."""
        ...

    def send(self, question: LoadModel | Sleep | Generate | Cancel) -> None:
        """Say something; that the process is gone is for `receive` to tell, behind what it may have said last."""
        ...

    def receive(self) -> WeightsLoaded | Asleep | Sampled | Finished | Rejected:
        """Wait for the next message.

        Raises:
            WorkerError: the process gave up or is gone, and why.
        """
        ...

    def close(self) -> None:
        """End the process and wait until it is gone."""
        ...


class Links(Protocol):
    """The vLLM processes of one policy."""

    @property
    def members(self) -> Sequence[Link]:
        """One at least."""
        ...

    @property
    def memory(self) -> mmap.mmap:
        """Where the worker writes the weights; again only when every process has answered `WeightsLoaded`."""
        ...

    def load_weights(self, load: LoadWeights) -> None:
        """Have all processes take the weights that lie in the memory."""
        ...


class Received:
    """What came from a process, in order, and at the end why no more comes."""

    def __init__(self, wake: Wake) -> None:
        self._wake = wake
        self._queue: queue.SimpleQueue[FromVllm] = queue.SimpleQueue()

    @property
    def is_empty(self) -> bool:
        return self._queue.empty()

    def put(self, message: bytes) -> None:
        """Take a message, on the thread that reads them."""
        self._queue.put(from_vllm.validate_json(message))
        self._wake()

    def end(self, why: str) -> None:
        """No more comes."""
        self._queue.put(Failed(why))
        self._wake()

    def next(self) -> WeightsLoaded | Asleep | Sampled | Finished | Rejected:
        """Wait for a message.

        Raises:
            WorkerError: there is none any more; so it stays.
        """
        message = self._queue.get()
        if isinstance(message, Failed):
            self._queue.put(message)
            raise WorkerError(message.reason)
        return message


class VllmProcess:
    """A vLLM process that this one has started. It ends when this one does."""

    def __init__(
        self, memory: int, num_threads: int, on_message: Callable[[bytes], None], on_end: Callable[[str], None]
    ) -> None:
        """Start it.

        Args:
            memory: descriptor of the memory that it takes weights from.
            num_threads: that it computes on.
            on_message: called with each message, on a thread of its own.
            on_end: called once, last, with the reason.

        Raises:
            WorkerError: the interpreter that A3R_VLLM_PYTHON names can't be run.
        """
        self._line, theirs = socket.socketpair()
        python = os.environ.get(PYTHON_VARIABLE) or sys.executable
        home = str(Path(swarm_engine.__file__).parent.parent)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [python, "-P", "-c", LAUNCH, home, "--line", str(theirs.fileno()), "--memory", str(memory)],
                    stdin=subprocess.PIPE,  # ends when this process does
                    pass_fds=(theirs.fileno(), memory),
                    env=os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": str(num_threads)},
                )
        except OSError as error:
            self._line.close()
            raise WorkerError(
                f"{python} can't be run: {error.strerror}",
                f"name the interpreter of the environment that has vLLM in {PYTHON_VARIABLE}",
            ) from error
        threading.Thread(target=self._read, args=(on_message, on_end), daemon=True).start()

    def send(self, message: bytes) -> None:
        """Say something."""
        # A line that broke is found out by the reading thread, behind what vLLM may have said last.
        with contextlib.suppress(OSError):
            self._line.sendall(frame(message))

    def close(self) -> None:
        """End it and wait until it is gone."""
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_RDWR)
        self._exit_code()

    def _read(self, on_message: Callable[[bytes], None], on_end: Callable[[str], None]) -> None:
        try:
            for message in read_frames(self._line):
                on_message(message)
        except (OSError, ValidationError) as error:
            log.error("the line to vLLM broke: %s", error)
        self._line.close()
        on_end(self._why_gone())

    def _why_gone(self) -> str:
        code = self._exit_code()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        reason = f"the vLLM process {how}"
        if code == -signal.SIGKILL:
            reason += ", perhaps by the system for want of memory"
        return f"{reason}; worker.log in the run folder may say more"

    def _exit_code(self) -> int:
        """Of the process, which is killed where it does not end by itself."""
        try:
            return self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()
        finally:
            assert self._process.stdin is not None
            self._process.stdin.close()


class LocalLink:
    """A process on this machine; see `Link`."""

    def __init__(self, memory: int, num_threads: int, wake: Wake) -> None:
        self._received = Received(wake)
        self._process = VllmProcess(memory, num_threads, self._received.put, self._received.end)

    @property
    def has_message(self) -> bool:
        return not self._received.is_empty

    def send(self, question: ToVllm) -> None:
        self._process.send(to_vllm.dump_json(question))

    def receive(self) -> WeightsLoaded | Asleep | Sampled | Finished | Rejected:
        return self._received.next()

    def close(self) -> None:
        self._process.close()


class LocalLinks:
    """Processes on this machine, which all have the worker's memory; see `Links`."""

    def __init__(self, size: int, count: int, num_threads: int, wake: Wake) -> None:
        """Start them.

        Args:
            size: bytes of the memory.
            num_threads: of each process.

        Raises:
            WorkerError: the interpreter that A3R_VLLM_PYTHON names can't be run.
        """
        descriptor = new_memory(size)
        self.memory = mapped(descriptor)
        try:
            self.members = tuple(LocalLink(descriptor, num_threads, wake) for _ in range(count))
        finally:
            os.close(descriptor)

    def load_weights(self, load: LoadWeights) -> None:
        for member in self.members:
            member.send(load)
