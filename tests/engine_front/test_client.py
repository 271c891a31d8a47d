"""The clients against a real front, and the small HTTP client against servers that behave oddly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
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
    NotFiniteError,
    SwarmClient,
    SwarmProtocolError,
    SwarmUnavailableError,
    SyncEpisode,
    Task,
)
from swarm_engine.client.http import HttpError, HttpPool
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


# The small HTTP client


class Odd:
    """A server that answers each connection's requests with prepared bytes, then hangs up."""

    def __init__(self, *answers: list[bytes]) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Odd:
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}/x?y=1"
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
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            self.requests.append(head + await reader.readexactly(length))
            for piece in answer.split(b"|"):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.005)
        writer.close()


def ask(*answers: list[bytes], times: int = 1) -> tuple[list[tuple[int, bytes] | HttpError], Odd]:
    async def main() -> tuple[list[tuple[int, bytes] | HttpError], Odd]:
        found: list[tuple[int, bytes] | HttpError] = []
        pool = HttpPool()
        async with Odd(*answers) as odd:
            for _ in range(times):
                try:
                    found.append(await pool.request("POST", odd.url, b"body", {"a": "b"}))
                except HttpError as error:
                    found.append(error)
                await asyncio.sleep(0.02)
            pool.close()
        return found, odd

    return asyncio.run(main())


def test_a_request_is_plain_http() -> None:
    found, odd = ask([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"])
    assert found == [(200, b"ok")]
    head, _, body = odd.requests[0].partition(b"\r\n\r\n")
    assert head.split(b"\r\n")[0] == b"POST /x?y=1 HTTP/1.1"
    assert body == b"body"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 201 Created\r\ncontent-length: 5\r\n\r\nhe|llo",
        b"HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n|3;x=y\r\nl|lo\r\n0\r\n\r\n",
        b"HTTP/1.1 201 Created\r\nconnection: close\r\n\r\nhe|llo",
        b"HTTP/1.1 100 Continue\r\n\r\n|HTTP/1.1 201 Created\r\ncontent-length: 5\r\n\r\nhello",
        b"HTTP/1.1 201 Cre|ated\r\ncontent-length: 5\r|\n\r\nhello",
    ],
)
def test_replies_come_with_a_length_in_chunks_or_up_to_the_end_and_in_any_pieces(answer: bytes) -> None:
    assert ask([answer])[0] == [(201, b"hello")]


def test_a_connection_is_used_again_and_one_that_was_hung_up_while_idle_is_replaced() -> None:
    ok = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    found, odd = ask([ok, ok], [ok], times=3)
    assert found == [(200, b"")] * 3
    assert len(odd.requests) == 3


def test_a_connection_that_is_hung_up_just_as_it_is_used_again_is_replaced() -> None:
    ok = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
    found, odd = ask([ok, b""], [ok], times=2)
    assert found == [(200, b"")] * 2
    assert len(odd.requests) == 3


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhel", b"", b"SSH-2.0-x\r\n\r\n"])
def test_an_answer_that_breaks_off_or_is_no_http_is_an_error(answer: bytes) -> None:
    ((error,), _) = ask([answer])
    assert isinstance(error, HttpError)


def test_something_that_is_no_swarm_is_told_apart() -> None:
    async def main() -> None:
        odd = Odd([b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n<html>"])
        async with odd, AsyncSwarmClient(odd.url.partition("/x")[0], "t") as client:
            with pytest.raises(SwarmProtocolError, match="is this the address of a swarm"):
                await client.status()

    asyncio.run(main())


def test_an_episode_may_be_given_up_inside_its_block(engine: Served) -> None:
    with engine.client() as client, client.episode("given up", mode=Mode.EVAL) as episode:
        episode.abort("nothing to judge")
    assert episode.is_given_up
    assert episode.result is None
