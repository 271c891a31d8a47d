"""A real engine worker to talk to, with the test as its front."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from swarm_engine.protocol import (
    Boot,
    Booted,
    Cancel,
    Export,
    Generate,
    Save,
    Stop,
    Update,
    frame,
    from_worker,
    unframe,
)

Question = Boot | Generate | Cancel | Update | Save | Export | Stop
Kind = TypeVar("Kind")


class WorkerProcess:
    """Starts the worker, waits until it has connected, and kills it at the end."""

    def __init__(
        self,
        folder: Path,
        timeout_s: float = 60.0,
        command: Sequence[str] = (sys.executable, "-m", "swarm_engine.worker"),
    ) -> None:
        from pydantic import TypeAdapter

        self._adapter: TypeAdapter[Any] = TypeAdapter(Question)
        self._buffer = bytearray()
        self._received: list[Any] = []
        path = folder / "w.sock"
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            listener.settimeout(timeout_s)
            self._path = folder / "worker.log"
            self._log = self._path.open("ab")
            self.process = subprocess.Popen(
                [*command, "--socket", str(path)],
                stdout=self._log,
                stderr=self._log,
            )
            self.line, _ = listener.accept()
        self.line.settimeout(timeout_s)

    def boot(self, model_root: Path, checkpoint_dir: Path, model: str, **config: Any) -> Booted:
        """Load a policy on one thread."""
        config = {"num_threads": 1, "policies": {"policy": {"model": model}}} | config
        self.send(Boot(config, str(model_root), str(checkpoint_dir)))
        return self.receive(Booted)

    def send(self, *questions: Question) -> None:
        """Ask."""
        self.line.sendall(b"".join(frame(self._adapter.dump_json(question)) for question in questions))

    def receive(self, kind: type[Kind]) -> Kind:
        """The next answer, which must be of this kind."""
        while not self._received:
            chunk = self.line.recv(1 << 16)
            if not chunk:
                log = self._path.read_text()[-8000:]
                raise EOFError(f"the worker ended with {self.process.wait(30)}; its log:\n{log}")
            self._buffer += chunk
            self._received += [from_worker.validate_json(message) for message in unframe(self._buffer)]
        answer = self._received.pop(0)
        assert isinstance(answer, kind), answer
        return answer

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.wait(30)

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.kill()
        self.line.close()
        self._log.close()
