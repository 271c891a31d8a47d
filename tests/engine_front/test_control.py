"""The control routes of a real server."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import socket
import sqlite3
import stat
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from conftest import SMALL, Served, fake_worker, spoken, wait_until

from swarm_engine.client import (
    AsyncSwarmClient,
    ClaimTimeoutError,
    Episode,
    EpisodeLostError,
    EpisodeNotEndedError,
    EpisodeResult,
    NotFiniteError,
    SwarmClient,
    SwarmRequestError,
    SwarmUnavailableError,
    SyncEpisode,
    Task,
)
from swarm_engine.config import EngineConfig
from swarm_engine.errors import RunDirError
from swarm_engine.server import roster
from swarm_engine.server.auth import Role, Tokens
from swarm_engine.server.engine import Engine
from swarm_engine.server.episodes import ClaimRequest, LiveEpisode
from swarm_engine.server.roster import episode_records
from swarm_engine.types import ClaimReason, DropReason, EngineState, Mode, Outcome

EVAL = Mode.EVAL
HI = [{"role": "user", "content": "hi"}]


def ask(
    served: Served, method: str, path: str, body: Any = None, role: str = "operator", **headers: str
) -> httpx.Response:
    return httpx.request(
        method,
        f"{served.url}/swarm/v1{path}",
        headers={
            "authorization": f"Bearer {served.tokens[role]}",
            "content-type": "application/json",
            **headers,
        },
        content=body if isinstance(body, bytes) else None if body is None else json.dumps(body),
    )


def error_of(response: httpx.Response) -> tuple[int, str]:
    found = response.json()["error"]
    assert set(found) == {"code", "message", "hint"}
    return response.status_code, found["code"]


def claim_body(**changes: Any) -> dict[str, Any]:
    return {"client_id": "c", "task_id": "t", "mode": "eval", "wait_s": 0, **changes}


# Who may do what


def test_a_token_is_needed_on_loopback_too(engine: Served) -> None:
    assert error_of(httpx.get(f"{engine.url}/swarm/v1/status")) == (401, "unauthorized")
    wrong = httpx.get(f"{engine.url}/swarm/v1/status", headers={"authorization": "Bearer swarm-wrong"})
    assert error_of(wrong) == (401, "unauthorized")


@pytest.mark.parametrize(
    ("role", "method", "path", "status"),
    [
        ("observer", "GET", "/status", 200),
        ("observer", "POST", "/episodes", 403),
        ("sampler", "POST", "/episodes", 200),
        ("sampler", "POST", "/engine/stop", 403),
        ("sampler", "POST", "/checkpoints", 403),
    ],
)
def test_each_role_may_do_its_part(engine: Served, role: str, method: str, path: str, status: int) -> None:
    body = claim_body() if method == "POST" else None
    assert ask(engine, method, path, body, role).status_code == status


@pytest.mark.parametrize(
    "text",
    [None, "", "[]", "{", "[" * 100_000, *(json.dumps(dict.fromkeys(Role, token)) for token in (5, "", "é" * 30))],
    ids=["pipe", "empty", "list", "torn", "deep", "number", "no text", "not ASCII"],
)  # fmt: skip
def test_a_token_file_that_can_not_be_one_is_refused_at_once(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "token.json"
    if text is None:
        os.mkfifo(path)
    else:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(
        RunDirError, match=r"token\.json can't be used .*delete it, and the next start makes new tokens"
    ):
        Tokens.load(path)


def test_a_token_file_whose_link_leads_nowhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "token.json"
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(RunDirError, match=r"token\.json can't be used"):
        Tokens.load(path)


def test_the_token_file_is_for_its_owner_only(engine: Served) -> None:
    assert stat.S_IMODE((engine.run_dir / "token.json").stat().st_mode) == 0o600


@pytest.mark.parametrize("path", ["/swarm/v1/status", "/e/x/chat/completions", "/openapi.json"])
def test_a_request_that_names_another_host_is_refused_everywhere(engine: Served, path: str) -> None:
    answer = httpx.get(engine.url + path, headers={"host": "evil.example:80"})
    assert answer.status_code == 421
    port = urlsplit(engine.url).port
    assert httpx.get(f"{engine.url}/openapi.json", headers={"host": f"localhost:{port}"}).status_code == 200


def test_no_page_elsewhere_is_let_in_by_cors(engine: Served) -> None:
    answer = httpx.options(
        f"{engine.url}/swarm/v1/status",
        headers={"origin": "https://evil.example", "access-control-request-method": "GET"},
    )
    assert "access-control-allow-origin" not in answer.headers


def test_the_api_describes_itself(engine: Served) -> None:
    described = httpx.get(f"{engine.url}/openapi.json").json()
    assert "/swarm/v1/episodes/{episode_id}/end" in described["paths"]


# Episodes


def test_an_episode_from_claim_to_timelines(engine: Served) -> None:
    with engine.client() as client, client.episode("walk", mode=EVAL, tags={"split": "heldout"}) as episode:
        reply = episode.chat(HI, max_tokens=5)
        result = episode.end(reward=0.5, metrics={"moves": 3.0})
    assert result.rewards == {"main": 0.5}
    described = ask(engine, "GET", f"/episodes/{episode.episode_id}").json()
    assert described["status"] == "ended"
    assert described["rewards"] == {"main": 0.5}
    with engine.client("observer") as client:
        (timeline,) = client.timelines(episode.episode_id)
        claim, event = [
            one for one in client.events(follow=False) if one.payload.get("episode_id") == episode.episode_id
        ]
    sampled = timeline["blocks"][-1]
    assert sampled["author"] == "llm"
    assert len(sampled["token_ids"]) == len(sampled["logprobs"]) == reply.completion_tokens
    assert all(sampled["loss_mask"])
    assert sampled["policy_version"] == 0
    assert claim.kind == "claim"
    assert (claim.payload["tags"], claim.payload["policy_version"]) == ({"split": "heldout"}, 0)
    assert event.kind == "episode"
    seconds = event.payload.pop("seconds")
    assert 0 < seconds < 60
    assert event.payload == {
        "episode_id": episode.episode_id,
        "task_id": "walk",
        "group_id": "walk#0",
        "index": 0,
        "mode": "eval",
        "tags": {"split": "heldout"},
        "rewards": {"main": 0.5},
        "outcome": "success",
        "metrics": {"moves": 3.0},
        "policy_version": 0,
        "num_calls": 1,
        "num_prompt_tokens": len("user\nhi") + 3 + len("assistant\n") + 1,
        "num_sampled_tokens": reply.completion_tokens,
        "num_refused": 0,
        "last_refusal": None,
    }


def test_an_end_that_says_something_else_is_a_conflict_however_little_was_said_before(engine: Served) -> None:
    """Nobody was rewarded; then somebody is. And a zero is a zero, whatever its sign."""
    with engine.client() as client:
        nobody, zero = (client.episode(name, mode=EVAL) for name in ("nobody", "zero"))
    path = f"/episodes/{nobody.episode_id}/end"
    assert ask(engine, "POST", path, {"reward": {}, "outcome": "success"}).json()["rewards"] == {}
    assert error_of(ask(engine, "POST", path, {"reward": 1.0, "outcome": "success"})) == (409, "ended_differently")
    path = f"/episodes/{zero.episode_id}/end"
    for reward in (0.0, -0.0, 0):
        assert ask(engine, "POST", path, {"reward": reward, "outcome": "success"}).status_code == 200


@pytest.mark.parametrize("reward", [True, "1.5", {"main": True}, {"main": "1"}])
def test_neither_a_truth_nor_a_text_is_a_reward(engine: Served, reward: Any) -> None:
    with engine.client() as client, client.episode("strict", mode=EVAL) as episode:
        path = f"/episodes/{episode.episode_id}/end"
        assert ask(engine, "POST", path, {"reward": reward, "outcome": "success"}).status_code == 422
        steps = [{"call_id": "x", "reward": True}]
        body = {"reward": 1.0, "outcome": "success", "step_rewards": steps}
        assert ask(engine, "POST", path, body).status_code == 422
        episode.end(reward=1)


def test_the_same_end_twice_is_one_episode_and_another_end_a_conflict(engine: Served) -> None:
    """B097."""
    with engine.client() as client:
        episode = client.episode("twice", mode=EVAL)
        path = f"/episodes/{episode.episode_id}/end"
        body = {"reward": 1.0, "outcome": "success"}
        assert ask(engine, "POST", path, body).status_code == 200
        assert ask(engine, "POST", path, body).json()["rewards"] == {"main": 1.0}
        assert ask(engine, "POST", path, {**body, "reward": {"main": 1}}).status_code == 200
        assert error_of(ask(engine, "POST", path, {**body, "reward": 0.0})) == (409, "ended_differently")
        assert error_of(ask(engine, "POST", f"/episodes/{episode.episode_id}/abort")) == (410, "episode_lost")
        ends = [one for one in client.events(follow=False) if one.kind == "episode"]
    assert len([one for one in ends if one.payload["episode_id"] == episode.episode_id]) == 1


def test_ends_that_arrive_together_are_one_episode(engine: Served) -> None:
    with engine.client() as client:
        episode = client.episode("together", mode=EVAL)
        codes: list[int] = []

        def end(reward: float) -> None:
            codes.append(
                ask(
                    engine, "POST", f"/episodes/{episode.episode_id}/end", {"reward": reward, "outcome": "success"}
                ).status_code
            )

        threads = [threading.Thread(target=end, args=(number % 2,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(codes) == [200] * 4 + [409] * 4


def test_an_end_whose_caller_goes_away_meanwhile_still_counts(tmp_path: Path) -> None:
    async def play() -> tuple[int, list[str]]:
        engine = Engine(tmp_path / "run", fake_worker(tmp_path / "run"))
        await engine.open()
        engine.start(EngineConfig.model_validate(SMALL))
        claimed = await engine.roster.claim(ClaimRequest("me", "a"), 60.0)
        assert isinstance(claimed, LiveEpisode)
        end = asyncio.create_task(engine.roster.end(claimed.episode_id, 1.0, Outcome.SUCCESS, {}, {}))
        await asyncio.sleep(0)
        end.cancel()
        assert claimed.ended is not None
        await claimed.ended
        found = engine.roster.num_running, [event.kind for event in (await engine.journal.events_after(0))[-2:]]
        await engine.close("the test is over")
        return found

    assert asyncio.run(play()) == (0, ["episode", "drop"])


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b'"high"', b"[1]", b"1e10", b"-1e200"])
def test_a_reward_that_is_no_number_to_learn_from_is_refused(engine: Served, number: bytes) -> None:
    with engine.client() as client:
        episode = client.episode("bad", mode=EVAL)
        answer = ask(
            engine, "POST", f"/episodes/{episode.episode_id}/end", b'{"outcome":"success","reward":' + number + b"}"
        )
        assert error_of(answer) == (422, "invalid")
        episode.abort()


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_a_time_that_is_not_finite_is_refused_as_such(engine: Served, number: str) -> None:
    for field in ("lease_s", "wait_s"):
        body = f'{{"client_id": "c", "task_id": "t", "{field}": {number}}}'
        answer = ask(engine, "POST", "/episodes", body.encode())
        assert error_of(answer) == (422, "invalid")
        assert f"{field}: Input should be a finite number" in answer.json()["error"]["message"]
    answer = ask(engine, "POST", "/engine/start", f'{{"lease_s": {number}}}'.encode())
    assert "lease_s: Input should be a finite number" in answer.json()["error"]["message"]


def test_a_reward_out_of_range_is_refused_in_a_plain_sentence(engine: Served) -> None:
    with engine.client() as client:
        episode = client.episode("bad", mode=EVAL)
        for reward, is_shown in ((1e300, "1e+300"), ({"main": -1e300}, "{'main': -1e+300}"), ("high", "'high'")):
            body = {"outcome": "success", "reward": reward}
            answer = ask(engine, "POST", f"/episodes/{episode.episode_id}/end", body)
            assert answer.json()["error"]["message"].startswith(
                "reward: it must be null, a number from -1000000000 to 1000000000, or an object with one of these for "
                f"each agent, not {is_shown}"
            )
        episode.abort()


def test_a_body_with_an_unknown_field_or_without_a_needed_one_is_refused_by_name(engine: Served) -> None:
    answer = ask(engine, "POST", "/episodes", claim_body(colour="red"))
    assert error_of(answer) == (422, "invalid")
    assert "colour" in answer.json()["error"]["message"]
    assert "task_id" in ask(engine, "POST", "/episodes", {"client_id": "c"}).json()["error"]["message"]
    assert error_of(ask(engine, "POST", "/episodes", b"{")) == (422, "invalid")


def test_every_agent_that_spoke_needs_a_reward_and_a_bare_number_goes_to_all(engine: Served) -> None:
    with engine.client() as client:
        episode = client.episode("seats", mode=EVAL)
        for agent in ("white", "black"):
            episode.chat(HI, agent=agent, max_tokens=1)
        with pytest.raises(SwarmRequestError, match="'black' made calls too") as caught:
            episode.end(reward={"white": 1.0})
        assert caught.value.status == 422
        assert episode.end(reward=2).rewards == {"white": 2.0, "black": 2.0}


def test_an_agent_that_got_no_turn_may_have_a_reward_and_is_counted(serving: Callable[..., Served]) -> None:
    with serving().client() as client:
        client.start(SMALL, wait=True)
        for task in ("a", "a", "b", "b"):
            with client.episode(task) as episode:
                for agent in ("white",) if task == "a" else ("white", "black", "grey"):
                    episode.chat(HI, agent=agent, max_tokens=1)
                episode.end(reward={"white": 1.0, "black": 0.0, "grey": None})
        (step,) = wait_for_steps(client, 1)
    assert step["drops"] == {"silent_agent": 2}


def test_a_reward_for_an_agent_that_the_claim_did_not_name_is_refused(engine: Served) -> None:
    claimed = ask(engine, "POST", "/episodes", claim_body(agents=["white", "black"])).json()
    path = f"/episodes/{claimed['episode_id']}"
    end = {"outcome": "success", "reward": {"white": 1.0, "blakc": 0.0}}
    answer = ask(engine, "POST", f"{path}/end", end)
    assert answer.status_code == 422
    assert answer.json()["error"]["message"] == "reward names 'blakc', which is not in this episode"
    assert answer.json()["error"]["hint"] == "its claim named white, black"
    end["reward"] = {"white": 1.0, "black": 0.0}
    assert ask(engine, "POST", f"{path}/end", end).status_code == 200


def test_a_bare_number_is_for_every_agent_of_the_claim_also_after_an_end_that_named_some(engine: Served) -> None:
    """It is the same end only where that gave all of them this number."""

    def ended(first: Any, again: Any) -> list[int]:
        claimed = ask(engine, "POST", "/episodes", claim_body(agents=["white", "black"])).json()
        path = f"/episodes/{claimed['episode_id']}/end"
        return [
            ask(engine, "POST", path, {"reward": reward, "outcome": "success"}).status_code
            for reward in (first, again, first)
        ]

    assert ended({"white": 1.0}, 1.0) == [200, 409, 200]
    assert ended({}, 1.0) == [200, 409, 200]
    assert ended({"white": None}, None) == [200, 409, 200]
    assert ended({"white": 1.0, "black": 0.0}, 1.0) == [200, 409, 200]
    assert ended({"white": 1.0, "black": 1.0}, 1.0) == [200, 200, 200]
    assert ended({"white": 1.0}, {"white": 1.0, "black": 1.0}) == [200, 409, 200]
    assert ended(1.0, {"black": 1.0, "white": 1.0}) == [200, 200, 200]
    assert ended(1.0, {"white": 1.0}) == [200, 409, 200]


def test_rewards_of_calls_are_kept_with_the_episode_and_part_of_its_end(engine: Served) -> None:
    with engine.client() as client:
        episode = client.episode("steps", mode=EVAL)
        calls = [episode.chat([{"role": "user", "content": "hi"}]).call_id for _ in range(2)]
        path = f"/episodes/{episode.episode_id}/end"
        end: dict[str, Any] = {"reward": 1.0, "outcome": "success"}
        for steps, message in (
            ([("x", 1.0)], "step_rewards names 'x', which is no answered call of this episode"),
            ([(calls[0], 1.0), (calls[0], 0.0)], "step_rewards names a call twice"),
        ):
            answer = ask(engine, "POST", path, {**end, "step_rewards": [{"call_id": c, "reward": r} for c, r in steps]})
            assert (answer.status_code, answer.json()["error"]["message"]) == (422, message)
            if "no answered call" in message:
                assert "as x-call-id, and stand behind msg_ or resp_ in the id" in answer.json()["error"]["hint"]
        episode.end(reward=1.0, step_rewards={calls[1]: 0.5, calls[0]: -1.0})
        again = [{"call_id": calls[0], "reward": -1.0}, {"call_id": calls[1], "reward": 0.5}]
        assert ask(engine, "POST", path, {**end, "step_rewards": again}).status_code == 200
        assert ask(engine, "POST", path, end).status_code == 409
        with pytest.raises(NotFiniteError, match="step reward"):
            client.episode("other", mode=EVAL).end(reward=1.0, step_rewards={"x": float("nan")})
    with sqlite3.connect(engine.run_dir / "journal.db") as journal:
        (row,) = journal.execute("SELECT record FROM episodes WHERE episode_id = ?", (episode.episode_id,))
    journal.close()
    record = episode_records.validate_json(zlib.decompress(row[0]))
    assert record.episode.step_rewards == {calls[0]: -1.0, calls[1]: 0.5}


def test_an_unknown_episode_is_not_found_and_one_that_was_given_up_is_gone(engine: Served) -> None:
    for method, path in [("GET", ""), ("POST", "/heartbeat"), ("POST", "/abort"), ("GET", "/timelines")]:
        assert error_of(ask(engine, method, f"/episodes/e0123{path}")) == (404, "not_found")
    with engine.client() as client:
        episode = client.episode("gone", mode=EVAL)
        episode.abort("changed my mind")
        for method, path in [("GET", ""), ("POST", "/heartbeat"), ("POST", "/abort"), ("GET", "/timelines")]:
            assert error_of(ask(engine, method, f"/episodes/{episode.episode_id}{path}")) == (410, "episode_lost")
        with pytest.raises(EpisodeLostError, match="changed my mind"):
            episode.chat(HI)
        with pytest.raises(EpisodeLostError):
            episode.end(reward=1.0)


def test_leaving_a_block_with_an_exception_or_without_an_end_aborts(engine: Served) -> None:
    with engine.client() as client:
        with pytest.raises(ZeroDivisionError), client.episode("oops", mode=EVAL) as failed:
            raise ZeroDivisionError("by me")
        with pytest.raises(EpisodeNotEndedError, match="call end"), client.episode("oops", mode=EVAL) as forgotten:
            pass
        drops = {
            one.payload["episode_id"]: one.payload["reason"]
            for one in client.events(follow=False)
            if one.kind == "drop"
        }
    assert drops[failed.episode_id] == "aborted: ZeroDivisionError: by me"
    assert drops[forgotten.episode_id] == "aborted: left without an end"


def test_an_exception_that_quotes_what_is_no_text_aborts_all_the_same(engine: Served) -> None:
    """A file's name may be of any bytes, and stands in the words of an OSError."""
    with engine.client() as client:
        with pytest.raises(OSError, match="notes"), client.episode("oops", mode=EVAL) as failed:
            raise OSError("notes\udcff are gone")
        reasons = [one.payload["reason"] for one in client.events(follow=False) if one.kind == "drop"]
        assert reasons[-1] == "aborted: OSError: notes\ufffd are gone"
        assert client.status().clients[client.client_id] == 0
        assert failed.is_given_up


def test_a_policy_that_is_not_served_can_not_be_claimed(engine: Served) -> None:
    assert error_of(ask(engine, "POST", "/episodes", claim_body(policies=["other"]))) == (404, "unknown_policy")


def test_agents_that_a_claim_named_are_the_only_ones_to_speak(engine: Served) -> None:
    claimed = ask(engine, "POST", "/episodes", claim_body(agents=["white"])).json()
    auth = {"authorization": f"Bearer {claimed['api_key']}"}
    body = {"messages": HI, "max_tokens": 1}
    assert (
        httpx.post(f"{claimed['base_url']}/agents/white/chat/completions", headers=auth, json=body).status_code == 200
    )
    refused = httpx.post(f"{claimed['base_url']}/chat/completions", headers=auth, json=body)
    assert refused.status_code == 404
    assert "white" in refused.json()["error"]["message"]


# Events


def test_events_are_numbered_resumable_and_followed_live(engine: Served) -> None:
    with engine.client() as client:
        seen = list(client.events(follow=False))
        assert [event.seq for event in seen] == list(range(1, len(seen) + 1))
        assert [event.kind for event in seen[:5]] == ["server", "config", "state", "trained", "state"]
        assert list(client.events(after=seen[-3].seq, follow=False))[:2] == seen[-2:]
        raw = ask(engine, "GET", "/events?follow=false", **{"last-event-id": str(seen[-2].seq)})
        assert raw.headers["content-type"].startswith("text/event-stream")
        first = raw.text.split("\n\n")[0].split("\n")
        assert first[0] == f"id: {seen[-1].seq}"
        assert first[1] == f"event: {seen[-1].kind}"
        assert json.loads(first[2].removeprefix("data: "))["seq"] == seen[-1].seq
        live = client.events(after=client.status().last_seq)
        client.episode("followed", mode=EVAL).abort()
        assert [next(live).kind, next(live).kind] == ["claim", "drop"]


def test_a_last_event_id_that_is_no_number_is_refused(engine: Served) -> None:
    assert error_of(ask(engine, "GET", "/events", **{"last-event-id": "x"})) == (422, "invalid")


# Claims that wait


def test_train_claims_wait_for_the_quota_and_evaluation_goes_on(serving: Callable[..., Served]) -> None:
    served = serving()
    with served.client() as client:
        with pytest.raises(SwarmUnavailableError, match="OFFLINE; start it"):
            client.episode("t", wait_s=0)
        client.start(SMALL, wait=True)
        held = [client.episode(task) for task in ("a", "a", "b")]
        with pytest.raises(ClaimTimeoutError) as caught:
            client.episode("c", wait_s=0)
        assert caught.value.reason is ClaimReason.QUOTA
        held.append(client.episode("b"))
        assert client.status().state is EngineState.ROLLING_POST
        with pytest.raises(ClaimTimeoutError) as caught:
            client.episode("a", wait_s=0.2)
        assert caught.value.reason is ClaimReason.ROLLING_POST
        with client.episode("v", mode=EVAL) as episode:
            episode.end(reward=0.0)
        held[0].abort("lost interest")
        assert client.status().state is EngineState.ROLLING
        again = client.episode("a")
        assert (again.group_id, again.index) == ("a#0", 0)


def test_a_claim_that_waits_gets_the_place_that_becomes_free(serving: Callable[..., Served]) -> None:
    served = serving()
    with served.client() as client:
        client.start(SMALL, wait=True)
        held = [client.episode(task) for task in ("a", "a", "b", "b")]
        got: list[Any] = []
        waiting = threading.Thread(target=lambda: got.append(client.episode("b", wait_s=30)))
        waiting.start()
        wait_until(lambda: client.status().state is EngineState.ROLLING_POST)
        held[2].abort()
        waiting.join(10)
        assert (got[0].group_id, got[0].index) == ("b#0", 0)


def test_a_client_that_goes_away_while_its_claim_waits_takes_no_place(serving: Callable[..., Served]) -> None:
    served = serving()
    with served.client() as client:
        client.start(SMALL, wait=True)
        held = [client.episode(task) for task in ("a", "a", "b", "b")]
        connection = http.client.HTTPConnection(urlsplit(served.url).netloc)
        body = json.dumps({"client_id": "leaver", "task_id": "b", "wait_s": 60})
        headers = {"authorization": f"Bearer {served.tokens['sampler']}", "content-type": "application/json"}
        connection.request("POST", "/swarm/v1/episodes", body, headers)
        wait_until(lambda: client.status().state is EngineState.ROLLING_POST)
        time.sleep(0.2)
        assert connection.sock is not None
        connection.sock.shutdown(socket.SHUT_RDWR)
        connection.close()
        time.sleep(0.2)
        held[3].abort()
        with client.episode("b", wait_s=5) as mine:
            assert mine.index == 1
            mine.end(reward=1.0)
        claims = [one for one in client.events(follow=False) if one.kind == "claim"]
        assert not any(one.payload["client_id"] == "leaver" for one in claims)


def test_a_group_that_nobody_works_on_is_given_up_while_others_wait(serving: Callable[..., Served]) -> None:
    served = serving()
    with served.client() as client:
        client.start({**SMALL, "lease_s": 1.0}, wait=True)
        done = client.episode("left behind")
        spoken(done).end(reward=1.0)
        for _ in range(2):
            spoken(client.episode("b")).end(reward=1.0)
        with client.episode("c", wait_s=20) as episode:
            spoken(episode).end(reward=0.0)
        drops = [one.payload for one in client.events(follow=False) if one.kind == "drop"]
        assert drops == [{"episode_id": done.episode_id, "group_id": "left behind#0", "reason": "group_abandoned"}]


def test_a_claim_turned_away_for_the_crowd_says_so_after_its_wait(
    serving: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "MAX_LIVE_EPISODES", 1)
    with serving().client() as client:
        client.start(SMALL, wait=True)
        with client.episode("a") as episode:
            for mode in (EVAL, Mode.TRAIN):
                with pytest.raises(ClaimTimeoutError) as caught:
                    client.episode("b", mode=mode, wait_s=0.1)
                assert caught.value.reason is ClaimReason.FULL
            episode.end(reward=1.0)


def test_no_more_groups_are_given_up_than_others_wait_for(serving: Callable[..., Served]) -> None:
    served = serving()
    with served.client() as client:
        client.start({**SMALL, "lease_s": 1.0}, wait=True)
        for task in ("a", "b"):
            spoken(client.episode(task)).end(reward=1.0)
        with client.episode("c", wait_s=20) as episode:
            drops = [one.payload["group_id"] for one in client.events(follow=False) if one.kind == "drop"]
            assert drops == ["a#0"]
            assert client.status().pool.episodes == 1
            episode.end(reward=0.0)


def test_groups_that_are_never_filled_stop_the_run_with_a_reason(serving: Callable[..., Served]) -> None:
    served = serving()
    with served.client() as client:
        client.start({**SMALL, "lease_s": 0.2}, wait=True)
        for number in range(13):
            spoken(client.episode(f"t{number}", wait_s=20)).end(reward=1.0)
        with pytest.raises(SwarmUnavailableError, match="nobody filled their groups; play every task 2 times"):
            client.episode("t13", wait_s=20)
        drops = Counter(one.payload["reason"] for one in client.events(follow=False) if one.kind == "drop")
        assert drops == {"group_abandoned": 12}


# Leases and time limits


def test_a_silent_client_loses_its_episode_and_calls_keep_it(serving: Callable[..., Served]) -> None:
    """B088, B096: the place is given out again, and the late end of the first attempt counts for nothing."""
    served = serving()
    with served.client() as client:
        client.start({**SMALL, "lease_s": 1.5}, wait=True)
        raw = ask(served, "POST", "/episodes", claim_body(mode="train")).json()
        kept = ask(served, "POST", "/episodes", claim_body(mode="train", task_id="kept")).json()
        for _ in range(5):
            time.sleep(0.4)
            assert ask(served, "POST", f"/episodes/{kept['episode_id']}/heartbeat").status_code == 200
        late = ask(served, "POST", f"/episodes/{raw['episode_id']}/end", {"reward": 1.0, "outcome": "success"})
        assert error_of(late) == (410, "episode_lost")
        assert "lease_expired" in late.json()["error"]["message"]
        again = ask(served, "POST", "/episodes", claim_body(mode="train")).json()
        assert (again["group_id"], again["index"]) == (raw["group_id"], raw["index"])
        key = {"x-api-key": again["api_key"]}
        httpx.post(f"{again['base_url']}/chat/completions", headers=key, json={"messages": HI}).raise_for_status()
        assert (
            ask(
                served, "POST", f"/episodes/{again['episode_id']}/end", {"reward": 0.0, "outcome": "success"}
            ).status_code
            == 200
        )
        assert client.status().pool.episodes == 1


def test_the_clients_heartbeats_keep_a_quiet_episode(serving: Callable[..., Served]) -> None:
    served = serving()
    with served.client() as client:
        client.start({**SMALL, "lease_s": 1.2}, wait=True)
        with client.episode("thinking", mode=EVAL) as episode:
            time.sleep(2.5)
            episode.end(reward=1.0)


def test_a_client_that_keeps_claiming_keeps_its_quiet_episode_too(serving: Callable[..., Served]) -> None:
    served = serving()
    with served.client() as client:
        client.start({**SMALL, "lease_s": 1.2}, wait=True)
        with client.episode("thinking", mode=EVAL) as episode:
            for _ in range(20):
                with client.episode("other", mode=EVAL) as other:
                    time.sleep(0.125)
                    other.end(reward=0.0)
            episode.end(reward=1.0)


def test_an_episode_that_takes_too_long_ends_as_timeout_whatever_its_heartbeats(serving: Callable[..., Served]) -> None:
    """B103."""
    served = serving()
    with served.client() as client:
        client.start({**SMALL, "episode_timeout_s": 0.5}, wait=True)
        episode = client.episode("slow")
        time.sleep(0.8)
        with pytest.raises(EpisodeLostError, match="timeout"):
            episode.chat(HI)
        assert client.status().running == 0


def test_null_rewards_and_broken_environments_are_counted_and_their_places_played_again(
    serving: Callable[..., Served],
) -> None:
    served = serving()
    with served.client() as client:
        client.start(SMALL, wait=True)
        client.episode("a").end(reward=None)
        client.episode("a").end(reward=1.0, outcome=Outcome.ENV_ERROR)
        for task in ("a", "a", "b", "b"):
            spoken(client.episode(task)).end(reward=1.0, outcome=Outcome.TRUNCATED)
        (step,) = wait_for_steps(client, 1)
        assert step["drops"] == {"null_reward": 1, "env_error": 1}
        events = list(client.events(follow=False))
        (batch,) = [one.payload for one in events if one.kind == "batch"]
        claims = {one.payload["episode_id"]: one.payload for one in events if one.kind == "claim"}
        assert [claims[one]["index"] for one in batch["episode_ids"]] == [0, 1, 0, 1]
        ended = {one.payload["episode_id"]: one.payload for one in events if one.kind == "episode"}
        assert all(ended[one]["outcome"] == "truncated" for one in batch["episode_ids"])


def say_nothing(episode: SyncEpisode, _: Task) -> None:
    episode.end(reward=1.0)


def test_an_episode_that_asked_nothing_frees_its_place_and_its_group_completes(serving: Callable[..., Served]) -> None:
    """Nothing of it can be trained, and an agent that asks another model is found out before it has run for long."""
    with serving().client() as client:
        client.start(SMALL, wait=True)
        silent = client.episode("a")
        said = silent.end(reward=1.0)
        assert (said.rewards, said.drop_reason) == ({"main": 1.0}, DropReason.NO_CALLS)
        assert client.status().pool.episodes == 0
        assert silent.end(reward=1.0) == said, "the same end is the same episode"
        with client.episode("a", mode=EVAL) as measured:
            measured.end(reward=1.0)
        for task in ("a", "a", "b", "b"):
            with client.episode(task) as episode:
                assert episode.group_id == f"{task}#0"
                said = spoken(episode).end(reward=1.0)
                assert said.drop_reason is None
                assert episode.end(reward=1.0) == said
        (step,) = wait_for_steps(client, 1)
        assert step["drops"]["no_calls"] == 1
        drops = [one.payload for one in client.events(follow=False) if one.kind == "drop"]
        assert drops == [{"episode_id": silent.episode_id, "group_id": "a#0", "reason": "no_calls"}]
        assert client.completed() == {"a": 2, "b": 2}

        with pytest.raises(SwarmUnavailableError, match=r"last 12 .* without a call, the last one as no_calls"):
            client.run([Task("c"), Task("d")], say_nothing, group_size=2, concurrency=2)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_run_that_fills_its_groups_alone_plays_again_what_was_dropped(
    serving: Callable[..., Served], is_async: bool
) -> None:
    """Else the group would wait for nobody, until its lease is over and all of it is given up."""
    played: Counter[str] = Counter()
    tasks = [Task("a"), Task("b"), Task("c"), Task("d")]

    def end_of(task: Task) -> tuple[bool, dict[str, Any]]:
        """Whether an attempt asks the model, and its end: the first of each task is dropped."""
        played[task.task_id] += 1
        if played[task.task_id] > 1:
            return True, {"reward": 1.0}
        return {
            "a": (False, {"reward": 1.0}),
            "b": (True, {"reward": None}),
            "c": (True, {"reward": 1.0, "outcome": Outcome.ENV_ERROR}),
            "d": (True, {"reward": 1.0}),
        }[task.task_id]

    def rollout(episode: SyncEpisode, task: Task) -> None:
        speaks, end = end_of(task)
        if speaks:
            spoken(episode)
        episode.end(**end)

    async def rollout_too(episode: Episode, task: Task) -> None:
        speaks, end = end_of(task)
        if speaks:
            await episode.chat(HI, max_tokens=1)
        await episode.end(**end)

    async def run_too(served: Served) -> list[EpisodeResult]:
        async with AsyncSwarmClient(served.url, served.tokens["operator"]) as client:
            return await client.run(tasks, rollout_too, group_size=2, concurrency=3)

    served = serving()
    with served.client() as client:
        client.start(SMALL, wait=True)
        results = asyncio.run(run_too(served)) if is_async else client.run(tasks, rollout, group_size=2, concurrency=3)
        steps = wait_for_steps(client, 2)
    assert [one.task_id for one in results] == ["a", "a", "b", "b", "c", "c", "d", "d"]
    assert {one.drop_reason for one in results} == {None}
    assert played == {"a": 3, "b": 3, "c": 3, "d": 2}
    assert steps[0]["drops"] == {"no_calls": 1, "null_reward": 1}
    assert steps[1]["drops"] == {"env_error": 1}


def test_a_place_whose_episodes_are_all_dropped_keeps_the_last_of_them(serving: Callable[..., Served]) -> None:
    played: list[str] = []

    def unjudged(episode: SyncEpisode, _: Task) -> None:
        played.append(episode.episode_id)
        episode.end(reward=None)

    with serving().client() as client:
        client.start({**SMALL, "trainer": {"group_size": 4, "tasks_per_update": 4}}, wait=True)
        (last,) = client.run([Task("a")], unjudged, group_size=1, concurrency=1, is_partial=True)
        assert [last.episode_id] == played, "who shares a group with others leaves the place to them"
        results = client.run([Task("a")], unjudged, group_size=4, concurrency=1)
    assert [one.episode_id for one in results] == played[6::6]
    assert {one.drop_reason for one in results} == {DropReason.NULL_REWARD}


def wait_for_steps(client: SwarmClient, count: int) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = []
    for event in client.events():
        if event.kind == "step":
            steps.append(dict(event.payload))
            if len(steps) == count:
                break
    return steps


def win(episode: SyncEpisode, _: Task) -> None:
    spoken(episode).end(reward=1.0)


def test_status_answers_at_once_during_an_update(serving: Callable[..., Served]) -> None:
    served = serving(update_s=5.0)
    with served.client() as client:
        client.start(SMALL, wait=True)
        client.run([Task("a"), Task("b")], win, group_size=2, concurrency=4)
        wait_until(lambda: client.status().state is EngineState.WEIGHT_SYNCING)
        times = []
        for _ in range(20):
            started = time.perf_counter()
            status = client.status()
            times.append(time.perf_counter() - started)
        assert status.update is not None
        assert status.update["step"] == 1
        assert sorted(times)[18] < 1
        with pytest.raises(ClaimTimeoutError) as caught:
            client.episode("v", mode=EVAL, wait_s=0)
        assert caught.value.reason is ClaimReason.WEIGHT_SYNCING


def test_a_frozen_policy_is_served_and_can_not_be_claimed_for_training(serving: Callable[..., Served]) -> None:
    with serving().client() as client:
        client.start({**SMALL, "policies": {"rock": {"trainable": False}}}, wait=True)
        with pytest.raises(SwarmRequestError, match=r"'rock' is frozen .*claim with mode eval") as caught:
            client.episode("t", wait_s=0)
        assert caught.value.status == 409
        with client.episode("t", mode=EVAL) as episode:
            assert episode.chat(HI).text
            episode.end(reward=1.0)
