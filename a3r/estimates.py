"""From evaluation items to every number that a report may quote. Pure.

The analyst stores these numbers, `a3r verify` computes them again and compares. Each has a key that names it in the
study and in the report's slots, and the hash of the scores it was computed from.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from a3r.analysis import Run, arm_mean, by_arm, contrasts, metric_of, unpaired
from a3r.prereg.plan import MetricKind, Plan, canonical
from a3r.stats import Comparison, Curve, failure_rate, mean_of, smallest_difference, spread
from experiments_db.intervals import LEVEL


@dataclass(frozen=True, slots=True)
class Measurement:
    """One evaluation of one run."""

    step: int
    """Updates in the weights."""
    episodes: int
    """Training episodes behind them."""
    scores: Mapping[str, float]
    """Score of each held-out game, the mean where it was played several times."""

    @property
    def mean(self) -> float:
        """Mean over games."""
        return math.fsum(self.scores.values()) / len(self.scores)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One training run as the database has it."""

    experiment_id: str
    arm: str
    seed: int
    measurements: tuple[Measurement, ...]
    """In order of episodes; whatever there is, also of a run that failed."""
    failure: str | None = None
    """Why it counts as failed; None for a run that finished and passed its checks."""

    @property
    def curve(self) -> Curve:
        """Mean held-out reward over training episodes."""
        return Curve.of((each.episodes, each.mean) for each in self.measurements)

    @property
    def inputs_sha(self) -> str:
        """Hash of every score."""
        return _sha({str(each.step): dict(each.scores) for each in self.measurements})


@dataclass(frozen=True, slots=True)
class Draft:
    """A number with all that an `Estimate` row says of it."""

    key: str
    estimand: str
    method: str
    value: float | None
    unit: str
    inputs_sha: str
    experiments: tuple[str, ...] = ()
    ci: tuple[float, float] | None = None
    level: float = LEVEL
    se_seed: float | None = None
    se_eval: float | None = None
    n_seeds: int = 0
    n_items: int = 0
    p: float | None = None
    p_adj: float | None = None
    family: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)


def run_of(plan: Plan, record: RunRecord) -> Run:
    """The run as its number; a failed one has none."""
    if record.failure is not None:
        return Run(record.arm, record.seed, None)
    value, is_censored = metric_of(record.curve, plan.metric)
    return Run(record.arm, record.seed, value, is_censored)


def noise_floor(plan: Plan, records: Sequence[RunRecord]) -> list[Draft]:
    """Numbers of the first stage: the reference's runs, their spread, and what the design can tell by it."""
    reference = [record for record in records if record.arm == plan.reference.key and record.seed in plan.seeds]
    found = [*_runs(plan, reference), _failures(plan, plan.reference.key, reference, "noise")]
    values = [run.value for run in (run_of(plan, record) for record in reference) if run.value is not None]
    if len(values) < 2:
        return found
    known = spread(values)
    ids, sha = _inputs(reference)
    unit = plan.metric.unit
    found.append(
        Draft(
            key="noise/sd",
            estimand=f"deviation of {plan.metric.kind} between seeds of {plan.reference.key}",
            method="sd_chi2_interval",
            value=known.sd,
            ci=(known.low, known.high),
            unit=unit,
            n_seeds=known.n,
            experiments=ids,
            inputs_sha=sha,
        )
    )
    if known.sd == 0:  # runs that agree say nothing of how far others differ, so what can be told is not known
        return found
    for name, seeds in (("seeds", len(plan.seeds)), ("all_seeds", len(plan.seeds) + len(plan.extra_seeds))):
        if name == "seeds" or plan.extra_seeds:
            found.append(
                Draft(
                    key=f"noise/smallest_difference/{name}",
                    estimand=f"smallest difference told with probability {plan.power:g} by {seeds} seeds per arm",
                    method="power_paired_t",
                    value=smallest_difference(known.sd, seeds, alpha=1 - plan.level, power=plan.power),
                    unit=unit,
                    n_seeds=seeds,
                    experiments=ids,
                    inputs_sha=sha,
                    params={"alpha": 1 - plan.level, "power": plan.power, "sd": known.sd},
                )
            )
    return found


def comparison(plan: Plan, records: Sequence[RunRecord], look: int) -> list[Draft]:
    """Numbers of one look: every run, every arm, every contrast.

    Args:
        records: every run of the look, in any order.
        look: 1 for the first, 2 after seeds were added.
    """
    found = _runs(plan, records)
    runs = [run_of(plan, record) for record in records]
    arms = by_arm(plan, runs)
    for arm in plan.arms:
        of_arm = [record for record in records if record.arm == arm.key]
        found += _arm(plan, arm.key, arms[arm.key], of_arm, look)
    for contrast in contrasts(plan, runs):
        pair = [record for record in records if record.arm in {contrast.arm, plan.reference.key}]
        ids, sha = _inputs(pair)
        estimand = f"{plan.metric.kind}: {contrast.arm} minus {plan.reference.key}"

        def draft(
            key: str,
            method: str,
            compared: Comparison,
            *,
            level: float = plan.level,
            estimand: str = estimand,
            ids: tuple[str, ...] = ids,
            sha: str = sha,
            arm: str = contrast.arm,
            **more: Any,
        ) -> Draft:
            return Draft(
                key=f"{key}/{arm}/look{look}",
                estimand=estimand,
                method=method,
                value=compared.value,
                ci=compared.interval(level),
                level=level,
                se_seed=compared.se,
                n_seeds=compared.n,
                unit=plan.metric.unit,
                experiments=ids,
                inputs_sha=sha,
                **more,
            )

        found.append(
            draft(
                "contrast",
                "paired_t",
                contrast.difference,
                p=contrast.difference.p_value(),
                p_adj=contrast.p_difference,
                family="difference",
                params={"failed": contrast.num_failed, "runs": contrast.num_runs, "worst": plan.metric.worst},
            )
        )
        found.append(
            draft(
                "equivalence",
                "tost",
                contrast.difference,
                level=1 - 2 * (1 - plan.level),
                p=contrast.difference.p_equivalent(plan.metric.margin),
                p_adj=contrast.p_equivalent,
                family="equivalence",
                params={"margin": plan.metric.margin},
            )
        )
        welch = unpaired(plan, runs, contrast.arm)
        found.append(draft("unpaired", "welch_t", welch, p=welch.p_value()))
        if contrast.survivors is not None:
            found.append(draft("survivors", "paired_t", contrast.survivors, p=contrast.survivors.p_value()))
    return found


ANALYSIS = ("a3r/estimates.py", "a3r/analysis.py", "a3r/stats/*.py", "experiments_db/intervals.py")
"""The code that computes numbers from scores."""
STUDY_CODE = (
    *ANALYSIS,
    "a3r/planner/*.py",
    "a3r/prereg/*.py",
    "a3r/integrity.py",
    "a3r/decisions.py",
    "a3r/claims.py",
    "a3r/workshop.py",
    "a3r/graph/*.py",
)
"""With it the code that plans, checks runs, decides and claims; not the game's nor the engine's, which runs record."""


@cache
def code_sha(patterns: tuple[str, ...]) -> str:
    """Hash of our source files of these names, so that a row says which version made it."""
    top = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(path for pattern in patterns for path in top.glob(pattern)):
        digest.update(f"{path.relative_to(top).as_posix()}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _runs(plan: Plan, records: Sequence[RunRecord]) -> list[Draft]:
    """One number a run. Its standard error is over games: what playing other games would have changed."""
    found: list[Draft] = []
    for record in sorted(records, key=lambda record: (record.arm, record.seed)):
        run = run_of(plan, record)
        games = {game for each in record.measurements for game in each.scores}
        found.append(
            Draft(
                key=f"run/{record.arm}/s{record.seed}",
                estimand=f"{plan.metric.kind} of {record.arm}, seed {record.seed}",
                method=plan.metric.kind,
                value=run.value,
                unit=plan.metric.unit,
                se_eval=_se_over_games(plan, record) if run.value is not None else None,
                n_seeds=1,
                n_items=len(games),
                experiments=(record.experiment_id,),
                inputs_sha=record.inputs_sha,
                params={
                    "failure": record.failure,
                    "censored": run.is_censored,
                    "threshold": plan.metric.threshold,
                    "evaluations": len(record.measurements),
                },
            )
        )
    return found


def _se_over_games(plan: Plan, record: RunRecord) -> float | None:
    """Deviation over games over the root of their number, for metrics that are a mean over games; None for others."""
    if plan.metric.kind is MetricKind.EPISODES_TO:
        return None
    played = set.intersection(*(set(each.scores) for each in record.measurements))
    values = [
        metric_of(Curve.of((each.episodes, each.scores[game]) for each in record.measurements), plan.metric)[0]
        for game in sorted(played)
    ]
    return mean_of(values).se if values else None


def _arm(plan: Plan, key: str, runs: Sequence[Run], records: Sequence[RunRecord], look: int) -> list[Draft]:
    """An arm's mean, how many of its runs failed, and where its curve began and ended."""
    ids, sha = _inputs(records)
    found = [_failures(plan, key, records, f"look{look}")]

    def draft(name: str, estimand: str, compared: Comparison, unit: str, level: float, **more: Any) -> Draft:
        return Draft(
            key=f"{name}/{key}/look{look}",
            estimand=estimand,
            method="t_interval",
            value=compared.value,
            ci=compared.interval(level),
            level=level,
            se_seed=compared.se,
            n_seeds=compared.n,
            unit=unit,
            experiments=ids,
            inputs_sha=sha,
            **more,
        )

    if runs:
        mean = arm_mean(plan, runs)
        censored = sum(run.is_censored for run in runs)
        failed = sum(run.has_failed for run in runs)
        params = {"worst": plan.metric.worst, "failed": failed, "censored": censored}
        estimand = f"mean {plan.metric.kind} of {key} over seeds"
        found.append(draft("arm", estimand, mean, plan.metric.unit, LEVEL, params=params))
    whole = [record.curve for record in records if record.failure is None]
    if whole:
        for name, values in (
            ("before", [curve.rewards[0] for curve in whole]),
            ("after", [curve.rewards[-1] for curve in whole]),
            ("rise", [curve.rewards[-1] - curve.rewards[0] for curve in whole]),
        ):
            found.append(draft(name, f"held-out reward of {key}, {name}", mean_of(values), "reward", LEVEL))
    return found


def _failures(plan: Plan, key: str, records: Sequence[RunRecord], when: str) -> Draft:
    ids, sha = _inputs(records)
    failed = sum(record.failure is not None for record in records)
    rate = failure_rate(failed, len(records)) if records else None
    return Draft(
        key=f"failed/{key}/{when}",
        estimand=f"share of runs of {key} that fail",
        method="clopper_pearson",
        value=rate.value if rate else None,
        ci=(rate.low, rate.high) if rate else None,
        unit="share",
        n_seeds=len(records),
        experiments=ids,
        inputs_sha=sha,
        params={"failed": failed, "runs": len(records), "seeds_planned": len(plan.seeds)},
    )


def _inputs(records: Sequence[RunRecord]) -> tuple[tuple[str, ...], str]:
    ordered = sorted(records, key=lambda record: (record.arm, record.seed))
    return tuple(record.experiment_id for record in ordered), _sha(
        {f"{record.arm}/s{record.seed}": [record.inputs_sha, record.failure] for record in ordered}
    )


def _sha(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(value).encode()).hexdigest()
