"""From runs to contrasts, by the rules of the plan. Pure; the analyst, the simulation and `a3r verify` all use it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from a3r.prereg.plan import Metric, MetricKind, Plan
from a3r.prereg.tree import Evidence
from a3r.stats import (
    Comparison,
    Curve,
    area_under,
    episodes_to,
    final_reward,
    holm,
    mean_of,
    paired_t,
    welch_t,
    with_worst,
)


@dataclass(frozen=True, slots=True)
class Run:
    """One training run as its number."""

    arm: str
    """Key of its arm."""
    seed: int
    value: float | None
    """The metric; None for a run that failed."""
    is_censored: bool = False
    """It was still below the threshold when its episodes were used up."""

    @property
    def has_failed(self) -> bool:
        """No value, or none that is a finite number."""
        return self.value is None or not math.isfinite(self.value)


@dataclass(frozen=True, slots=True)
class Contrast:
    """One arm against the reference, in the unit and direction of the metric."""

    arm: str
    difference: Comparison
    """Arm minus reference, paired by seed, failed runs at the worst value."""
    survivors: Comparison | None
    """The paired difference over seeds whose two runs finished; None where there is no such seed, or none failed."""
    p_difference: float
    """Two-sided, adjusted over the contrasts (Holm)."""
    p_equivalent: float
    num_failed: int
    num_runs: int


def metric_of(curve: Curve, metric: Metric) -> tuple[float, bool]:
    """What a run's held-out curve comes to, and whether that number is censored.

    Raises:
        ValueError: the curve is too short for the metric.
    """
    match metric.kind:
        case MetricKind.FINAL_REWARD:
            return final_reward(curve), False
        case MetricKind.AREA:
            return area_under(curve), False
        case MetricKind.EPISODES_TO:
            assert metric.threshold is not None
            reached = episodes_to(curve, metric.threshold)
            return reached.episodes, reached.is_censored
        case other:
            assert_never(other)


def by_arm(plan: Plan, runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each arm, in the plan's order of arms and seeds."""
    order = {seed: index for index, seed in enumerate((*plan.seeds, *plan.extra_seeds))}
    return {
        arm.key: sorted((run for run in runs if run.arm == arm.key), key=lambda run: order[run.seed])
        for arm in plan.arms
    }


def arm_mean(plan: Plan, runs: Sequence[Run]) -> Comparison:
    """Mean of an arm's runs, failed ones at the worst value."""
    return mean_of(with_worst([run.value for run in runs], plan.metric.worst))


def contrasts(plan: Plan, runs: Sequence[Run]) -> list[Contrast]:
    """Every arm against the reference, over the seeds that both were given.

    A seed that one of the arms has not run at all is left out; a run that failed is not.
    """
    arms = by_arm(plan, runs)
    reference = {run.seed: run for run in arms[plan.reference.key]}
    found: list[Contrast] = []
    for arm in plan.treated:
        pairs = [(run, reference[run.seed]) for run in arms[arm.key] if run.seed in reference]
        if not pairs:
            continue
        treated = with_worst([run.value for run, _ in pairs], plan.metric.worst)
        control = with_worst([run.value for _, run in pairs], plan.metric.worst)
        difference = paired_t(treated, control)
        num_failed = sum(run.has_failed + other.has_failed for run, other in pairs)
        whole = [
            (run.value, other.value)
            for run, other in pairs
            if run.value is not None and other.value is not None and not (run.has_failed or other.has_failed)
        ]
        survivors = paired_t([one for one, _ in whole], [other for _, other in whole]) if whole and num_failed else None
        found.append(
            Contrast(
                arm=arm.key,
                difference=difference,
                survivors=survivors,
                p_difference=difference.p_value(),
                p_equivalent=difference.p_equivalent(plan.metric.margin),
                num_failed=num_failed,
                num_runs=2 * len(pairs),
            )
        )
    differ = holm([contrast.p_difference for contrast in found])
    same = holm([contrast.p_equivalent for contrast in found])
    return [
        replace(contrast, p_difference=p_difference, p_equivalent=p_equivalent)
        for contrast, p_difference, p_equivalent in zip(found, differ, same, strict=True)
    ]


def unpaired(plan: Plan, runs: Sequence[Run], arm: str) -> Comparison:
    """An arm against the reference by Welch, without the pairs: a cross-check that no decision reads."""
    arms = by_arm(plan, runs)
    values = [with_worst([run.value for run in arms[key]], plan.metric.worst) for key in (arm, plan.reference.key)]
    return welch_t(*values)


def evidence(plan: Plan, contrast: Contrast, *, times_extended: int, can_extend: bool) -> Evidence:
    """A contrast as the tree reads it: with the sign that makes better positive."""
    difference = contrast.difference
    sign = 1 if plan.metric.higher_is_better else -1
    return Evidence(
        gain=Comparison(sign * difference.value, difference.se, difference.df, difference.n),
        p_difference=contrast.p_difference,
        p_equivalent=contrast.p_equivalent,
        num_failed=contrast.num_failed,
        num_runs=contrast.num_runs,
        times_extended=times_extended,
        can_extend=can_extend,
    )
