"""Merging keeps every sampled span exactly once, and does it like the paper: last to first, by exact ids."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from swarm_engine.config import Merge
from swarm_engine.merger import merge
from swarm_engine.types import Continuation, Span, Timeline


def line(
    prompt: tuple[int, ...],
    reply: tuple[int, ...],
    call: str,
    agent: str = "main",
    policy: str = "policy",
    *,
    is_trained: bool = True,
) -> Timeline:
    span = Span(len(prompt), call, tuple(-0.1 * token for token in reply), (0,) * len(reply), 1.0, is_trained)
    return Timeline(policy, agent, prompt + reply, (span,) if reply else ())


def spans(timelines: tuple[Timeline, ...] | list[Timeline]) -> Counter[tuple[str, str, tuple[int, ...], Span]]:
    """Each span with its agent and everything before its end: all that its loss depends on."""
    return Counter(
        (line.policy, line.agent, line.tokens[: span.end], span) for line in timelines for span in line.spans
    )


def replies(timelines: tuple[Timeline, ...] | list[Timeline]) -> Counter[tuple[str, str, tuple[int, ...], Span]]:
    """Each span with its agent and its tokens, wherever it stands."""
    return Counter(
        (line.policy, line.agent, line.tokens[span.start : span.end], replace(span, start=0))
        for line in timelines
        for span in line.spans
    )


def by_definition(timelines: list[Timeline]) -> list[Timeline]:
    """The paper's rule, word by word, with every pair compared."""
    kept: list[tuple[int, Timeline]] = []
    for index in reversed(range(len(timelines))):
        earlier = timelines[index]
        length = len(earlier.tokens)
        hosts = [
            place
            for place, (_, later) in enumerate(kept)
            if (later.policy, later.agent, later.tokens[:length]) == (earlier.policy, earlier.agent, earlier.tokens)
        ]
        if hosts:
            place, later = kept[hosts[0]]
            taken = {position for span in later.spans for position in range(span.start, span.end)}
            if not any(set(range(span.start, span.end)) & taken for span in earlier.spans):
                joined = sorted([*later.spans, *earlier.spans], key=lambda span: span.start)
                kept[hosts[0]] = (place, replace(later, spans=tuple(joined)))
                continue
        kept.append((index, earlier))
    return [timeline for _, timeline in reversed(kept)]


@st.composite
def conversations(draw: st.DrawFn) -> list[Timeline]:
    """Calls that go on from earlier calls, branch, retry, get no reply, and belong to two agents and two policies.

    A call may continue an earlier one from any place of its prompt on, as if its history had been written anew.
    """
    token = st.integers(0, 2)
    lines: list[Timeline] = []
    for call in range(draw(st.integers(0, 8))):
        base = draw(st.sampled_from([(), *(line.tokens for line in lines)]))
        cut = draw(st.integers(0, len(base)))
        prompt = base[:cut] + tuple(draw(st.lists(token, max_size=3)))
        reply = tuple(draw(st.lists(token, max_size=3)))
        agent, policy = draw(st.sampled_from(["a", "a", "b"])), draw(st.sampled_from(["x", "x", "y"]))
        one = line(prompt, reply, f"call-{call}", agent, policy, is_trained=draw(st.booleans()))
        if lines and draw(st.booleans()):
            continued = draw(st.integers(0, call - 1))
            one = replace(one, continues=Continuation(f"call-{continued}", draw(st.integers(0, len(prompt)))))
        lines.append(one)
    return lines


def test_the_first_answer_is_trained_inside_the_second_turn() -> None:
    first, second = line((7, 8), (1,), "c1"), line((7, 8, 1, 9), (5, 6), "c2")
    (merged,) = merge([first, second], Merge.TOKEN)
    assert merged.tokens == (7, 8, 1, 9, 5, 6)
    assert merged.loss_mask == (False, False, True, False, True, True)
    assert merged.spans == (first.spans[0], second.spans[0])


def test_a_branch_stays_apart_and_the_opening_goes_to_the_latest() -> None:
    opening, left, right = line((7,), (1,), "c1"), line((7, 1, 2), (3,), "c2"), line((7, 1, 4), (5,), "c3")
    kept_left, kept_right = merge([opening, left, right], Merge.TOKEN)
    assert kept_left == left
    assert kept_right.spans == (opening.spans[0], right.spans[0])


def test_one_drifted_token_keeps_timelines_apart() -> None:
    lines = [line((7, 8), (1,), "c1"), line((7, 8, 2, 9), (5,), "c2")]
    assert merge(lines, Merge.TOKEN) == tuple(lines)


def test_agents_do_not_merge_with_each_other() -> None:
    lines = [line((7,), (1,), "c1", "x"), line((7, 1), (2,), "c2", "y")]
    assert merge(lines, Merge.TOKEN) == tuple(lines)


def test_a_retry_that_drew_the_same_words_is_trained_twice() -> None:
    lines = [line((7,), (1, 2), "c1"), line((7,), (1, 2), "c2"), line((7, 1, 2, 3), (4,), "c3")]
    merged = merge(lines, Merge.TOKEN)
    assert [[span.call_id for span in kept.spans] for kept in merged] == [["c1"], ["c2", "c3"]]


def continuing(base: Timeline, later: Timeline, start: int) -> Timeline:
    return replace(later, continues=Continuation(base.spans[0].call_id, start))


def test_by_text_each_call_adds_its_own_behind_what_was_sampled() -> None:
    """The history tells (1, 2, 3) as (3): the row has all three, and the later prompt's own 9 behind them."""
    first = line((7, 8), (1, 2, 3), "c1")
    second = continuing(first, line((7, 8, 3, 9), (5, 6), "c2"), 3)
    third = continuing(second, line((7, 8, 3, 9, 6, 9), (4,), "c3"), 5)
    (merged,) = merge([first, second, third], Merge.TEXT)
    assert merged.tokens == (7, 8, 1, 2, 3, 9, 5, 6, 9, 4)
    assert [(span.start, span.call_id) for span in merged.spans] == [(2, "c1"), (6, "c2"), (9, "c3")]
    assert merged.num_out_of_context == 2 + 1, "the second and third reply"


def test_of_two_that_continue_a_call_the_later_one_takes_it_in_and_the_other_stays_as_served() -> None:
    first = line((7,), (1, 2), "c1")
    left = continuing(first, line((7, 2, 3), (4,), "c2"), 2)
    right = continuing(first, line((7, 2, 5), (6,), "c3"), 2)
    assert merge([first, left, right], Merge.TEXT)[0] == left
    assert merge([first, left, right], Merge.TEXT)[1].tokens == (7, 1, 2, 5, 6)


def test_by_text_agents_and_calls_that_continue_nothing_stay_apart() -> None:
    first = line((7,), (1,), "c1", "x")
    second = continuing(first, line((7, 1), (2,), "c2", "y"), 2)
    third = line((7, 1), (3,), "c3", "x")
    assert merge([first, second, third], Merge.TEXT) == (first, second, third)


def test_none_leaves_everything_as_it_was() -> None:
    lines = [line((7,), (1,), "c1"), line((7, 1), (2,), "c2")]
    assert merge(lines, Merge.NONE) == tuple(lines)


@given(conversations())
def test_every_span_is_kept_once_with_the_context_it_was_sampled_in(lines: list[Timeline]) -> None:
    merged = merge(lines, Merge.TOKEN)
    assert spans(merged) == spans(lines)
    assert sum(timeline.num_trained for timeline in merged) == sum(timeline.num_trained for timeline in lines)
    assert all(sum(timeline.loss_mask) == timeline.num_trained for timeline in merged), "spans overlap"


@given(conversations(), st.one_of(st.none(), st.integers(1, 12)))
def test_by_text_every_reply_is_kept_once_whole_and_with_its_agent(
    lines: list[Timeline], max_tokens: int | None
) -> None:
    merged = merge(lines, Merge.TEXT, max_tokens)
    assert replies(merged) == replies(lines)
    longest = max((len(line.tokens) for line in lines), default=0)
    assert max_tokens is None or all(len(row.tokens) <= max(max_tokens, longest) for row in merged)
    for row in merged:
        assert sum(row.loss_mask) == row.num_trained, "spans overlap"
        if row.num_out_of_context == 0 and row.spans:
            served = {span.call_id: line.tokens for line in lines for span in line.spans}
            assert all(row.tokens[: span.end] == served[span.call_id] for span in row.spans if span.is_trained)


@given(conversations())
def test_merging_by_text_twice_is_merging_once(lines: list[Timeline]) -> None:
    once = merge(lines, Merge.TEXT)
    assert merge(once, Merge.TEXT) == once


@given(conversations())
def test_merging_is_the_papers_rule(lines: list[Timeline]) -> None:
    assert list(merge(lines, Merge.TOKEN)) == by_definition(lines)


@given(conversations())
def test_merging_twice_is_merging_once(lines: list[Timeline]) -> None:
    once = merge(lines, Merge.TOKEN)
    assert merge(once, Merge.TOKEN) == once


def test_a_long_conversation_merges_in_little_time() -> None:
    tokens: tuple[int, ...] = tuple(range(2000))
    lines = []
    for call in range(200):
        lines.append(line(tokens, (call, call), f"c{call}"))
        tokens = lines[-1].tokens + tuple(range(30))
    start = time.process_time()
    (merged,) = merge(lines, Merge.TOKEN)
    assert merged.num_trained == 400
    assert time.process_time() - start < 1
