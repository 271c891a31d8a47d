"""Folding the timelines of an episode so that shared context is computed once.

An agent resends its history every turn, so turn two holds turn one as plain context. Kept apart, turn one is computed
twice; dropped, its answer is never trained. Every way of merging keeps each sampled span exactly once, and all but
`text` leave the loss what it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from swarm_engine.config import Merge
from swarm_engine.merger.text import merge_by_text
from swarm_engine.merger.token import merge_by_token
from swarm_engine.types import Timeline


def merge(timelines: Sequence[Timeline], how: Merge, max_tokens: int | None = None) -> tuple[Timeline, ...]:
    """Fold the timelines of one episode, in order of their calls; what is kept stays in that order.

    Args:
        max_tokens: that the model takes; only merging by text can make a timeline longer than those given.
    """
    match how:
        case Merge.NONE | Merge.TREE:  # a tree is laid over the batch: see `merger.trie`
            return tuple(timelines)
        case Merge.TOKEN:
            return merge_by_token(timelines)
        case Merge.TEXT:
            return merge_by_text(timelines, max_tokens)
        case _:
            assert_never(how)
