"""Connections as they are in the world: left, blocked, shared by requests, and offered for another protocol."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from conftest import SMALL, Served, fake_worker, log_of, serve_process, wait_until
from tiny_tokenizer import END_ID, ids

from swarm_engine.client import AsyncSwarmClient, SwarmClient, SyncEpisode
from swarm_engine.server.serve import ServeOptions, listening
from swarm_engine.types import EngineState, Mode

HI: list[Any] = [{"role": "user", "content": "hi"}]
PLAYED = {**SMALL, "sampler": {"backend": "scripted", "max_tokens": 100_000}}
OFFER = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
FLOOD = {"messages": HI, "stream": True, "logprobs": True, "top_logprobs": 20, "script": "abcdefghij" * 2000}
"""Its reply is some megabytes, more than the system keeps for a caller that does not read."""


def request(episode: SyncEpisode, body: dict[str, Any], headers: str = "") -> bytes:
    url, payload = urlsplit(episode.base_url), json.dumps(body)
    head = f"POST {url.path}/v1/chat/completions HTTP/1.1\r\nHost: {url.netloc}\r\nX-Api-Key: {episode.api_key}\r\n"
    return f"{head}{headers}Content-Length: {len(payload)}\r\n\r\n{payload}".encode()


def connect(served: Served, read_ahead: int | None = None) -> socket.socket:
    url = urlsplit(served.url)
    line = socket.socket()
    if read_ahead is not None:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, read_ahead)
    line.settimeout(20)
    line.connect((url.hostname, url.port))
    return line


def read_until(line: socket.socket, wanted: bytes) -> bytes:
    found = b""
    while wanted not in found:
        piece = line.recv(1 << 16)
        assert piece, found
        found += piece
    return found


@pytest.mark.parametrize("host", ["::1", "localhost", "127.0.0.1"])
def test_whatever_it_is_bound_to_a_server_tells_an_address_that_is_one(host: str, tmp_path: Path) -> None:
    if host == "::1" and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")

    async def ask() -> tuple[str, EngineState]:
        async with listening(ServeOptions(tmp_path / "run", host=host, worker_command=("false",))) as front:
            token = json.loads(front.token_file.read_text())["observer"]
            async with AsyncSwarmClient(front.url, token) as client:
                return front.url, (await client.status()).state

    url, state = asyncio.run(ask())
    assert state is EngineState.OFFLINE
    assert url.startswith("http://[::1]:" if host == "::1" else "http://127.0.0.1:" if host[0] == "1" else "http://")


def num_running(served: Served, episode: SyncEpisode) -> int:
    assert served.front is not None
    return served.front.engine.roster.find(episode.episode_id).num_running


@pytest.fixture
def slow(serving: Callable[..., Served]) -> Iterator[tuple[Served, SwarmClient]]:
    """Every token takes 30 ms."""
    served = serving(token_s=0.03)
    with served.client() as client:
        client.start(PLAYED, wait=True)
        yield served, client


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_caller_that_leaves_while_more_of_its_requests_wait_trains_nothing(
    slow: tuple[Served, SwarmClient], caplog: pytest.LogCaptureFixture, is_stream: bool
) -> None:
    served, client = slow
    with client.episode("t", mode=Mode.EVAL) as episode:
        with closing(connect(served)) as line:
            line.sendall(request(episode, {"messages": HI, "stream": is_stream, "script": "abcdefghij" * 10}))
            wait_until(lambda: num_running(served, episode) == 1)
            line.sendall(request(episode, {"messages": HI, "script": "x"}) * 2)
            time.sleep(0.3)
        started = time.monotonic()
        wait_until(lambda: num_running(served, episode) == 0)
        assert time.monotonic() - started < 1
        episode.end(reward=1.0)
    (timeline,) = client.timelines(episode.episode_id)
    assert not any(timeline["blocks"][-1]["loss_mask"])
    assert not caplog.records


def test_requests_sent_ahead_on_one_connection_are_answered_in_order(slow: tuple[Served, SwarmClient]) -> None:
    served, client = slow
    with client.episode("t", mode=Mode.EVAL) as episode:
        with closing(connect(served)) as line:
            line.sendall(b"".join(request(episode, {"messages": HI, "script": f"-{n}-"}) for n in range(30)))
            found = read_until(line, b"-29-")
        assert [found.find(f'"-{n}-"'.encode()) for n in range(30)] == sorted(
            found.find(f'"-{n}-"'.encode()) for n in range(30)
        )
        assert found.count(b"HTTP/1.1 200 OK") == 30
        episode.end(reward=1.0)


@pytest.mark.parametrize("cut", [5, 40, -40, -2, None])
def test_an_offer_of_http_2_is_answered_in_http_1_with_its_body_read(
    played: Served, caplog: pytest.LogCaptureFixture, cut: int | None
) -> None:
    """As `curl --http2` and Java's client send it; its parts may come in any pieces."""
    with played.client() as client, client.episode("t", mode=Mode.EVAL) as episode:
        with closing(connect(played)) as line:
            for script in ("first", "second"):
                sent = request(episode, {"messages": HI, "script": script}, OFFER)
                line.sendall(sent[:cut])
                time.sleep(0.1)
                line.sendall(b"" if cut is None else sent[cut:])
                found = read_until(line, b"}}")
                assert found.startswith(b"HTTP/1.1 200 OK")
                assert f'"content":"{script}"'.encode() in found
            line.sendall(request(episode, {"messages": HI, "script": "third"}))
            assert b'"content":"third"' in read_until(line, b"}}")
        episode.end(reward=1.0)
    assert not caplog.records


def test_a_tunnel_is_refused(played: Served) -> None:
    with closing(connect(played)) as line:
        line.sendall(b"CONNECT a.b:80 HTTP/1.1\r\nHost: a.b:80\r\n\r\n")
        assert read_until(line, b"served here").startswith(b"HTTP/1.1 400")


def short_lived(served: Served) -> SyncEpisode:
    """An episode with a lease of a second, which nobody renews; only its address and key are used."""
    claim = {"client_id": "c", "task_id": "t", "mode": "eval", "lease_s": 1}
    auth = {"authorization": f"Bearer {served.tokens['sampler']}"}
    claimed: Any = SimpleNamespace(**httpx.post(f"{served.url}/swarm/v1/episodes", headers=auth, json=claim).json())
    return claimed  # type: ignore[no-any-return]


def test_a_caller_that_reads_no_more_loses_its_lease_and_its_connection(serving: Callable[..., Served]) -> None:
    served = serving()
    with served.client() as client:
        client.start(PLAYED, wait=True)
        episode = short_lived(served)
        assert served.front is not None
        roster = served.front.engine.roster
        with closing(connect(served, read_ahead=2048)) as line:
            line.sendall(request(episode, FLOOD))
            wait_until(lambda: "lease_expired" in str(roster.gone(episode.episode_id)))
            time.sleep(1.5)
            found = b""
            with suppress(ConnectionResetError):
                while piece := line.recv(1 << 16):
                    found += piece
            assert b"[DONE]" not in found


def test_a_stream_that_is_read_in_time_keeps_its_lease_though_sampling_outlasts_it(
    serving: Callable[..., Served],
) -> None:
    served = serving(token_s=0.03)
    with served.client() as client:
        client.start(PLAYED, wait=True)
        episode = short_lived(served)
        with closing(connect(served)) as line:
            line.sendall(request(episode, {"messages": HI, "stream": True, "script": "a" * 80}))
            assert b'"finish_reason":"stop"' in read_until(line, b"[DONE]")
        assert served.front is not None
        assert served.front.engine.roster.find(episode.episode_id)


def test_a_reply_that_nobody_reads_to_its_end_is_not_trained(serving: Callable[..., Served]) -> None:
    served = serving()
    with served.client() as client:
        client.start(PLAYED, wait=True)
        with client.episode("t", mode=Mode.EVAL) as episode:
            assert served.front is not None
            live = served.front.engine.roster.find(episode.episode_id)
            with closing(connect(served, read_ahead=2048)) as line:
                line.sendall(request(episode, FLOOD))
                wait_until(lambda: bool(live.asks) and not live.is_sampling)
            wait_until(lambda: num_running(served, episode) == 0)
            episode.end(reward=1.0)
        (timeline,) = client.timelines(episode.episode_id)
    assert not any(timeline["blocks"][-1]["loss_mask"])


def test_a_server_that_ends_hangs_up_on_callers_that_do_not_read_and_says_nothing(tmp_path: Path) -> None:
    server = serve_process(tmp_path / "run", worker=fake_worker(tmp_path / "run"))
    with server.client() as client:
        client.start(PLAYED, wait=True)
        episode = client.episode("t", mode=Mode.EVAL)
        with closing(connect(server, read_ahead=2048)) as line, closing(connect(server)) as half:
            line.sendall(request(episode, FLOOD))
            half.sendall(request(episode, {"messages": HI})[:-5])
            time.sleep(1.5)
            assert server.stop(signal.SIGTERM) == 0
    assert log_of(server.run_dir).read_text() == ""


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_reply_that_can_not_be_read_fails_alone(
    slow: tuple[Served, SwarmClient], caplog: pytest.LogCaptureFixture, is_stream: bool
) -> None:
    served, client = slow
    assert served.front is not None
    with client.episode("t", mode=Mode.EVAL) as episode:
        live = served.front.engine.loaded.policies["policy"].codec
        honest = live.token_bytes

        def read(token_id: int) -> bytes:
            if token_id == ord("!"):
                raise OverflowError("no such token")
            return honest(token_id)

        live.token_bytes = read  # type: ignore[assignment]
        with closing(connect(served)) as line:
            line.sendall(request(episode, {"messages": HI, "stream": is_stream, "script": "xy!cd"}))
            found = read_until(line, b"please report it")
            assert found.startswith(b"HTTP/1.1 200" if is_stream else b"HTTP/1.1 500")
        assert "could not be read" in caplog.text
        assert episode.chat(HI, script="good").message["content"] == "good"
        episode.end(reward=1.0)
    sampled = [timeline["blocks"][-1] for timeline in client.timelines(episode.episode_id)]
    assert sampled[-1]["token_ids"] == [*ids("good"), END_ID]
    assert [one["token_ids"] for one in sampled[:-1]] == ([ids("xy")] if is_stream else [])
    assert not any(any(one["loss_mask"]) for one in sampled[:-1])
