"""Intervals over games and seeds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vibe.stats import group_means, share_with_variance, t_interval


def test_the_interval_of_1_2_3_is_the_textbook_one() -> None:
    # mean 2, standard deviation 1, standard error 1 / sqrt(3), t(0.975; 2) = 4.302653
    interval = t_interval([1.0, 2.0, 3.0])
    assert interval.mean == 2.0
    assert interval.high == pytest.approx(2 + 4.302653 / math.sqrt(3), abs=1e-5)
    assert interval.low == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-5)
    assert interval.n == 3


def test_one_value_says_nothing_about_the_spread() -> None:
    interval = t_interval([0.5])
    assert (interval.mean, interval.low, interval.high) == (0.5, -math.inf, math.inf)


def test_no_value_has_no_mean() -> None:
    with pytest.raises(ValueError, match="no value"):
        t_interval([])


def test_a_group_counts_once_however_many_episodes_it_holds() -> None:
    assert group_means([[1.0, 0.0], [], [1.0, 1.0, 1.0, 0.0]]) == [0.5, 0.75]


def test_a_group_without_variance_teaches_nothing() -> None:
    assert share_with_variance([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]]) == pytest.approx(1 / 3)


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=50))
def test_the_mean_lies_in_its_interval(values: list[float]) -> None:
    interval = t_interval(values)
    assert interval.low <= interval.mean <= interval.high
