"""Why an episode has several contexts: where each leaves the earlier one it has most in common with, and over what.

Every place where two timelines part costs computing and tells something about the agent: a template that drops
reasoning, a framework that writes history anew, a retry, a second agent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, takewhile
from typing import Any

import numpy as np

from swarm_engine.merger.trie import num_shared

SHOWN_BEFORE, SHOWN_AFTER = 30, 70
"""Characters of a text before the first difference and from it on."""

Timeline = Mapping[str, Any]
"""As `GET /episodes/ID/timelines` answers."""


class Reason(StrEnum):
    """Why a context leaves another, as a sentence's end."""

    OTHER_AGENT = "another agent speaks"
    ASKED_AGAIN = "the same was asked again and got another reply: a retry, or one of several choices"
    REPLY_REWRITTEN = "the reply stands otherwise in the history: its template or its framework rewrote it"
    RETOKENIZED = "the same text became other tokens"
    REPLY_LEFT_OUT = "the reply is not in the history"
    MESSAGE_CHANGED = "a message was changed, or another one was sent"
    HISTORY_CUT = "the history ends earlier"
    NOTHING_SHARED = "the first token differs"


@dataclass(frozen=True, slots=True)
class Split:
    """One timeline beside the earlier one that it shares most with."""

    timeline: int
    earlier: int
    num_shared: int
    """Tokens at which both begin."""
    reason: Reason
    role: str
    """Of the message in which they part."""
    was: str
    """The earlier one's text around the first difference; empty where it ends."""
    now: str


def find_splits(timelines: Sequence[Timeline]) -> list[Split]:
    """Where the timelines of an episode part, in order; one that only goes on from another parts from nothing.

    A timeline is measured against those of its own agent; an agent's first one against all.
    """
    tokens = [
        np.array([token for block in timeline["blocks"] for token in block["token_ids"]], np.int32)
        for timeline in timelines
    ]
    splits = []
    for number in range(1, len(timelines)):
        own = [one for one in range(number) if timelines[one]["agent"] == timelines[number]["agent"]]
        shared = {one: num_shared(tokens[one], tokens[number]) for one in own or range(number)}
        earlier = max(shared, key=lambda one: (shared[one], one))
        if shared[earlier] < len(tokens[earlier]):
            splits.append(_split(timelines, earlier, number, shared[earlier]))
    return splits


def split_lines(splits: Sequence[Split], num_timelines: int) -> list[str]:
    """Splits in words."""
    if not splits:
        return [f"nothing splits: of {num_timelines} calls each goes on from an earlier one, or repeats it"]
    lines = []
    for split in splits:
        lines += [
            f"timeline {split.timeline} leaves timeline {split.earlier} after {split.num_shared} tokens, "
            f"in a message of {split.role}: {split.reason}",
            f"  was  {split.was!r}",
            f"  now  {split.now!r}",
        ]
    return lines


def _split(timelines: Sequence[Timeline], earlier: int, number: int, num_shared: int) -> Split:
    was, now = _block_at(timelines[earlier], num_shared), _block_at(timelines[number], num_shared)
    before, after = _around(was["text"] if was else "", now["text"] if now else "")
    shown = now or was
    assert shown, "two timelines that part have a place where they do"
    return Split(
        timeline=number,
        earlier=earlier,
        num_shared=num_shared,
        reason=_reason(timelines[earlier], timelines[number], was, now, num_shared),
        role=shown["role"],
        was=before,
        now=after,
    )


def _reason(
    earlier: Timeline, later: Timeline, was: Mapping[str, Any] | None, now: Mapping[str, Any] | None, num_shared: int
) -> Reason:
    if earlier["agent"] != later["agent"]:
        return Reason.OTHER_AGENT
    if num_shared == 0:
        return Reason.NOTHING_SHARED
    if was is None or now is None:
        return Reason.HISTORY_CUT
    if _is_sampled(was) and _is_sampled(now):
        return Reason.ASKED_AGAIN
    if was["role"] == now["role"] and was["text"] == now["text"]:
        return Reason.RETOKENIZED
    if _is_sampled(was):
        return Reason.REPLY_REWRITTEN if now["role"] == was["role"] else Reason.REPLY_LEFT_OUT
    return Reason.MESSAGE_CHANGED


def _is_sampled(block: Mapping[str, Any]) -> bool:
    return any(logprob is not None for logprob in block["logprobs"])


def _block_at(timeline: Timeline, place: int) -> Mapping[str, Any] | None:
    """The block that holds a token; None behind the last one."""
    ends = accumulate(len(block["token_ids"]) for block in timeline["blocks"])
    return next((block for block, end in zip(timeline["blocks"], ends, strict=True) if place < end), None)


def _around(was: str, now: str) -> tuple[str, str]:
    """Both texts around their first difference."""
    place = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(was, now, strict=False)))
    start = max(0, place - SHOWN_BEFORE)
    return was[start : place + SHOWN_AFTER], now[start : place + SHOWN_AFTER]
