"""Merging by what was said: a call goes into a later one whose messages continue it, whatever became of its tokens.

The paper's default. A template that drops reasoning, or a framework that writes a reply anew, gives a later call
another history than was sampled; here the sampled replies are put back in their places. What each call added of its
own comes behind what the call before it recorded. So the merged context is one that no sampler saw, later replies are
trained under it, and the loss is not that of unmerged training; `Timeline.num_out_of_context` counts their tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from swarm_engine.types import Timeline


def merge_by_text(timelines: Sequence[Timeline], max_tokens: int | None = None) -> tuple[Timeline, ...]:
    """Fold each timeline into the latest later one that continues it; where two continue it, the other stays as it was.

    Args:
        timelines: as recorded, one a call, in order.
        max_tokens: a merged timeline may have; with what left history back in it, it can outgrow the model's context.
    """
    places = {line.spans[0].call_id: place for place, line in enumerate(timelines) if line.spans}
    merged = dict(enumerate(timelines))
    for place in reversed(range(len(timelines))):
        if place not in merged:
            continue
        chain, num_added = [place], 0
        while (base := _base(timelines, places, chain[-1])) is not None and base in merged:
            num_added += _num_own(timelines[chain[-1]])
            if max_tokens is not None and len(timelines[base].tokens) + num_added > max_tokens:
                break
            chain.append(base)
        for taken in chain[1:]:
            del merged[taken]
        if len(chain) > 1:
            merged[place] = _join([timelines[one] for one in reversed(chain)])
    return tuple(merged.values())


def _base(timelines: Sequence[Timeline], places: Mapping[str, int], place: int) -> int | None:
    """Where the call stands that a timeline continues."""
    line = timelines[place]
    base = places.get(line.continues.call_id) if line.continues and line.spans else None
    if base is None or base >= place:
        return None
    same = (timelines[base].policy, timelines[base].agent) == (line.policy, line.agent)
    return base if same else None


def _num_own(line: Timeline) -> int:
    """Tokens that a call added to what it continues."""
    assert line.continues is not None
    return len(line.tokens) - line.continues.start


def _join(chain: Sequence[Timeline]) -> Timeline:
    """Calls that continue each other as one timeline: the first, then what each other one added."""
    tokens, spans, num_out_of_context = chain[0].tokens, list(chain[0].spans), 0
    for _, line in pairwise(chain):
        assert line.continues is not None
        start = line.continues.start
        if tokens != line.tokens[:start]:
            num_out_of_context += line.num_trained
        moved = len(tokens) - start
        tokens += line.tokens[start:]
        spans += [replace(span, start=span.start + moved) for span in line.spans]
    return replace(chain[0], tokens=tokens, spans=tuple(spans), num_out_of_context=num_out_of_context)
