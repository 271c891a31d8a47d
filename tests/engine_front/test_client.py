"""The clients against a real front, and against servers that behave oddly."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
import uvloop
from conftest import SMALL, Served

from swarm_engine.client import (
    AddressError,
    AsyncSwarmClient,
    Episode,
    EpisodeLostError,
    EpisodeNotEndedError,
    EpisodeResult,
    Event,
    GroupSizeError,
    NoAnswerError,
    NotFiniteError,
    SwarmClient,
    SwarmProtocolError,
    SwarmUnavailableError,
    SyncEpisode,
    Task,
)
from swarm_engine.client.http import Reconnection, TransportPool, request_of
from swarm_engine.client.wire import EventReader
from swarm_engine.types import EngineState, Mode

HI = [{"role": "user", "content": "hi"}]
TASKS = [Task(f"t{number}", {"number": number}) for number in range(3)]


def with_client(served: Served, work: Callable[[AsyncSwarmClient], Any]) -> Any:
    async def main() -> Any:
        async with AsyncSwarmClient(served.url, served.tokens["operator"]) as client:
            return await work(client)

    return asyncio.run(main())


def test_names_with_every_kind_of_line_end_come_back_whole_in_the_events(serving: Callable[..., Served]) -> None:
    served = serving()
    name = "a\u2028b\u0085c\u2029d\x0be\x0cf\r\ng\x1eh 🙂"

    async def work(client: AsyncSwarmClient) -> list[Any]:
        await client.start(SMALL, wait=True)
        async with client.episode(name, mode=Mode.EVAL) as episode:
            await episode.end(reward=1.0)
        return [event async for event in client.events(follow=False)]

    events = with_client(served, work)
    assert [event.payload["task_id"] for event in events if event.kind in ("claim", "episode")] == [name, name]
    with served.client() as client:
        assert list(client.events(follow=False)) == events


@pytest.mark.parametrize(
    ("reward", "metrics", "said"),
    [
        (float("nan"), None, "reward is nan, .* give None where it can't be judged"),
        ({"white": 1.0, "black": float("-inf")}, None, "reward of agent 'black' is -inf"),
        (None, {"moves": 3.0, "speed": float("inf")}, "metric 'speed' is inf; leave it out"),
        ("1", None, "reward is '1', which can't be trained on"),
        (10**400, None, "reward is 1000"),
        ([1.0], None, r"reward is \[1.0\], which"),
        (None, {"moves": None}, "metric 'moves' is None; leave it out"),
    ],
)
def test_a_number_that_is_none_is_refused_in_words_and_the_episode_can_end_with_another(
    engine: Served, reward: Any, metrics: Any, said: str
) -> None:
    async def work(client: AsyncSwarmClient) -> None:
        async with client.episode("t", mode=Mode.EVAL) as episode:
            with pytest.raises(NotFiniteError, match=said):
                await episode.end(reward=reward, metrics=metrics)
            await episode.end(reward=None)

    with_client(engine, work)
    with engine.client() as client, client.episode("t", mode=Mode.EVAL) as episode:
        with pytest.raises(NotFiniteError, match=said):
            episode.end(reward=reward, metrics=metrics)
        episode.end(reward=None)


def test_a_call_after_the_end_ends_the_run_instead_of_playing_the_task_again(serving: Callable[..., Served]) -> None:
    served = serving()
    played: list[str] = []

    async def late(episode: Episode, _: Task) -> None:
        played.append(episode.episode_id)
        await episode.end(reward=1.0)
        await episode.chat(HI)

    def late_too(episode: SyncEpisode, _: Task) -> None:
        played.append(episode.episode_id)
        episode.end(reward=1.0)
        episode.chat(HI)

    async def work(client: AsyncSwarmClient) -> None:
        await client.start(SMALL, wait=True)
        await client.run(TASKS[:1], late, group_size=1, concurrency=1, mode=Mode.EVAL)

    with pytest.raises(EpisodeLostError, match="does not run any more"):
        with_client(served, work)
    with served.client() as client, pytest.raises(EpisodeLostError, match="does not run any more"):
        client.run(TASKS[:1], late_too, group_size=1, concurrency=1, mode=Mode.EVAL)
    assert len(set(played)) == len(played) == 2


def test_a_train_run_whose_groups_are_not_the_servers_is_refused_before_it_claims(
    serving: Callable[..., Served],
) -> None:
    served = serving()

    async def work(client: AsyncSwarmClient) -> None:
        await client.start(SMALL, wait=True)
        assert (await client.status()).pool.targets == {"episodes": 4, "tasks": 2, "group_size": 2}

        async def win(episode: Episode, _: Task) -> None:
            await episode.chat(HI, max_tokens=1)
            await episode.end(reward=1.0)

        with pytest.raises(GroupSizeError, match=r"is 3.*groups of 2.*pass group_size=2.*trainer.group_size 3"):
            await client.run(TASKS, win, group_size=3, concurrency=4)
        assert (await client.status()).pool.episodes == 0
        await client.run(TASKS[:1], win, group_size=3, concurrency=4, mode=Mode.EVAL)
        await client.run(TASKS[:1], win, group_size=1, concurrency=4, is_partial=True)
        assert (await client.status()).pool.episodes == 1

    with_client(served, work)
    with served.client() as client, pytest.raises(GroupSizeError, match="is 1, the server trains on groups of 2"):
        client.run(TASKS, lambda *_: None, group_size=1, concurrency=1)


def test_an_event_is_read_whole_in_whatever_pieces_its_bytes_come() -> None:
    payload = '{"seq":3,"at":1.5,"kind":"claim","payload":{"task_id":"a\u2028é"}}'
    stream = f": hello\n\nid: 3\nevent: claim\ndata: {payload}\n\n".encode()
    event = Event(seq=3, at=1.5, kind="claim", payload={"task_id": "a\u2028é"})
    for size in range(1, len(stream)):
        reader = EventReader()
        pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
        assert [event for piece in pieces for event in reader.feed(piece)] == [event]


def test_a_run_plays_every_place_and_answers_in_the_order_of_tasks(serving: Callable[..., Served]) -> None:
    served = serving(token_s=0.002)

    async def work(client: AsyncSwarmClient) -> list[EpisodeResult]:
        await client.start(SMALL, wait=True)
        seen: list[EpisodeResult] = []

        async def rollout(episode: Episode, task: Task) -> None:
            reply = await episode.chat(HI, agent="seat", max_tokens=1 + task.data["number"])
            await episode.end(reward={"seat": task.data["number"]}, metrics={"tokens": reply.completion_tokens})

        # Three groups against a batch of two: the third waits for the update and is served after it.
        results = await client.run(TASKS, rollout, group_size=2, concurrency=6, on_episode=seen.append)
        assert sorted(result.episode_id for result in seen) == sorted(result.episode_id for result in results)
        return results

    results = with_client(served, work)
    assert [(result.task_id, result.index) for result in results] == [(f"t{n}", i) for n in range(3) for i in range(2)]
    assert [result.rewards["seat"] for result in results] == [0, 0, 1, 1, 2, 2]
    assert [result.policy_version for result in results] == [0, 0, 0, 0, 1, 1]
    with served.client() as client:
        claims = [event.payload["task_id"] for event in client.events(follow=False) if event.kind == "claim"]
    assert claims == ["t0", "t0", "t1", "t1", "t2", "t2"]


def test_a_lost_episode_is_played_again_by_both_clients(serving: Callable[..., Served]) -> None:
    served = serving()
    lost: list[str] = []

    async def work(client: AsyncSwarmClient) -> list[EpisodeResult]:
        await client.start(SMALL, wait=True)

        async def rollout(episode: Episode, task: Task) -> None:
            if task.task_id == "t0" and len(lost) < 2:
                lost.append(episode.episode_id)
                await client._control("POST", f"/episodes/{episode.episode_id}/abort")
            await episode.chat(HI)
            await episode.end(reward=1.0)

        return await client.run(TASKS[:2], rollout, group_size=2, concurrency=4)  # type: ignore[no-any-return]

    assert len(with_client(served, work)) == 4
    assert len(lost) == 2

    def rollout(episode: SyncEpisode, _: Task) -> None:
        if len(lost) < 3:
            lost.append(episode.episode_id)
            episode._client._control("POST", f"/episodes/{episode.episode_id}/abort")
        episode.chat(HI)
        episode.end(reward=1.0)

    with served.client() as client:
        results = client.run(TASKS[:2], rollout, group_size=2, concurrency=1, mode=Mode.EVAL, tags={"split": "x"})
        assert len(results) == 4
        tags = [event.payload["tags"] for event in client.events(follow=False) if event.kind == "episode"]
        assert tags[-4:] == [{"split": "x"}] * 4


def test_an_exception_of_a_rollout_ends_the_run_and_frees_every_place(serving: Callable[..., Served]) -> None:
    served = serving(token_s=0.05, end_chance=0.0)

    async def work(client: AsyncSwarmClient) -> None:
        await client.start(SMALL, wait=True)

        async def rollout(episode: Episode, task: Task) -> None:
            if task.task_id == "t1":
                raise KeyError("a bug of mine")
            await episode.chat(HI, max_tokens=16)
            await episode.end(reward=1.0)

        with pytest.raises(KeyError, match="a bug of mine"):
            await client.run(TASKS, rollout, group_size=2, concurrency=6)
        status = await client.status()
        assert (status.running, status.state) == (0, EngineState.ROLLING)

        async def forgetful(episode: Episode, _: Task) -> None:
            await episode.chat(HI, max_tokens=1)

        with pytest.raises(EpisodeNotEndedError):
            await client.run(TASKS, forgetful, group_size=2, concurrency=1)

    with_client(served, work)

    def broken(_: SyncEpisode, __: Task) -> None:
        raise KeyError("a bug of mine")

    with served.client() as client:
        with pytest.raises(KeyError, match="a bug of mine"):
            client.run(TASKS, broken, group_size=2, concurrency=2)
        assert client.status().running == 0


def test_cancelling_a_rollout_in_the_middle_of_a_call_frees_its_place(serving: Callable[..., Served]) -> None:
    """B090."""
    served = serving(token_s=0.05, end_chance=0.0)

    async def work(client: AsyncSwarmClient) -> None:
        await client.start(SMALL, wait=True)

        async def play() -> None:
            async with client.episode("t") as episode:
                await episode.chat(HI, max_tokens=16)

        playing = asyncio.create_task(play())
        await asyncio.sleep(0.2)
        assert (await client.status()).running == 1
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        assert (await client.status()).running == 0
        async with client.episode("t") as again:
            assert again.index == 0
            await again.end(reward=0.0)

    with_client(served, work)


def test_after_an_update_as_many_episodes_run_as_before(serving: Callable[..., Served]) -> None:
    """B091: the barrier does not leave the run at one episode at a time."""
    served = serving(token_s=0.06, end_chance=0.0)

    async def work(client: AsyncSwarmClient) -> None:
        await client.start({**SMALL, "trainer": {"group_size": 4, "tasks_per_update": 4}}, wait=True)
        now = 0
        peaks: dict[int, int] = {}

        async def rollout(episode: Episode, _: Task) -> None:
            nonlocal now
            now += 1
            version = episode.policy_version
            peaks[version] = max(peaks.get(version, 0), now)
            await episode.chat(HI, max_tokens=16)
            now -= 1
            await episode.end(reward=1.0)

        tasks = [Task(str(number)) for number in range(12)]
        await client.run(tasks, rollout, group_size=4, concurrency=16)
        assert peaks.keys() == {0, 1, 2}
        assert min(peaks.values()) >= 12, peaks

    with_client(served, work)


def test_nobody_at_the_address_is_a_clear_error() -> None:
    with (
        SwarmClient("http://127.0.0.1:9", "x") as client,
        pytest.raises(SwarmUnavailableError, match="is the swarm run"),
    ):
        client.status()

    async def work() -> None:
        async with AsyncSwarmClient("http://127.0.0.1:9", "x") as client:
            with pytest.raises(SwarmUnavailableError, match="is the swarm run"):
                await client.status()
            with pytest.raises(SwarmUnavailableError, match="event stream"):
                await anext(client.events())

    asyncio.run(work())


@pytest.mark.parametrize("url", ["http://me:hunter2@host:1", "http://hunter2@host", "http://host/?token=hunter2"])
def test_an_address_with_a_secret_is_refused_without_showing_it(url: str) -> None:
    """Addresses stand in errors, logs and rows; a password in one went before the token and opened nothing."""
    for kind in (SwarmClient, AsyncSwarmClient):
        with pytest.raises(AddressError, match="a token opens it") as caught:
            kind(url, "token")
        assert "hunter2" not in str(caught.value)


def test_a_token_that_can_not_be_a_header_is_refused() -> None:
    for kind in (SwarmClient, AsyncSwarmClient):
        with pytest.raises(ValueError, match="token"):
            kind("http://127.0.0.1:9", "two\nlines")


def test_events_of_the_async_client(engine: Served) -> None:
    async def work(client: AsyncSwarmClient) -> None:
        known = [event async for event in client.events(follow=False)]
        assert [event.seq for event in known] == list(range(1, len(known) + 1))
        follower = client.events(after=known[-1].seq)
        async with client.episode("t", mode=Mode.EVAL) as episode:
            await episode.end(reward=1.0)
        assert [(await anext(follower)).kind for _ in range(2)] == ["claim", "episode"]

    with_client(engine, work)


# Servers that behave oddly


class Odd:
    """A server that answers each connection's requests with prepared bytes, then hangs up."""

    def __init__(self, *answers: list[bytes]) -> None:
        self.answers = list(answers)
        self.requests: list[tuple[str, Any]] = []
        """Method and path, and the body's JSON."""
        self.writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Odd:
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        for writer in self.writers:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
        await self.server.wait_closed()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        for answer in self.answers.pop(0):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int((head.lower().split(b"content-length: ")[1:] or [b"0"])[0].split(b"\r\n")[0])
            body = await reader.readexactly(length)
            self.requests.append((" ".join(head.decode().split()[:2]), json.loads(body or b"null")))
            writer.write(answer)
            await writer.drain()
        writer.close()


def http(body: Any, status: str = "200 OK") -> bytes:
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(payload)}\r\n\r\n".encode() + payload


CLOSED: dict[str, Any] = {"episode_id": None, "reason": "quota", "retry_after_s": 0.1}
OPEN = {
    **{"episode_id": "e1", "group_id": "t#0", "index": 0, "base_url": "http://x", "api_key": "k"},
    **{"policy_version": 0, "lease_s": 60.0},
}
DIES = b""
"""The connection is closed once the request has been read."""


def in_both_clients(*answers: list[bytes], ask: Callable[..., Any]) -> Iterator[tuple[Any, list[tuple[str, Any]]]]:
    """What a question of a client comes to, asked of a server with these answers, and the requests that it took."""

    async def of_sync() -> tuple[Any, list[tuple[str, Any]]]:
        async with Odd(*answers) as odd:

            def work() -> Any:
                with SwarmClient(odd.url, "t") as client:
                    return ask(client)

            return await asyncio.to_thread(work), odd.requests

    async def of_async() -> tuple[Any, list[tuple[str, Any]]]:
        async with Odd(*answers) as odd, AsyncSwarmClient(odd.url, "t") as client:
            return await ask(client), odd.requests

    yield asyncio.run(of_sync())
    yield asyncio.run(of_async())


def claim(client: Any) -> Any:
    return (client.claim if isinstance(client, AsyncSwarmClient) else client.episode)("t", wait_s=None)


def test_a_claim_whose_connection_dies_is_sent_again_with_its_key() -> None:
    claims = [http(CLOSED), DIES], [http(OPEN)], [http({})]
    for episode, requests in in_both_clients(*claims, ask=claim):
        assert episode.episode_id == "e1"
        assert [path for path, _ in requests] == ["POST /swarm/v1/episodes"] * 3
        assert len({body["claim_key"] for _, body in requests}) == 1


def test_a_claim_whose_episode_was_lost_with_its_answer_takes_another_key() -> None:
    gone = http({"error": {"code": "episode_lost", "message": "gone", "hint": ""}}, "410 Gone")
    for episode, requests in in_both_clients([http(CLOSED), DIES], [gone, http(OPEN)], [http({})], ask=claim):
        assert episode.episode_id == "e1"
        keys = [body["claim_key"] for _, body in requests]
        assert keys == [keys[0]] * 3 + [keys[3]]
        assert keys[3] != keys[0]


def test_what_a_proxy_answers_while_the_server_is_gone_is_waited_out() -> None:
    bad_gateway = http(b"<html>nginx</html>", "502 Bad Gateway")
    for episode, requests in in_both_clients([http(CLOSED), bad_gateway, http(OPEN)], [http({})], ask=claim):
        assert (episode.episode_id, len(requests)) == ("e1", 3)


NUMBERS = ("SO_KEEPALIVE", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")


def options_of(answer: httpx.Response) -> list[int]:
    line = answer.extensions["network_stream"].get_extra_info("socket")
    levels = (socket.SOL_SOCKET, *[socket.IPPROTO_TCP] * 4)
    return [line.getsockopt(level, getattr(socket, name)) for level, name in zip(levels, NUMBERS, strict=True)]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere some of them have another name, or are not there")
def test_every_connection_is_probed_for_a_server_that_has_vanished(engine: Served) -> None:
    """A minute without an answer to a probe, or to what was sent, ends it."""
    request = request_of("GET", f"{engine.url}/swarm/v1/status", None, {})

    async def of_async() -> list[int]:
        async with TransportPool(httpx.AsyncHTTPTransport).make() as transport:
            answer = await transport.handle_async_request(request)
            await answer.aread()
            return options_of(answer)

    with TransportPool(httpx.HTTPTransport).make() as transport:
        answer = transport.handle_request(request)
        answer.read()
        found = options_of(answer)
    assert found == asyncio.run(of_async()) == uvloop.run(of_async()) == [1, 30, 10, 3, 60_000]


def test_a_request_that_does_something_twice_when_sent_twice_is_sent_once() -> None:
    def save_sync(client: SwarmClient) -> None:
        assert client.completed() == {}
        with pytest.raises(NoAnswerError, match="no answer from"):
            client.checkpoint()

    async def save_async(client: AsyncSwarmClient) -> None:
        assert await client.completed() == {}
        with pytest.raises(NoAnswerError, match="no answer from"):
            await client.checkpoint()

    def save(client: Any) -> Any:
        return (save_async if isinstance(client, AsyncSwarmClient) else save_sync)(client)  # type: ignore[arg-type]

    for _, requests in in_both_clients([http({"completed": {}}), DIES], ask=save):
        assert [path for path, _ in requests] == ["GET /swarm/v1/tasks", "POST /swarm/v1/checkpoints"]


def refusal(code: str) -> SwarmUnavailableError:
    return SwarmUnavailableError("503", code)


def test_a_server_is_waited_for_in_growing_pauses_up_to_the_limit_counted_from_its_loss() -> None:
    sent, unsent = NoAnswerError("gone", is_sent=True), NoAnswerError("gone", is_sent=False)

    def pause(error: SwarmUnavailableError, now: float, num_tries: int = 0, is_repeatable: bool = True) -> float:
        return reconnection.pause_s(error, is_repeatable=is_repeatable, num_tries=num_tries, now=now)

    reconnection = Reconnection(10.0)
    with pytest.raises(NoAnswerError, match=r"^gone$"):  # it has never answered
        pause(sent, 0.0)
    reconnection.heard()
    assert [pause(sent, 100.0, tries) for tries in range(7)] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert pause(unsent, 109.75, 9, is_repeatable=False) == 0.25
    with pytest.raises(NoAnswerError, match=r"^gone$"):
        pause(sent, 101.0, is_repeatable=False)
    with pytest.raises(NoAnswerError, match=r"gone It was waited for 10 s \(reconnect_s\)"):
        pause(sent, 110.0, 9)
    # Another request finds the limit reached and does not wait anew.
    with pytest.raises(NoAnswerError, match=r"^gone$"):
        pause(sent, 111.0)
    # Back: its engine may still have to be started, within the same time; one that failed does not get better.
    assert pause(refusal("engine_offline"), 105.0) == 0.05
    with pytest.raises(SwarmUnavailableError):
        pause(refusal("engine_failed"), 105.0)
    with pytest.raises(SwarmUnavailableError):
        pause(refusal("engine_offline"), 110.0)
    for code in ("server_closing", "too_many_connections"):
        assert pause(refusal(code), 200.0, is_repeatable=False) == 0.05
    assert pause(refusal("journal_locked"), 200.0) == 0.05
    with pytest.raises(SwarmUnavailableError):
        pause(refusal("journal_locked"), 200.0, is_repeatable=False)
    with pytest.raises(ValueError, match="reconnect_s is -1"):
        Reconnection(-1)


def test_something_that_is_no_swarm_is_told_apart() -> None:
    async def main() -> None:
        async with Odd([http(b"<html>")]) as odd, AsyncSwarmClient(odd.url, "t") as client:
            with pytest.raises(SwarmProtocolError, match="is this the address of a swarm"):
                await client.status()

    asyncio.run(main())


def test_an_episode_may_be_given_up_inside_its_block(engine: Served) -> None:
    with engine.client() as client, client.episode("given up", mode=Mode.EVAL) as episode:
        episode.abort("nothing to judge")
    assert episode.is_given_up
    assert episode.result is None
