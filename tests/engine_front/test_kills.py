"""SIGKILL of front and real worker at random moments: the weights are those of a run that nothing disturbed.

A run in lockstep repeats itself, so the whole of it does: what is sampled, in which order it is trained, and the
weights bit for bit. Of one whose clients race, the journal's batches give a trainer that was never killed its weights.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import Process, serve_process, wait_until
from test_lifecycle import free_port, read_journal
from tiny_model import build_tiny_model

from swarm_engine.client import EpisodeLostError, SwarmClient, SwarmError, SwarmRequestError
from swarm_engine.protocol import Boot, Save, Update
from swarm_engine.server.roster import episode_records
from swarm_engine.types import BatchRecord, EngineState
from swarm_engine.worker import Engine

NUM_STEPS = 10
NUM_KILLS = 5
CONFIG: dict[str, Any] = {
    "seed": 3,
    "num_threads": 1,
    "lease_s": 3,
    "policies": {"policy": {"model": "tiny"}},
    # The only checkpoint is replaced at every update, so that kills meet its writing and its removal.
    "trainer": {"group_size": 2, "tasks_per_update": 2, "checkpoint_every": 1, "keep_last": 1},
    "sampler": {"max_tokens": 6},
}


class Run:
    """A server that is started again whenever it is found dead."""

    def __init__(self, run_dir: Path, config: dict[str, Any]) -> None:
        build_tiny_model(run_dir / "models" / "tiny")
        self.run_dir = run_dir
        self.is_over = threading.Event()
        self._config = run_dir / "config.json"
        self._config.write_text(json.dumps(config))
        self._port = str(free_port())
        self._starting = threading.Lock()
        self.served: Process = self._serve("--config", str(self._config))

    def _serve(self, *words: str) -> Process:
        return serve_process(self.run_dir, "--port", self._port, "--start", *words)

    def client(self) -> SwarmClient:
        return self.served.client()

    def mend(self) -> None:
        """Start what is dead, and wait until the engine takes episodes."""
        with self._starting:
            assert self.served.process is not None
            if self.served.process.poll() is not None:
                self.served.stop()
                self.served = self._serve()
            with suppress(SwarmError), self.client() as client:
                if client.status().state is EngineState.FAILED:
                    client.start()
                deadline = time.monotonic() + 60
                while client.status().state is EngineState.BOOTING:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)

    def takes_episodes(self) -> bool:
        """Whether it is up and has booted."""
        with suppress(SwarmError), self.client() as client:
            return client.status().state not in (EngineState.BOOTING, EngineState.FAILED)
        return False

    def kill(self, draw: random.Random) -> str:
        """Kill front or worker, where there is one; says which, and in which state."""
        assert self.served.process is not None
        state = "no answer"
        with suppress(SwarmError), self.client() as client:
            status = client.status()
            state = f"{status.state}, training" if status.update else str(status.state)
        with suppress(psutil.NoSuchProcess):
            if draw.random() < 0.5 and (workers := psutil.Process(self.served.pid).children()):
                workers[0].kill()
                return f"worker in {state}"
        self.served.process.kill()
        self.served.process.wait()  # `mend` asks whether it lives
        return f"front in {state}"


@contextmanager
def running(run_dir: Path, config: dict[str, Any]) -> Iterator[Run]:
    run = Run(run_dir, config)
    try:
        yield run
    finally:
        run.is_over.set()
        run.served.stop()


def play(run: Run, task: str) -> str:
    """Complete one episode of a task, however often that takes; returns its id."""
    episode_id, end = "", {}
    while not run.is_over.is_set():
        try:
            with run.client() as client:
                if end:  # its answer was lost, so it may be on disk
                    client._control("POST", f"/episodes/{episode_id}/end", end)
                    return episode_id
                episode = client.episode(task, wait_s=5)
                episode_id = episode.episode_id
                reply = episode.chat([{"role": "user", "content": f"Your move in {task}?"}])
                end = {"reward": float(len(set(reply.text))), "outcome": "success"}
                client._control("POST", f"/episodes/{episode_id}/end", end)
                return episode_id
        except EpisodeLostError:
            end = {}
        except SwarmRequestError as error:
            if error.status < 500:
                raise
            run.mend()
        except SwarmError:
            run.mend()
    return ""


def keep_killing(run: Run, draw: random.Random, met: Counter[str]) -> None:
    """Kills at random moments: most a little after a boot, in updates and checkpoints, the others in boots as well."""
    for _ in range(NUM_KILLS):
        if draw.random() < 0.75:
            with suppress(AssertionError):
                wait_until(run.takes_episodes)
            time.sleep(draw.uniform(0.0, 0.8))
        else:
            time.sleep(draw.uniform(0.0, 4.0))
        met[run.kill(draw)] += 1


def last_weights(run: Run) -> tuple[int, bytes]:
    """Step and weights of the checkpoint that an orderly stop leaves."""
    run.mend()
    with run.client() as client:
        wait_until(lambda: client.status().state is EngineState.ROLLING, 60)
        client.stop()
        newest = client.checkpoints()[-1]
    return newest.step, (Path(newest.path) / "policy" / "model.safetensors").read_bytes()


def trained_from_journal(run_dir: Path, aside: Path, config: dict[str, Any]) -> tuple[int, bytes]:
    """What a trainer of one policy that is never disturbed makes of a journal's batches."""
    step, saved = saved_from_journal(run_dir, aside, config)
    return step, (saved / "policy" / "model.safetensors").read_bytes()


def saved_from_journal(run_dir: Path, aside: Path, config: dict[str, Any]) -> tuple[int, Path]:
    """The checkpoint that trainers write which are never disturbed, of a journal's batches."""
    torch.set_num_threads(1)
    events, _, records = read_journal(run_dir)
    engine = Engine.boot(Boot(config, str(run_dir / "models"), str(aside)))
    for _, kind, batch in events:
        if kind == "batch":
            episodes = tuple(episode_records.validate_json(records[one]).episode for one in batch["episode_ids"])
            versions = {version for one in episodes for call in one.calls for version in call.policy_versions}
            allowed = range(batch["step"] - 1 - config["trainer"].get("max_staleness", 0), batch["step"])
            assert versions <= set(allowed), "B093: an episode was trained that other weights had sampled"
            engine.update(Update(BatchRecord(batch["step"], tuple(batch["episode_ids"]), batch["seed"]), episodes))
    return engine.step, Path(engine.save(Save()).path or "")


@pytest.mark.slow
def test_a_lockstep_run_that_is_killed_again_and_again_is_the_run_that_never_was(tmp_path: Path) -> None:
    """B106, B108: every task once, in order, and the weights of each step from the batches before it."""
    seed = 11
    print(f"seed {seed}")
    config = {**CONFIG, "lockstep": True}
    tasks = [f"{step}-{number}" for step in range(NUM_STEPS) for number in range(2) for _ in range(2)]
    found = []
    for kills in (0, NUM_KILLS):
        met: Counter[str] = Counter()
        with running(tmp_path / f"kills{kills}", config) as run:
            killer = threading.Thread(target=keep_killing, args=(run, random.Random(seed), met))
            run.mend()
            if kills:
                killer.start()
            played = [play(run, task) for task in tasks]
            if kills:
                killer.join()
            found.append(last_weights(run))
        print(dict(met))
        _, step_of, records = read_journal(run.run_dir)
        assert [step_of[episode] for episode in played] == [place // 4 + 1 for place in range(len(tasks))]
        replies = [episode_records.validate_json(records[episode]).episode.calls for episode in played]
        found.append(tuple(call.completion_ids for calls in replies for call in calls))
    assert found[0][0] == NUM_STEPS
    assert found[2:] == found[:2]
    assert trained_from_journal(run.run_dir, tmp_path / "aside", config) == found[0]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "max_staleness"), [(21, 0), (22, 2)])
def test_however_clients_race_and_processes_die_the_weights_are_the_journals(
    tmp_path: Path, seed: int, max_staleness: int
) -> None:
    print(f"seed {seed}")
    config = {**CONFIG, "trainer": {**CONFIG["trainer"], "max_staleness": max_staleness}}
    met: Counter[str] = Counter()
    with running(tmp_path / "run", config) as run:
        run.mend()

        def keep_playing(name: str) -> None:
            number = 0
            while not run.is_over.is_set():
                play(run, f"{name}{number}")
                number += 1

        # Two clients work on each task, so that groups fill.
        clients = [threading.Thread(target=keep_playing, args=(name,)) for name in ("a", "a", "b", "b")]
        for one in clients:
            one.start()
        try:
            keep_killing(run, random.Random(seed), met)
            run.mend()
            with run.client() as client:
                last = client.status().step
                wait_until(lambda: client.status().step >= last + 2, 90)
        finally:
            run.is_over.set()
            for one in clients:
                one.join(60)
        kept = last_weights(run)
    print(dict(met))
    assert kept[0] >= 3
    assert trained_from_journal(run.run_dir, tmp_path / "aside", config) == kept
