"""What is computed together: everything once, at the least cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from swarm_engine.merger.trie import Ints, count_places
from swarm_engine.trainer.units import CHUNKED_COST, plan_trees

sequence_lists = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=7)


def arrays_of(sequences: Sequence[Sequence[int]]) -> list[Ints]:
    return [np.array(sequence, np.int32) for sequence in sequences]


def cost(some: Sequence[Ints], max_tokens: int) -> float:
    size = count_places(some)
    return size if size <= max_tokens else CHUNKED_COST * size


@given(sequence_lists, st.integers(1, 12))
def test_every_sequence_is_planned_once_and_no_other_cuts_cost_less(
    sequences: list[list[int]], max_tokens: int
) -> None:
    arrays = arrays_of(sequences)
    plan = plan_trees(arrays, max_tokens)
    assert sorted(index for tree in plan for index in tree) == list(range(len(arrays)))
    in_order = arrays_of(sorted(sequences))
    places = range(1, len(in_order))
    least = min(
        sum(cost(in_order[start:stop], max_tokens) for start, stop in pairwise((0, *cuts, len(in_order))))
        for count in range(len(in_order))
        for cuts in combinations(places, count)
    )
    assert sum(cost([arrays[index] for index in tree], max_tokens) for tree in plan) == least


def test_a_wide_group_on_a_long_prompt_stays_together_and_what_shares_nothing_fits() -> None:
    prompt = list(range(100))
    group = arrays_of([[*prompt, 200 + index, 1, 2] for index in range(8)])
    assert len(plan_trees(group, 110)) == 1
    apart = arrays_of([[index] * 40 for index in range(8)])
    assert sorted(len(tree) for tree in plan_trees(apart, 110)) == [2, 2, 2, 2]


def test_a_group_that_needs_chunks_does_not_bring_its_neighbours_into_them() -> None:
    group = [[*range(300), 1000 + index] for index in range(8)]
    others = [[2000 + 50 * index + place for place in range(50)] for index in range(40)]
    plan = plan_trees(arrays_of([*others, *group]), 200)
    assert sorted(len(tree) for tree in plan) == [4] * 10 + [8]


def test_equal_sequences_that_are_too_long_are_computed_once() -> None:
    twice, other = list(range(20)), list(range(100, 130))
    plan = plan_trees(arrays_of([twice, twice, other]), 10)
    assert any(set(tree) >= {0, 1} for tree in plan)
