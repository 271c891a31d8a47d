"""Which engine a request goes to; the blocks and counts were worked out by hand."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_engine.sampler.routing import BLOCK_TOKENS, Prefixes, blocks_of, choose

FIRST, SECOND, OTHER = ([token] * BLOCK_TOKENS for token in (5, 6, 7))
contexts = st.lists(st.sampled_from([FIRST, SECOND, OTHER, [9] * 5]), max_size=6).map(lambda parts: [*chain(*parts)])


def test_a_block_is_named_by_its_tokens_and_all_before_them() -> None:
    assert blocks_of([5] * 31) == ()
    assert len(blocks_of([5] * 63)) == 1
    one, other = blocks_of(FIRST + SECOND), blocks_of(FIRST + OTHER)
    assert one[0] == other[0] == blocks_of([*FIRST, 1, 2, 3])[0]
    assert one[1] != other[1]
    assert blocks_of(SECOND + SECOND)[1] != one[1]


def test_what_is_shared_is_counted_from_the_beginning() -> None:
    prefixes = Prefixes(max_tokens=10_000)
    prefixes.add(blocks_of(FIRST + SECOND + FIRST))
    assert prefixes.num_shared(blocks_of(FIRST + SECOND + OTHER + FIRST)) == 2
    assert prefixes.num_shared(blocks_of(SECOND + FIRST)) == 0
    assert prefixes.num_shared(blocks_of(FIRST + SECOND)) == 2
    prefixes.clear()
    assert prefixes.num_shared(blocks_of(FIRST)) == 0


def test_the_longest_unused_is_forgotten_first_and_from_its_end() -> None:
    prefixes = Prefixes(max_tokens=3 * BLOCK_TOKENS + 31)
    old, new = blocks_of(FIRST + SECOND + FIRST), blocks_of(OTHER)
    prefixes.add(old)
    prefixes.add(new)
    assert (prefixes.num_shared(old), prefixes.num_shared(new)) == (2, 1)
    prefixes.add(old[:1])
    prefixes.add(blocks_of(SECOND + SECOND))
    assert (prefixes.num_shared(old), prefixes.num_shared(new)) == (1, 0)


@given(st.lists(contexts, max_size=5), contexts)
def test_without_a_limit_a_context_shares_as_many_blocks_as_the_best_of_all_before(
    added: list[list[int]], asked: list[int]
) -> None:
    prefixes = Prefixes(max_tokens=1_000_000)
    expected = 0
    for context in added:
        prefixes.add(blocks_of(context))
        common = next((place for place, (a, b) in enumerate(zip(context, asked, strict=False)) if a != b), None)
        length = min(len(context), len(asked)) if common is None else common
        expected = max(expected, length // BLOCK_TOKENS)
    assert prefixes.num_shared(blocks_of(asked)) == expected


@given(st.lists(contexts, max_size=8), st.integers(0, 6))
def test_what_is_left_of_a_context_is_its_beginning(added: list[list[int]], max_blocks: int) -> None:
    prefixes = Prefixes(max_tokens=max_blocks * BLOCK_TOKENS)
    for context in added:
        prefixes.add(blocks_of(context))
    for context in added:
        blocks = blocks_of(context)
        left = prefixes.num_shared(blocks)
        assert all(prefixes.num_shared(blocks[:end]) == min(end, left) for end in range(len(blocks) + 1))
        # A later block alone would be a context whose beginning has to be computed again.
        assert not any(prefixes.num_shared(blocks[place:]) for place in range(left, len(blocks)))


@pytest.mark.parametrize(
    ("shared", "running", "place"),
    [
        ([0, 0, 0], [3, 1, 2], 1),  # nobody has it: the emptiest
        ([0, 0, 0], [1, 1, 1], 0),
        ([2, 5, 3], [4, 4, 4], 1),  # the most of the prompt
        ([2, 5, 5], [4, 4, 3], 2),  # of equals the emptier
        ([9, 0, 0], [4, 0, 0], 0),  # four more than the emptiest is not much
        ([9, 0, 0], [5, 0, 0], 1),  # five more is
        ([9, 3, 0], [5, 1, 0], 1),  # then the next best
        ([9, 0], [30, 20], 0),  # nor is half as many again
        ([9, 0], [31, 20], 1),
        ([9, 0], [64, 62], 1),  # it would wait at the first, and has room at the second
        ([9, 0], [64, 64], 0),  # it waits anywhere
    ],
)
def test_a_request_goes_to_its_prefix_unless_that_engine_is_much_fuller(
    shared: list[int], running: list[int], place: int
) -> None:
    assert choose(shared, running, max_running=64) == place


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 200)), min_size=1, max_size=8),
    st.integers(1, 100),
)
def test_the_engine_that_is_chosen_is_never_much_fuller_and_no_emptier_one_has_more(
    engines: list[tuple[int, int]], max_running: int
) -> None:
    shared, running = zip(*engines, strict=True)
    place = choose(shared, running, max_running)
    assert running[place] <= max(min(running) + 4, 1.5 * min(running))
    assert running[place] < max_running or min(running) >= max_running
    assert all(shared[other] <= shared[place] for other in range(len(engines)) if running[other] <= running[place])
