"""Warnings against series made by hand: each where it is due, and none in a healthy run."""

from __future__ import annotations

import math
import random
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from episodes import conversations

from swarm_engine.config import TrainerConfig
from swarm_engine.health import METRICS, Limits, warnings_of
from swarm_engine.health import WarningKind as Kind
from swarm_engine.models.loading import LoadedPolicy
from swarm_engine.trainer.trainer import Trainer
from swarm_engine.types import BatchRecord

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

HEALTHY: dict[str, float | None] = {
    "loss": 0.01,
    "entropy": 1.0,
    "reward_std": 0.5,
    "reward_min": -0.5,
    "sampling_entropy": 1.0,
    "num_calls": 100.0,
    "num_trained_tokens": 500.0,
    "kl_sampling": 0.001,
    "grad_norm": 0.5,
    "truncated_fraction": 0.1,
    "zero_variance_fraction": 0.3,
    "nonfinite_gradient": 0.0,
    "nonfinite_loss": 0.0,
}


def series(num: int = 30, last: int = 5, **changes: float | None) -> list[dict[str, float | None]]:
    """A run whose reward climbs by 0.02 an update; `changes` hold in its last updates."""
    return [HEALTHY | {"reward_mean": 0.02 * step} | (changes if step >= num - last else {}) for step in range(num)]


def test_each_policy_is_judged_by_its_own_metrics() -> None:
    def together(ill: list[dict[str, float | None]], well: list[dict[str, float | None]]) -> list[Any]:
        named = {"ill": ill, "well": well}
        both = [
            {f"{policy}/{name}": value for policy, run in named.items() for name, value in run[step].items()}
            for step in range(len(ill))
        ]
        return warnings_of([step | {"truncated_fraction": 0.9} for step in both])  # what is said of all is no policy's

    assert together(series(), series()) == []
    (warning,) = together(series(kl_sampling=0.5), series())
    (alone,) = warnings_of(series(kl_sampling=0.5))
    assert (warning.kind, warning.value, warning.policy) == (Kind.KL_SPIKE, 0.5, "ill")
    assert warning.message == f"policy 'ill': {alone.message}"


def test_a_healthy_run_and_a_short_one_have_no_warnings() -> None:
    assert warnings_of(series()) == []
    assert warnings_of([]) == []
    assert warnings_of(series(9, entropy=0.05)) == [], "start and end would overlap"
    assert warnings_of(series(3, last=3, entropy=0.0, kl_sampling=9.0, grad_norm=99.0)) == []


@pytest.mark.parametrize(
    ("changes", "kind", "value", "message"),
    [
        (
            {"entropy": 0.05},
            Kind.ENTROPY_COLLAPSE,
            0.05,
            "entropy fell from 1 to 0.05 nats per token, 5% of the start",
        ),
        ({"kl_sampling": 0.2}, Kind.KL_SPIKE, 0.2, "differ by 0.2 nats per token"),
        (
            {"grad_norm": 6.0},
            Kind.GRADIENT_EXPLODES,
            12.0,
            "norm is 6 over the last 5 updates and was 0.5 before",
        ),
        ({"truncated_fraction": 0.4}, Kind.TRUNCATION, 0.4, "40% of the replies were cut"),
        ({"zero_variance_fraction": 0.9}, Kind.ZERO_VARIANCE, 0.9, "90% of the groups got one reward"),
        (
            {"nonfinite_gradient": 1.0, "grad_norm": None},
            Kind.NOT_FINITE,
            5.0,
            "not finite in 5 of the last 5 updates",
        ),
        ({"nonfinite_loss": 1.0}, Kind.NOT_FINITE, 5.0, "these steps were skipped"),
    ],
)
def test_one_warning_for_one_ill_with_its_value_its_limit_and_a_way_out(
    changes: dict[str, Any], kind: Kind, value: float, message: str
) -> None:
    (warning,) = warnings_of(series(**changes))
    assert warning.kind is kind
    assert warning.value == pytest.approx(value)
    assert message in warning.message
    assert "the limit is" in warning.message
    assert "trainer." in warning.message or "tasks" in warning.message
    if kind is not Kind.NOT_FINITE:
        assert warnings_of(series(last=2, **changes)) == [], "two updates are no trend"


@pytest.mark.parametrize(
    "at_the_limit",
    [
        {"entropy": 0.1},
        {"kl_sampling": 0.1},
        {"grad_norm": 5.0},
        {"truncated_fraction": 0.3},
        {"zero_variance_fraction": 0.7},
    ],
)
def test_what_is_at_its_limit_is_not_over_it(at_the_limit: dict[str, Any]) -> None:
    assert warnings_of(series(**at_the_limit)) == []


def test_one_step_that_was_not_finite_is_told_and_forgotten() -> None:
    history = series(last=1, nonfinite_gradient=1.0)
    assert [warning.value for warning in warnings_of(history)] == [1.0]
    assert warnings_of([*history, *series(5)]) == []


def test_a_reward_that_does_not_move_is_told_after_twenty_updates() -> None:
    flat: dict[str, float | None] = HEALTHY | {"reward_mean": 0.25}
    assert warnings_of([flat] * 19) == []
    (warning,) = warnings_of([flat] * 20)
    assert (warning.kind, warning.value) == (Kind.REWARD_FLAT, 0.0)
    assert "in 20 updates the mean reward rose by 0, at most 0 of the rewards' deviation" in warning.message
    assert warnings_of([flat | {"reward_std": 0.0}] * 20) == [], "zero variance is told by its own name"


def swinging(size: float, rise: float = 0.0) -> list[dict[str, float | None]]:
    """Twenty updates whose means lie in turn above and below a line that rises."""
    return [HEALTHY | {"reward_mean": rise * place / 19 + size * (-1) ** place} for place in range(20)]


def test_a_reward_is_flat_where_its_scatter_leaves_no_room_for_a_rise() -> None:
    """Of means 0.05 above and below a level: slope -0.5 / 665 an update, so over 19 a rise of -0.01429; the residuals'
    squares sum to 20 * 0.0025 - 665 * slope^2 = 0.04962, so its standard error is 19 * sqrt(0.04962 / 18 / 665) =
    0.03868; its upper end is -0.01429 + 2.326 * 0.03868 = 0.0757, in deviations of 0.5 it is 0.1514."""
    (warning,) = warnings_of(swinging(0.05))
    assert (warning.kind, warning.value) == (Kind.REWARD_FLAT, pytest.approx(0.1514, abs=1e-4))
    # Four times the scatter could hide 0.6 deviations, and nobody knows.
    assert warnings_of(swinging(0.2)) == []
    assert warnings_of(swinging(0.05, rise=0.1)) == [], "0.2 deviations more are above 0.25"
    assert [warning.kind for warning in warnings_of(swinging(0.05, rise=-0.3))] == [Kind.REWARD_FLAT]


def test_a_run_that_learns_slowly_under_much_noise_has_no_warning() -> None:
    """From 0.34 to 0.81 in 80 updates, batch means deviating by 0.08."""
    for seed in range(10):
        noise = random.Random(seed)
        run = [
            HEALTHY | {"reward_mean": 0.34 + 0.47 * step / 80 + noise.gauss(0, 0.08), "reward_std": 0.45}
            for step in range(80)
        ]
        warned = [step for step in range(20, 81) if warnings_of(run[:step])]
        assert len(warned) <= 2, (seed, warned)


COLLAPSED: dict[str, Any] = {
    "reward_mean": -0.5,
    "reward_std": 0.0,
    "entropy": None,
    "grad_norm": None,
    "zero_variance_fraction": 1.0,
}


def test_a_collapse_is_seen_at_its_second_update() -> None:
    start = HEALTHY | {"reward_mean": 0.375}
    assert warnings_of([start, HEALTHY | COLLAPSED]) == []
    (warning,) = warnings_of([start, HEALTHY | COLLAPSED, HEALTHY | COLLAPSED])
    assert (warning.kind, warning.value) == (Kind.COLLAPSE, 0.0)
    assert "0% of the start's height above the lowest reward is left, the limit is 15%" in warning.message
    assert "lower trainer.learning_rate" in warning.message
    # 0.875 above the lowest at the start: 15% of it is 0.13125.
    for reward, num in ((-0.37, 1), (-0.36, 0)):
        assert len(warnings_of([start, *[HEALTHY | {"reward_mean": reward, "reward_min": -0.5}] * 2])) == num
    assert warnings_of([start, HEALTHY | COLLAPSED, HEALTHY | {"reward_mean": -0.3}]) == [], "it comes back"


def test_a_start_that_earns_next_to_nothing_has_nothing_to_lose() -> None:
    rare: dict[str, float | None] = HEALTHY | {"reward_mean": 0.05, "reward_std": 0.22, "reward_min": 0.0}
    assert warnings_of([rare, *[rare | {"reward_mean": 0.0}] * 4]) == []


@pytest.mark.parametrize(
    ("lost", "value", "said"),
    [
        ({"sampling_entropy": 0.1, "entropy": 0.1}, 0.1, "10% of the start's entropy is left and no reward was won"),
        ({"num_trained_tokens": 100.0}, 1.0, "a reply has 1.00 tokens, its end included, and no reward was won"),
    ],
)
def test_replies_that_are_empty_or_always_the_same_are_a_collapse_unless_they_win(
    lost: dict[str, float], value: float, said: str
) -> None:
    start = HEALTHY | {"reward_mean": 0.5}
    (warning,) = warnings_of([start, *[start | lost | {"reward_mean": 0.4}] * 2])
    assert (warning.kind, warning.value) == (Kind.COLLAPSE, pytest.approx(value))
    assert said in warning.message
    assert warnings_of([start, *[start | lost | {"reward_mean": 0.6}] * 2]) == []
    assert warnings_of([start, start | lost | {"reward_mean": 0.4}, start]) == []


def test_after_eight_updates_of_nothing_to_learn_a_collapsed_run_is_stuck() -> None:
    start = HEALTHY | {"reward_mean": 0.375}
    seven = [start, *[HEALTHY | COLLAPSED] * 7]
    assert Kind.STUCK not in {warning.kind for warning in warnings_of(seven)}
    found = {warning.kind: warning for warning in warnings_of([*seven, HEALTHY | COLLAPSED])}
    assert found[Kind.STUCK].value == 8
    assert "nothing can be learned any more: for 8 updates" in found[Kind.STUCK].message
    lucky = HEALTHY | COLLAPSED | {"zero_variance_fraction": 0.9}
    assert Kind.STUCK not in {warning.kind for warning in warnings_of([*seven, lucky, HEALTHY | COLLAPSED])}
    pulled = [start, *[HEALTHY | COLLAPSED | {"grad_norm": 0.01}] * 9]
    assert Kind.STUCK not in {warning.kind for warning in warnings_of(pulled)}, "KL or entropy may bring it back"
    solved = HEALTHY | {"reward_mean": 1.0, "zero_variance_fraction": 1.0}
    assert {warning.kind for warning in warnings_of([start, *[solved] * 9])} == {Kind.ZERO_VARIANCE}


def test_recorded_runs_that_the_rules_were_not_made_with_are_judged_in_time() -> None:
    sys.path.append(str(BENCHMARKS))
    benchmark = runpy.run_path(str(BENCHMARKS / "health.py"))
    verdicts = [benchmark["judge"](*one) for one in benchmark["histories"](benchmark["RUNS"])]
    assert len(verdicts) == 20
    rows = benchmark["rows_of"](verdicts, is_quick=False)
    assert [(is_kept, said) for is_kept, said in benchmark["promises"](rows) if not is_kept] == []


def test_values_that_are_missing_are_no_values() -> None:
    assert warnings_of(series(last=30, entropy=None, reward_mean=None, kl_sampling=None, grad_norm=None)) == []
    assert warnings_of([{}] * 30) == []


@pytest.mark.parametrize("is_skipped", [lambda step: step == 1, lambda step: step >= 15 and step % 3 == 0])
def test_an_update_that_skips_its_step_hides_nothing(is_skipped: Callable[[int], bool]) -> None:
    history = series(last=8, entropy=0.05, kl_sampling=0.5, grad_norm=6.0)
    for step, metrics in enumerate(history):
        if is_skipped(step):
            metrics |= {"entropy": None, "kl_sampling": None, "grad_norm": None}
    kinds = [warning.kind for warning in warnings_of(history)]
    assert kinds == [Kind.ENTROPY_COLLAPSE, Kind.KL_SPIKE, Kind.GRADIENT_EXPLODES]


def test_a_gradient_that_grew_from_nothing_is_told_in_json() -> None:
    history = series(last=25, grad_norm=6.0)
    for step in history[:5]:
        step["grad_norm"] = 0.0
    (warning,) = warnings_of(history[:10])
    assert warning.value == math.inf
    said = warning.as_event()
    assert (said["kind"], said["value"], said["limit"], said["policy"]) == ("gradient_explodes", None, 10.0, "")
    assert said["message"] == warning.message


def test_limits_can_be_set() -> None:
    assert [warning.kind for warning in warnings_of(series(), Limits(truncated_fraction=0.05))] == [Kind.TRUNCATION]


def test_every_metric_that_is_judged_is_one_that_an_update_has(tiny: LoadedPolicy) -> None:
    metrics = Trainer(tiny.model, TrainerConfig()).update(BatchRecord(1, (), 0), conversations(1)).metrics
    assert set(HEALTHY) | {"reward_mean"} == set(METRICS) | {"loss"}
    assert set(METRICS) <= set(metrics)
