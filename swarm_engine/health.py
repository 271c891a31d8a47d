"""What a history of step metrics says is going wrong: each warning with its value, its limit and a way out.

Pure: it reads the metrics of updates, oldest first and each policy by itself, and knows neither the run nor its config.
Single bad steps happen in healthy runs, so all but numbers that are not finite are judged over the last `WINDOW`
updates that have the metric, and changes against the same number of them at the start.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from swarm_engine.metrics import by_policy

Metrics = Mapping[str, float | None]

WINDOW = 5
"""Updates that are judged together."""
FLAT_WINDOW = 20
"""Updates after which a reward that has not moved is worth a word."""


class WarningKind(StrEnum):
    """What can be wrong."""

    NOT_FINITE = "not_finite"
    ENTROPY_COLLAPSE = "entropy_collapse"
    REWARD_FLAT = "reward_flat"
    KL_SPIKE = "kl_spike"
    GRADIENT_EXPLODES = "gradient_explodes"
    TRUNCATION = "truncation"
    ZERO_VARIANCE = "zero_variance"


@dataclass(frozen=True, slots=True)
class Limits:
    """From where on a warning is given. They are rules of thumb; none was fitted to runs."""

    entropy_left: float = 0.1
    """Least share of the entropy at the start that may be left."""
    reward_change: float = 0.1
    """Least change of the mean reward over `FLAT_WINDOW` updates, in deviations of the rewards inside a batch."""
    kl_sampling: float = 0.1
    """Most nats per token between sampler and trainer."""
    gradient_growth: float = 10.0
    """Most times the median norm of the updates before."""
    truncated_fraction: float = 0.3
    zero_variance_fraction: float = 0.7


@dataclass(frozen=True, slots=True)
class HealthWarning:
    """One thing that is wrong."""

    kind: WarningKind
    value: float
    limit: float
    message: str
    """What was found, the limit, and the way out."""
    policy: str = ""
    """Empty where the update named none."""

    def as_event(self) -> dict[str, str | float | None]:
        """As a `step` event says it; a value that is not finite, of a gradient that grew from nothing, is null."""
        value = self.value if math.isfinite(self.value) else None
        return {
            "policy": self.policy,
            "kind": self.kind.value,
            "value": value,
            "limit": self.limit,
            "message": self.message,
        }


def warnings_of(history: Sequence[Metrics], limits: Limits = Limits()) -> list[HealthWarning]:
    """Everything that is wrong at the end of a history, policy by policy."""
    if not history:
        return []
    apart = [by_policy(metrics) for metrics in history]
    return [
        replace(warning, policy=policy, message=f"policy {policy!r}: {warning.message}" if policy else warning.message)
        for policy in apart[-1]
        for warning in _warnings_of_one([metrics.get(policy, {}) for metrics in apart], limits)
    ]


def _warnings_of_one(history: Sequence[Metrics], limits: Limits) -> list[HealthWarning]:
    checks: Sequence[Callable[[Sequence[Metrics], Limits], HealthWarning | None]] = (
        not_finite,
        entropy_collapse,
        kl_spike,
        gradient_explodes,
        reward_flat,
        truncation,
        zero_variance,
    )
    return [warning for check in checks if (warning := check(history, limits)) is not None]


def not_finite(history: Sequence[Metrics], _limits: Limits) -> HealthWarning | None:
    """Steps in the window that were not taken because loss or gradient was not finite."""
    recent = history[-WINDOW:]
    bad = sum(1 for step in recent if step.get("nonfinite_gradient") or step.get("nonfinite_loss"))
    if bad == 0:
        return None
    return HealthWarning(
        WarningKind.NOT_FINITE,
        float(bad),
        0.0,
        f"loss or gradient was not finite in {bad} of the last {len(recent)} updates, the limit is 0; these steps were "
        "skipped. Look for rewards without bound, lower trainer.learning_rate, or set trainer.max_staleness",
    )


def entropy_collapse(history: Sequence[Metrics], limits: Limits) -> HealthWarning | None:
    """The policy has nearly stopped choosing."""
    first, last = _ends(_values(history, "entropy"))
    if first is None or last is None or first <= 0 or last >= limits.entropy_left * first:
        return None
    return HealthWarning(
        WarningKind.ENTROPY_COLLAPSE,
        last / first,
        limits.entropy_left,
        f"entropy fell from {first:.3g} to {last:.3g} nats per token, {last / first:.0%} of the start, the limit is "
        f"{limits.entropy_left:.0%}; raise trainer.clip_high or trainer.entropy_weight, or lower trainer.learning_rate",
    )


def kl_spike(history: Sequence[Metrics], limits: Limits) -> HealthWarning | None:
    """The weights that sample and those that are trained are far apart."""
    value = _median(_values(history, "kl_sampling")[-WINDOW:])
    if value is None or value <= limits.kl_sampling:
        return None
    return HealthWarning(
        WarningKind.KL_SPIKE,
        value,
        limits.kl_sampling,
        f"sampler and trainer differ by {value:.3g} nats per token over the last {WINDOW} updates, the limit is "
        f"{limits.kl_sampling:g}; set trainer.off_policy to truncated, lower trainer.max_staleness or "
        "trainer.learning_rate",
    )


def gradient_explodes(history: Sequence[Metrics], limits: Limits) -> HealthWarning | None:
    """Gradients are much longer than they used to be."""
    norms = _values(history, "grad_norm")
    before, value = _median(norms[:-WINDOW]), _median(norms[-WINDOW:])
    if before is None or value is None or value <= limits.gradient_growth * before:
        return None
    return HealthWarning(
        WarningKind.GRADIENT_EXPLODES,
        value / before if before else math.inf,
        limits.gradient_growth,
        f"the gradient's norm is {value:.3g} over the last {WINDOW} updates and was {before:.3g} before, the limit is "
        f"{limits.gradient_growth:g} times that; lower trainer.learning_rate or trainer.max_grad_norm",
    )


def reward_flat(history: Sequence[Metrics], limits: Limits) -> HealthWarning | None:
    """Nothing is learned, though rewards differ."""
    rewards = _values(history, "reward_mean")[-FLAT_WINDOW:]
    deviation = _median(_values(history, "reward_std")[-FLAT_WINDOW:])
    first, last = _ends(rewards)
    if len(rewards) < FLAT_WINDOW or first is None or last is None or not deviation:
        return None
    change = abs(last - first) / deviation
    if change >= limits.reward_change:
        return None
    return HealthWarning(
        WarningKind.REWARD_FLAT,
        change,
        limits.reward_change,
        f"the mean reward went from {first:.3g} to {last:.3g} in {FLAT_WINDOW} updates, {change:.2g} of the rewards' "
        f"deviation, the limit is {limits.reward_change:g}; raise trainer.learning_rate or trainer.group_size, or see "
        "whether the reward can be earned at all",
    )


def truncation(history: Sequence[Metrics], limits: Limits) -> HealthWarning | None:
    """Replies are cut before they end."""
    return _share(
        history,
        limits.truncated_fraction,
        WarningKind.TRUNCATION,
        "truncated_fraction",
        "of the replies were cut at their limit of tokens",
        "raise the max_tokens of requests (sampler.max_tokens where they name none), or punish length with algorithm "
        "dapo and trainer.overlong_limit",
    )


def zero_variance(history: Sequence[Metrics], limits: Limits) -> HealthWarning | None:
    """Most groups teach nothing."""
    return _share(
        history,
        limits.zero_variance_fraction,
        WarningKind.ZERO_VARIANCE,
        "zero_variance_fraction",
        "of the groups got one reward for all episodes and taught nothing",
        "raise trainer.group_size, or give tasks that are neither always nor never solved",
    )


def _share(
    history: Sequence[Metrics], limit: float, kind: WarningKind, name: str, found: str, way_out: str
) -> HealthWarning | None:
    value = _median(_values(history, name)[-WINDOW:])
    if value is None or value <= limit:
        return None
    message = f"{value:.0%} {found} over the last {WINDOW} updates, the limit is {limit:.0%}; {way_out}"
    return HealthWarning(kind, value, limit, message)


def _ends(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Medians of the first and of the last window; None where these would overlap."""
    if len(values) < 2 * WINDOW:
        return None, None
    return _median(values[:WINDOW]), _median(values[-WINDOW:])


def _median(values: Sequence[float]) -> float | None:
    """None where there are fewer than a window."""
    return statistics.median(values) if len(values) >= WINDOW else None


def _values(history: Sequence[Metrics], name: str) -> list[float]:
    """Of the updates that have the metric: one that skips its step must not hide what those around it say."""
    found = (step.get(name) for step in history)
    return [value for value in found if value is not None and math.isfinite(value)]
