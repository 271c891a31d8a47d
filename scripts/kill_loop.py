"""Kill a server again and again while others look into its files, and see that nothing that was answered is lost.

    python scripts/kill_loop.py --kills 40 --readers 3

A real server plays scripted episodes for clients; a collector writes the experiment log. Meanwhile readers, processes
that know nothing of ours, open the journal and the log, read, sometimes hold the write lock for a moment, and close.
Front or worker is killed with SIGKILL at random moments and started again. In the end every episode whose `end` was
answered must be in the journal and in the log once, with its reward, in at most one batch, and none that nobody ended;
and no process of ours may ever have had a deleted file open. Exits 1 otherwise. Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from sqlmodel import col, select

from experiments_db.collect import Collector
from experiments_db.engine import Database, open_database
from experiments_db.models import EpisodeRow
from experiments_db.writes import create_single_run

CONFIG = {
    "num_threads": 1,
    "lease_s": 5,
    "trainer": {"group_size": 2, "tasks_per_update": 2, "checkpoint_every": 3},
    "sampler": {"backend": "scripted", "max_tokens": 8},
}
NUM_CLIENTS = 4
BOOT_TIMEOUT_S = 120.0
LOCK_CHANCE = 0.05
READER = f"""
import contextlib, random, sqlite3, sys, time
while True:
    time.sleep(0.02)
    for path, table in zip(sys.argv[1::2], sys.argv[2::2]):
        with contextlib.suppress(sqlite3.Error):
            with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
                database.execute("SELECT count(*) FROM " + table).fetchall()
                if random.random() < {LOCK_CHANCE}:
                    database.execute("BEGIN IMMEDIATE")
                    time.sleep(0.2)
"""


@dataclass
class Server:
    """A front on a fixed port, which is started again when it is dead."""

    run_dir: Path
    port: int
    token: str = ""
    deaths: set[str] = field(default_factory=set)
    """How fronts ended that nobody had killed."""
    process: subprocess.Popen[bytes] = field(init=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/swarm/v1"

    def start(self) -> None:
        words = ["serve", "--run-dir", str(self.run_dir), "--port", str(self.port), "--json"]
        command = [sys.executable, "-P", "-m", "swarm_engine.cli", *words]
        with (self.run_dir.parent / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert self.process.stdout
        with self.process.stdout as lines:
            if not lines.readline():
                raise SystemExit(f"the server did not start; see {log.name}")
        self.token = json.loads((self.run_dir / "token.json").read_text())["operator"]

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers={"authorization": f"Bearer {self.token}"}, timeout=60)

    def status(self) -> dict[str, Any]:
        answer = httpx.get(f"{self.url}/status", headers={"authorization": f"Bearer {self.token}"}, timeout=60)
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    def workers(self) -> list[int]:
        """Process ids of what the front has started; none where it is dead."""
        found: list[int] = []
        for children in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):  # a thread that has ended
                found += map(int, children.read_text().split())
        return found

    def kill(self) -> None:
        """Kill the front."""
        self.process.kill()
        if (code := self.process.wait()) != -signal.SIGKILL:
            self.deaths.add(f"process {self.process.pid} ended with code {code}")

    def mend(self) -> None:
        """Start what is dead, and wait until episodes are taken."""
        while True:
            with contextlib.suppress(httpx.TransportError):
                return self._bring_up()
            self.kill()

    def _bring_up(self) -> None:
        if self.process.poll() is not None:
            self.kill()
            self.start()
        deadline = time.monotonic() + BOOT_TIMEOUT_S
        while (status := self.status())["state"] in ("OFFLINE", "FAILED", "BOOTING"):
            if status["state"] != "BOOTING":
                self.post("/engine/start", CONFIG)
            if time.monotonic() > deadline:
                raise SystemExit(f"the engine does not come up: {status['reason']}")
            time.sleep(0.05)


@dataclass
class Ends:
    """What clients have been told."""

    asked: dict[str, float] = field(default_factory=dict)
    """Reward of every episode that a client tried to end."""
    answered: set[str] = field(default_factory=set)
    """Those whose end was answered with 200."""


def keep_playing(server: Server, ends: Ends, draw: random.Random, is_over: threading.Event) -> None:
    """One client: claims, one call, an end that is repeated until it is answered."""
    while not is_over.is_set():
        with contextlib.suppress(httpx.TransportError):
            claim = {"client_id": "kill-loop", "task_id": f"task-{draw.randrange(4)}", "script": ["5"], "wait_s": 1}
            claimed = server.post("/episodes", claim)
            if claimed.status_code != 200 or (episode := claimed.json())["episode_id"] is None:
                time.sleep(0.05)
                continue
            ask = {"model": "policy", "messages": [{"role": "user", "content": "Your move?"}]}
            key = {"authorization": f"Bearer {episode['api_key']}"}
            if httpx.post(f"{episode['base_url']}/chat/completions", json=ask, headers=key).status_code == 200:
                end(server, ends, episode["episode_id"], draw.random(), is_over)


def end(server: Server, ends: Ends, episode_id: str, reward: float, is_over: threading.Event) -> None:
    ends.asked[episode_id] = reward
    while not is_over.is_set():
        with contextlib.suppress(httpx.TransportError):
            answer = server.post(f"/episodes/{episode_id}/end", {"reward": reward, "outcome": "success"})
            if answer.status_code == 200:
                ends.answered.add(episode_id)
            if answer.status_code < 500:
                return
        time.sleep(0.05)


def deleted_files(pids: Sequence[int], home: Path) -> set[str]:
    """Files of the home that these processes write to though they are deleted."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                    if target.startswith(str(home)) and target.endswith("(deleted)"):
                        found.add(f"{target}, process {pid}")
    return found


def faults(run_dir: Path, database: Database, ends: Ends) -> dict[str, list[str]]:
    """What is wrong with the journal and the log, by kind."""
    with contextlib.closing(sqlite3.connect(run_dir / "journal.db")) as journal:
        rewards = {
            one: json.loads(text)["main"] for one, text in journal.execute("SELECT episode_id, rewards FROM episodes")
        }
        payloads = [
            json.loads(text) for (text,) in journal.execute("SELECT payload FROM events WHERE kind = 'episode'")
        ]
        batches = [json.loads(text) for (text,) in journal.execute("SELECT episode_ids FROM batches")]
    told = Counter(payload["episode_id"] for payload in payloads)
    trained = Counter(one for batch in batches for one in batch)
    with database.read() as session:
        logged = Counter(session.exec(select(EpisodeRow.episode_id).where(col(EpisodeRow.ended_at).is_not(None))).all())
    return {
        "lost": sorted(ends.answered - rewards.keys()),
        "other reward": sorted(one for one, reward in rewards.items() if ends.asked.get(one, reward) != reward),
        "doubled": sorted(one for counts in (told, trained, logged) for one, count in counts.items() if count > 1),
        "invented": sorted((rewards.keys() | told.keys() | trained.keys() | logged.keys()) - ends.asked.keys()),
        "lost from the log": sorted(rewards.keys() - logged.keys()),
    }


@contextlib.contextmanager
def readers(count: int, files: list[str]) -> Iterator[None]:
    """Processes that look into the files, and leave, until the block ends."""
    started = [subprocess.Popen([sys.executable, "-I", "-S", "-c", READER, *files]) for _ in range(count)]
    try:
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()


def run(home: Path, kills: int, num_readers: int, seed: int) -> int:
    """The whole loop in a folder; returns the exit code."""
    draw = random.Random(seed)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        server = Server(home / "run", probe.getsockname()[1])
    server.run_dir.mkdir()
    server.start()
    ends, is_over, killed, deleted = Ends(), threading.Event(), Counter[str](), set[str]()
    files = [str(server.run_dir / "journal.db"), "episodes", str(home / "experiments.db"), "episode"]
    clients = [
        threading.Thread(target=keep_playing, args=(server, ends, random.Random(draw.random()), is_over))
        for _ in range(NUM_CLIENTS)
    ]
    with open_database(home=home) as database:
        with database.write() as session:
            experiment = create_single_run(session, "vibe", "kill loop", "none", {})
        collector = Collector(server.url.removesuffix("/swarm/v1"), server.token, database.url, experiment)
        with readers(num_readers, files), collector.run_in_thread():
            server.mend()
            for client in clients:
                client.start()
            for _ in range(kills):
                time.sleep(draw.uniform(0.0, 2.0))
                deleted |= deleted_files([os.getpid(), server.process.pid, *server.workers()], home)
                workers = server.workers()
                is_worker = bool(workers) and draw.random() < 0.5
                killed["worker" if is_worker else "front"] += 1
                if is_worker:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(workers[0], signal.SIGKILL)
                else:
                    server.kill()
                if draw.random() < 0.8:  # else the next kill meets a boot
                    server.mend()
                elif not is_worker:
                    server.start()
                    server.post("/engine/start", CONFIG)
            server.mend()
            time.sleep(1.0)  # the ends that no answer came to are asked again meanwhile
            is_over.set()
            for client in clients:
                client.join()
            deleted |= deleted_files([os.getpid(), server.process.pid, *server.workers()], home)
            collector.drain(server.status()["last_seq"])
        server.process.terminate()
        server.process.wait(60)
        found = {**faults(server.run_dir, database, ends), "deleted, yet open": sorted(deleted)}
    found["front ended by itself"] = sorted(server.deaths)
    print(f"kills                 {dict(killed)}, seed {seed}, {num_readers} readers")
    print(f"ends asked for        {len(ends.asked)}")
    print(f"ends answered         {len(ends.answered)}")
    for name, cases in found.items():
        print(f"{name:<21} {len(cases)}{'  ' + cases[0] if cases else ''}")
    return int(any(found.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40, help="how often front or worker is killed")
    parser.add_argument("--readers", type=int, default=3, help="processes that look into the files meanwhile")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kill-loop-") as folder:
        return run(Path(folder).resolve(), args.kills, args.readers, args.seed)


if __name__ == "__main__":
    sys.exit(main())
