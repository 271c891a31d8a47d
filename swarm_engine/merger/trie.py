"""Many sequences as one: a prefix trie in depth-first order, in which every shared prefix stands once.

Sorted as bytes, sequences with a common prefix are neighbours, and what each adds to the one before it is the trie in
depth-first order: no hashing and no object a token, time and memory linear in the tokens.

Axis U: the tokens of the trie. A token sees its ancestors and itself, and since descendants follow their ancestor
without a gap, place `t` sees place `j` exactly if `j <= t < ends_U[j]`: one number per token is the attention mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Node:
    """A run of tokens that no sequence leaves or ends a branch in: places `start` to `stop`."""

    start: int
    stop: int
    end: int
    """Place behind the last descendant; `stop` for a leaf."""


@dataclass(frozen=True, slots=True)
class Trie:
    """The distinct prefixes of some sequences."""

    tokens_U: Ints
    depths_U: Ints
    """Place of each token in its sequences, from 0: its position for the model."""
    ends_U: Ints
    """Place behind the last descendant of each token."""
    places: tuple[Ints, ...]
    """Of each sequence, in the order they were given: where its tokens are."""
    nodes: tuple[Node, ...]
    """In order of their places; together they hold every token."""

    def __len__(self) -> int:
        return len(self.tokens_U)


def build_trie(sequences: Sequence[Ints]) -> Trie:
    """The trie of some sequences of token ids; empty ones and duplicates are allowed."""
    order, shared = sorted_with_shared(sequences)
    lengths = np.array([len(sequences[index]) for index in order], np.int64)
    starts = np.concatenate(([0], np.cumsum(lengths - shared)))
    num_places = int(starts[-1])
    tokens_U, depths_U = np.empty(num_places, np.int32), np.empty(num_places, np.int32)
    places: list[Ints] = [np.empty(0, np.int32)] * len(sequences)
    before = np.empty(0, np.int32)
    for rank, index in enumerate(order):
        start, stop, depth = int(starts[rank]), int(starts[rank + 1]), int(shared[rank])
        tokens_U[start:stop] = sequences[index][depth:]
        depths_U[start:stop] = np.arange(depth, depth + stop - start, dtype=np.int32)
        before = np.concatenate((before[:depth], np.arange(start, stop, dtype=np.int32)))
        places[index] = before
    nodes = _nodes(starts, shared, lengths)
    ends_U = np.repeat(np.array([node.end for node in nodes], np.int32), [node.stop - node.start for node in nodes])
    return Trie(tokens_U, depths_U, ends_U, tuple(places), nodes)


def count_places(sequences: Sequence[Ints]) -> int:
    """Tokens that their trie would have."""
    order, shared = sorted_with_shared(sequences)
    return sum(len(sequences[index]) for index in order) - int(shared.sum())


def shared_with_earlier(sequences: Sequence[Sequence[int]]) -> list[int]:
    """How many of its first tokens each sequence has in common with the earlier one that has most of them."""
    trie = build_trie([np.array(sequence, np.int32) for sequence in sequences])
    is_seen_U = np.zeros(len(trie), np.bool_)
    counts = []
    for places in trie.places:
        counts.append(int(is_seen_U[places].sum()))  # what was seen of a path is a beginning of it
        is_seen_U[places] = True
    return counts


def sorted_with_shared(sequences: Sequence[Ints]) -> tuple[list[int], NDArray[np.int64]]:
    """The order of the sequences, and how many tokens each shares with the one before it."""
    keys = [np.ascontiguousarray(sequence, ">u4").tobytes() for sequence in sequences]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    shared = np.zeros(len(order), np.int64)
    for rank in range(1, len(order)):
        shared[rank] = num_shared(sequences[order[rank - 1]], sequences[order[rank]])
    return order, shared


def num_shared(one: Ints, other: Ints) -> int:
    """Length of the common prefix."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _nodes(starts: NDArray[np.int64], shared: NDArray[np.int64], lengths: NDArray[np.int64]) -> tuple[Node, ...]:
    """The maximal runs, from where each sorted sequence leaves the one before it."""
    nodes: list[Node] = []
    # The path to the newest token: first place and first depth of each run, whose tokens go on to the next one's depth.
    path: list[tuple[int, int]] = []
    depth = 0  # of the path's end
    for rank in range(len(lengths)):
        start, leaves_at = int(starts[rank]), int(shared[rank])
        has_left = leaves_at < depth
        while path and path[-1][1] >= leaves_at:
            first, first_depth = path.pop()
            nodes.append(Node(first, first + depth - first_depth, start))
            depth = first_depth
        if path and leaves_at < depth:
            first, first_depth = path[-1]
            nodes.append(Node(first + leaves_at - first_depth, first + depth - first_depth, start))
            depth = leaves_at
        # A sequence that only goes on lengthens the run, unless another one has branched off there.
        if int(lengths[rank]) > leaves_at:
            if has_left or not path or not _is_end(path[-1], depth, start):
                path.append((start, leaves_at))
            depth = int(lengths[rank])
    total = int(starts[-1])
    while path:
        first, first_depth = path.pop()
        nodes.append(Node(first, first + depth - first_depth, total))
        depth = first_depth
    return tuple(sorted(nodes, key=lambda node: node.start))


def _is_end(run: tuple[int, int], depth: int, start: int) -> bool:
    """Whether a run's last token lies right before `start`."""
    first, first_depth = run
    return first + depth - first_depth == start
