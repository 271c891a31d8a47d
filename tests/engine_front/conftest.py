"""Real servers for the tests of the front: `swarm serve` as a process, with a fake worker as another."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from swarm_engine.client import SwarmClient, SyncEpisode
from swarm_engine.server.serve import Front, ServeOptions, listening

HERE = Path(__file__).parent
# Test modules are imported without a package; this lets them share `tiny_tokenizer`.
sys.path.append(str(HERE))

from chat_template import TOOLS_AND_THINKING  # noqa: E402


@dataclass
class Served:
    """A server that runs, as a process or on a thread of the test."""

    url: str
    run_dir: Path
    tokens: dict[str, str]
    pid: int
    front: Front | None = None
    """The front itself, where it runs on a thread."""

    def client(self, role: str = "operator", *, reconnect_s: float = 0) -> SwarmClient:
        """A client that waits for nobody, unless it is told to."""
        return SwarmClient(self.url, self.tokens[role], reconnect_s=reconnect_s)


@dataclass
class Process(Served):
    """A server that runs as `swarm serve`."""

    process: subprocess.Popen[str] | None = None

    def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(30)
        for pipe in (self.process.stdout, self.process.stdin):
            if pipe:
                pipe.close()
        return code


def fake_worker(run_dir: Path, **knobs: Any) -> tuple[str, ...]:
    """The command of the fake worker for a run folder, its knobs written beside."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "fake.json").write_text(json.dumps(knobs))
    return (sys.executable, str(HERE / "fake_worker.py"), "--home", str(run_dir))


def log_of(run_dir: Path) -> Path:
    return run_dir.parent / f"{run_dir.name}.log"


def serve_process(
    run_dir: Path, *words: str, worker: tuple[str, ...] = (), stdin: int | None = None, prefix: tuple[str, ...] = ()
) -> Process:
    """Start `swarm serve`, by a program that becomes it where a prefix names one, and wait until it listens."""
    command = [*prefix, sys.executable, "-P", "-m", "swarm_engine.cli", "serve", "--run-dir", str(run_dir), *words]
    if worker:
        command += ["--worker", shlex.join(worker)]
    with log_of(run_dir).open("a") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, stdin=stdin, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, log_of(run_dir).read_text()
    about = json.loads(line)
    token_file = Path(f"/proc/{process.pid}/root{about['token_file']}") if prefix else Path(about["token_file"])
    tokens = json.loads(token_file.read_text())
    return Process(about["url"], run_dir, tokens, about["pid"], process=process)


@contextlib.contextmanager
def serve_thread(
    run_dir: Path, *, worker: tuple[str, ...] = (), options: Mapping[str, Any] | None = None, **knobs: Any
) -> Iterator[Served]:
    """A front on a thread of this process, with a worker, fake unless another is named, in its own process."""
    worker = worker or fake_worker(run_dir, **knobs)
    up: queue.Queue[tuple[Served, asyncio.AbstractEventLoop, asyncio.Event] | BaseException] = queue.Queue()

    async def main() -> None:
        ending = asyncio.Event()
        async with listening(ServeOptions(run_dir, worker_command=worker, **(options or {}))) as front:
            tokens = json.loads(front.token_file.read_text())
            up.put((Served(front.url, run_dir, tokens, os.getpid(), front), asyncio.get_running_loop(), ending))
            await ending.wait()
            front.ends_because = "the test is over"

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            up.put(error)
            raise

    thread = threading.Thread(target=run, name="front")
    thread.start()
    found = up.get(timeout=60)
    if isinstance(found, BaseException):
        thread.join()
        raise found
    served, loop, ending = found
    try:
        yield served
    finally:
        loop.call_soon_threadsafe(ending.set)
        thread.join(30)
        assert not thread.is_alive()


def wait_until(holds: Callable[[], bool], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come to hold"
        time.sleep(0.01)


def wait_for_running(served: Served, episode: SyncEpisode, count: int) -> None:
    """Wait until so many calls of an episode run."""
    auth = {"authorization": f"Bearer {served.tokens['observer']}"}
    url = f"{served.url}/swarm/v1/episodes/{episode.episode_id}"
    wait_until(lambda: httpx.get(url, headers=auth).json()["num_running_calls"] == count)


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Starts fronts with fake workers; all have ended after the test."""
    with contextlib.ExitStack() as cleanup:
        yield lambda name="run", **knobs: cleanup.enter_context(serve_thread(tmp_path / name, **knobs))


def spoken(episode: SyncEpisode, policy: str | None = None) -> SyncEpisode:
    """An episode after one call, without which it takes no place in a batch."""
    episode.chat([{"role": "user", "content": "hi"}], policy=policy, max_tokens=1)
    return episode


SMALL = {"seed": 7, "trainer": {"group_size": 2, "tasks_per_update": 2}, "sampler": {"max_tokens": 16}}
"""Four episodes an update."""


@contextlib.contextmanager
def started(run_dir: Path, config: Mapping[str, Any], **given: Any) -> Iterator[Served]:
    """A front as `serve_thread` gives it, its engine started."""
    with serve_thread(run_dir, **given) as served:
        with served.client() as client:
            client.start(config, wait=True)
        yield served


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An engine that plays scripts, with a chat template that knows tools and reasoning."""
    run_dir = tmp_path_factory.mktemp("played") / "-".join(["longer", "than", "the", "path", "of", "a", "socket"] * 4)
    config = {**SMALL, "sampler": {"backend": "scripted", "max_tokens": 1000}}
    with started(run_dir, config, template=TOOLS_AND_THINKING) as served:
        yield served


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One started engine for a module whose tests leave each other alone: eval and debug episodes only."""
    with started(tmp_path_factory.mktemp("shared") / "run", SMALL) as served:
        yield served
