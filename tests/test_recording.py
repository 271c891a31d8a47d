"""The recorded set of the merging benchmark is what it says: calls of frameworks' agents that continue each other."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from swarm_engine.config import Merge
from swarm_engine.merger import merge
from swarm_engine.types import Continuation, Span, Timeline

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from trajectories import RECORDING, VOCAB_SIZE, Turn, batch_of  # noqa: E402

EPISODES = batch_of("recorded x4", 1.0).episodes


def timeline(number: int, turn: Turn) -> Timeline:
    start, length = len(turn.context), len(turn.reply)
    return Timeline(
        policy="policy",
        agent="main",
        tokens=turn.context + turn.reply,
        spans=(Span(start, str(number), (-1.0,) * length, (0,) * length, 1.0),),
        continues=turn.continues and Continuation(str(turn.continues[0]), turn.continues[1]),
    )


def num_rows(how: Merge) -> int:
    return sum(len(merge([timeline(*one) for one in enumerate(turns)], how)) for turns in EPISODES)


def test_every_call_has_tokens_of_the_vocabulary_and_continues_an_earlier_one() -> None:
    assert [len(turns) > 1 for turns in EPISODES] == [True] * 24
    for turns in EPISODES:
        for number, turn in enumerate(turns):
            for tokens in (turn.context, turn.reply):
                assert tokens
                assert 0 <= min(tokens) <= max(tokens) < VOCAB_SIZE
            if turn.continues is not None:
                earlier, start = turn.continues
                assert 0 <= earlier < number
                assert 0 < start < len(turn.context)


def test_episodes_of_a_framework_begin_alike_and_none_is_another_again() -> None:
    assert len({turns[0].context for turns in EPISODES}) == 6
    assert len({turns[0].context + turns[0].reply for turns in EPISODES}) == 24


@pytest.mark.parametrize(("how", "rows"), [(Merge.NONE, 354), (Merge.TOKEN, 128), (Merge.TEXT, 88)])
def test_merging_gives_as_many_rows_as_were_counted_by_hand(how: Merge, rows: int) -> None:
    """Of 306 calls of five frameworks 80 and 40 rows; what smolagents sends back is no reply of before.

    By token, calls whose tokens begin no later call's; by text, calls that no other continues. Each was counted with a
    few lines that know nothing of merging.
    """
    assert num_rows(how) == rows


def test_the_smaller_sets_have_the_first_episode_of_each_framework() -> None:
    assert batch_of("recorded x1", 1.0).episodes == EPISODES[::4]
    assert batch_of("recorded", 1.0).episodes == [turns[:6] for turns in EPISODES[::4]]


def test_a_scale_leaves_the_recording_as_it_is() -> None:
    assert batch_of("recorded x4", 0.05).episodes == EPISODES


def test_the_header_says_what_recorded_it() -> None:
    header = json.loads(gzip.decompress(RECORDING.read_bytes()))["header"]
    assert list(header["frameworks"]) == [
        "raw HTTP", "LangGraph", "OpenAI Agents", "Pydantic AI", "smolagents", "AgentScope",
    ]  # fmt: skip
    assert header["vocab_size"] <= VOCAB_SIZE
    assert RECORDING.stat().st_size < 300_000
