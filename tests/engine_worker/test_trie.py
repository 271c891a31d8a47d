"""The prefix trie, against its definition: the set of all prefixes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from swarm_engine.merger.trie import Node, Trie, build_trie, count_places, shared_with_earlier

sequence_lists = st.integers(1, 3).flatmap(
    lambda num_ids: st.lists(st.lists(st.integers(0, num_ids - 1), max_size=8), max_size=8)
)
"""Few ids, so that much is shared: duplicates, prefixes of each other, single tokens, nothing at all."""


def trie_of(sequences: Sequence[Sequence[int]]) -> Trie:
    return build_trie([np.array(sequence, np.int32) for sequence in sequences])


def prefixes(sequences: Sequence[Sequence[int]]) -> set[tuple[int, ...]]:
    return {tuple(sequence[:length]) for sequence in sequences for length in range(1, len(sequence) + 1)}


def path(trie: Trie, place: int) -> tuple[int, ...]:
    """The prefix that ends at a place: depth first, what stands before a token is the last one that is less deep."""
    depth = int(trie.depths_U[place])
    before = [one for one in range(place) if trie.depths_U[one] == depth - 1]
    return (*(path(trie, before[-1]) if depth else ()), int(trie.tokens_U[place]))


def test_a_fork_and_a_continuation_by_hand() -> None:
    trie = trie_of([[7, 8, 9], [7, 8], [7, 8, 9, 5], [7, 4], [6]])
    assert trie.tokens_U.tolist() == [6, 7, 4, 8, 9, 5]
    assert trie.depths_U.tolist() == [0, 0, 1, 1, 2, 3]
    assert trie.ends_U.tolist() == [1, 6, 3, 6, 6, 6]
    assert [places.tolist() for places in trie.places] == [[1, 3, 4], [1, 3], [1, 3, 4, 5], [1, 2], [0]]
    # [7, 8, 9] only goes on in [7, 8, 9, 5], so 8, 9 and 5 are one run.
    assert trie.nodes == (Node(0, 1, 1), Node(1, 2, 6), Node(2, 3, 3), Node(3, 6, 6))


@given(sequence_lists)
def test_every_prefix_is_there_once_and_every_sequence_reads_along_its_places(sequences: list[list[int]]) -> None:
    trie = trie_of(sequences)
    paths = [path(trie, place) for place in range(len(trie))]
    assert set(paths) == prefixes(sequences)
    assert len(paths) == len(set(paths)) == count_places([np.array(one, np.int32) for one in sequences])
    assert trie.depths_U.tolist() == [len(one) - 1 for one in paths]
    for sequence, places in zip(sequences, trie.places, strict=True):
        assert [paths[place] for place in places] == [tuple(sequence[: end + 1]) for end in range(len(sequence))]


@given(sequence_lists)
def test_what_each_sequence_adds_to_the_earlier_ones_makes_up_the_trie(sequences: list[list[int]]) -> None:
    shared = shared_with_earlier(sequences)
    assert sum(len(one) - count for one, count in zip(sequences, shared, strict=True)) == len(prefixes(sequences))


@given(sequence_lists)
def test_one_number_a_token_is_the_attention_mask(sequences: list[list[int]]) -> None:
    trie = trie_of(sequences)
    paths = [path(trie, place) for place in range(len(trie))]
    for place, one in enumerate(paths):
        for other, seen in enumerate(paths):
            assert (other <= place < trie.ends_U[other]) == (one[: len(seen)] == seen)


@given(sequence_lists)
def test_nodes_are_the_longest_runs_without_a_branch(sequences: list[list[int]]) -> None:
    trie = trie_of(sequences)
    assert [place for node in trie.nodes for place in range(node.start, node.stop)] == list(range(len(trie)))
    for node in trie.nodes:
        assert {int(trie.ends_U[place]) for place in range(node.start, node.stop)} == {node.end}
    for node, after in zip(trie.nodes, trie.nodes[1:], strict=False):
        has_one_child = after.start == node.stop < node.end == after.end
        assert not has_one_child
