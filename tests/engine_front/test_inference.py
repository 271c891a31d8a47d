"""The inference routes of a real server, through OpenAI's SDK and by hand."""

from __future__ import annotations

import gc
import http.client
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from conftest import SMALL, Served, wait_for_running
from tiny_tokenizer import END_ID, PAD_ID, ids

from swarm_engine.client import ContextLengthError, SwarmClient, SwarmRequestError, SyncEpisode
from swarm_engine.server.episodes import LiveEpisode
from swarm_engine.tracker.tracker import EpisodeTracker
from swarm_engine.types import Call, LogitsProcessors, Mode, Outcome

HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def episode(engine: Served) -> Iterator[SyncEpisode]:
    with engine.client() as client:
        claimed = client.episode("inference", mode=Mode.DEBUG)
        yield claimed
        claimed.abort()


def sdk(episode: SyncEpisode, suffix: str = "") -> openai.OpenAI:
    return openai.OpenAI(base_url=episode.base_url + suffix, api_key=episode.api_key, max_retries=0)


def blocks(engine: Served, episode: SyncEpisode) -> list[dict[str, Any]]:
    """The sampled block of every call of an episode."""
    with engine.client() as client:
        return [timeline["blocks"][-1] for timeline in client.timelines(episode.episode_id)]


@pytest.mark.parametrize("suffix", ["", "/v1", "/"])
def test_the_openai_sdk_works_with_and_without_v1(engine: Served, episode: SyncEpisode, suffix: str) -> None:
    with sdk(episode, suffix) as client:
        reply = client.chat.completions.create(model="whatever", messages=HI, max_tokens=6, logprobs=True)
        assert [model.id for model in client.models.list()] == ["policy"]
    assert reply.model == "policy"
    assert reply.usage is not None
    (choice,) = reply.choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    sampled = blocks(engine, episode)[-1]
    assert len(sampled["token_ids"]) == len(choice.logprobs.content) == reply.usage.completion_tokens
    assert [entry.logprob for entry in choice.logprobs.content] == sampled["logprobs"]
    assert reply.usage.prompt_tokens == 21
    joined = b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content)
    assert joined.decode().removesuffix("<|im_end|>") == choice.message.content
    assert choice.finish_reason == ("stop" if sampled["token_ids"][-1] == END_ID else "length")


@pytest.mark.parametrize(
    "path", ["/chat/completions", "/v1/chat/completions", "/v1/v1/responses", "/v1/responses", "/v1/models/policy"]
)
def test_an_inference_route_without_an_episode_says_where_its_routes_are(engine: Served, path: str) -> None:
    answer = httpx.request("GET" if "models" in path else "POST", engine.url + path, json={})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (404, "no_episode", "invalid_request_error")
    assert error["message"] == (
        f"{path} is a route of an episode, and this address names none; claim an episode with POST /swarm/v1/episodes "
        "and use the base_url and api_key that it returns"
    )
    elsewhere = httpx.post(engine.url + path, json={}, headers={"host": "elsewhere.example"})
    assert (elsewhere.status_code, elsewhere.json()["error"]["type"]) == (421, "invalid_request_error")


def test_so_does_anthropics_route_in_its_own_shape(engine: Served) -> None:
    error = httpx.post(f"{engine.url}/v1/messages", json={}).json()
    assert (error["type"], error["error"]["type"]) == ("error", "not_found_error")
    assert "use the base_url" in error["error"]["message"]


def test_streamed_and_whole_replies_of_one_seed_are_the_same_to_the_token(engine: Served, episode: SyncEpisode) -> None:
    """B010, B067."""
    with sdk(episode) as client:
        whole = client.chat.completions.create(model="p", messages=HI, max_tokens=12, seed=7, logprobs=True)
        chunks = list(
            client.chat.completions.create(
                model="p",
                messages=HI,
                max_tokens=12,
                seed=7,
                logprobs=True,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    first, second = blocks(engine, episode)
    assert first["token_ids"] == second["token_ids"]
    assert first["logprobs"] == second["logprobs"]
    *content, last, counted = chunks
    assert counted.choices == []
    assert counted.usage == whole.usage
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    assert "".join(chunk.choices[0].delta.content or "" for chunk in content) == whole.choices[0].message.content
    assert whole.choices[0].logprobs is not None
    entries = [
        entry for chunk in content if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content or []
    ]
    assert entries == whole.choices[0].logprobs.content
    assert all(chunk.usage is None for chunk in content)
    assert len({chunk.id for chunk in chunks}) == 1


def test_without_the_option_a_stream_has_no_usage_chunk_and_ends_with_done(episode: SyncEpisode) -> None:
    """B067."""
    raw = httpx.post(
        f"{episode.base_url}/v1/chat/completions",
        headers={"x-api-key": episode.api_key},
        json={"messages": HI, "stream": True, "max_tokens": 3},
    )
    assert raw.headers["content-type"].startswith("text/event-stream")
    assert raw.headers["x-call-id"].startswith(episode.episode_id)
    events = raw.text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    assert all(json.loads(event.removeprefix("data: "))["choices"] for event in events[:-1])


def test_tokens_are_streamed_as_they_come(serving: Callable[..., Served]) -> None:
    served = serving(token_s=0.05, end_chance=0.0)
    with served.client() as client:
        client.start(SMALL, wait=True)
        claimed = client.episode("t", mode=Mode.DEBUG)
        with sdk(claimed) as api:
            arrived = [
                time.monotonic() for _ in api.chat.completions.create(model="p", messages=HI, max_tokens=8, stream=True)
            ]
    assert len(arrived) >= 9
    assert arrived[-1] - arrived[0] > 0.2


def test_policy_at_agent_and_the_agents_path_name_the_agent(engine: Served, episode: SyncEpisode) -> None:
    auth = {"authorization": f"Bearer {episode.api_key}"}
    body = {"model": "policy@seat-2", "messages": HI, "max_tokens": 2}
    assert httpx.post(f"{episode.base_url}/chat/completions", headers=auth, json=body).json()["model"] == "policy"
    url = f"{episode.base_url}/agents/a%2Fb%20c/v1/chat/completions"
    assert httpx.post(url, headers=auth, json={**body, "model": "x"}).status_code == 200
    assert httpx.post(f"{episode.base_url}/agents/seat-1/chat/completions", headers=auth, json=body).status_code == 400
    with engine.client() as client:
        assert [timeline["agent"] for timeline in client.timelines(episode.episode_id)] == ["seat-2", "a/b c"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": 0.5}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": "1"}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"reasoning_effort": "much"}, "reasoning_effort"),
    ({"made_up": 1}, "made_up"),
    ({"temperature": 3}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 0.0099}, "temperature"),
    ({"temperature": 1e-320}, "temperature"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": "5"}, "max_completion_tokens"),
    ({"temperature": 1e-8}, "temperature"),
    ({"temperature": 5e-324}, "temperature"),
    ({"temperature": 1e30}, "temperature"),
    ({"seed": 1.5}, "seed"),
    ({"seed": True}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 10**400}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"x": 1}}, "stream_options.x"),
    ({"messages": []}, "messages"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
]


@pytest.mark.parametrize(("change", "param"), REFUSED, ids=[str(change) for change, _ in REFUSED])
def test_what_is_not_supported_is_a_400_that_names_the_field(
    episode: SyncEpisode, change: dict[str, Any], param: str
) -> None:
    answer = httpx.post(
        f"{episode.base_url}/chat/completions",
        headers={"authorization": f"Bearer {episode.api_key}"},
        json={"model": "p", "messages": HI, **change},
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert error["message"]


RESHAPING: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"top_k": 5},
    {"min_p": 0.1},
    {"presence_penalty": 0.5},
    {"frequency_penalty": -1},
    {"repetition_penalty": 1.1},
    {"logit_bias": {"97": 1}},
]


def test_what_training_can_not_follow_is_refused_in_training_and_taken_in_other_modes(
    serving: Callable[..., Served],
) -> None:
    """B054: the trainer's distribution is over the whole vocabulary."""
    bodies: dict[str, dict[str, Any]] = {
        "chat/completions": {"messages": HI},
        "completions": {"prompt": "hi"},
        "responses": {"input": "hi"},
        "messages": {"messages": HI, "max_tokens": 5},
    }
    served = serving()
    with served.client() as client:
        client.start(SMALL, wait=True)
        asked = []
        for mode in Mode:
            claimed = client.episode("k", mode=mode)
            for route, body in bodies.items():
                for change in RESHAPING:
                    url, auth = f"{claimed.base_url}/{route}", {"x-api-key": claimed.api_key}
                    answer = httpx.post(url, headers=auth, json={"model": "p", **body, **change})
                    (name,) = change
                    if mode is Mode.TRAIN:
                        assert answer.status_code == 400, answer.text
                        assert name in answer.json()["error"]["message"]
                        assert "eval or debug" in answer.json()["error"]["message"]
                    else:
                        assert answer.status_code == 200, answer.text
                        asked.append({name: [[97, 1.0]]} if name == "logit_bias" else change)
                    greedy = httpx.post(url, headers=auth, json={"model": "p", **body, **change, "temperature": 0})
                    is_taken = mode is not Mode.TRAIN or name in ("top_p", "top_k", "min_p")
                    assert greedy.status_code == (200 if is_taken else 400), greedy.text
                    if is_taken:
                        asked.append(None if name in ("top_p", "top_k", "min_p") else asked[-1])
            blocks = [timeline["blocks"][-1] for timeline in client.timelines(claimed.episode_id)]
            assert not any(any(block["loss_mask"]) for block in blocks)
            claimed.abort()
    log = (served.run_dir / "fake_requests.jsonl").read_text().splitlines()
    plain = asdict(LogitsProcessors()) | {"logit_bias": []}
    told = [json.loads(line)["processors"] for line in log]
    assert told == [change and plain | change for change in asked]


def test_values_that_change_nothing_and_labels_are_taken(episode: SyncEpisode) -> None:
    harmless = {
        "top_p": 1, "n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "tools": [],
        "tool_choice": "auto", "response_format": {"type": "text"}, "user": "me", "metadata": {"a": "b"}, "seed": None,
        "store": False, "max_tokens": 2, "stop": None,
    }  # fmt: skip
    auth = {"authorization": f"Bearer {episode.api_key}"}
    for values in (harmless, {"seed": -1, "max_tokens": 2}, {"temperature": -0.0, "max_tokens": 2}):
        answer = httpx.post(f"{episode.base_url}/chat/completions", headers=auth, json={"messages": HI, **values})
        assert answer.status_code == 200, answer.text


DEEP = b'{"messages": [{"role": "user", "content": [{"type": ' + b"[" * 990 + b"]" * 990 + b"}]}]}"


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e400", b"9" * 5000], ids=range(6))
def test_numbers_that_json_has_not_are_refused_before_anything_is_sampled(
    engine: Served, episode: SyncEpisode, number: bytes
) -> None:
    auth = {"authorization": f"Bearer {episode.api_key}"}
    body = b'{"input": "hi", "metadata": {"a": ' + number + b"}}"
    answer = httpx.post(f"{episode.base_url}/responses", headers=auth, content=body)
    assert answer.status_code == 400
    assert "not valid JSON" in answer.json()["error"]["message"]
    assert blocks(engine, episode) == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 100_000, DEEP], ids=range(7))
def test_a_body_that_is_no_json_object_is_a_400(episode: SyncEpisode, body: bytes) -> None:
    auth = {"authorization": f"Bearer {episode.api_key}"}
    assert httpx.post(f"{episode.base_url}/chat/completions", headers=auth, content=body).status_code == 400


def test_the_newer_limit_goes_first_and_a_cut_reply_says_length(serving: Callable[..., Served]) -> None:
    """B066."""
    served = serving(end_chance=0.0)
    with served.client() as client:
        client.start({**SMALL, "sampler": {"max_tokens": 40}}, wait=True)
        with client.episode("t", mode=Mode.DEBUG) as episode, sdk(episode) as api:
            for limits, expected in [
                ({"max_completion_tokens": 5}, 5),
                ({"max_completion_tokens": 5, "max_tokens": 9}, 5),
                ({"max_tokens": 9}, 9),
                ({}, 40),
            ]:
                reply = api.chat.completions.create(model="p", messages=HI, **limits)  # type: ignore[call-overload]
                assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (expected, "length")
            # OpenAI's own completions stop at 16 tokens where no limit is set.
            free = api.completions.create(model="p", prompt="hi")
            assert free.usage is not None
            assert (free.usage.completion_tokens, free.choices[0].finish_reason) == (40, "length")
            episode.end(reward=0.0)


def test_the_context_bounds_the_reply_and_a_prompt_without_room_is_named(serving: Callable[..., Served]) -> None:
    """B102, B043."""
    served = serving(end_chance=0.0, max_context=100)
    with served.client() as client:
        client.start({**SMALL, "sampler": {"max_tokens": 400}}, wait=True)
        with client.episode("t", mode=Mode.DEBUG) as episode:
            reply = episode.chat(HI, max_tokens=400)
            assert (reply.completion_tokens, reply.finish_reason) == (100 - 21, "length")
            with pytest.raises(
                ContextLengthError, match="119 tokens, prompt and reply together may have 100"
            ) as caught:
                episode.chat([{"role": "user", "content": "x" * 100}])
            assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
            episode.end(reward=0.0)


@pytest.mark.parametrize("route", ["chat/completions", "completions", "messages/count_tokens"])
def test_a_prompt_far_over_the_context_is_refused_at_once_and_nobody_waits_for_it(
    engine: Served, episode: SyncEpisode, route: str
) -> None:
    text = "One or two words. " * 400_000
    body = {"prompt": text} if route == "completions" else {"messages": [{"role": "user", "content": text}]}
    with engine.client() as client, while_asked_for_the_status(client) as waits:
        started = time.monotonic()
        answer = httpx.post(
            f"{episode.base_url}/{route}", headers={"x-api-key": episode.api_key}, json=body, timeout=60
        )
        assert time.monotonic() - started < 5
    assert answer.status_code == 400
    assert re.match(r"prompt is too long: it has at least 2\d{6} tokens, ", answer.json()["error"]["message"])
    assert max(waits) < 0.5


def test_a_long_prompt_that_fits_is_encoded_beside_other_requests(serving: Callable[..., Served]) -> None:
    served = serving(max_context=2_000_000, end_chance=1.0)
    with served.client() as client:
        client.start(SMALL, wait=True)
        with client.episode("t", mode=Mode.DEBUG) as episode, while_asked_for_the_status(client) as waits:
            count = httpx.post(
                f"{episode.base_url}/messages/count_tokens",
                headers={"x-api-key": episode.api_key},
                json={"messages": [{"role": "user", "content": "a b " * 250_000}]},
                timeout=60,
            )
            assert count.json() == {"input_tokens": 1_000_019}
            episode.end(reward=None)
    assert max(waits) < 0.5


@contextmanager
def while_asked_for_the_status(client: SwarmClient) -> Iterator[list[float]]:
    """Ask for the status again and again on another thread; the seconds that each answer took."""
    waits: list[float] = []
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.wait(0.01):
            started = time.monotonic()
            client.status()
            waits.append(time.monotonic() - started)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield waits
    finally:
        is_over.set()
        thread.join()


@pytest.mark.parametrize("outcome", [Outcome.SUCCESS, Outcome.TRUNCATED])
def test_an_episode_that_ran_into_the_context_keeps_the_reward_it_is_given(
    serving: Callable[..., Served], outcome: Outcome
) -> None:
    """B036, B043: whether it was finished is its caller's to say, and no row is longer than the context."""
    served = serving(max_context=100, end_chance=1.0)
    with served.client() as client:
        client.start(SMALL, wait=True)
        with client.episode("t") as episode:
            answer = episode.chat(HI).message
            with pytest.raises(ContextLengthError):
                episode.chat([*HI, answer, {"role": "user", "content": "x" * 100}])
            episode.end(reward=0.75, outcome=outcome)
        (ended,) = [event.payload for event in client.events(follow=False) if event.kind == "episode"]
        assert (ended["rewards"], ended["outcome"]) == ({"main": 0.75}, outcome)
        assert client.status().pool.episodes == 1
        (timeline,) = client.timelines(episode.episode_id)
        assert sum(len(block["token_ids"]) for block in timeline["blocks"]) <= 100
        assert all(timeline["blocks"][-1]["loss_mask"])


@pytest.mark.parametrize("token_s", [0.0, 0.005], ids=["at once", "one by one"])
def test_a_stop_string_ends_the_reply_before_it_and_the_ids_keep_its_token(
    serving: Callable[..., Served], token_s: float
) -> None:
    """B085, through HTTP, streamed and whole."""
    served = serving(replies=[[*ids("x"), 259, *ids("yz"), END_ID]], token_s=token_s)
    with served.client() as client:
        client.start(SMALL, wait=True)
        with client.episode("t", mode=Mode.EVAL) as episode:
            whole = episode.chat(HI, stop=["ab"])
            assert (whole.text, whole.finish_reason, whole.completion_tokens) == ("x", "stop", 2)
            with sdk(episode) as api:
                chunks = list(api.chat.completions.create(model="p", messages=HI, stop="ab", stream=True))
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "x"
            again = episode.chat([*HI, whole.message, *HI], stop="ab")
            episode.end(reward=1.0)
        recorded = client.timelines(episode.episode_id)
    assert recorded[0]["blocks"][-1]["token_ids"] == recorded[1]["blocks"][-1]["token_ids"] == [*ids("x"), 259]
    assert recorded[2]["blocks"][2]["token_ids"] == [*ids("x"), 259]
    assert again.text == "x"


def test_characters_of_several_tokens_arrive_whole_with_true_bytes(serving: Callable[..., Served]) -> None:
    """B013, B024."""
    smile = [240, 159, 152, 138]
    served = serving(replies=[[*smile, PAD_ID, END_ID]], token_s=0.002)
    with served.client() as client:
        client.start(SMALL, wait=True)
        with client.episode("t", mode=Mode.DEBUG) as episode, sdk(episode) as api:
            whole = api.chat.completions.create(model="p", messages=HI, logprobs=True)
            chunks = list(api.chat.completions.create(model="p", messages=HI, stream=True))
            episode.end(reward=0.0)
    assert whole.choices[0].message.content == "😊"
    assert [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content] == ["😊"]
    assert whole.choices[0].logprobs is not None
    entries = whole.choices[0].logprobs.content or []
    assert [entry.bytes for entry in entries[:4]] == [[240], [159], [152], [138]]
    assert [entry.token for entry in entries] == [
        "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x8a", "<|endoftext|>", "<|im_end|>",
    ]  # fmt: skip


def test_members_of_a_group_differ_though_the_caller_fixes_the_seed(serving: Callable[..., Served]) -> None:
    """B084."""
    served = serving(end_chance=0.01)
    with served.client() as client:
        client.start({**SMALL, "trainer": {"group_size": 4, "tasks_per_update": 1}}, wait=True)
        texts = []
        for _ in range(4):
            with client.episode("t") as episode:
                first, second = (episode.chat(HI, seed=42, max_tokens=16).text for _ in range(2))
                assert first == second, "a seed repeats within its episode"
                texts.append(first)
                episode.end(reward=0.0)
        assert len(set(texts)) == 4


def test_the_same_config_gives_the_same_replies_on_another_server(serving: Callable[..., Served]) -> None:
    found = []
    for name in ("one", "two"):
        with serving(name).client() as client:
            client.start(SMALL, wait=True)
            texts = []
            for task in ("a", "a", "b"):
                with client.episode(task) as episode:
                    texts.append([episode.chat(HI).text for _ in range(2)])
                    episode.end(reward=0.0)
            found.append(texts)
    assert found[0] == found[1]
    assert len({text for texts in found[0] for text in texts}) == 6


def test_a_wrong_key_opens_nothing_and_keys_do_not_mix_episodes(engine: Served) -> None:
    """B094."""
    with engine.client() as client:
        first, second = client.episode("k", mode=Mode.DEBUG), client.episode("k", mode=Mode.DEBUG)
        for key in (second.api_key, engine.tokens["operator"], "x"):
            answer = httpx.post(f"{first.base_url}/chat/completions", headers={"x-api-key": key}, json={"messages": HI})
            assert answer.status_code == 401
        assert httpx.get(f"{first.base_url}/models").status_code == 401
        assert first.api_key not in {second.api_key}
        for episode in (first, second):
            episode.abort()


@pytest.mark.parametrize(
    ("method", "route", "status"),
    [
        ("POST", "/embeddings", 404),
        ("OPTIONS", "/embeddings", 404),
        ("GET", "/chat/completions", 405),
        ("HEAD", "/responses", 405),
        ("POST", "/models", 405),
        ("POST", "/responses/resp_x", 405),
        ("GET", "/responses/resp_x", 404),
        ("GET", "/responses/resp_x/input_items", 404),
        ("GET", "", 404),
    ],
)
def test_routes_that_are_not_there_say_so(episode: SyncEpisode, method: str, route: str, status: int) -> None:
    auth = {"authorization": f"Bearer {episode.api_key}"}
    answer = httpx.request(method, f"{episode.base_url}{route}", headers=auth)
    assert answer.status_code == status
    assert method == "HEAD" or answer.json()["error"]["message"]


@pytest.mark.parametrize("route", ["/models", "/v1/models", "/models/policy"])
def test_models_are_looked_at_by_head_and_options(episode: SyncEpisode, route: str) -> None:
    auth = {"authorization": f"Bearer {episode.api_key}"}
    url = episode.base_url + route
    whole, head = httpx.get(url, headers=auth), httpx.head(url, headers=auth)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(whole.content))
    options = httpx.options(url, headers=auth)
    assert (options.status_code, options.content, options.headers["allow"]) == (204, b"", "GET, HEAD, OPTIONS")
    assert "access-control-allow-origin" not in options.headers
    assert httpx.head(url).status_code == httpx.options(url).status_code == 401
    posted = httpx.options(f"{episode.base_url}/chat/completions", headers=auth)
    assert (posted.status_code, posted.headers["allow"]) == (204, "OPTIONS, POST")


def test_either_of_two_keys_opens_an_episode(episode: SyncEpisode) -> None:
    for headers in (
        [("authorization", f"Bearer {episode.api_key}"), ("x-api-key", "another vendor's")],
        [("authorization", "Bearer another"), ("x-api-key", episode.api_key)],
        [("x-api-key", episode.api_key), ("authorization", "Basic eDp5")],
    ):
        assert httpx.get(f"{episode.base_url}/models", headers=headers).status_code == 200
    none = [("authorization", "Bearer another"), ("x-api-key", "another")]
    assert httpx.get(f"{episode.base_url}/models", headers=none).status_code == 401


def test_a_refused_call_is_no_call_of_its_agent(serving: Callable[..., Served]) -> None:
    served = serving(max_context=100)
    with served.client() as client:
        client.start({**SMALL, "sampler": {"backend": "scripted", "max_tokens": 16}}, wait=True)
        with client.episode("t", mode=Mode.EVAL, script=["one", "two"]) as episode:
            assert episode.chat(HI).text == "one"
            with pytest.raises(ContextLengthError):
                episode.chat([{"role": "user", "content": "x" * 100}], agent="other")
            tool = {"type": "function", "function": {"name": "f"}}
            url, auth = f"{episode.base_url}/agents/third/chat/completions", {"x-api-key": episode.api_key}
            assert httpx.post(url, headers=auth, json={"messages": HI, "tools": [tool]}).status_code == 400
            assert episode.chat(HI).text == "two"
            with pytest.raises(SwarmRequestError, match="0 replies left"):
                episode.chat(HI, agent="fourth")
            episode.end(reward={"main": 1.0})
        timelines = client.timelines(episode.episode_id)
    assert [timeline["agent"] for timeline in timelines] == ["main", "main"]


@pytest.mark.parametrize("route", ["chat/completions", "messages/count_tokens"])
@pytest.mark.parametrize("how", ["abort", "end"])
def test_an_episode_that_is_gone_when_a_body_has_come_in_serves_it_no_more(
    engine: Served, route: str, how: str
) -> None:
    body = json.dumps({"model": "m", "messages": HI}).encode()
    with engine.client() as client:
        episode = client.episode("inference", mode=Mode.DEBUG)
        url = urlsplit(episode.base_url)
        connection = http.client.HTTPConnection(url.netloc)
        connection.putrequest("POST", f"{url.path}/{route}")
        connection.putheader("x-api-key", episode.api_key)
        connection.putheader("content-length", str(len(body)))
        connection.endheaders(body[:9])
        time.sleep(0.2)
        episode.abort() if how == "abort" else episode.end(reward=0.0)
        connection.send(body[9:])
        assert connection.getresponse().status == 410
        connection.close()


@contextmanager
def scripted(served: Served, *script: str) -> Iterator[SyncEpisode]:
    """An episode that plays these replies."""
    with served.client() as client:
        client.start({**SMALL, "sampler": {"backend": "scripted", "max_tokens": 500}}, wait=True)
        yield client.episode("t", mode=Mode.EVAL, script=list(script))


def streamed(episode: SyncEpisode, num_choices: int) -> AbstractContextManager[httpx.Response]:
    body = {"messages": HI, "n": num_choices, "stream": True}
    return httpx.stream(
        "POST", f"{episode.base_url}/chat/completions", headers={"x-api-key": episode.api_key}, json=body
    )


def read_to_first_finish(lines: Iterator[str]) -> None:
    next(line for line in lines if '"finish_reason":"stop"' in line)


def assert_two_are_kept_and_none_is_trained(served: Served, episode: SyncEpisode) -> None:
    first, second = blocks(served, episode)
    assert first["token_ids"] == [*ids("a"), END_ID]
    assert len(second["token_ids"]) >= 1
    assert not any([*first["loss_mask"], *second["loss_mask"]])


def test_a_caller_that_leaves_between_two_choices_trains_neither(serving: Callable[..., Served]) -> None:
    served = serving(token_s=0.01)
    with scripted(served, "a", "b" * 400) as episode:
        with streamed(episode, 2) as answer:
            read_to_first_finish(answer.iter_lines())
        wait_for_running(served, episode, 0)
        assert_two_are_kept_and_none_is_trained(served, episode)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_of_which_one_choice_fails_trains_neither(serving: Callable[..., Served], is_stream: bool) -> None:
    served = serving(token_s=0.01, fails_after=4)
    with scripted(served, "a", "bbbbbbb") as episode:
        answer = httpx.post(
            f"{episode.base_url}/chat/completions",
            headers={"x-api-key": episode.api_key},
            json={"messages": HI, "n": 2, "stream": is_stream},
        )
        assert "the weights are broken" in answer.text
        assert_two_are_kept_and_none_is_trained(served, episode)


def test_an_end_between_two_choices_trains_neither(serving: Callable[..., Served]) -> None:
    served = serving(token_s=0.01)
    with scripted(served, "a", "b" * 400) as episode:
        with streamed(episode, 2) as answer:
            lines = answer.iter_lines()
            read_to_first_finish(lines)
            episode.end(reward=1.0)
            assert "ended while this call ran" in "".join(lines)
        assert_two_are_kept_and_none_is_trained(served, episode)


def test_a_caller_that_ends_its_episode_at_the_finish_reason_trains_the_reply(serving: Callable[..., Served]) -> None:
    served = serving(token_s=0.01)
    with scripted(served, "a") as episode:
        with streamed(episode, 1) as answer:
            read_to_first_finish(answer.iter_lines())
            episode.end(reward=1.0)
        (block,) = blocks(served, episode)
    assert all(block["loss_mask"])


def test_a_call_after_the_end_is_gone(engine: Served) -> None:
    with engine.client() as client, client.episode("t", mode=Mode.DEBUG) as episode:
        episode.end(reward=0.0)
    answer = httpx.post(
        f"{episode.base_url}/chat/completions", headers={"x-api-key": episode.api_key}, json={"messages": HI}
    )
    assert answer.status_code == 410


def slow(serving: Callable[..., Served]) -> Served:
    return serving(token_s=0.02, end_chance=0.0)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_caller_that_goes_away_cancels_its_call(serving: Callable[..., Served], is_stream: bool) -> None:
    """B100."""
    served = slow(serving)
    with served.client() as client:
        client.start({**SMALL, "sampler": {"max_tokens": 2000}}, wait=True)
        with client.episode("t", mode=Mode.EVAL) as episode:
            connection = http.client.HTTPConnection(urlsplit(served.url).netloc)
            path = urlsplit(episode.base_url).path + "/chat/completions"
            body = json.dumps({"messages": HI, "stream": is_stream, "max_tokens": 2000})
            connection.request("POST", path, body, {"x-api-key": episode.api_key})
            if is_stream:
                assert connection.getresponse().readline()
            wait_for_running(served, episode, 1)
            time.sleep(0.1)
            connection.close()
            wait_for_running(served, episode, 0)
            assert episode.chat([{"role": "user", "content": "still there?"}], max_tokens=1).completion_tokens == 1
            episode.end(reward=1.0)
        (cancelled, asked) = client.timelines(episode.episode_id)
    # A reply that nobody follows comes at its end, and this one had none.
    assert len(cancelled["blocks"][-1]["token_ids"]) in (range(1, 500) if is_stream else [0])
    assert not any(cancelled["blocks"][-1]["loss_mask"])
    assert all(asked["blocks"][-1]["loss_mask"])


def test_an_end_while_a_call_runs_cancels_the_call(serving: Callable[..., Served]) -> None:
    served = slow(serving)
    with served.client() as client:
        client.start({**SMALL, "sampler": {"max_tokens": 2000}}, wait=True)
        with client.episode("t", mode=Mode.EVAL) as episode:
            answers: list[int] = []

            def call() -> None:
                answers.append(
                    httpx.post(
                        f"{episode.base_url}/chat/completions",
                        headers={"x-api-key": episode.api_key},
                        json={"messages": HI},
                        timeout=30,
                    ).status_code
                )

            thread = threading.Thread(target=call)
            thread.start()
            wait_for_running(served, episode, 1)
            episode.end(reward=1.0)
            thread.join(5)
        assert answers == [410]
        (timeline,) = client.timelines(episode.episode_id)
        assert not any(timeline["blocks"][-1]["loss_mask"])


def test_calls_of_one_episode_run_side_by_side(serving: Callable[..., Served]) -> None:
    served = slow(serving)
    with served.client() as client:
        client.start(SMALL, wait=True)
        with client.episode("t", mode=Mode.EVAL) as episode:
            started = time.monotonic()
            threads = [
                threading.Thread(
                    target=episode.chat, args=([{"role": "user", "content": str(number)}],), kwargs={"max_tokens": 16}
                )
                for number in range(6)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert time.monotonic() - started < 6 * 16 * 0.02
            episode.end(reward=1.0)
        assert len(client.timelines(episode.episode_id)) == 6


def test_only_a_reply_that_somebody_follows_is_sent_token_by_token(serving: Callable[..., Served]) -> None:
    served = serving()
    with served.client() as client:
        client.start(SMALL, wait=True)
        with client.episode("t", mode=Mode.EVAL) as episode:
            episode.chat(HI, max_tokens=2)
            episode.chat(HI, max_tokens=2, stop="zz")
            auth = {"authorization": f"Bearer {episode.api_key}"}
            url = f"{episode.base_url}/chat/completions"
            httpx.post(url, headers=auth, json={"messages": HI, "max_tokens": 2, "stream": True}).raise_for_status()
            episode.end(reward=1.0)
    lines = (served.run_dir / "fake_requests.jsonl").read_text().splitlines()
    assert [json.loads(line)["is_streamed"] for line in lines] == [False, True, True]


def test_tool_calls_that_the_template_has_no_place_for_are_refused_and_not_dropped(episode: SyncEpisode) -> None:
    """B064: not one word of the history may vanish."""
    calls = [{"id": "c1", "type": "function", "function": {"name": "lookup", "arguments": "{}"}}]
    tool = {"role": "tool", "content": "17", "tool_call_id": "c1"}
    answer = httpx.post(
        f"{episode.base_url}/chat/completions",
        headers={"authorization": f"Bearer {episode.api_key}"},
        json={"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": calls}, tool]},
    )
    assert answer.status_code == 400
    assert "no place for tool calls" in answer.json()["error"]["message"]


def test_a_script_is_played_by_the_scripted_backend_and_refused_by_others(serving: Callable[..., Served]) -> None:
    served = serving()
    with served.client() as client:
        client.start({**SMALL, "sampler": {"backend": "scripted"}}, wait=True)
        with client.episode("t", mode=Mode.DEBUG) as episode:
            assert episode.chat(HI, script="go left").text == "go left"
            assert episode.chat(HI, script=[97, 98, END_ID]).text == "ab"
            episode.end(reward=0.0)
        client.stop()
        client.start(SMALL, wait=True)
        with client.episode("t", mode=Mode.DEBUG) as episode:
            with pytest.raises(SwarmRequestError, match="scripted backend only"):
                episode.chat(HI, script="go left")
            episode.end(reward=0.0)


def test_nothing_of_trained_episodes_stays_in_memory(serving: Callable[..., Served]) -> None:
    """B099: what was trained is in the journal only."""
    before = _alive()  # other tests' constants
    with serving().client() as client:
        client.start(SMALL, wait=True)
        for batch in range(3):
            for task in ("a", "a", "b", "b"):
                with client.episode(f"{task}{batch}") as episode:
                    episode.chat(HI)
                    episode.end(reward=1.0)
        while client.status().step < 3:
            time.sleep(0.01)
        kept = [type(one) for one in _alive() if not any(one is other for other in before)]
    assert kept == []


def _alive() -> list[object]:
    gc.collect()
    return [one for one in gc.get_objects() if type(one) in (EpisodeTracker, Call, LiveEpisode)]
