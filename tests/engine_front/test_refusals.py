"""Refused calls leave a trace, for many an agent goes on without the reply and has its reward all the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from conftest import SMALL, Served, spoken
from test_control import wait_for_steps
from typer.testing import CliRunner

from swarm_engine.cli import app
from swarm_engine.client import SwarmClient, SyncEpisode
from swarm_engine.types import MAX_REFUSAL_CHARS, Mode, Refusals
from swarm_engine.watch import refusal_line, status_lines, step_lines, why_nothing_trained

HI: list[Any] = [{"role": "user", "content": "hi"}]
TOP_P = (
    "400: top_p=0.9 is not taken by this server; training needs the whole distribution; leave it at 1, or claim the "
    'episode with sampling: {"temperature": 1}, which goes before what its calls ask for, or for eval or debug, which '
    "are not trained"
)
NONSENSE = "400: nonsense is not taken by this server; leave it out"


def ask(episode: SyncEpisode, route: str = "chat/completions", method: str = "POST", **body: Any) -> int:
    """The status of a call that nobody looks at the answer of."""
    headers = {"authorization": f"Bearer {episode.api_key}"}
    return httpx.request(method, f"{episode.base_url}/{route}", json=body, headers=headers).status_code


def event(client: SwarmClient, kind: str) -> dict[str, Any]:
    """The first event of a kind, once it is there."""
    return next(dict(one.payload) for one in client.events() if one.kind == kind)


def test_refused_calls_are_counted_with_their_episode_wherever_it_is_told(serving: Callable[..., Served]) -> None:
    served = serving()
    with served.client() as client:
        client.start(SMALL, wait=True)
        with client.episode("a", mode=Mode.EVAL) as episode:
            assert [
                ask(episode, messages=HI, nonsense=1),
                ask(episode, "chat/nowhere", messages=HI),
                ask(episode, "chat/completions", "DELETE"),
                ask(episode, messages=HI, nonsense=1),
            ] == [400, 404, 405, 400]
            strange = {"authorization": "Bearer of-nobody"}
            assert httpx.post(f"{episode.base_url}/chat/completions", headers=strange).status_code == 401
            described = client.describe(episode.episode_id)
            assert (described["num_refused"], described["last_refusal"]) == (4, NONSENSE)
            result = spoken(episode).end(reward=1.0)
            assert (result.num_refused, result.last_refusal) == (4, NONSENSE)
            assert ask(episode, messages=HI) == 410, "it is over, and nothing of it is refused any more"
            assert episode.end(reward=1.0) == result
        described = client.describe(episode.episode_id)
        assert (described["status"], described["num_refused"], described["last_refusal"]) == ("ended", 4, NONSENSE)
        ended = event(client, "episode")
        assert (ended["num_refused"], ended["last_refusal"]) == (4, NONSENSE)
        lost = client.episode("b", mode=Mode.EVAL)
        ask(lost, messages=HI, nonsense=1)
        lost.abort()
        dropped = event(client, "drop")
        assert (dropped["num_refused"], dropped["last_refusal"]) == (1, NONSENSE)
        assert client.status().num_refused == 0, "no update comes of evaluation"
    words = [episode.episode_id, "--run-dir", str(served.run_dir)]
    for command in ("timelines", "why-split"):
        said = CliRunner().invoke(app, [command, *words])
        assert f"4 calls refused, the last with {NONSENSE}" in said.output
        told = json.loads(CliRunner().invoke(app, [command, *words, "--json"]).output)
        assert (told["num_refused"], told["last_refusal"]) == (4, NONSENSE)


def test_an_update_counts_what_was_refused_since_the_one_before(serving: Callable[..., Served]) -> None:
    with serving().client() as client:
        client.start(SMALL, wait=True)
        for number in range(8):
            with client.episode(f"t{number // 2}") as episode:
                if number < 4:
                    ask(episode, messages=HI, top_p=0.9)
                if number == 2:
                    assert "refused   since the last update: 3 calls refused, the last with " + TOP_P in status_lines(
                        client.status()
                    )
                spoken(episode).end(reward=1.0)
        first, second = wait_for_steps(client, 2)
        assert (first["num_refused"], first["last_refusal"]) == (4, TOP_P)
        assert (second["num_refused"], second["last_refusal"]) == (0, None)
        assert f"  4 calls refused, the last with {TOP_P}" in step_lines({**first, "metrics": {"skipped": 0.0}})
        assert f"4 calls refused, the last with {TOP_P}" in step_lines({**first, "metrics": {"skipped": 1.0}})[0]


def test_an_engine_whose_agent_gets_nothing_but_refusals_says_what_they_were(serving: Callable[..., Served]) -> None:
    with serving().client() as client:
        client.start(SMALL, wait=True)
        for _ in range(12):
            with client.episode("a") as episode:
                ask(episode, messages=HI, top_p=0.9)
                episode.end(reward=1.0)
        assert f"as no_calls (1 of its calls were refused: {TOP_P})" in str(client.status().reason)


def test_refusals_do_not_write_the_journal(serving: Callable[..., Served]) -> None:
    with serving().client() as client:
        client.start(SMALL, wait=True)
        with client.episode("a", mode=Mode.EVAL) as episode:
            before = client.status().last_seq
            assert {ask(episode, messages=HI, nonsense=1) for _ in range(20)} == {400}
            assert client.status().last_seq == before
            assert spoken(episode).end(reward=1.0).num_refused == 20


def test_what_is_kept_of_a_refusal_is_short() -> None:
    refusals = Refusals().and_one(400, "x" * 1000).and_one(400, "y" * 1000 + "\ud800")
    assert refusals.num_refused == 2
    assert refusals.last_refusal is not None
    assert len(refusals.last_refusal) == MAX_REFUSAL_CHARS
    assert Refusals().and_one(400, "\ud800").last_refusal == "400: \ufffd"


def test_what_a_caller_sent_moves_no_cursor_where_its_refusal_is_shown(serving: Callable[..., Served]) -> None:
    """A field's name is quoted as it came; no text column of PostgreSQL takes its zero byte."""
    with serving().client() as client:
        client.start(SMALL, wait=True)
        with client.episode("a", mode=Mode.EVAL) as episode:
            assert ask(episode, messages=HI, **{"a\x1b[2J\nb\x00c\u2028d": 1}) == 400
            result = episode.end(reward=1.0)
    assert result.last_refusal == "400: a [2J b c d is not taken by this server; leave it out"


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        ({}, None),
        ({"num_refused": 0, "last_refusal": None}, None),
        ({"num_refused": 1, "last_refusal": "400: no"}, "1 call refused, the last with 400: no"),
    ],
)
def test_refusals_in_words(payload: dict[str, Any], said: str | None) -> None:
    assert refusal_line(payload) == said
    why = why_nothing_trained({"skipped": 1.0}, {"untrained": 1}, said)
    assert why == "nothing trained: 1 episode without a reply to train" + (f", {said}" if said else "")
