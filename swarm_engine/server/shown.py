"""Recorded contexts as `GET /episodes/ID/timelines` answers them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from swarm_engine.config import Merge
from swarm_engine.merger import merge
from swarm_engine.merger.trie import shared_with_earlier
from swarm_engine.tracker.blocks import EpisodeBlocks
from swarm_engine.tracker.codec import ChatCodec
from swarm_engine.tracker.continuations import with_continuations
from swarm_engine.tracker.tracker import EpisodeRecord
from swarm_engine.types import Block, Timeline, Untrained


@dataclass(frozen=True, slots=True)
class Shown:
    """What recorded tokens of a policy are shown with."""

    codec: ChatCodec
    max_context: int
    """Of the policy that sampled them; a merged timeline has no more."""


def show_timelines(
    record: EpisodeRecord, shown_with: Mapping[str, Shown], how: Merge, ignore_tools: bool
) -> list[dict[str, Any]]:
    """The contexts of an episode, policy by policy, for what one of them sampled no other goes on from."""
    return [
        line
        for policy in record.policies
        for line in _show_policy(record.part(policy), shown_with[policy], how, ignore_tools)
    ]


def _show_policy(record: EpisodeRecord, shown_with: Shown, how: Merge, ignore_tools: bool) -> list[dict[str, Any]]:
    codec = shown_with.codec
    shown = EpisodeBlocks(record, codec)
    episode = with_continuations(record, codec, ignore_tools=ignore_tools) if how is Merge.TEXT else record.episode
    timelines = merge(episode.timelines(), how, shown_with.max_context)
    shared = shared_with_earlier([timeline.tokens for timeline in timelines]) if how is Merge.TREE else None
    builds_on = {note.call_id: note.builds_on for note in record.notes}
    reasons = {call.call_id: call.untrained_because for call in record.episode.calls}
    return [
        {
            "policy": timeline.policy,
            "agent": timeline.agent,
            **({} if shared is None else {"num_shared_tokens": shared[number]}),
            **({"num_out_of_context_tokens": timeline.num_out_of_context} if how is Merge.TEXT else {}),
            "call_ids": [span.call_id for span in timeline.spans],
            "builds_on": builds_on[timeline.spans[0].call_id] if timeline.spans else None,
            "blocks": _show_blocks(timeline, shown.blocks(timeline), reasons),
        }
        for number, timeline in enumerate(timelines)
    ]


def _show_blocks(
    timeline: Timeline, blocks: Sequence[Block], reasons: Mapping[str, Untrained | None]
) -> list[dict[str, Any]]:
    """The blocks of a timeline; one that a call sampled says why that call is not trained, null where it is."""
    because = {span.start: reasons[span.call_id] for span in timeline.spans}
    starts = accumulate((len(block.token_ids) for block in blocks), initial=0)
    return [
        {
            "author": block.author,
            "role": block.role,
            "text": block.text,
            "token_ids": block.token_ids,
            "logprobs": block.logprobs,
            "loss_mask": block.loss_mask,
            "untrained_because": because.get(start),
            "policy_version": block.policy_version,
        }
        for start, block in zip(starts, blocks, strict=False)
    ]
