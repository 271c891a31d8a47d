"""A stop is one stop, whoever asks for it and however often, and a server that goes down does not wait for ever."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import SMALL, Served, serve_thread, wait_until
from test_lifecycle import check_journal, play, wait_for_state, wait_for_step, worker_of

from swarm_engine.client import SwarmClient, SwarmRequestError
from swarm_engine.errors import ServerClosingError
from swarm_engine.server import engine as front_engine
from swarm_engine.types import EngineState


def one_step(client: SwarmClient) -> None:
    client.start(SMALL, wait=True)
    play(client, "a", "b")
    wait_for_step(client, 1)


def test_two_stops_at_once_are_one_and_a_start_meanwhile_is_refused(serving: Callable[..., Served]) -> None:
    served = serving(save_s=0.6)
    with served.client() as client, ThreadPoolExecutor(2) as pool:
        one_step(client)
        stops = [pool.submit(client.stop), pool.submit(client.stop)]
        wait_for_state(client, EngineState.OFFLINE)
        with pytest.raises(SwarmRequestError, match="still going down") as caught:
            client.start()
        assert (caught.value.status, caught.value.code) == (409, "stopping")
        late = client.stop()
        assert [one.result().state for one in stops] == [EngineState.OFFLINE] * 2
        assert late.state is EngineState.OFFLINE
        saved = [event.payload["step"] for event in client.events(follow=False) if event.kind == "checkpoint"]
        assert saved == [1]
        assert client.start(wait=True).step == 1
    check_journal(served.run_dir)


def test_two_stops_while_an_update_runs_are_one(serving: Callable[..., Served]) -> None:
    served = serving(update_s=0.6)
    with served.client() as client, ThreadPoolExecutor(2) as pool:
        client.start(SMALL, wait=True)
        play(client, "a", "b")
        wait_for_state(client, EngineState.WEIGHT_SYNCING)
        stops = [pool.submit(client.stop), pool.submit(client.stop)]
        assert [(one.result().state, one.result().step) for one in stops] == [(EngineState.OFFLINE, 1)] * 2
    check_journal(served.run_dir)


def test_a_server_that_goes_down_skips_a_checkpoint_that_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_engine, "CLOSE_TIMEOUT_S", 0.2)
    with ThreadPoolExecutor(1) as pool:
        with serve_thread(tmp_path / "run", save_s=60.0) as served, served.client() as client:
            one_step(client)
            # An operator's stop, which would wait for two minutes, must not hold up the end either.
            pool.submit(client.stop)
            wait_until(lambda: client.status().state is EngineState.OFFLINE)
            started = time.monotonic()
        assert time.monotonic() - started < 5
    assert not list((tmp_path / "run" / "checkpoints").glob("*/weights.json"))
    with serve_thread(tmp_path / "run") as again, again.client() as client:
        assert client.start(wait=True).step == 1
    check_journal(tmp_path / "run")


def test_a_request_that_finds_the_journal_closed_hears_that_the_server_goes_down(tmp_path: Path) -> None:
    """A client that asks meanwhile whether its episode is gone must not take it for an answer."""
    with serve_thread(tmp_path / "run") as served:
        assert served.front is not None
        roster = served.front.engine.roster
    with pytest.raises(ServerClosingError, match="the server is going down; start it again"):
        asyncio.run(roster.describe("e"))


def test_a_stop_ends_the_worker_whatever_its_checkpoint_runs_into(
    serving: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the disk is on fire")

    served = serving()
    with served.client() as client:
        one_step(client)
        worker = worker_of(served)
        monkeypatch.setattr(front_engine, "best_checkpoint", broken)
        assert client.stop().state is EngineState.OFFLINE
        wait_until(lambda: not worker.is_running())
        assert "no checkpoint at the stop" in caplog.text
        monkeypatch.undo()
        assert client.start(wait=True).step == 1
    check_journal(served.run_dir)


def test_a_client_goes_on_after_a_fault_of_the_server(
    serving: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the disk is on fire")

    with serving().client() as client:
        monkeypatch.setattr(front_engine, "rate_checkpoints", broken)
        for _ in range(3):
            with pytest.raises(SwarmRequestError) as caught:
                client.checkpoints()
            assert caught.value.status == 500
            assert client.status().state is EngineState.OFFLINE
