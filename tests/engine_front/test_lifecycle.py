"""Starts, stops, failures and kills of real processes: what was answered is there afterwards, once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from children import children_with
from conftest import SMALL, Process, Served, fake_worker, log_of, serve_process, serve_thread, spoken, wait_until
from fake_worker import as_metric, digest

from swarm_engine.client import (
    AsyncSwarmClient,
    Episode,
    EpisodeLostError,
    SwarmClient,
    SwarmError,
    SwarmRequestError,
    SwarmUnavailableError,
    SyncEpisode,
    Task,
)
from swarm_engine.protocol import Update
from swarm_engine.server import journal as journals
from swarm_engine.server.engine import Engine
from swarm_engine.server.roster import episode_records
from swarm_engine.types import BatchRecord, EngineState, Mode

HI = [{"role": "user", "content": "hi"}]
CONFIG = {**SMALL, "trainer": {"group_size": 2, "tasks_per_update": 2, "checkpoint_every": 2}}


def talk(episode: SyncEpisode, task: Task) -> None:
    reply = episode.chat([{"role": "user", "content": task.task_id}], max_tokens=6)
    episode.chat([{"role": "user", "content": task.task_id}, reply.message, *HI], max_tokens=6)
    episode.end(reward=float(len(reply.text)))


def play(client: SwarmClient, *tasks: str, size: int = 2) -> None:
    client.run([Task(task) for task in tasks], talk, group_size=size, concurrency=4)


def wait_for_step(client: SwarmClient, step: int) -> None:
    wait_until(lambda: client.status().step >= step and client.status().state is EngineState.ROLLING)


def wait_for_state(client: SwarmClient, state: EngineState, limit_s: float = 20) -> None:
    wait_until(lambda: client.status().state is state, limit_s)


def worker_of(served: Served) -> psutil.Process:
    wait_until(lambda: len(children_with(str(served.run_dir), served.pid)) == 1)
    return children_with(str(served.run_dir), served.pid)[0]


def read_journal(
    run_dir: Path,
) -> tuple[list[tuple[int, str, dict[str, Any]]], dict[str, int | None], dict[str, bytes]]:
    """Events, step by episode, record by episode."""
    database = sqlite3.connect(run_dir / "journal.db")
    events = [
        (seq, kind, json.loads(payload))
        for seq, kind, payload in database.execute("SELECT seq, kind, payload FROM events")
    ]
    rows = database.execute("SELECT episode_id, step, record FROM episodes").fetchall()
    database.close()
    return events, {row[0]: row[1] for row in rows}, {row[0]: zlib.decompress(row[2]) for row in rows}


def check_journal(run_dir: Path) -> list[float]:
    """Every promise that can be read off a journal; returns the weights after each step."""
    events, step_of, records = read_journal(run_dir)
    assert [seq for seq, _, _ in events] == list(range(1, len(events) + 1))
    batches = [payload for _, kind, payload in events if kind == "batch"]
    assert [batch["step"] for batch in batches] == list(range(1, len(batches) + 1))
    trained = [episode for batch in batches for episode in batch["episode_ids"]]
    assert len(set(trained)) == len(trained), "an episode is in two batches"
    weights, expected = "start", []
    for batch in batches:
        assert all(step_of[episode] == batch["step"] for episode in batch["episode_ids"])
        episodes = tuple(episode_records.validate_json(records[episode]).episode for episode in batch["episode_ids"])
        versions = {version for one in episodes for call in one.calls for version in call.policy_versions}
        assert versions <= {batch["step"] - 1}, "B093: other weights than the last have sampled what was trained"
        record = BatchRecord(batch["step"], tuple(batch["episode_ids"]), batch["seed"])
        weights = digest(weights, Update(record, episodes))
        expected.append(as_metric(weights))
    steps = [payload for _, kind, payload in events if kind == "step"]
    assert len({step["step"] for step in steps}) == len(steps), "a step was reported twice"
    for step in steps:
        assert step["metrics"]["weights"] == expected[step["step"] - 1], "the weights are not what the journal says"
    states = [payload for _, kind, payload in events if kind == "state"]
    for before, after in itertools.pairwise(states):
        assert before["to"] == after["from"]
    return expected


# Orderly ends


def test_a_stopped_engine_goes_on_with_what_it_had(serving: Callable[..., Served], tmp_path: Path) -> None:
    served = serving()
    with served.client() as client:
        client.start(CONFIG, wait=True)
        play(client, "a", "b", "c")
        wait_for_step(client, 1)
        running = client.episode("d")
        assert client.stop().state is EngineState.OFFLINE
        with pytest.raises(SwarmUnavailableError, match="OFFLINE"):
            client.episode("d", wait_s=0)
        with pytest.raises(EpisodeLostError):
            running.chat(HI)
        assert not children_with(str(served.run_dir), served.pid)
        status = client.start(wait=True)
        assert (status.step, status.pool.episodes) == (1, 2)
        play(client, "d")
        wait_for_step(client, 2)
        kinds = Counter(event.kind for event in client.events(follow=False))
    assert kinds["config"] == 2
    assert check_journal(tmp_path / "run")


def test_the_status_counts_kept_episodes_while_nothing_is_started(tmp_path: Path) -> None:
    with serve_thread(tmp_path / "run") as first, first.client() as client:
        assert client.status().pool.targets["episodes"] == 0
        assert client.status().pool.rule == "tasks"
        client.start(CONFIG, wait=True)
        play(client, "a", "b", "c")
        wait_for_step(client, 1)
        with client.episode("d") as half:
            spoken(half).end(reward=0.0)
        rolling = client.status().pool
        assert (rolling.episodes, rolling.tasks, rolling.targets["episodes"]) == (3, 1, 4)
        assert client.stop().pool == rolling
    with serve_thread(tmp_path / "run") as second, second.client() as client:
        assert client.status().pool == rolling
        client.start(wait=True)
        assert client.status().pool == rolling


def test_another_start_in_the_same_folder_keeps_tokens_and_name_and_says_what_is_lost(tmp_path: Path) -> None:
    with serve_thread(tmp_path / "run") as first, first.client() as client:
        client.start(CONFIG, wait=True)
        play(client, "a")
        with client.episode("ended", mode=Mode.EVAL) as ended:
            ended.end(reward=1.0)
        running = client.episode("b")
        server_id = client.status().server_id
    with serve_thread(tmp_path / "run") as second, second.client() as client:
        assert second.tokens == first.tokens
        assert client.status().server_id == server_id
        assert client.status().state is EngineState.OFFLINE
        assert len(client.timelines(ended.episode_id)) == 0
        with pytest.raises(SwarmRequestError, match="claim its task again") as caught:
            client._control("POST", f"/episodes/{running.episode_id}/end", {"reward": 1.0, "outcome": "success"})
        assert (caught.value.status, caught.value.code) == (410, "episode_lost")
        same = client._control("POST", f"/episodes/{ended.episode_id}/end", {"reward": 1.0, "outcome": "success"})
        assert same["rewards"] == {"main": 1.0}
        assert client.start(wait=True).pool.episodes == 2
        play(client, "b")
        wait_for_step(client, 1)
    check_journal(tmp_path / "run")


def test_a_config_that_would_break_the_replay_is_refused_in_a_folder_with_episodes(
    serving: Callable[..., Served],
) -> None:
    with serving().client() as client:
        client.start(SMALL, wait=True)
        client.stop()
        client.start({**SMALL, "seed": 8}, wait=True)
        play(client, "a")
        client.stop()
        with pytest.raises(SwarmRequestError, match=r"seed, trainer.learning_rate can't change") as caught:
            client.start({**SMALL, "trainer": {**SMALL["trainer"], "learning_rate": 0.5}})  # type: ignore[dict-item]
        assert caught.value.code == "config_changed"
        relaxed = {**SMALL, "seed": 8, "lease_s": 5.0, "sampler": {"max_tokens": 3}}
        assert client.start(relaxed, wait=True).pool.episodes == 2


def test_what_a_config_leaves_open_is_compared_by_what_the_run_was_begun_with(serving: Callable[..., Served]) -> None:
    def config(**trainer: Any) -> dict[str, Any]:
        return {**SMALL, "trainer": {**SMALL["trainer"], **trainer}}  # type: ignore[dict-item]

    with serving().client() as client:
        assert client.start(config(), wait=True).policies["policy"].learning_rate == 1e-6
        play(client, "a")
        client.stop()
        trained = [event.payload["policies"] for event in client.events(follow=False) if event.kind == "trained"]
        assert trained == [{"policy": {"learning_rate": 1e-6, "warmup_updates": 0}}]
        with pytest.raises(SwarmRequestError, match=r"; trainer.learning_rate can't change"):
            client.start(config(learning_rate=1e-3))
        with pytest.raises(SwarmRequestError, match=r"; trainer.warmup_updates can't change"):
            client.start(config(warmup_updates=5))
        client.start(config(learning_rate=1e-6, warmup_updates=0), wait=True)
        client.stop()


def test_a_run_whose_config_named_every_value_goes_on_with_these(serving: Callable[..., Served]) -> None:
    old = {**SMALL["trainer"], "learning_rate": 1e-3, "warmup_updates": 0}  # type: ignore[dict-item]
    with serving().client() as client:
        client.start({**SMALL, "trainer": old}, wait=True)
        play(client, "a")
        client.stop()
        assert client.start(SMALL, wait=True).policies["policy"].learning_rate == 1e-3
        *_, config = (event.payload["config"] for event in client.events(follow=False) if event.kind == "config")
        assert (config["trainer"]["learning_rate"], config["trainer"]["warmup_updates"]) == (1e-3, 0)


def test_an_engine_that_runs_can_not_be_started(serving: Callable[..., Served]) -> None:
    with serving().client() as client:
        client.start(SMALL, wait=True)
        with pytest.raises(SwarmRequestError, match="ROLLING, it can be started from OFFLINE and FAILED") as caught:
            client.start(SMALL)
        assert caught.value.status == 409


@pytest.mark.parametrize(
    ("config", "where"),
    [
        ({"seeds": 1}, "seeds"),
        ({"trainer": {"group_size": 1}}, "trainer.group_size"),
        ({"policies": {}}, "policies names none"),
        ({"lockstep": True, "trainer": {"max_staleness": 2}}, "lockstep is true and trainer.max_staleness is 2"),
    ],
)
def test_a_config_with_a_mistake_is_refused_by_name(engine: Served, config: dict[str, Any], where: str) -> None:
    with engine.client() as client, pytest.raises(SwarmRequestError, match=where) as caught:
        client.start(config)
    assert caught.value.status == 422


def test_checkpoints_come_every_so_many_updates_and_a_start_loads_the_last(serving: Callable[..., Served]) -> None:
    served = serving()
    with served.client() as client:
        client.start(CONFIG, wait=True)
        for number in range(3):
            play(client, f"a{number}", f"b{number}")
        wait_for_step(client, 3)
        wait_until(lambda: any(event.kind == "checkpoint" for event in client.events(follow=False)))
        client.stop()
        saved = [event.payload["step"] for event in client.events(follow=False) if event.kind == "checkpoint"]
        assert saved == [2, 3]
        # What a crash left of a third.
        (served.run_dir / "checkpoints" / "step-000004").mkdir()
        listed = client._control("GET", "/checkpoints")["checkpoints"]
        assert [one["step"] for one in listed] == [2, 3]
        client.start(wait=True)
        assert client.checkpoint().endswith("step-000003")
        assert client.export("policy", "mine").endswith("exports/mine")
        with pytest.raises(SwarmRequestError, match="is there already; name another folder") as refused:
            client.export("policy", "mine")
        assert (refused.value.status, refused.value.code) == (409, "export_exists")
        for name in ("../mine", "mine\0", "m" * 201):
            with pytest.raises(SwarmRequestError, match=r"no plain folder name.*at most 200 bytes"):
                client.export("policy", name)
        play(client, "a", "b")
        wait_for_step(client, 4)
    check_journal(served.run_dir)


def test_a_checkpoint_waits_until_the_step_it_holds_is_on_disk(serving: Callable[..., Served]) -> None:
    served = serving(update_s=0.5)
    every = {**SMALL, "trainer": {**SMALL["trainer"], "checkpoint_every": 1}}
    with served.client() as client:
        client.start(every, wait=True)
        play(client, "a", "b")
        wait_for_state(client, EngineState.WEIGHT_SYNCING)
        wait_until(lambda: any(event.kind == "batch" for event in client.events(follow=False)))
        other = sqlite3.connect(served.run_dir / "journal.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        wait_until(lambda: client.status().step == 1)
        for _ in range(20):
            assert client._control("GET", "/checkpoints")["checkpoints"] == []
            time.sleep(0.01)
        other.execute("COMMIT")
        other.close()
        wait_until(lambda: len(client._control("GET", "/checkpoints")["checkpoints"]) == 1)


def test_a_program_that_was_killed_goes_on_with_its_tasks_where_it_was(tmp_path: Path) -> None:
    """B108: ten tasks, killed after four and a half; the others are played once each, in their order."""
    run_dir = tmp_path / "run"
    tasks = [Task(f"t{number}") for number in range(10)]
    played: list[str] = []

    def rollout(episode: SyncEpisode, task: Task) -> None:
        if len(played) == 9 and served.process and served.process.poll() is None:
            served.stop(signal.SIGKILL)
        talk(episode, task)
        played.append(task.task_id)

    served = serve_process(run_dir, "--start", "--config", str(config_file(tmp_path)), worker=fake_worker(run_dir))
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(served.stop)
        client = cleanup.enter_context(served.client())
        wait_for_state(client, EngineState.ROLLING)
        with pytest.raises(SwarmUnavailableError):
            client.run(tasks, rollout, group_size=2, concurrency=1, resume=True)
    before = played.copy()
    played.clear()
    with serve_thread(run_dir) as again, again.client() as client:
        assert client.start(wait=True).step == 2
        assert client.completed() == {"t0": 2, "t1": 2, "t2": 2, "t3": 2, "t4": 1}
        results = client.run(tasks, rollout, group_size=2, concurrency=1, resume=True)
        assert [one.task_id for one in results] == ["t4", *(f"t{number}" for number in range(5, 10) for _ in range(2))]
        wait_for_step(client, 5)
        assert client.run(tasks, talk, group_size=2, concurrency=1, resume=True, epoch=0) == []
    assert before + played == [f"t{number}" for number in range(10) for _ in range(2)]
    check_journal(run_dir)


def test_a_program_that_runs_its_tasks_once_an_update_goes_on_where_it_was(serving: Callable[..., Served]) -> None:
    """Three updates of the same two tasks; killed in the second, begun again, killed again, gone on with by number."""
    served = serving()
    tasks, played = [Task("a"), Task("b")], []

    def program(
        stops_after: int, run: Callable[[SwarmClient, int, Callable[[SyncEpisode, Task], None]], Any]
    ) -> list[str]:
        """What it plays until it is killed, or through all its updates."""
        played.clear()

        def rollout(episode: SyncEpisode, task: Task) -> None:
            if len(played) == stops_after:
                raise KeyboardInterrupt
            talk(episode, task)
            played.append(task.task_id)

        with served.client() as client, suppress(KeyboardInterrupt):
            for number in range(3):
                run(client, number, rollout)
        return played.copy()

    def counted(client: SwarmClient, _: int, rollout: Callable[[SyncEpisode, Task], None]) -> None:
        client.run(tasks, rollout, group_size=2, concurrency=1, resume=True)

    def numbered(client: SwarmClient, number: int, rollout: Callable[[SyncEpisode, Task], None]) -> None:
        if number == 2:  # it begins elsewhere than the program before
            client.run(tasks, rollout, group_size=2, concurrency=1, resume=True, epoch=number)

    with served.client() as client:
        client.start(CONFIG, wait=True)
        assert program(5, counted) == ["a", "a", "b", "b", "a"]
        assert program(4, counted) == ["a", "b", "b", "a"]
        assert program(99, numbered) == ["a", "b", "b"]
        assert program(99, counted) == []
        wait_for_step(client, 3)
        assert client.completed() == {"a": 6, "b": 6}
    check_journal(served.run_dir)


def test_a_run_that_failed_is_not_counted_as_a_pass(serving: Callable[..., Served]) -> None:
    served = serving()

    async def main() -> None:
        async with AsyncSwarmClient(served.url, served.tokens["operator"]) as client:
            played: list[str] = []

            async def rollout(episode: Episode, task: Task) -> None:
                if len(played) == 3:
                    played.append("fails")
                    raise KeyError("a bug of mine")
                played.append(task.task_id)
                await episode.chat(HI, max_tokens=1)
                await episode.end(reward=1.0)

            await client.start(CONFIG, wait=True)
            tasks = [Task("a"), Task("b"), Task("a")]
            with pytest.raises(KeyError):
                await client.run(tasks, rollout, group_size=2, concurrency=1, resume=True)
            assert played == ["a", "a", "b", "fails"]
            for _ in range(2):
                del played[4:]
                await client.run(tasks, rollout, group_size=2, concurrency=1, resume=True)
            assert played[4:] == ["a", "a", "b", "b", "a", "a"]
            with pytest.raises(ValueError, match="resume goes with mode train, not eval"):
                await client.run(tasks, rollout, group_size=2, concurrency=1, resume=True, mode=Mode.EVAL)
            with pytest.raises(ValueError, match="add resume=True"):
                await client.run(tasks, rollout, group_size=2, concurrency=1, epoch=1)
            assert await client.completed() == {"a": 8, "b": 4}

    asyncio.run(main())


def test_a_member_that_never_ends_wedges_its_group_neither_before_nor_after_a_restart(tmp_path: Path) -> None:
    """B088."""
    run_dir = tmp_path / "run"
    four = {**SMALL, "lease_s": 1.0, "trainer": {"group_size": 4, "tasks_per_update": 1}}
    with serve_thread(run_dir) as first, first.client() as client:
        client.start(four, wait=True)
        for reward in (0.0, 1.0, 2.0):
            spoken(client.episode("a")).end(reward=reward)
        stuck = client._control("POST", "/episodes", {"client_id": "c", "task_id": "a"})
    with serve_thread(run_dir) as second, second.client() as client:
        status = client.start(wait=True)
        assert (status.pool.episodes, status.running) == (3, 0)
        with pytest.raises(EpisodeLostError):
            client._control("POST", f"/episodes/{stuck['episode_id']}/end", {"reward": 1.0, "outcome": "success"})
        client._control("POST", "/episodes", {"client_id": "c", "task_id": "a"})  # stuck again
        with client.episode("a", wait_s=10) as rest:
            assert (rest.group_id, rest.index) == ("a#0", 3)
            spoken(rest).end(reward=3.0)
        wait_for_step(client, 1)
    check_journal(run_dir)


@pytest.mark.slow
def test_the_status_answers_while_the_journal_of_a_long_run_is_read(tmp_path: Path) -> None:
    """Within 100 ms, counted in CPU time between two turns of the event loop, for the machine is shared."""
    run_dir = tmp_path / "run"
    config = {**SMALL, "trainer": {"group_size": 2, "tasks_per_update": 128}}
    with serve_thread(run_dir, max_context=100_000) as served, served.client() as client:
        client.start(config, wait=True)
        with client.episode("t#0") as episode:
            for number in range(10):
                episode.chat([{"role": "user", "content": f"{number}" * 5000}], max_tokens=4)
            episode.end(reward=1.0)
    multiply_episodes(run_dir, num_open=255, num_trained=50_000)
    with serve_thread(run_dir) as served, served.client() as client:
        assert served.front is not None
        engine = served.front.engine
        started_s = time.process_time()
        client.start()
        longest_turn = asyncio.run_coroutine_threadsafe(longest_turn_s(engine), engine.journal._loop)
        states = []
        while (status := client.status()).state is EngineState.BOOTING:
            states.append(status.state)
        assert (status.state, status.pool.episodes) == (EngineState.ROLLING, 255)
        print(
            f"longest {longest_turn.result(10):.3f} s of {time.process_time() - started_s:.3f} s, {len(states)} answers"
        )
        assert longest_turn.result() < 0.1
        assert len(states) > 10


async def longest_turn_s(engine: Engine) -> float:
    """CPU time of this process between two turns of its event loop, at most, while an engine boots."""
    longest_s, last_s = 0.0, time.process_time()
    while engine.state is EngineState.BOOTING:
        await asyncio.sleep(0.001)
        now_s = time.process_time()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    return longest_s


def multiply_episodes(run_dir: Path, num_open: int, num_trained: int) -> None:
    """Make of a journal's one completed episode many: some of the open batch, and more of earlier batches."""
    database = sqlite3.connect(run_dir / "journal.db")
    names = [name for _, name, *_ in database.execute("PRAGMA table_info(episodes)")]
    ((*values,),) = database.execute("SELECT * FROM episodes").fetchall()
    first = dict(zip(names, values, strict=True))
    record = zlib.decompress(first["record"])

    def copies() -> Iterator[tuple[Any, ...]]:
        for number in range(1, num_open + num_trained):
            episode_id, group = f"e{number:024x}", number // 2
            is_open = number < num_open
            changed = record.replace(first["episode_id"].encode(), episode_id.encode()) if is_open else b"{}"
            row = first | {
                "episode_id": episode_id,
                "group_id": f"t#{group}",
                "position": group + 1,
                "place": number % 2,
                "step": None if is_open else 1,
                "record": zlib.compress(changed, 1),
            }
            yield tuple(row.values())

    with database:
        database.executemany(f"INSERT INTO episodes VALUES ({', '.join('?' * len(names))})", copies())
    database.close()


# Failures


def test_a_worker_that_can_not_boot_fails_the_engine_with_its_reason(serving: Callable[..., Served]) -> None:
    served = serving(boot_error="there is no model 'nano-chess'")
    with served.client() as client:
        with pytest.raises(SwarmUnavailableError, match="there is no model 'nano-chess'"):
            client.start(SMALL, wait=True)
        assert client.status().state is EngineState.FAILED
        with pytest.raises(SwarmUnavailableError, match=r"nano-chess.*start it again"):
            client.episode("a", wait_s=0)
        fake_worker(served.run_dir)
        client.start(wait=True)
        play(client, "a")


def test_a_worker_that_is_killed_fails_the_engine_and_a_start_loses_nothing(serving: Callable[..., Served]) -> None:
    served = serving(token_s=0.02, end_chance=0.0)
    with served.client() as client:
        client.start(CONFIG, wait=True)
        play(client, "a")
        episode = client.episode("b")
        failures: list[BaseException] = []

        def call() -> None:
            try:
                episode.chat(HI, max_tokens=16)
            except SwarmError as error:
                failures.append(error)

        waiting = threading.Thread(target=call)
        waiting.start()
        wait_until(lambda: client._control("GET", f"/episodes/{episode.episode_id}")["num_running_calls"] == 1)
        worker_of(served).send_signal(signal.SIGKILL)
        waiting.join(10)
        wait_for_state(client, EngineState.FAILED)
        assert isinstance(failures[0], EpisodeLostError)
        assert "killed by SIGKILL" in (client.status().reason or "")
        assert client.start(wait=True).pool.episodes == 2
        play(client, "b")
        wait_for_step(client, 1)
    check_journal(served.run_dir)


@pytest.mark.parametrize(
    ("route", "error"),
    [("chat/completions", 'data: {"error"'), ("responses", "event: response.failed"), ("messages", "event: error")],
)
def test_a_stream_whose_worker_is_killed_ends_with_an_error(
    serving: Callable[..., Served], route: str, error: str
) -> None:
    """B082: nobody waits for the rest."""
    served = serving(token_s=0.02, end_chance=0.0)
    with served.client() as client:
        client.start({**CONFIG, "sampler": {"max_tokens": 2000}}, wait=True)
        episode = client.episode("a")
        asked = {"input": "hi"} if route == "responses" else {"messages": HI}
        limit = {"max_tokens": 2000} if route == "messages" else {}
        body = {"model": "m", "stream": True, **asked, **limit}
        auth = {"authorization": f"Bearer {episode.api_key}"}
        with httpx.stream("POST", f"{episode.base_url}/{route}", headers=auth, json=body, timeout=5) as answer:
            lines = answer.iter_lines()
            seen = [next(lines) for _ in range(20)]
            worker_of(served).send_signal(signal.SIGKILL)
            seen += list(lines)
        assert any(line.startswith(error) for line in seen[20:])
        assert not {"data: [DONE]", "event: message_stop", "event: response.completed"} & set(seen)
        wait_for_state(client, EngineState.FAILED)
        episode.abort()


def test_a_batch_whose_update_was_killed_is_trained_at_the_next_start(serving: Callable[..., Served]) -> None:
    served = serving(update_s=0.5)
    with served.client() as client:
        client.start(CONFIG, wait=True)
        for number in range(3):
            play(client, f"a{number}", f"b{number}")
            wait_for_step(client, number + 1)
        play(client, "a", "b")
        wait_for_state(client, EngineState.WEIGHT_SYNCING)
        worker_of(served).send_signal(signal.SIGKILL)
        wait_for_state(client, EngineState.FAILED)
        client.start(wait=True)
        assert client.status().step == 4
        steps = [event.payload["step"] for event in client.events(follow=False) if event.kind == "step"]
        assert steps == [1, 2, 3, 4]
    check_journal(served.run_dir)


def test_a_full_disk_fails_the_engine_and_a_start_after_making_room_goes_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with serve_thread(run_dir) as served, served.client() as client:
        client.start(CONFIG, wait=True)
        play(client, "a")
        limit_pages(served, 2)
        unwritten = client.episode("b")
        with pytest.raises(SwarmRequestError, match=r"is full.*make room") as caught:
            unwritten.end(reward=1.0, metrics={f"metric {number}": 1.0 for number in range(1000)})
        assert (caught.value.status, caught.value.code) == (507, "journal_full")
        wait_for_state(client, EngineState.FAILED)
        assert "is full" in (client.status().reason or "")
        assert client.status().running == 0
        client.start(wait=True)
        assert client.status().pool.episodes == 2
        with pytest.raises(EpisodeLostError, match=r"its end could not be written.*claim its task again"):
            unwritten.end(reward=1.0)
        play(client, "b")
        wait_for_step(client, 1)
    events, _, _ = read_journal(run_dir)
    assert Counter(kind for _, kind, _ in events)["episode"] == 4


def test_another_programs_lock_delays_ends_and_claims_and_the_engine_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "WRITER_TIMEOUT_S", 0.02)
    run_dir = tmp_path / "run"
    with serve_thread(run_dir) as served, served.client() as client:
        client.start(CONFIG, wait=True)
        play(client, "a")
        waits, asks_again = (spoken(client.episode("b")) for _ in range(2))
        other = sqlite3.connect(run_dir / "journal.db", isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        ending = threading.Thread(target=lambda: waits.end(reward=1.0))
        ending.start()
        assert served.front is not None
        journal = served.front.engine.journal
        wait_until(lambda: journal.locked_since is not None)
        assert client.status().pool.episodes == 2
        other.execute("ROLLBACK")
        ending.join()
        assert client.status().pool.episodes == 3

        other.execute("BEGIN IMMEDIATE")
        with monkeypatch.context() as patched:
            patched.setattr(journals, "LOCK_PATIENCE_S", 0.0)
            for refused in (lambda: asks_again.end(reward=0.0), lambda: client.episode("c", mode=Mode.EVAL, wait_s=0)):
                with pytest.raises(SwarmUnavailableError, match=r"locked .*end it .*ask again"):
                    refused()
        other.close()
        asks_again.end(reward=0.0)
        wait_for_step(client, 1)
    assert check_journal(run_dir)
    events, _, _ = read_journal(run_dir)
    assert Counter(kind for _, kind, _ in events)["episode"] == 4


def limit_pages(served: Served, more: int) -> None:
    """Make SQLite believe that the disk is full after a few more pages of 4 KiB."""
    assert served.front is not None
    database = served.front.engine.journal._writer_database
    (pages,) = database.execute("PRAGMA page_count").fetchone()
    database.execute(f"PRAGMA max_page_count={pages + more}")


def test_a_judge_that_never_judges_stops_the_run_with_a_reason(serving: Callable[..., Served]) -> None:
    """B087."""
    with serving().client() as client:
        client.start(CONFIG, wait=True)
        spoken(client.episode("a")).end(reward=1.0)
        for _ in range(11):
            client.episode("b").end(reward=None)
        spoken(client.episode("b")).end(reward=1.0)
        for _ in range(12):
            client.episode("b").end(reward=None)
        status = client.status()
        assert status.state is EngineState.FAILED
        assert "last 12 train episodes ended without a reward or without a call, the last one as null_reward" in (
            status.reason or ""
        )
        assert client.start(wait=True).pool.episodes == 2
        assert client.stop().reason is None, "an old failure is no reason to be OFFLINE"


# Processes


def test_a_second_server_in_a_folder_and_a_taken_port_are_refused(tmp_path: Path) -> None:
    with serve_thread(tmp_path / "run") as served:
        again = serve_in_vain("--run-dir", str(tmp_path / "run"))
        assert again.returncode == 2
        assert f"another server runs in {tmp_path / 'run'} at {served.url}" in again.stderr
        assert "choose another --run-dir" in again.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        refused = serve_in_vain("--run-dir", str(tmp_path / "other"), "--port", port, "--json")
        assert refused.returncode == 2
        assert f"127.0.0.1 port {port} can't be bound" in refused.stderr
        assert json.loads(refused.stdout)["event"] == "error"


def serve_in_vain(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "swarm_engine.cli", "serve", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_ends_the_worker_and_exits_with_0(tmp_path: Path, number: int) -> None:
    run_dir = tmp_path / "run"
    served = serve_process(run_dir, "--start", "--config", str(config_file(tmp_path)), worker=fake_worker(run_dir))
    with served.client() as client:
        wait_for_state(client, EngineState.ROLLING)
        play(client, "a", "b")
        wait_for_step(client, 1)
        followed = client.events(after=client.status().last_seq - 1)
        next(followed)
        worker = worker_of(served)
        started = time.monotonic()
        assert served.stop(number) == 0
        assert time.monotonic() - started < 10
        wait_until(lambda: not worker.is_running())
        ends = (event.payload for event in followed if event.kind == "state" and event.payload["to"] == "OFFLINE")
        assert next(ends)["cause"] == signal.Signals(number).name
    assert not (run_dir / "server.json").exists()
    assert not [*run_dir.glob("*.sock")]
    assert stat.S_IMODE((run_dir / "journal.db").stat().st_mode) == 0o600
    assert (run_dir / "checkpoints" / "step-000001" / "weights.json").exists()
    assert "Traceback" not in log_of(run_dir).read_text()
    check_journal(run_dir)


def config_file(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({**CONFIG, **changes}))
    return file


def test_a_server_ends_with_the_program_that_embeds_it_and_its_worker_with_it(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    served = serve_process(run_dir, "--start", "--exit-with-stdin", worker=fake_worker(run_dir), stdin=subprocess.PIPE)
    with served.client() as client:
        wait_for_state(client, EngineState.ROLLING)
    worker = worker_of(served)
    assert served.process is not None
    assert served.process.stdin is not None
    served.process.stdin.close()
    assert served.process.wait(20) == 0
    wait_until(lambda: not worker.is_running())
    served.stop()


@pytest.mark.slow
def test_whatever_is_killed_whenever_no_completed_episode_is_lost_and_none_is_trained_twice(tmp_path: Path) -> None:
    """SIGKILL of front and worker at random points while clients play; the weights are those of the journal."""
    run_dir = tmp_path / "run"
    draw = random.Random(5)
    worker = fake_worker(run_dir, token_s=0.001, update_s=0.05)
    # An end whose answer is lost is played again in a group that nobody fills; a short lease gives that up soon.
    config = config_file(tmp_path, lease_s=3)
    served = serve_process(run_dir, "--port", str(free_port()), "--start", "--config", str(config), worker=worker)
    port = served.url.rpartition(":")[2]
    answered: list[str] = []
    is_over = threading.Event()

    def keep_playing(name: str) -> None:
        number = 0
        while not is_over.is_set():
            with suppress(SwarmError), SwarmClient(served.url, served.tokens["sampler"]) as client:
                while not is_over.is_set():
                    with client.episode(f"{name}{number}", wait_s=5) as episode:
                        talk(episode, Task(f"{name}{number}"))
                        answered.append(episode.episode_id)
                    number += 1
            time.sleep(0.05)

    # Two clients work on each task, so that groups fill.
    clients = [threading.Thread(target=keep_playing, args=(name,)) for name in ("a", "a", "b", "b")]
    for client_thread in clients:
        client_thread.start()
    try:
        for _ in range(5):
            time.sleep(draw.uniform(0.3, 1.5))
            if draw.random() < 0.5:
                served.stop(signal.SIGKILL)
                served = serve_process(run_dir, "--port", port, "--start", worker=worker)
            else:
                with suppress(psutil.NoSuchProcess, AssertionError):
                    worker_of(served).send_signal(signal.SIGKILL)
                with served.client() as client:
                    wait_until(lambda client=client: client.status().state in (EngineState.FAILED, EngineState.ROLLING))
                    with suppress(SwarmRequestError):
                        client.start()
            with served.client() as client:
                wait_until(lambda client=client: client.status().state not in (EngineState.BOOTING, EngineState.FAILED))
        with served.client() as client:
            last = client.status().step
            wait_until(lambda: client.status().step >= last + 2, 60)
    finally:
        is_over.set()
        for client_thread in clients:
            client_thread.join(30)
        assert served.stop() == 0
    weights = check_journal(run_dir)
    assert len(weights) >= 3
    _, step_of, _ = read_journal(run_dir)
    assert set(answered) <= set(step_of), "an episode that was answered is gone"
    kept = json.loads(sorted((run_dir / "checkpoints").glob("step-*/weights.json"))[-1].read_text())
    assert as_metric(kept["weights"]) == weights[kept["step"] - 1]
    assert len(answered) > 10


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_no_worker_outlives_a_front_that_was_killed(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    served: Process = serve_process(run_dir, "--start", worker=fake_worker(run_dir))
    with served.client() as client:
        wait_for_state(client, EngineState.ROLLING)
    worker = worker_of(served)
    served.stop(signal.SIGKILL)
    wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)
    with serve_thread(run_dir) as again, again.client() as client:
        causes = [event.payload["cause"] for event in client.events(follow=False) if event.kind == "state"]
        assert causes[-1] == "the server ended without stopping the engine"
        assert client.status().state is EngineState.OFFLINE


def test_a_step_says_what_goes_wrong_over_updates_and_over_a_restart(tmp_path: Path) -> None:
    """Five updates make a window; the first one after a restart is judged with those before it."""
    run_dir = tmp_path / "run"
    worker = fake_worker(run_dir, zero_variance_fraction=0.9)
    config = {**SMALL, "trainer": {"group_size": 2, "tasks_per_update": 1}}
    with serve_thread(run_dir, worker=worker) as served, served.client() as client:
        client.start(config, wait=True)
        for step in range(1, 6):
            play(client, f"t{step}")
            wait_for_step(client, step)
        client.stop()
    with serve_thread(run_dir, worker=worker) as served, served.client() as client:
        client.start(wait=True)
        play(client, "t6")
        wait_for_step(client, 6)
        health = [event.payload["health"] for event in client.events(follow=False) if event.kind == "step"]
    assert [len(some) for some in health] == [0, 0, 0, 0, 1, 1]
    warning = health[-1][0]
    assert warning.pop("message").startswith("90% of the groups got one reward for all episodes")
    assert warning == {"policy": "", "kind": "zero_variance", "value": 0.9, "limit": 0.7}
