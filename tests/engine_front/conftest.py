"""Real servers for the tests of the front: `swarm serve` as a process, with a fake worker as another."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from swarm_engine.client import SwarmClient

HERE = Path(__file__).parent
# Test modules are imported without a package; this lets them share `tiny_tokenizer`.
sys.path.append(str(HERE))


@dataclass
class Served:
    """A server that runs."""

    process: subprocess.Popen[str]
    url: str
    run_dir: Path
    tokens: dict[str, str]

    def client(self, role: str = "operator") -> SwarmClient:
        return SwarmClient(self.url, self.tokens[role])

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(20)
        if self.process.stdout:
            self.process.stdout.close()
        return code


def fake_worker(run_dir: Path, **knobs: Any) -> str:
    """The command of the fake worker for a run folder, its knobs written beside."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "fake.json").write_text(json.dumps(knobs))
    return shlex.join([sys.executable, str(HERE / "fake_worker.py"), "--home", str(run_dir)])


def serve(run_dir: Path, *words: str, worker: str | None = None) -> Served:
    """Start `swarm serve` and wait until it listens."""
    command = [sys.executable, "-m", "swarm_engine.cli", "serve", "--run-dir", str(run_dir), *words]
    if worker is not None:
        command += ["--worker", worker]
    log = (run_dir.parent / f"{run_dir.name}.log").open("a")
    with log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ})
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, (run_dir.parent / f"{run_dir.name}.log").read_text()
    about = json.loads(line)
    return Served(process, about["url"], run_dir, json.loads(Path(about["token_file"]).read_text()))


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Starts servers with a fake worker; all are gone at the end of the test."""
    with contextlib.ExitStack() as cleanup:

        def start(name: str = "run", words: tuple[str, ...] = (), **knobs: Any) -> Served:
            run_dir = tmp_path / name
            served = serve(run_dir, *words, worker=fake_worker(run_dir, **knobs))
            cleanup.callback(served.stop, signal.SIGKILL)
            return served

        yield start


SMALL = {"seed": 7, "trainer": {"group_size": 2, "tasks_per_update": 2}, "sampler": {"max_tokens": 16}}
"""Four episodes an update."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One started engine for a module whose tests leave each other alone: eval and debug episodes only."""
    run_dir = tmp_path_factory.mktemp("shared") / "run"
    served = serve(run_dir, worker=fake_worker(run_dir))
    with served.client() as client:
        client.start(SMALL, wait=True)
    yield served
    served.stop()
