"""What a claim decides for all calls of its episode: how they are sampled, and who answers which model's name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import SMALL, Served, fake_worker, serve_process, serve_thread
from test_control import wait_for_steps

from swarm_engine.client import AsyncSwarmClient, SwarmClient, SwarmRequestError, SyncEpisode, Task
from swarm_engine.types import Mode

HI: list[Any] = [{"role": "user", "content": "hi"}]
SHAPED = {"temperature": 0, "top_p": 0.9, "top_k": 40, "frequency_penalty": 0.3, "logit_bias": {"5": 1}}
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": HI, "max_completion_tokens": 9},
    "completions": {"prompt": "hi", "max_tokens": 9},
    "responses": {"input": "hi", "max_output_tokens": 9},
    "messages": {"messages": HI, "max_tokens": 9},
}
AGENTS: dict[str, dict[str, Any]] = {
    "aider": {"temperature": 0, "stream": True},
    "browser-use": {"temperature": 0.2, "frequency_penalty": 0.3, "max_completion_tokens": 4096},
    "gptme": {"temperature": 0.0, "top_p": 0.1},
    "lm-eval": {"temperature": 0.0, "max_tokens": 256, "stop": ["\n\n"], "seed": 1234},
}
"""What these send beside the conversation where nobody sets anything."""
TWO = {**SMALL, "policies": {"learner": {}, "old": {"trainable": False}}}


def ask(episode: SyncEpisode, route: str, **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {episode.api_key}"}
    return httpx.post(f"{episode.base_url}/{route}", json=body, headers=headers)


def sampled(client: SwarmClient, episode: SyncEpisode) -> list[dict[str, Any]]:
    return [timeline["blocks"][-1] for timeline in client.timelines(episode.episode_id)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve_thread(tmp_path_factory.mktemp("two") / "run") as served:
        with served.client() as client:
            client.start(TWO, wait=True)
        yield served


@pytest.mark.parametrize("route", BODIES)
def test_a_claim_goes_before_what_every_api_asks_for(engine: Served, route: str) -> None:
    with engine.client() as client, client.episode("a", mode=Mode.EVAL, sampling={"temperature": 1}) as episode:
        assert ask(episode, route, **BODIES[route], **SHAPED).status_code == 200
        assert [block["untrained_because"] for block in sampled(client, episode)] == [None]
        assert ask(episode, route, **BODIES[route], nonsense=1).status_code == 400, "the rest is read as ever"
        episode.end(reward=0.0)


@pytest.mark.parametrize("agent", AGENTS)
def test_what_agents_send_by_default_is_trained_to_the_last_token(engine: Served, agent: str) -> None:
    with engine.client() as client, client.episode("a", mode=Mode.EVAL, sampling={"temperature": 1}) as episode:
        assert ask(episode, "chat/completions", messages=HI, **AGENTS[agent]).status_code == 200
        (block,) = sampled(client, episode)
        episode.end(reward=0.0)
    assert block["untrained_because"] is None
    assert all(block["loss_mask"])


@pytest.mark.parametrize("route", BODIES)
def test_its_limit_of_a_reply_goes_before_theirs(engine: Served, route: str) -> None:
    with engine.client() as client, client.episode("a", mode=Mode.DEBUG, sampling={"max_tokens": 2}) as episode:
        ask(episode, route, **BODIES[route])
        assert [len(block["token_ids"]) <= 2 for block in sampled(client, episode)] == [True]
        episode.abort()


def test_an_evaluation_may_be_greedy_whatever_its_agent_sends(engine: Served) -> None:
    with engine.client() as client, client.episode("a", mode=Mode.EVAL, sampling={"temperature": 0}) as episode:
        assert ask(episode, "chat/completions", messages=HI, temperature=1.5).status_code == 200
        assert [block["untrained_because"] for block in sampled(client, episode)] == ["greedy"]
        episode.end(reward=0.0)


@pytest.mark.parametrize(
    ("mode", "sampling", "said"),
    [
        (Mode.TRAIN, {"temperature": 0}, "sampling.temperature is 0, at which nothing is trained; take 1, or claim"),
        (Mode.EVAL, {"temperature": 0.001}, "too close to 0 to be sampled at; take 0 for the likeliest token, or at"),
        (Mode.EVAL, {"temperature": 3}, "sampling.temperature: Input should be less than or equal to 2"),
        (Mode.EVAL, {"max_tokens": 0}, "sampling.max_tokens: Input should be greater than or equal to 1"),
        (Mode.EVAL, {"top_p": 0.9}, "sampling.top_p: Extra inputs are not permitted"),
    ],
)
def test_what_can_not_be_sampled_or_trained_is_refused_with_the_claim(
    engine: Served, mode: Mode, sampling: dict[str, float], said: str
) -> None:
    with engine.client() as client, pytest.raises(SwarmRequestError, match=said) as caught:
        client.episode("a", mode=mode, sampling=sampling)
    assert caught.value.status == 422


def test_calls_by_a_name_that_the_claim_routes_are_answered_by_the_frozen_policy_and_not_trained(two: Served) -> None:
    with two.client() as client, client.episode("a", models={"titles": "old"}, mode=Mode.EVAL) as episode:
        told = [
            ask(episode, "chat/completions", messages=HI, model=model).json()["model"]
            for model in ("gpt-4o", "titles", "titles@namer", "learner", "old")
        ]
        assert told == ["learner", "old", "old", "learner", "old"]
        lines = {
            line["policy"]: line["blocks"][-1]["untrained_because"] for line in client.timelines(episode.episode_id)
        }
        assert lines == {"learner": None, "old": "frozen"}
        counted = ask(episode, "messages/count_tokens", messages=HI, model="titles")
        assert counted.status_code == 200
        episode.end(reward=1.0)
    with (
        two.client() as client,
        pytest.raises(SwarmRequestError, match=r"routes to 'new', which is no policy of") as no,
    ):
        client.episode("a", mode=Mode.EVAL, models={"titles": "new"})
    assert no.value.status == 404


def test_a_routed_name_may_have_an_at_sign_of_its_own(two: Served) -> None:
    """As vendors' names have; what is behind it is no agent then."""
    models = {"claude@20240620": "old", "claude": "learner"}
    with two.client() as client, client.episode("a", models=models, mode=Mode.EVAL) as episode:
        told = [
            ask(episode, "chat/completions", messages=HI, model=model).json()["model"]
            for model in ("claude@20240620", "claude@critic")
        ]
        spoke = {(line["policy"], line["agent"]) for line in client.timelines(episode.episode_id)}
        shown = httpx.get(f"{episode.base_url}/models/claude@20240620", headers={"x-api-key": episode.api_key})
        assert ask(episode, "messages/count_tokens", messages=HI, model="claude@20240620").status_code == 200
        episode.end(reward=1.0)
    assert told == ["old", "learner"]
    assert spoke == {("old", "main"), ("learner", "critic")}
    assert shown.json()["id"] == "old"


def test_a_run_gives_every_episode_the_same(two: Served) -> None:
    sampling, models = {"temperature": 1, "max_tokens": 3}, {"titles": "old"}
    said = {"temperature": 1.0, "max_tokens": 3}

    def rollout(episode: SyncEpisode, _: Task) -> None:
        about = client.describe(episode.episode_id)
        assert (about["sampling"], about["models"]) == (said, models)
        episode.end(reward=1.0)

    tasks = [Task("a")]
    with two.client() as client:
        given: dict[str, Any] = {"group_size": 2, "concurrency": 2, "mode": Mode.EVAL}
        assert len(client.run(tasks, rollout, sampling=sampling, models=models, **given)) == 2

    async def run() -> None:
        async def play(episode: Any, _: Task) -> None:
            about = await swarm.describe(episode.episode_id)
            assert (about["sampling"], about["models"]) == (said, models)
            await episode.end(reward=1.0)

        async with AsyncSwarmClient(two.url, two.tokens["operator"]) as swarm:
            assert len(await swarm.run(tasks, play, sampling=sampling, models=models, **given)) == 2

    asyncio.run(run())


def test_the_journal_keeps_what_a_claim_decided(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    worker = fake_worker(run_dir)
    served = serve_process(run_dir, worker=worker)
    with served.client() as client:
        client.start(TWO, wait=True)
        with client.episode("a", mode=Mode.EVAL, sampling={"temperature": 0.5}, models={"titles": "old"}) as episode:
            ask(episode, "chat/completions", messages=HI, model="x", max_tokens=1)
            episode.end(reward=1.0)
    served.stop()
    served = serve_process(run_dir, worker=worker)
    with served.client() as client:
        about = client.describe(episode.episode_id)
        (claim,) = [event.payload for event in client.events(follow=False) if event.kind == "claim"]
    served.stop()
    decided = {"temperature": 0.5, "max_tokens": None}
    assert (about["sampling"], about["models"]) == (claim["sampling"], claim["models"]) == (decided, {"titles": "old"})


def test_an_agent_that_sends_temperature_0_and_top_p_trains(serving: Callable[..., Served]) -> None:
    with serving().client() as client:
        client.start(SMALL, wait=True)
        for number in range(4):
            with client.episode(f"t{number // 2}", sampling={"temperature": 1}) as episode:
                ask(episode, "chat/completions", messages=HI, max_tokens=1, **SHAPED)
                assert [block["untrained_because"] for block in sampled(client, episode)] == [None]
                assert episode.end(reward=1.0).num_refused == 0
        wait_for_steps(client, 1)
