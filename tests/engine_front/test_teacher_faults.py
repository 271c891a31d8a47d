"""What a teacher may do wrong, over a socket: dawdle, fall silent, or answer what is no answer. All of it is told."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable

import pytest
from episodes import call, episode

from swarm_engine.config import TeacherConfig
from swarm_engine.errors import TeacherError
from swarm_engine.server.teacher import KEY_VARIABLE, Patience, Teacher, read_logprobs

BATCH = [episode("e", [call([5], [7, 9])], 1.0)]
SHORT = Patience(timeout_s=1.5, pauses_s=(0.0, 0.0))

Behave = Callable[[asyncio.StreamWriter], Awaitable[None]]
"""What a server does once it has read a request."""


class Codec:
    """Has three tokens for any text, each of which reads `a`."""

    def encode_text(self, _: str) -> list[int]:
        return [5, 7, 9]

    def decode(self, _: list[int]) -> str:
        return "a"


async def ask(behave: Behave, patience: Patience, *, probes: bool = False) -> tuple[str, int]:
    """What a teacher that behaves so is accused of, and how many requests it got."""
    num_requests = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_requests
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            (length,) = (line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
            num_requests += 1
            await behave(writer)
        except ConnectionError:
            pass  # the teacher was given up
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        teacher = Teacher(TeacherConfig(base_url=f"http://127.0.0.1:{port}/v1", model="large"), patience)
        with pytest.raises(TeacherError) as caught:
            await (teacher.probe(Codec()) if probes else teacher.judge(BATCH))  # type: ignore[arg-type]
    return str(caught.value), num_requests


def answering(body: str, status: str = "200 OK") -> Behave:
    async def behave(writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode())
        await writer.drain()

    return behave


async def trickle(writer: asyncio.StreamWriter) -> None:
    """A byte at a time, for ever, far more often than any limit between two of them."""
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.02)


async def say_nothing(_: asyncio.StreamWriter) -> None:
    await asyncio.sleep(30)


def entry(logprob: str, decoded: str = '"a"') -> str:
    """An answer with one value for the tokens 7 and 9."""
    said = f'{{"logprob": {logprob}, "decoded_token": {decoded}}}'
    return f'{{"choices": [{{"prompt_logprobs": [null, {{"7": {said}}}, {{"9": {said}}}]}}]}}'


@pytest.mark.parametrize("behave", [trickle, say_nothing])
def test_an_answer_has_so_long_as_a_whole_and_is_not_asked_for_again(behave: Behave) -> None:
    said, num_requests = asyncio.run(asyncio.wait_for(ask(behave, SHORT), 20))
    assert "has not answered about 3 tokens within 1.5 s" in said
    assert num_requests == 1


@pytest.mark.parametrize(("again_s", "num_requests"), [(60.0, 3), (0.0, 1)])
def test_no_attempt_begins_after_the_time_for_them(again_s: float, num_requests: int) -> None:
    patience = Patience(pauses_s=(0.01, 0.01), again_s=again_s)
    said, found = asyncio.run(ask(answering("loading", "503 Service Unavailable"), patience))
    assert "answers 503: 'loading'" in said
    assert found == num_requests


def test_the_pauses_between_attempts_fit_into_the_time_for_them() -> None:
    """1 + 2 + 4 + 8 + 16 + 24 = 55 s leave 5 s for the attempts; the page says a minute."""
    assert (sum(Patience().pauses_s), Patience().again_s, Patience().timeout_s) == (55, 60, 120)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("[" * 200_000, "no prompt_logprobs for every token"),
        ("1" * 5000, "no prompt_logprobs for every token"),
        ("[1]", "no prompt_logprobs for every token"),
        ('{"choices": {}}', "no prompt_logprobs for every token"),
        (entry("-1" + "0" * 400), "no prompt_logprobs for every token (OverflowError"),
        (entry("-1e308"), "token 7 has a log-probability of -1e+308 nats, and they go from -10000 to 0"),
    ],
    ids=["deep", "long number", "list", "no list", "400 digits", "finite"],
)
@pytest.mark.parametrize("probes", [True, False])
def test_garbage_is_told_as_such(body: str, said: str, probes: bool) -> None:
    found, num_requests = asyncio.run(ask(answering(body), Patience(), probes=probes))
    assert said in found
    assert num_requests == 1


@pytest.mark.parametrize(
    ("status", "said", "num_requests"),
    [
        ("200 OK", "answers more than 1060864 bytes about 3 tokens", 1),
        ("404 Not Found", "answers 404: '   ", 1),
        ("503 Service Unavailable", "answers 503: '   ", 3),
    ],
)
def test_an_answer_may_be_so_long(status: str, said: str, num_requests: int) -> None:
    async def pour(writer: asyncio.StreamWriter) -> None:
        """Without an end, so that who waits for one does not come back in time."""
        writer.write(f"HTTP/1.1 {status}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        while True:
            writer.write(b"10000\r\n" + b" " * 65536 + b"\r\n")
            await writer.drain()

    patience = Patience(timeout_s=60, pauses_s=(0.0, 0.0))
    found = asyncio.run(asyncio.wait_for(ask(pour, patience), 20))
    assert said in found[0]
    assert found[1] == num_requests


def test_what_is_compressed_is_not_unpacked() -> None:
    """It was not asked for, and a few bytes may become any number."""

    async def behave(writer: asyncio.StreamWriter) -> None:
        body = gzip.compress(entry("-1.5").encode())
        writer.write(
            f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\ncontent-encoding: gzip\r\n\r\n".encode() + body
        )
        await writer.drain()

    said, _ = asyncio.run(ask(behave, Patience()))
    assert "no prompt_logprobs for every token" in said


@pytest.mark.parametrize(("key", "sent"), [("hunter2", "Bearer hunter2"), ("Basic aHVudGVyMg==", "Basic aHVudGVyMg==")])
def test_a_key_is_sent_and_not_told_where_the_teacher_repeats_it(
    key: str, sent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, key)
    said, _ = asyncio.run(ask(answering(f"no such key: {sent}!", "401 Unauthorized"), Patience()))
    assert "answers 401: 'no such key: " in said
    assert key.split()[-1] not in said
    teacher = Teacher(TeacherConfig(base_url="http://host/v1", model="large"))
    assert teacher._headers["authorization"] == sent


def test_a_host_that_can_not_be_one_is_told_as_such() -> None:
    teacher = Teacher(TeacherConfig(base_url="http://é..com/v1", model="large"))
    with pytest.raises(TeacherError, match="is no URL"):
        asyncio.run(teacher.judge(BATCH))


@pytest.mark.parametrize("decoded", ["7", "[]", '"b"'])
def test_a_token_that_reads_as_no_text_is_not_the_policys(decoded: str) -> None:
    found, _ = asyncio.run(ask(answering(entry("-1.5", decoded)), Patience(), probes=True))
    assert found.startswith("the teacher reads token 7 as ")
    assert "the policy as 'a'" in found


@pytest.mark.parametrize("logprob", ["NaN", "0.5", "-Infinity", "-10000.1"])
def test_a_log_probability_that_can_not_be_one_is_refused(logprob: str) -> None:
    with pytest.raises(TeacherError, match=r"token 7 has a log-probability of \S+ nats, and they go from -10000 to 0"):
        read_logprobs(json.loads(entry(logprob)), [5, 7, 9], 1)


@pytest.mark.parametrize("logprob", [0, -1, -10000.0])
def test_one_that_can_be_is_taken(logprob: float) -> None:
    assert read_logprobs(json.loads(entry(str(logprob))), [5, 7, 9], 1) == (logprob, logprob)
