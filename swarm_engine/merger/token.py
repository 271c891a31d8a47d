"""Exact prefix absorption, last to first: a timeline goes into the latest later one that continues it token by token.

Timelines are sorted as bytes, which puts everything that continues a timeline right behind it; so each is compared with
its neighbours only, instead of with every other.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from swarm_engine.types import Timeline


def merge_by_token(timelines: Sequence[Timeline]) -> tuple[Timeline, ...]:
    """Fold each timeline into the latest later one that it is a prefix of.

    Two calls that sampled the same stretch (a retry that drew the same words) must both be trained, and one timeline
    can't hold both: the earlier one then stays on its own.
    """
    merged = dict(enumerate(timelines))
    hosts = _latest_continuations(timelines)
    for index in reversed(range(len(timelines))):
        host = hosts[index]
        if host != index and _is_disjoint(merged[host], timelines[index]):
            merged[host] = merged[host].absorb(timelines[index])
            del merged[index]
    return tuple(merged.values())


def _latest_continuations(timelines: Sequence[Timeline]) -> list[int]:
    """For each timeline the last of those that start with it; itself where no later one does."""
    keys = [(line.policy, line.agent, array("q", line.tokens).tobytes()) for line in timelines]
    hosts = list(range(len(timelines)))
    # Right to left, the stack holds what nothing seen so far is a prefix of, nearest on top.
    roots: list[int] = []
    for index in sorted(range(len(timelines)), key=lambda index: (keys[index], index), reverse=True):
        policy, agent, tokens = keys[index]
        while roots and keys[roots[-1]][:2] == (policy, agent) and keys[roots[-1]][2].startswith(tokens):
            hosts[index] = max(hosts[index], hosts[roots.pop()])
        roots.append(index)
    return hosts


def _is_disjoint(host: Timeline, earlier: Timeline) -> bool:
    return all(span.end <= other.start or other.end <= span.start for span in earlier.spans for other in host.spans)
