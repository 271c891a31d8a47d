"""What is computed together: everything once, at the least cost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, pairwise, permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm_engine.config import Merge
from swarm_engine.merger.trie import Ints, count_places
from swarm_engine.models.loading import LoadedPolicy
from swarm_engine.trainer.scoring import Row
from swarm_engine.trainer.units import CHUNKED_COST, Unit, deal, plan_rounds, plan_trees, plan_units

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


# For several ranks.


def rows_of(sequences: Sequence[Sequence[int]]) -> list[Row]:
    """Rows that score their last token."""
    return [Row((*sequence, 0), (len(sequence),), (1.0,)) for sequence in sequences]


def cost_of(rounds: Sequence[Sequence[Unit]]) -> float:
    """What is waited for, a filler for nobody."""
    return sum(max(unit.cost for unit in some if unit.row_indices) for some in rounds)


@pytest.mark.parametrize("how", [Merge.NONE, Merge.TREE])
@given(sequences=sequence_lists, max_tokens=st.integers(1, 12), num_ranks=st.integers(2, 4))
def test_every_row_is_dealt_once_and_no_other_deal_costs_less(
    how: Merge, sequences: list[list[int]], max_tokens: int, num_ranks: int
) -> None:
    rows = rows_of(sequences)
    rounds = plan_rounds(rows, how, max_tokens, num_ranks)
    assert sorted(place for some in rounds for unit in some for place in unit.row_indices) == list(range(len(rows)))
    for some in rounds:
        assert len(some) == num_ranks
        assert len({unit.num_chunks for unit in some}) == 1
    units = plan_units(rows, how, max_tokens)[:5]
    plain = [unit for unit in units if unit.num_chunks == 1]
    least = min(
        sum(max(unit.cost for unit in order[at : at + num_ranks]) for at in range(0, len(order), num_ranks))
        for order in permutations(plain)
    )
    assert cost_of(deal(plain, num_ranks)) == least


def test_what_fits_into_one_unit_is_cut_for_a_second_rank() -> None:
    """Four rows of 30 tokens that share nothing: 120 at once, or twice 60 side by side."""
    rows = rows_of([[*range(start, start + 30)] for start in (0, 100, 200, 300)])
    assert [unit.cost for unit in plan_units(rows, Merge.TREE, 200)] == [120]
    assert [[unit.cost for unit in some] for some in plan_rounds(rows, Merge.TREE, 200, 2)] == [[60, 60]]


def test_a_group_is_cut_where_its_ends_are_long_and_not_where_they_are_short() -> None:
    """Sixteen ends on a prompt of 100. Of 50 tokens: eight a rank, 500 and not 900. Of one: all of it on one rank."""
    for length, expected in ((50, [[500, 500]]), (1, [[116, 2]])):
        ends = [[1000 * end + place for place in range(length)] for end in range(1, 17)]
        rows = rows_of([[*range(100), *end] for end in ends])
        assert [[unit.cost for unit in some] for some in plan_rounds(rows, Merge.TREE, 2000, 2)] == expected


@pytest.mark.parametrize("how", [Merge.NONE, Merge.TREE])
def test_all_units_of_a_round_make_the_same_passes(
    tiny: LoadedPolicy, monkeypatch: pytest.MonkeyPatch, how: Merge
) -> None:
    """Chunked tries of different lengths, single passes, and ranks without a unit."""
    passes: list[bool] = []
    hidden = tiny.model.hidden

    def counted(*arguments: Any) -> torch.Tensor:
        passes.append(torch.is_grad_enabled())
        return hidden(*arguments)

    monkeypatch.setattr(tiny.model, "hidden", counted)
    draw = random.Random(0)
    lengths = [70, 45, 20, 9, 8, 3]
    rows = rows_of([[draw.randrange(3, 900) for _ in range(length)] for length in lengths])
    rounds = plan_rounds(rows, how, 16, 3)
    seen = set()
    for some in rounds:
        made = []
        for unit in some:
            passes.clear()
            scored = unit.score(tiny.model)
            before = tuple(passes)
            scored.backward(scored.scores.logprobs_N.sum())
            with torch.no_grad():
                unit.score(tiny.model)
            made.append((before, tuple(passes)))
        assert len(set(made)) == 1
        seen.add(made[0][0])
    if how is Merge.TREE:
        assert (False,) * 5 in seen, "70 tokens in chunks of 16"
    assert (True,) in seen
    assert any(not unit.row_indices for some in rounds for unit in some)
