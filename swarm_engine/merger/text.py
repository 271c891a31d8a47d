"""Merging by what was said: a call goes into a later one whose messages continue it, whatever became of its tokens.

The paper's default. A template that drops reasoning, or a framework that writes a reply anew, gives a later call
another history than was sampled; here the sampled replies are put back in their places. What each call added of its
own comes behind what the call before it recorded. So the merged context is one that no sampler saw, later replies are
trained under it, and the loss is not that of unmerged training: `Timeline.num_changed` says by how many tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from swarm_engine.types import Timeline


def merge_by_text(timelines: Sequence[Timeline]) -> tuple[Timeline, ...]:
    """Fold each timeline into the latest later one that continues it; where two continue it, the other stays as it was.

    Args:
        timelines: as recorded, one a call, in order.
    """
    places = {line.spans[0].call_id: place for place, line in enumerate(timelines) if line.spans}
    merged = dict(enumerate(timelines))
    for place in reversed(range(len(timelines))):
        if place not in merged:
            continue
        chain = [place]
        while (base := _base(timelines, places, chain[-1])) is not None and base in merged:
            chain.append(base)
        for taken in chain[1:]:
            del merged[taken]
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


def _join(chain: Sequence[Timeline]) -> Timeline:
    """Calls that continue each other as one timeline: the first, then what each other one added."""
    tokens, spans, num_changed = list(chain[0].tokens), list(chain[0].spans), 0
    for before, line in pairwise(chain):
        assert line.continues is not None
        start = line.continues.start
        num_changed += num_differing(before.tokens, line.tokens[:start])
        moved = len(tokens) - start
        tokens += line.tokens[start:]
        spans += [replace(span, start=span.start + moved) for span in line.spans]
    return replace(chain[0], tokens=tuple(tokens), spans=tuple(spans), num_changed=num_changed)


def num_differing(some: Sequence[int], others: Sequence[int]) -> int:
    """Tokens of the longer one between the beginning and the end that both have in common."""
    shorter, longer = sorted((some, others), key=len)
    start = next((place for place, token in enumerate(shorter) if token != longer[place]), len(shorter))
    rest = len(shorter) - start
    end = next((back for back in range(rest) if shorter[-1 - back] != longer[-1 - back]), rest)
    return len(longer) - start - end
