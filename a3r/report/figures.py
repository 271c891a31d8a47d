"""The report's figures, from a study's rows. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from a3r.planner.offline import shown
from a3r.prereg.plan import MetricKind
from a3r.report import charts
from a3r.report.bundle import Bundle, by_arm
from a3r.report.document import Figure
from a3r.report.slots import Number
from experiments_db.intervals import Interval, t_interval

METRIC_TITLES: Mapping[MetricKind, str] = {
    MetricKind.AREA: "area under the held-out curve",
    MetricKind.FINAL_REWARD: "final held-out reward",
    MetricKind.EPISODES_TO: "episodes to the threshold",
}


def curve_figure(bundle: Bundle) -> Figure | None:
    """Learning curves of every run and arm; None where no run finished."""
    lines: list[charts.Line] = []
    for arm in bundle.plan.arms:
        pairs = [(run, record) for run, record in by_arm(bundle, arm.key) if record.measurements]
        whole = [record for _, record in pairs if record.failure is None]
        if not whole:
            continue
        episodes = sorted(set.intersection(*({each.episodes for each in record.measurements} for record in whole)))
        at = [
            [next(each.mean for each in record.measurements if each.episodes == place) for record in whole]
            for place in episodes
        ]
        bands = [_band(values) for values in at]
        lines.append(
            charts.Line(
                label=f"{bundle.plan.factor.label} {shown(arm.level)}",
                episodes=tuple(episodes),
                mean=tuple(band.mean for band in bands),
                low=tuple(band.mean if band.low is None else band.low for band in bands),
                high=tuple(band.mean if band.high is None else band.high for band in bands),
                seeds=tuple(
                    (
                        f"{arm.key}, seed {run.seed}" + (" (failed)" if record.failure else ""),
                        tuple(each.episodes for each in record.measurements),
                        tuple(each.mean for each in record.measurements),
                    )
                    for run, record in pairs
                ),
            )
        )
    if not lines:
        return None
    svg = charts.curves(
        lines, x_label="training episodes", y_label="held-out reward", title="Held-out reward over training episodes"
    )
    caption = (
        "Held-out reward at temperature {{f:temperature}} on {{f:eval_games}} games. Thin lines are runs, thick lines "
        "means, bands {{f:level_arm}} t-intervals over seeds."
    )
    return Figure("curves", svg, caption)


def dot_figure(bundle: Bundle) -> Figure | None:
    """The metric of every run; None where there is no arm to show."""
    look = bundle.look
    arms: list[charts.Dots] = []
    for arm in bundle.plan.arms:
        number = bundle.numbers.get(f"arm/{arm.key}/look{look}")
        if number is None or number.value is None:
            continue
        low, high = _ends(number)
        values = []
        for run, record in by_arm(bundle, arm.key):
            estimate = bundle.numbers.get(f"run/{arm.key}/s{run.seed}")
            has_failed = record.failure is not None or estimate is None or estimate.value is None
            value = bundle.plan.metric.worst if has_failed or estimate is None else estimate.value
            assert value is not None
            values.append((f"seed {run.seed}", value, has_failed))
        arms.append(
            charts.Dots(
                label=f"{bundle.plan.factor.label} {shown(arm.level)}",
                values=tuple(values),
                mean=number.value,
                low=low,
                high=high,
            )
        )
    if not arms:
        return None
    name = METRIC_TITLES[bundle.plan.metric.kind]
    svg = charts.dots(arms, x_label=name, title=f"{name} of every run")
    return Figure("runs", svg, "Every run as a dot; diamonds are means, bars {{f:level_arm}} t-intervals over seeds.")


def gap_figure(bundle: Bundle) -> Figure | None:
    """The differences from the reference; None where nothing was compared."""
    look, plan = bundle.look, bundle.plan
    rows: list[charts.Gap] = []
    for arm in plan.treated:
        number = bundle.numbers.get(f"contrast/{arm.key}/look{look}")
        if number is not None and number.value is not None:
            within = bundle.numbers.get(f"equivalence/{arm.key}/look{look}", number)
            label = f"{shown(arm.level)} against {shown(plan.reference.level)}"
            rows.append(charts.Gap(label, number.value, *_ends(number), *_ends(within)))
    if not rows:
        return None
    told = bundle.numbers.get(told_key(look, bundle.numbers) or "")
    name = METRIC_TITLES[plan.metric.kind]
    svg = charts.gaps(
        rows,
        margin=plan.metric.margin,
        told=told.value if told else None,
        x_label=f"difference in {name}",
        title=f"Difference in {name} from the reference",
    )
    caption = (
        "The difference with its {{f:level_look}} interval (thin: does it reach zero?) and its "
        "{{f:level_equivalence}} interval (thick: is it within the band?). The band is what was declared not to "
        "matter; dashed lines are the smallest difference that this design tells."
    )
    return Figure("difference", svg, caption)


def told_key(look: int, numbers: Mapping[str, object]) -> str | None:
    """Key of the estimate that says what the seeds of a look can tell."""
    for name in ("all_seeds", "seeds") if look == 2 else ("seeds",):
        if f"noise/smallest_difference/{name}" in numbers:
            return f"noise/smallest_difference/{name}"
    return None


def _band(rewards: Sequence[float]) -> Interval:
    """Of the runs' rewards at one place; there is at least one run."""
    band = t_interval(rewards)
    assert band is not None
    return band


def _ends(number: Number) -> tuple[float, float]:
    """Ends of an estimate's interval, infinite where there is no bound."""
    low, high = number.bounds
    return (-math.inf if low is None else low, math.inf if high is None else high)
