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
from numpy.typing import NDArray

from swarm_engine.merger.trie import Trie, build_trie

SHOWN_BEFORE, SHOWN_AFTER = 30, 70
"""Characters of a text before the first difference and from it on."""

ShownTimeline = Mapping[str, Any]
"""As `GET /episodes/ID/timelines` answers."""


class Reason(StrEnum):
    """Why a context leaves another, as a sentence's end."""

    OTHER_AGENT = "another agent speaks"
    ASKED_AGAIN = "the same was asked again and got another reply: a retry, or one of several choices"
    TEMPLATE_REWROTE = "the messages are the same, but the chat template writes what came before in another way"
    REPLY_CHANGED = "the history does not tell the reply as it was sampled: it was changed, or left out"
    RETOKENIZED = "the same text became other tokens"
    MESSAGE_CHANGED = "a message or the list of tools was changed, or another message was sent"
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
    """Of the message of the earlier one in which they part."""
    was: str
    """The earlier one's text around the first difference; empty where it ends."""
    now: str


def find_splits(timelines: Sequence[ShownTimeline]) -> list[Split]:
    """Where the timelines of an episode part, in order; one that only goes on from another parts from nothing.

    A timeline is measured against those of its own agent; an agent's first one against all.
    """
    trie = build_trie([np.array(_tokens(timeline), np.int32) for timeline in timelines])
    anybody, by_agent = _Visits.of(trie), dict[str, _Visits]()
    splits = []
    for number, timeline in enumerate(timelines):
        own = by_agent.get(timeline["agent"], anybody)
        shared, earlier = own.closest(trie.places[number])
        if earlier is not None and shared < len(trie.places[earlier]):
            splits.append(_split(timelines, earlier, number, shared))
        for visits in (anybody, by_agent.setdefault(timeline["agent"], _Visits.of(trie))):
            visits.add(number, trie.places[number])
    return splits


def split_lines(splits: Sequence[Split], num_timelines: int) -> list[str]:
    """Splits in words."""
    if num_timelines == 0:
        return ["the episode has no call yet"]
    if num_timelines == 1:
        return ["nothing splits: the episode has a single call"]
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


@dataclass(slots=True)
class _Visits:
    """Who went through a trie so far."""

    newest_U: NDArray[np.int32]
    """The newest timeline with each token; -1 where there is none."""
    whole: dict[int, int]
    """By the place of their last token, timelines that end there."""
    first: int | None = None

    @staticmethod
    def of(trie: Trie) -> _Visits:
        return _Visits(np.full(len(trie), -1, np.int32), {})

    def add(self, number: int, places: NDArray[np.int32]) -> None:
        self.newest_U[places] = number
        self.first = number if self.first is None else self.first
        if len(places):
            self.whole[int(places[-1])] = number

    def closest(self, places: NDArray[np.int32]) -> tuple[int, int | None]:
        """How many tokens a path shares with a timeline seen before, and with which: one that is all shared, if any."""
        num_shared = int((self.newest_U[places] >= 0).sum())
        if num_shared == 0:
            return 0, self.first
        last = int(places[num_shared - 1])
        return num_shared, self.whole.get(last, int(self.newest_U[last]))


def _split(timelines: Sequence[ShownTimeline], earlier: int, number: int, num_shared: int) -> Split:
    before, after = timelines[earlier], timelines[number]
    texts = ["".join(block["text"] for block in timeline["blocks"]) for timeline in (before, after)]
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False)))
    was, now = (text[max(0, same - SHOWN_BEFORE) : same + SHOWN_AFTER] for text in texts)
    block, end = _block_at(before, num_shared)
    return Split(
        timeline=number,
        earlier=earlier,
        num_shared=num_shared,
        reason=_reason(timelines, before, after, num_shared, is_same_text=same >= end),
        role=block["role"],
        was=was,
        now=now,
    )


def _reason(
    timelines: Sequence[ShownTimeline],
    before: ShownTimeline,
    after: ShownTimeline,
    num_shared: int,
    *,
    is_same_text: bool,
) -> Reason:
    """Why one timeline leaves another.

    Args:
        is_same_text: whether the message in which they part reads the same in both.
    """
    if before["agent"] != after["agent"]:
        return Reason.OTHER_AGENT
    if num_shared == 0:
        return Reason.NOTHING_SHARED
    if is_same_text:
        return Reason.RETOKENIZED
    if set(before["call_ids"]) & _history(timelines, after):
        return Reason.TEMPLATE_REWROTE
    if num_shared == len(_tokens(after)) or (_is_sampled(before, num_shared) and _is_sampled(after, num_shared)):
        return Reason.ASKED_AGAIN
    return Reason.REPLY_CHANGED if _is_sampled(before, num_shared) else Reason.MESSAGE_CHANGED


def _history(timelines: Sequence[ShownTimeline], timeline: ShownTimeline) -> set[str]:
    """The calls that a timeline's messages go on from, whatever became of their tokens."""
    builds_on = {call: one["builds_on"] for one in timelines for call in one["call_ids"]}
    history: set[str] = set()
    call = timeline["builds_on"]
    while call is not None:
        history.add(call)
        call = builds_on.get(call)
    return history


def _tokens(timeline: ShownTimeline) -> list[int]:
    return [token for block in timeline["blocks"] for token in block["token_ids"]]


def _is_sampled(timeline: ShownTimeline, place: int) -> bool:
    logprobs = [logprob for block in timeline["blocks"] for logprob in block["logprobs"]]
    return logprobs[place] is not None


def _block_at(timeline: ShownTimeline, place: int) -> tuple[Mapping[str, Any], int]:
    """The block that holds a token, and the characters of the timeline up to its end."""
    blocks = timeline["blocks"]
    tokens = accumulate(len(block["token_ids"]) for block in blocks)
    characters = accumulate(len(block["text"]) for block in blocks)
    return next(
        (block, text_end)
        for block, token_end, text_end in zip(blocks, tokens, characters, strict=True)
        if place < token_end
    )
