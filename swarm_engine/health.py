"""What a history of step metrics says is going wrong: each warning with its value, its limit and a way out.

Pure: it reads the metrics of updates, oldest first and each policy by itself, and knows neither the run nor its config.
Single bad steps happen in healthy runs, so most ills are judged over the last `WINDOW` updates that have the metric,
and changes against the same number of them at the start. A collapse can't wait so long: it is over in an update or two,
so it is judged by the last two against the first, whose episodes the start weights played.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from swarm_engine.metrics import by_policy

Metrics = Mapping[str, float | None]

METRICS = (
    "reward_mean",
    "reward_std",
    "reward_min",
    "entropy",
    "sampling_entropy",
    "kl_sampling",
    "grad_norm",
    "zero_variance_fraction",
    "truncated_fraction",
    "num_calls",
    "num_trained_tokens",
    "nonfinite_gradient",
    "nonfinite_loss",
)
"""What is read of an update."""

WINDOW = 5
"""Updates that are judged together."""
FLAT_WINDOW = 20
"""Updates after which a reward that does not rise is worth a word."""
COLLAPSE_WINDOW = 2
"""Updates that have to agree on a collapse: policies dip for one and come back."""
STUCK_WINDOW = 8
"""Updates without anything to learn after which nothing more is expected. Recorded runs came back after up to 4."""
UPPER_QUANTILE = 2.326
"""Of the normal distribution, 99% from below: a run is looked at after every update."""


class WarningKind(StrEnum):
    """What can be wrong."""

    NOT_FINITE = "not_finite"
    ENTROPY_COLLAPSE = "entropy_collapse"
    REWARD_FLAT = "reward_flat"
    KL_SPIKE = "kl_spike"
    GRADIENT_EXPLODES = "gradient_explodes"
    TRUNCATION = "truncation"
    ZERO_VARIANCE = "zero_variance"
    COLLAPSE = "collapse"
    STUCK = "stuck"
    """Nothing can be learned any more: whoever trains should stop."""


@dataclass(frozen=True, slots=True)
class Limits:
    """From where on a warning is given. They are rules of thumb; benchmarks/health.py says how those of a collapse do
    on runs that they were not made with."""

    entropy_left: float = 0.1
    """Least share of the entropy at the start that may be left."""
    reward_rise: float = 0.25
    """Least rise of the mean reward over the run that has to be possible, in deviations of the rewards inside a
    batch."""
    reward_left: float = 0.15
    """Least share of the start's height above the lowest reward that may be left."""
    collapsed_entropy_left: float = 0.15
    """The same of the start's entropy, where the reward has not risen."""
    reply_tokens: float = 1.05
    """Tokens of a reply, its end included, up to which it says nothing, where the start's had half as many again and
    the reward has not risen."""
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
        collapse,
        stuck,
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
    """Nothing is learned, though rewards differ.

    A line through the means of all updates has a slope and, from their scatter about it, a standard error: the warning
    is given where even the upper end of the rise is small, not where none can be told. So a noisy run that learns
    slowly has no warning, and neither has one that has learned and stays where it is.
    """
    rewards = _values(history, "reward_mean")
    deviation = _median(_values(history, "reward_std"))
    if len(rewards) < FLAT_WINDOW or not deviation:
        return None
    rise, error = _rise(rewards)
    upper = (rise + UPPER_QUANTILE * error) / deviation
    if upper >= limits.reward_rise:
        return None
    return HealthWarning(
        WarningKind.REWARD_FLAT,
        upper,
        limits.reward_rise,
        f"in {len(rewards)} updates the mean reward rose by {rise:.2g}, at most {upper:.2g} of the rewards' deviation, "
        f"the limit is {limits.reward_rise:g}; raise trainer.learning_rate or trainer.group_size, or see whether the "
        "reward can be earned at all",
    )


def collapse(history: Sequence[Metrics], limits: Limits) -> HealthWarning | None:
    """The policy has lost what it could do at the start."""
    recent = history[1:][-COLLAPSE_WINDOW:]
    if len(recent) < COLLAPSE_WINDOW:
        return None
    way_out = (
        "start again from the start weights or an earlier checkpoint with a lower trainer.learning_rate, a longer "
        "trainer.warmup_updates or larger batches"
    )
    for left, limit, said in (
        (_reward_left, limits.reward_left, "{:.0%} of the start's height above the lowest reward is left"),
        (_entropy_left, limits.collapsed_entropy_left, "{:.0%} of the start's entropy is left and no reward was won"),
        (_reply_tokens, limits.reply_tokens, "a reply has {:.2f} tokens, its end included, and no reward was won"),
    ):
        values = [left(history, metrics) for metrics in recent]
        known = [value for value in values if value is not None]
        if len(known) == len(recent) and max(known) <= limit:
            shown = f"{limit:.0%}" if limit < 1 else f"{limit:g}"
            message = f"the policy has collapsed: {said.format(max(known))}, the limit is {shown}; {way_out}"
            return HealthWarning(WarningKind.COLLAPSE, max(known), limit, message)
    return None


def stuck(history: Sequence[Metrics], limits: Limits) -> HealthWarning | None:
    """The policy has collapsed, and for long no group had two different rewards: there is nothing to learn from."""
    recent = history[-STUCK_WINDOW:]
    # A pull towards the start weights or more entropy has a gradient in flat groups too.
    is_idle = all(metrics.get("zero_variance_fraction") == 1 and metrics.get("grad_norm") is None for metrics in recent)
    if len(recent) < STUCK_WINDOW or not is_idle or (cause := collapse(history, limits)) is None:
        return None
    return HealthWarning(
        WarningKind.STUCK,
        float(STUCK_WINDOW),
        float(STUCK_WINDOW - 1),
        f"nothing can be learned any more: for {STUCK_WINDOW} updates all groups got one reward for all and no "
        f"gradient, the limit is {STUCK_WINDOW - 1}, and {cause.message}",
    )


def _reward_left(history: Sequence[Metrics], metrics: Metrics) -> float | None:
    """Share of the start's height above the lowest reward seen; None where the start stood no higher than its luck."""
    start, deviation, reward = history[0].get("reward_mean"), history[0].get("reward_std"), metrics.get("reward_mean")
    lowest = min(_values(history, "reward_min"), default=None)
    if start is None or deviation is None or reward is None or lowest is None:
        return None
    height = start - lowest
    return (reward - lowest) / height if height > 0 and height >= deviation / 2 else None


def _entropy_left(history: Sequence[Metrics], metrics: Metrics) -> float | None:
    """Share of the start's entropy; None where the reward is above the start's."""
    start, value = history[0].get("sampling_entropy"), metrics.get("sampling_entropy")
    return value / start if start and value is not None and not _has_risen(history, metrics) else None


def _reply_tokens(history: Sequence[Metrics], metrics: Metrics) -> float | None:
    """Tokens of a reply; None where the start's had few too, or the reward is above the start's."""
    start, value = _tokens_per_call(history[0]), _tokens_per_call(metrics)
    return value if start and value and start >= 1.5 * value and not _has_risen(history, metrics) else None


def _tokens_per_call(metrics: Metrics) -> float | None:
    calls, tokens = metrics.get("num_calls"), metrics.get("num_trained_tokens")
    return tokens / calls if calls and tokens else None


def _has_risen(history: Sequence[Metrics], metrics: Metrics) -> bool:
    start, reward = history[0].get("reward_mean"), metrics.get("reward_mean")
    return start is None or reward is None or reward > start


def _rise(values: Sequence[float]) -> tuple[float, float]:
    """What a least-squares line through values rises from the first to the last, and its standard error."""
    count = len(values)
    middle, mean = (count - 1) / 2, statistics.fmean(values)
    spread = math.fsum((place - middle) ** 2 for place in range(count))
    slope = math.fsum((place - middle) * (value - mean) for place, value in enumerate(values)) / spread
    residuals = [value - mean - slope * (place - middle) for place, value in enumerate(values)]
    error = math.sqrt(math.fsum(one * one for one in residuals) / (count - 2) / spread)
    return slope * (count - 1), error * (count - 1)


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
