"""`client.run` outlives its server: whatever an agent raises, what was lost is played again, and nothing twice.

The agents speak through SDKs with their own errors and their own ideas of when to ask again; LangChain's does so in
tests/frameworks, whose environment has it.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from conftest import Process, Served, fake_worker, serve_process, wait_until

HELPERS = Path(__file__).parent
sys.path.append(str(HELPERS))

from test_lifecycle import CONFIG, check_journal, config_file, free_port, read_journal, wait_for_step  # noqa: E402

from swarm_engine.client import (  # noqa: E402
    AsyncSwarmClient,
    Episode,
    EpisodeNotEndedError,
    EpisodeResult,
    NoAnswerError,
    ReplayLimitError,
    SwarmClient,
    SyncEpisode,
    Task,
)
from swarm_engine.types import Mode  # noqa: E402

HI: list[Any] = [{"role": "user", "content": "hi"}]
Ask = Callable[[SyncEpisode], None]


def by_openai(episode: SyncEpisode) -> None:
    with openai.OpenAI(base_url=episode.base_url, api_key=episode.api_key) as api:
        api.chat.completions.create(model="policy", messages=HI, max_tokens=12)


def by_anthropic(episode: SyncEpisode) -> None:
    with anthropic.Anthropic(base_url=episode.base_url, api_key=episode.api_key) as api:
        api.messages.create(model="policy", messages=HI, max_tokens=12)


def by_chat(episode: SyncEpisode) -> None:
    episode.chat(HI, max_tokens=12)


# What a rollout raises


def hidden(ask: Ask) -> Ask:
    """As frameworks do that turn every fault of a model into one of their own."""

    def asked(episode: SyncEpisode) -> None:
        try:
            ask(episode)
        except Exception as error:
            raise RuntimeError("the agent could not go on") from error

    return asked


def swallowed(ask: Ask) -> Ask:
    """As agents do that give up without a word."""

    def asked(episode: SyncEpisode) -> None:
        try:
            ask(episode)
        except (openai.OpenAIError, anthropic.AnthropicError):
            raise EpisodeNotEndedError("nobody ended it") from None

    return asked


def drop(served: Served, episode_id: str) -> None:
    with served.client() as client:
        client._control("POST", f"/episodes/{episode_id}/abort")


@pytest.mark.parametrize(
    "ask",
    [
        pytest.param(by_openai, id="openai"),
        pytest.param(by_anthropic, id="anthropic"),
        pytest.param(by_chat, id="chat"),
        pytest.param(hidden(by_openai), id="hidden"),
        pytest.param(swallowed(by_openai), id="swallowed"),
    ],
)
def test_an_episode_that_is_lost_is_played_again_whatever_its_agent_raises(engine: Served, ask: Ask) -> None:
    lose_one(engine, ask)


def lose_one(engine: Served, ask: Ask) -> None:
    """Run an agent whose first episode is lost under it."""
    played: list[str] = []

    def rollout(episode: SyncEpisode, _: Task) -> None:
        played.append(episode.episode_id)
        if len(played) == 1:
            drop(engine, episode.episode_id)
        ask(episode)
        episode.end(reward=1.0)

    with engine.client() as client:
        (result,) = client.run([Task("t")], rollout, group_size=1, concurrency=1, mode=Mode.EVAL)
    assert len(played) == 2
    assert result.episode_id == played[1]


def test_an_episode_that_is_lost_whenever_it_is_played_ends_the_run_after_five_replays(engine: Served) -> None:
    played: list[str] = []

    def rollout(episode: SyncEpisode, _: Task) -> None:
        played.append(episode.episode_id)
        drop(engine, episode.episode_id)
        by_openai(episode)

    async def rollout_too(episode: Episode, _: Task) -> None:
        played.append(episode.episode_id)
        drop(engine, episode.episode_id)
        await episode.chat(HI)

    async def run() -> None:
        async with AsyncSwarmClient(engine.url, engine.tokens["operator"]) as client:
            await client.run([Task("t")], rollout_too, group_size=1, concurrency=1, mode=Mode.EVAL)

    said = r"an episode of task 't' was lost, and a run plays it again 5 times at most; .* ended with "
    with engine.client() as client, pytest.raises(ReplayLimitError, match=said + "GoneError|APIStatusError"):
        client.run([Task("t")], rollout, group_size=1, concurrency=1, mode=Mode.EVAL)
    assert len(set(played)) == len(played) == 6
    with pytest.raises(ReplayLimitError, match=said + "EpisodeLostError"):
        asyncio.run(run())
    assert len(set(played)) == len(played) == 12


def test_an_error_of_an_agent_whose_episode_runs_ends_the_run_and_frees_its_place(engine: Served) -> None:
    def rollout(episode: SyncEpisode, _: Task) -> None:
        with openai.OpenAI(base_url=episode.base_url, api_key="wrong", max_retries=0) as api:
            api.models.list()

    with engine.client() as client:
        with pytest.raises(openai.AuthenticationError):
            client.run([Task("t")], rollout, group_size=1, concurrency=1, mode=Mode.EVAL)
        assert client.status().running == 0


def test_an_episode_that_its_own_rollout_gives_up_is_played_again(engine: Served) -> None:
    played: list[str] = []

    def rollout(episode: SyncEpisode, _: Task) -> None:
        played.append(episode.episode_id)
        if len(played) == 1:
            episode.abort("the world broke down")
        else:
            episode.end(reward=1.0)

    with engine.client() as client:
        (result,) = client.run([Task("t")], rollout, group_size=1, concurrency=1, mode=Mode.EVAL)
    assert [result.episode_id] == played[1:]


# Kills


class Restarted:
    """A server on one port that is killed and comes back."""

    def __init__(self, tmp_path: Path, config: dict[str, Any]) -> None:
        self.run_dir = tmp_path / "run"
        self._port = str(free_port())
        file = config_file(tmp_path)
        self._worker = fake_worker(self.run_dir, token_s=0.02, end_chance=0.0)
        assert config == CONFIG
        self.served: Process = self._serve("--start", "--config", str(file))

    def _serve(self, *words: str) -> Process:
        return serve_process(self.run_dir, "--port", self._port, *words, worker=self._worker)

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.served.stop(number)

    def start(self, *words: str) -> None:
        self.served = self._serve(*words)


def run_async(served: Served, tasks: list[Task], on_episode: Callable[[EpisodeResult], None]) -> list[EpisodeResult]:
    async def rollout(episode: Episode, _: Task) -> None:
        reply = await episode.chat(HI, max_tokens=12)
        await episode.chat([*HI, reply.message, *HI], max_tokens=12)
        await episode.end(reward=1.0)

    async def work() -> list[EpisodeResult]:
        async with AsyncSwarmClient(served.url, served.tokens["sampler"]) as client:
            return await client.run(tasks, rollout, group_size=2, concurrency=4, on_episode=on_episode)

    return asyncio.run(work())


@pytest.mark.slow
def test_runs_of_both_clients_end_with_every_group_complete_however_often_the_server_is_killed(tmp_path: Path) -> None:
    met = run_through_kills(tmp_path, (by_openai, by_anthropic, by_chat))
    assert met["openai"] + met["anthropic"] > 0


def run_through_kills(tmp_path: Path, agents: tuple[Ask, ...]) -> Counter[str]:
    """Run agents through three ends of their server; returns whose errors they met how often."""
    server = Restarted(tmp_path, CONFIG)
    ended: list[EpisodeResult] = []
    met: Counter[str] = Counter()

    def rollout(episode: SyncEpisode, task: Task) -> None:
        ask = agents[task.data["number"] % len(agents)]
        try:
            ask(episode)
            ask(episode)
        except Exception as error:
            met[type(error).__module__.partition(".")[0]] += 1
            raise
        episode.end(reward=float(task.data["number"]))

    def keep_killing() -> None:
        # A kill, one after which an operator has to start the engine, and an orderly end; calls run each time.
        for count, (number, words) in enumerate(
            [(signal.SIGKILL, ["--start"]), (signal.SIGKILL, []), (signal.SIGTERM, ["--start"])]
        ):
            with server.served.client() as client:
                wait_until(lambda enough=4 * count: len(ended) >= enough and client.status().running >= 3, 60)
            server.kill(number)
            server.start(*words)
            if not words:
                with server.served.client() as client:
                    client.start(wait=True)

    tasks = [Task(f"t{number}", {"number": number}) for number in range(6)]
    others = [Task(f"a{number}") for number in range(4)]
    killer = threading.Thread(target=keep_killing)
    results: list[EpisodeResult] = []
    asker = threading.Thread(target=lambda: results.extend(run_async(server.served, others, ended.append)))
    try:
        with SwarmClient(server.served.url, server.served.tokens["operator"]) as client:
            assert client.status().step == 0
            killer.start()
            asker.start()
            results += client.run(tasks, rollout, group_size=2, concurrency=6, on_episode=ended.append)
            asker.join()
            killer.join()
            wait_for_step(client, 5)
            assert client.completed() == {task.task_id: 2 for task in (*tasks, *others)}
    finally:
        server.kill(signal.SIGTERM)
    assert Counter(result.task_id for result in results) == {task.task_id: 2 for task in (*tasks, *others)}
    check_journal(server.run_dir)
    events, step_of, _ = read_journal(server.run_dir)
    ends = [payload["episode_id"] for _, kind, payload in events if kind == "episode"]
    assert sorted(ends) == sorted(result.episode_id for result in results) == sorted(step_of)
    assert sum(kind == "server" for _, kind, _ in events) == 4
    return met


def test_a_server_that_does_not_come_back_ends_the_run_after_the_stated_time(tmp_path: Path) -> None:
    server = Restarted(tmp_path, CONFIG)
    try:
        with server.served.client(reconnect_s=1.0) as client:

            def rollout(episode: SyncEpisode, _: Task) -> None:
                server.kill()
                by_openai(episode)

            began = time.monotonic()
            with pytest.raises(NoAnswerError, match=r"is the swarm running\? It was waited for 1 s \(reconnect_s\)"):
                client.run([Task("t")], rollout, group_size=1, concurrency=1, mode=Mode.EVAL)
            assert time.monotonic() - began < 30
    finally:
        server.kill()
