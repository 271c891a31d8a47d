"""Statistics: against numbers worked out by hand, and against what they promise in the long run."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as reference

from a3r.estimates import Draft
from a3r.stats import (
    Curve,
    Reached,
    area_under,
    episodes_to,
    failure_rate,
    final_reward,
    holm,
    mean_of,
    paired_t,
    power_of,
    smallest_difference,
    spread,
    welch_t,
    with_worst,
)
from a3r.verify import _differences
from experiments_db.models import Estimate

rewards = st.floats(-1, 1, allow_nan=False)


def test_a_t_interval_of_one_two_three_is_two_plus_minus_2_48():
    # sd 1, se 1/sqrt(3) = 0.57735, t(0.975, 2) = 4.30265: half width 2.48414.
    mean = mean_of([1.0, 2.0, 3.0])
    low, high = mean.interval()
    assert mean.value == 2.0
    assert low == pytest.approx(2 - 2.48414, abs=1e-5)
    assert high == pytest.approx(2 + 2.48414, abs=1e-5)


def test_one_run_has_no_interval():
    assert mean_of([0.5]).interval() == (-math.inf, math.inf)
    assert paired_t([0.5], [0.1]).p_value() == 1.0


def test_no_run_has_no_mean():
    with pytest.raises(ValueError, match="did every run fail"):
        mean_of([])


def test_a_paired_difference_uses_the_pairs():
    # Differences 0.1, 0.2, 0.3: mean 0.2, sd 0.1, se 0.057735, t 3.46410 on 2 df, p 0.0741799.
    compared = paired_t([0.5, 0.9, 0.4], [0.4, 0.7, 0.1])
    assert compared.value == pytest.approx(0.2)
    assert compared.se == pytest.approx(0.0577350, abs=1e-7)
    assert compared.df == 2
    assert compared.p_value() == pytest.approx(0.0741799, abs=1e-7)


def test_pairs_of_unequal_arms_are_refused():
    with pytest.raises(ValueError, match="3 and 2"):
        paired_t([1, 2, 3], [1, 2])


def test_welch_by_hand():
    # Variances 1 and 4 over 3 runs each: se sqrt(1/3 + 4/3) = 1.29099; df (5/3)^2 / ((1/9)/2 + (16/9)/2) = 2.941176.
    compared = welch_t([3.0, 4.0, 5.0], [0.0, 2.0, 4.0])
    assert compared.value == pytest.approx(2.0)
    assert compared.se == pytest.approx(1.2909944, abs=1e-7)
    assert compared.df == pytest.approx(2.9411765, abs=1e-7)


@given(st.lists(rewards, min_size=3, max_size=8), st.lists(rewards, min_size=3, max_size=8))
def test_welch_agrees_with_scipy(one, other):
    compared = welch_t(one, other)
    if np.ptp(one) > 1e-3 and np.ptp(other) > 1e-3:
        assert compared.p_value() == pytest.approx(reference.ttest_ind(one, other, equal_var=False).pvalue, rel=1e-6)


@given(st.lists(rewards, min_size=2, max_size=8), st.randoms())
def test_swapping_the_arms_flips_the_sign_and_keeps_the_p(values, random):
    other = random.sample(values, len(values))
    there, back = paired_t(values, other), paired_t(other, values)
    assert there.value == pytest.approx(-back.value)
    assert there.p_value() == pytest.approx(back.p_value())


def test_equal_values_say_nothing_about_the_spread():
    compared = paired_t([0.3, 0.3, 0.3], [0.1, 0.1, 0.1])
    assert not compared.is_informative
    assert compared.p_value() == 1.0
    assert compared.p_equivalent(0.5) == 1.0
    assert compared.interval() == (-math.inf, math.inf)
    known = spread([0.3, 0.3, 0.3])
    assert (known.sd, known.low, known.high) == (0.0, 0.0, math.inf)


@pytest.mark.parametrize(
    ("n", "stored", "is_right"),
    [
        (3, (0.5, 0.5), True),  # as earlier versions stored it
        (3, (None, None), True),
        (3, (0.4, 0.6), False),
        (1, (0.5, 0.5), False),
        (1, (None, None), True),
    ],
)
def test_an_interval_of_no_width_on_record_verifies_where_all_runs_agree_and_nowhere_else(n, stored, is_right):
    mean = mean_of([0.5] * n)
    said = {"key": "arm", "estimand": "mean", "method": "t_interval", "unit": "reward", "inputs_sha": "0", "n_seeds": n}
    draft = Draft(**said, value=mean.value, ci=mean.interval(), se_seed=mean.se)
    columns = {"n_items": 0, "level": 0.95, "params": {}, "value": 0.5, "se_seed": mean.se}
    row = Estimate(**said, **columns, ci_lo=stored[0], ci_hi=stored[1])
    assert (_differences(draft, row) == []) is is_right


def test_equivalence_by_hand():
    # Differences -0.01, 0, 0.01: mean 0, se 0.0057735. Margin 0.05: t = 8.66025 on 2 df, one-sided p 0.0065378.
    compared = paired_t([0.49, 0.50, 0.51], [0.50, 0.50, 0.50])
    assert compared.p_equivalent(0.05) == pytest.approx(float(reference.t.sf(8.660254, 2)), rel=1e-6)
    # The same difference against a margin of its own noise is not shown to be equivalent.
    assert compared.p_equivalent(0.005) > 0.2
    with pytest.raises(ValueError, match="above 0"):
        compared.p_equivalent(0.0)


@given(st.lists(rewards, min_size=3, max_size=6), st.floats(0.01, 0.5))
def test_equivalence_is_the_interval_inside_the_margin(values, margin):
    compared = paired_t(values, [0.0] * len(values))
    if compared.is_informative:
        low, high = compared.interval(0.90)
        p = compared.p_equivalent(margin)
        if abs(p - 0.05) > 1e-6:
            assert (p < 0.05) == (-margin < low and high < margin)


def test_holm_by_hand():
    # Sorted 0.01, 0.02, 0.04: times 3, 2, 1 = 0.03, 0.04, 0.04.
    assert holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=6))
def test_holm_never_lowers_a_p_and_keeps_their_order(p_values):
    adjusted = holm(p_values)
    assert all(new >= old for new, old in zip(adjusted, p_values, strict=True))
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    assert [adjusted[index] for index in order] == sorted(adjusted)


def test_a_curve_that_rises_in_a_straight_line_has_half_its_height_as_area():
    assert area_under(Curve((0, 100), (0.0, 1.0))) == 0.5


def test_area_under_a_bent_curve_by_hand():
    # (0 + 0.4)/2 * 100 + (0.4 + 0.6)/2 * 300 = 20 + 150 = 170, over 400 episodes.
    assert area_under(Curve((0, 100, 400), (0.0, 0.4, 0.6))) == pytest.approx(0.425)


@given(st.lists(rewards, min_size=2, max_size=10), st.integers(1, 500))
def test_area_lies_between_the_lowest_and_the_highest_reward(values, step):
    curve = Curve(tuple(step * index for index in range(len(values))), tuple(values))
    assert min(values) - 1e-12 <= area_under(curve) <= max(values) + 1e-12


def test_episodes_to_a_level_are_read_off_the_line_between_two_evaluations():
    curve = Curve((0, 100, 200), (0.2, 0.4, 0.8))
    assert episodes_to(curve, 0.6) == Reached(150.0, is_censored=False)
    assert episodes_to(curve, 0.1) == Reached(0.0, is_censored=False)
    assert episodes_to(curve, 0.9) == Reached(200.0, is_censored=True)


def test_the_final_reward_is_the_last_and_not_the_best():
    assert final_reward(Curve((0, 100, 200), (0.2, 0.9, 0.5))) == 0.5


@pytest.mark.parametrize(
    ("episodes", "values"), [((0, 100), (0.1,)), ((), ()), ((100, 0), (0.1, 0.2)), ((0, 1), (0.1, math.nan))]
)
def test_what_is_no_curve_is_refused(episodes, values):
    with pytest.raises(ValueError, match=r"curve|evaluations"):
        Curve(episodes, values)


def test_a_curve_of_points_is_put_in_order():
    assert Curve.of([(64, 0.2), (0, 0.1)]) == Curve((0, 64), (0.1, 0.2))


def test_a_failed_run_gets_the_declared_worst_value_and_stays():
    assert with_worst([0.5, None, math.nan, 0.1], worst=-1.0) == [0.5, -1.0, -1.0, 0.1]


def test_no_failure_in_three_runs_still_allows_a_rate_of_seven_tenths():
    # Clopper-Pearson for 0 of n: 1 - 0.025^(1/n).
    rate = failure_rate(0, 3)
    assert (rate.value, rate.low) == (0.0, 0.0)
    assert rate.high == pytest.approx(1 - 0.025 ** (1 / 3))
    assert failure_rate(3, 3).high == 1.0
    with pytest.raises(ValueError, match="4 of 3"):
        failure_rate(4, 3)


def test_the_spread_of_three_seeds_is_known_within_a_factor_of_six():
    # chi2(0.975, 2) = 7.37776, chi2(0.025, 2) = 0.0506356: factors 0.52066 and 6.28475.
    known = spread([1.0, 2.0, 3.0])
    assert known.sd == pytest.approx(1.0)
    assert known.low == pytest.approx(0.52066, abs=1e-5)
    assert known.high == pytest.approx(6.28475, abs=1e-4)
    with pytest.raises(ValueError, match="at least 2"):
        spread([1.0])


def test_the_smallest_difference_that_three_seeds_can_tell_is_many_deviations():
    # For a paired t on 3 pairs with alpha 0.05, published tables give an effect of 3.26 deviations of the difference
    # for a power of 0.8; times sqrt(2) for a deviation of one run.
    assert smallest_difference(1.0, 3) == pytest.approx(3.26 * math.sqrt(2), rel=0.01)
    # 1.68 for 5 pairs.
    assert smallest_difference(1.0, 5) == pytest.approx(1.68 * math.sqrt(2), rel=0.01)
    with pytest.raises(ValueError, match="a deviation of 0 between seeds says nothing"):
        smallest_difference(0.0, 3)


@given(st.floats(0.001, 2), st.integers(2, 30))
def test_power_at_the_smallest_difference_is_the_power_asked_for(sd, seeds):
    assert power_of(smallest_difference(sd, seeds), sd, seeds) == pytest.approx(0.8, abs=1e-6)


@pytest.mark.parametrize(("df", "shift"), [(2, 0.5), (2, 3.0), (4, 2.0), (9, 3.0)])
def test_power_agrees_with_scipy_where_scipy_has_a_value(df, shift):
    critical = reference.t.ppf(0.975, df)
    expected = reference.nct.sf(critical, df, shift) + reference.nct.cdf(-critical, df, shift)
    assert power_of(shift * math.sqrt(2 / (df + 1)), 1.0, df + 1) == pytest.approx(float(expected), abs=1e-5)


def test_power_is_what_simulation_says():
    rng = np.random.default_rng(5)
    one, other = rng.normal(0.10, 0.04, (4000, 4)), rng.normal(0, 0.04, (4000, 4))
    found = np.mean([paired_t(list(a), list(b)).p_value() < 0.05 for a, b in zip(one, other, strict=True)])
    assert found == pytest.approx(power_of(0.10, 0.04, 4), abs=0.02)


def test_arms_that_are_the_same_are_told_apart_in_at_most_one_study_in_twenty():
    rng = np.random.default_rng(6)
    arms = rng.normal(0.6, 0.03, (4000, 2, 3))
    claimed = np.mean([paired_t(list(one), list(other)).p_value() < 0.05 for one, other in arms])
    # 0.05 plus three standard errors of a share over 4000 studies.
    assert claimed <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 4000)
