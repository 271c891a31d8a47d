"""What comes in at the door of a real server: bodies, heads, encodings, methods, and too many connections."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http.client
import json
import re
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from conftest import Served, fake_worker, log_of, serve_process

from swarm_engine.client import SyncEpisode
from swarm_engine.errors import BadRequestError, TooLargeError
from swarm_engine.server.bodies import MAX_BODY_BYTES, MAX_CONTROL_BYTES, parse_json, read_body
from swarm_engine.types import Mode
from swarm_engine.watch import status_lines

HI = [{"role": "user", "content": "hi"}]
PIECE = b" " * 65536


@pytest.fixture
def episode(engine: Served) -> Iterator[SyncEpisode]:
    with engine.client() as client:
        claimed = client.episode("door", mode=Mode.EVAL)
        yield claimed
        claimed.end(reward=0.0)


def auth(served: Served, role: str = "operator") -> dict[str, str]:
    return {"authorization": f"Bearer {served.tokens[role]}", "content-type": "application/json"}


def control(served: Served, path: str, body: Any, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{served.url}/swarm/v1{path}", headers={**auth(served), **headers}, content=content)


def connected(served: Served) -> socket.socket:
    return socket.create_connection((urlsplit(served.url).hostname, urlsplit(served.url).port), timeout=30)


def push(served: Served, head: str, num_bytes: int) -> tuple[bytes, int]:
    """Send a head and so many bytes behind it, or as many as are taken; returns the answer and how many went out."""
    with connected(served) as connection:
        sent = 0
        try:
            connection.sendall(head.encode())
            while sent < num_bytes:
                connection.sendall(PIECE)
                sent += len(PIECE)
        except OSError:
            pass
        return connection.recv(65536), sent


def send_for_ever(connection: socket.socket) -> None:
    while True:
        connection.sendall(PIECE)


def memory() -> int:
    """Bytes that this process, in which the server runs, has in memory."""
    found = re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


# Bodies


@pytest.mark.parametrize("length", ["content-length: 60000000", "transfer-encoding: chunked"])
def test_nothing_of_a_body_is_kept_before_the_token_was_looked_at(engine: Served, length: str) -> None:
    """Eight at once, 60 MB each: all are answered, and the memory stays where it was."""
    chunk = "ff00000\r\n" if "chunked" in length else ""
    head = f"POST /swarm/v1/episodes HTTP/1.1\r\nhost: localhost\r\n{length}\r\n\r\n{chunk}"
    answers: list[tuple[bytes, int]] = []
    threads = [threading.Thread(target=lambda: answers.append(push(engine, head, 60_000_000))) for _ in range(8)]
    before = memory()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer[:12] for answer, _ in answers] == [b"HTTP/1.1 401"] * 8
    assert memory() - before < 30_000_000


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_beyond_the_bound_is_a_413_however_it_comes(
    engine: Served, episode: SyncEpisode, is_chunked: bool
) -> None:
    pieces = [PIECE] * (MAX_BODY_BYTES // len(PIECE) + 1)
    for url, headers, limit in (
        (f"{engine.url}/swarm/v1/episodes", auth(engine), MAX_CONTROL_BYTES),
        (f"{episode.base_url}/chat/completions", {"x-api-key": episode.api_key}, MAX_BODY_BYTES),
    ):
        content: Any = iter(pieces) if is_chunked else b"".join(pieces)
        answer = httpx.post(url, headers=headers, content=content, timeout=60)
        assert answer.status_code == 413
        assert f"more than {limit} bytes" in answer.json()["error"]["message"]


def test_a_caller_that_goes_on_sending_what_was_refused_is_cut_off(engine: Served) -> None:
    head = "POST /swarm/v1/episodes HTTP/1.1\r\nhost: localhost\r\ncontent-length: 999999999999\r\n\r\n"
    with connected(engine) as connection:
        connection.sendall(head.encode())
        assert connection.recv(12) == b"HTTP/1.1 401"
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            send_for_ever(connection)


@pytest.mark.parametrize("trailers", [b"a: b\r\n" * 100_000, b"a: " + b"b" * 1_000_000])
def test_trailers_without_an_end_are_refused_and_not_kept(
    engine: Served, episode: SyncEpisode, trailers: bytes
) -> None:
    path = urlsplit(episode.base_url).path
    with connected(engine) as connection:
        connection.sendall(
            f"POST {path}/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-api-key: {episode.api_key}\r\n"
            "transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n".encode()
        )
        connection.settimeout(10)
        # It may be cut off before all of it was taken.
        with contextlib.suppress(ConnectionError):
            connection.sendall(trailers)
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(100).startswith(b"HTTP/1.1 400")


def test_a_head_without_an_end_is_refused(engine: Served) -> None:
    answer, sent = push(engine, "GET /swarm/v1/status HTTP/1.1\r\nx: ", 60_000_000)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"more than 65536 bytes" in answer
    assert sent < 30_000_000


@pytest.mark.parametrize(
    ("path", "change", "said"),
    [
        ("/episodes", {"tags": {f"{number}": "" for number in range(50_000)}}, "tags: Dictionary should have at most"),
        ("/episodes", {"agents": ["a"] * 1001}, "agents: List should have at most 1000 items"),
        ("/episodes", {"policies": ["a"] * 1001}, "policies: List should have at most 1000 items"),
        ("/episodes", {"script": ["a"] * 10_001}, "script: List should have at most 10000 items"),
        ("/episodes", {"script": [[2**31]]}, "script."),
        ("/end", {"reward": {str(number): 1 for number in range(60_000)}}, "reward: it names 60000 agents"),
        ("/end", {"reward": {"main": 10**400}}, "reward: it must be null, a number from"),
        ("/end", {"metrics": {str(number): 1 for number in range(1001)}}, "metrics: Dictionary should have at most"),
        ("/end", {"step_rewards": [{"call_id": "c", "reward": 1}] * 10_001}, "step_rewards: List should have at most"),
        ("/export", {"step": 2**63}, "step: Input should be less than or equal to 9223372036854775807"),
    ],
)  # fmt: skip
def test_what_is_in_a_control_body_has_bounds_that_are_named(
    engine: Served, path: str, change: dict[str, Any], said: str
) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/episodes": {"client_id": "c", "task_id": "t", "mode": "eval"},
        "/end": {"reward": 1.0, "outcome": "success"},
        "/export": {"policy": "policy", "name": "x"},
    }
    answer = control(engine, "/episodes/e1/end" if path == "/end" else path, {**bodies[path], **change})
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["message"].startswith(said)
    assert len(answer.text) < 1000


@pytest.mark.parametrize("number", ["9" * 5000, "9" * 25, "-1", "x", ""])
def test_the_number_of_an_event_is_one_that_there_can_be(engine: Served, number: str) -> None:
    url = f"{engine.url}/swarm/v1/events?follow=false"
    assert httpx.get(url, headers={**auth(engine), "last-event-id": number}).status_code == 422
    assert httpx.get(f"{url}&after={number}", headers=auth(engine)).status_code == 422


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON (Exceeds the limit (4300 digits)"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": "\xed\xa0\x80"}', "not valid JSON ('utf-8' codec"),
        (b'{"a": [1, {"b": "x\\ud83cx"}]}', "a[1].b holds a lone surrogate at character 1"),
        (b'{"a": {"\\uDC00": 1}}', "a holds a lone surrogate at character 0"),
    ],
)
def test_a_body_that_is_no_json_to_store_is_refused_by_every_route(
    engine: Served, episode: SyncEpisode, body: bytes, said: str
) -> None:
    answer = control(engine, "/episodes", body)
    assert (answer.status_code, said in answer.json()["error"]["message"]) == (422, True), answer.text
    for route in ("chat/completions", "completions", "responses", "messages", "messages/count_tokens"):
        answer = httpx.post(f"{episode.base_url}/{route}", headers={"x-api-key": episode.api_key}, content=body)
        assert (answer.status_code, said in answer.json()["error"]["message"]) == (400, True), answer.text


@pytest.mark.parametrize(
    ("values", "limit"),
    [
        (b"[]," * 10_000_000 + b"[]", "200000 texts, lists and objects"),
        (b'{"a":1},' * 100_000 + b"1", "200000 texts, lists and objects"),
        (b'"",' * 200_001 + b"1", "200000 texts, lists and objects"),
        (b"1," * 2_000_001 + b"1", "2000000 values"),
    ],
)
def test_a_body_of_too_many_values_is_a_413_before_the_parser_holds_up_everybody(
    episode: SyncEpisode, values: bytes, limit: str
) -> None:
    body = b'{"messages": [' + values + b"]}"
    answer = httpx.post(f"{episode.base_url}/chat/completions", headers={"x-api-key": episode.api_key}, content=body)
    assert answer.status_code == 413
    assert f"more than {limit}" in answer.json()["error"]["message"]


@pytest.mark.parametrize("end", ["", "\\", '"', '\\"', '\\\\"'])
def test_what_a_text_holds_counts_as_no_value_of_its_body(end: str) -> None:
    """Ended by backslashes and quotes, which are escaped in JSON, the text still ends where it ends."""
    values = [f"{'[{,' * 1_000_000}{end}", list(range(1_000_000)), ["a", {}] * 60_000]
    assert parse_json(json.dumps(values).encode()) == values


def test_both_halves_of_a_pair_are_one_character_and_a_byte_order_mark_is_none() -> None:
    assert parse_json(b'\xef\xbb\xbf{"a": "\\ud83d\\ude0a \\\\ud83c"}') == {"a": "😊 \\ud83c"}
    with pytest.raises(BadRequestError, match="b holds a lone surrogate"):
        parse_json(b'{"a": "\\ud83d\\ude0a", "b": "\\ud83d \\ude0a"}')


# Packed ones


def raw_deflate(body: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(body) + stream.flush()


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [("gzip", gzip.compress), ("deflate", zlib.compress), ("Deflate", raw_deflate), ("identity", bytes)],
)
def test_a_packed_body_is_unpacked(
    engine: Served, episode: SyncEpisode, encoding: str, pack: Callable[[bytes], bytes]
) -> None:
    body = pack(json.dumps({"messages": HI, "max_tokens": 1}).encode())
    headers = {"x-api-key": episode.api_key, "content-encoding": encoding}
    answer = httpx.post(f"{episode.base_url}/chat/completions", headers=headers, content=body)
    assert answer.status_code == 200, answer.text
    claim = pack(json.dumps({"client_id": "c", "task_id": "t", "mode": "eval"}).encode())
    assert control(engine, "/episodes", claim, **{"content-encoding": encoding}).status_code == 200


@pytest.mark.parametrize("encoding", ["zstd", "br", "gzip, gzip", "x" * 1000])
def test_a_packing_that_is_not_known_is_named(engine: Served, episode: SyncEpisode, encoding: str) -> None:
    headers = {"x-api-key": episode.api_key, "content-encoding": encoding}
    answers = [
        httpx.post(f"{episode.base_url}/{route}", headers=headers, content=b"{}") for route in ("messages", "responses")
    ]
    answers.append(control(engine, "/episodes", b"{}", **{"content-encoding": encoding}))
    for answer in answers:
        assert answer.status_code == 415
        assert answer.json()["error"]["type" if answer is not answers[2] else "code"]
        assert f"the body's Content-Encoding is '{encoding[:20]}" in answer.text
        assert "gzip or deflate" in answer.text
        assert len(answer.text) < 500


def test_a_small_body_that_unpacks_to_a_large_one_is_a_413(engine: Served, episode: SyncEpisode) -> None:
    bomb = gzip.compress(b" " * 100_000_000)
    assert len(bomb) < 100_000
    before = memory()
    headers = {"x-api-key": episode.api_key, "content-encoding": "gzip"}
    assert httpx.post(f"{episode.base_url}/messages", headers=headers, content=bomb).status_code == 413
    assert control(engine, "/episodes", bomb, **{"content-encoding": "gzip"}).status_code == 413
    assert memory() - before < 60_000_000


@pytest.mark.parametrize("body", [b"{}", gzip.compress(b"{}", mtime=0)[:-4], gzip.compress(b"{}", mtime=0) + b"x"])
def test_a_body_that_is_not_what_its_packing_says_is_a_400(episode: SyncEpisode, body: bytes) -> None:
    headers = {"x-api-key": episode.api_key, "content-encoding": "gzip"}
    answer = httpx.post(f"{episode.base_url}/messages", headers=headers, content=body)
    assert answer.status_code == 400
    assert "gzip" in answer.json()["error"]["message"]


def test_a_body_is_counted_while_it_comes_whatever_its_length_says() -> None:
    messages = iter([{"type": "http.request", "body": b"12345", "more_body": True}] * 3)

    async def receive() -> dict[str, Any]:
        return next(messages)

    with pytest.raises(TooLargeError, match="more than 9 bytes"):
        asyncio.run(read_body(receive, [(b"content-length", b"5")], 9))
    assert next(messages), "it was refused before all of it was read"


# Methods


def test_a_method_that_a_route_has_not_is_a_405_that_names_those_it_has(engine: Served, episode: SyncEpisode) -> None:
    for method, path, allowed in (
        ("POST", "/swarm/v1/status", "GET"),
        ("DELETE", "/swarm/v1/checkpoints", "GET, POST"),
        ("GET", "/swarm/v1/episodes", "POST"),
        ("PUT", f"/swarm/v1/episodes/{episode.episode_id}", "GET"),
        ("POST", "/openapi.json", "GET, HEAD"),
    ):
        answer = httpx.request(method, engine.url + path, headers=auth(engine))
        assert (answer.status_code, answer.headers.get("allow")) == (405, allowed)
        assert answer.json()["error"]["code"] == "method_not_allowed"
        assert answer.json()["error"]["hint"] == f"use {allowed}"
    for method, route, allowed in (
        ("GET", "chat/completions", "OPTIONS, POST"),
        ("PUT", "messages", "OPTIONS, POST"),
        ("DELETE", "messages/count_tokens", "OPTIONS, POST"),
        ("POST", "models", "GET, HEAD, OPTIONS"),
    ):
        answer = httpx.request(method, f"{episode.base_url}/{route}", headers={"x-api-key": episode.api_key})
        assert (answer.status_code, answer.headers.get("allow")) == (405, allowed)
        assert answer.json()["error"]["type"] == "invalid_request_error"


# More connections than files


def test_a_server_without_files_left_says_so_and_answers_all_the_same(tmp_path: Path) -> None:
    """The soft limit is raised to the hard one of 256, of which 128 are kept back."""
    served = serve_process(
        tmp_path / "run", worker=fake_worker(tmp_path / "run"), prefix=("prlimit", "--nofile=64:256")
    )
    held: list[Any] = []
    try:
        idle = [connected(served) for _ in range(300)]
        held += idle
        for _ in range(3):
            answer = httpx.get(f"{served.url}/swarm/v1/status", headers=auth(served))
            assert answer.status_code == 200
        found = answer.json()["connections"]
        assert found["limit"] == 128
        assert found["open"] <= 130
        assert found["closed"] >= 300 - 128
        assert found["refused"] == 0
        idle[-1].sendall(b"GET /nowhere HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert idle[-1].recv(12) == b"HTTP/1.1 404", "the newest ones were left alone"

        busy = [http.client.HTTPConnection(urlsplit(served.url).netloc) for _ in range(135)]
        held += busy
        answers = []
        for connection in busy:
            connection.request("GET", "/swarm/v1/events", headers=auth(served))
            answers.append(connection.getresponse())
        assert {answer.status for answer in answers[:120]} == {200}
        refused = answers[-1]
        assert refused.status == 503
        assert refused.headers["connection"] == "close"
        error = json.loads(refused.read())["error"]
        assert error["code"] == "too_many_connections"
        assert "all of the 128 connections" in error["message"]
        answer = httpx.get(f"{served.url}/swarm/v1/status", headers=auth(served))
        assert answer.status_code == 200
        assert answer.json()["connections"]["refused"] > 0
        assert "the limit of open files leaves room for 128" in log_of(served.run_dir).read_text()
        with served.client() as client:
            assert "leaves room for 128 connections" in status_lines(client.status())[-1]
    finally:
        for one in held:
            one.close()
        served.stop()
