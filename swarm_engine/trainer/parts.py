"""One batch, several policies: what of it is each one's to learn from, and what the update says of all of them.

A policy learns from its own calls alone; what others said is in their prompts, as context. A reward is for an agent, so
it goes to the policies that the agent spoke through. Groups and baselines are then those of one policy by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from swarm_engine.protocol import Updated
from swarm_engine.types import Episode

SUMS = ("num_calls", "num_trained_tokens", "num_computed_tokens", "optimizer_steps", "update_s")
"""Metrics of policies that add up."""


def part_of(episode: Episode, policy: str) -> Episode | None:
    """What a policy did in an episode; None where only others took part.

    An agent that was judged and never spoke is anybody's: it trains nothing, and is counted by who was there.
    """
    calls = tuple(call for call in episode.calls if call.policy == policy)
    if episode.calls and not calls:
        return None
    own = {call.agent for call in calls}
    others = {call.agent for call in episode.calls} - own
    rewards = {agent: reward for agent, reward in episode.rewards.items() if agent not in others}
    return replace(episode, calls=calls, rewards=rewards)


def combined(updates: Mapping[str, Updated]) -> Updated:
    """The update of several policies as one: each one's metrics and drops under `POLICY/`, and what is said of all.

    Args:
        updates: of the policies that are trained, by name; one at least.
    """
    metrics = {f"{name}/{metric}": value for name, one in updates.items() for metric, value in one.metrics.items()}
    drops = {f"{name}/{reason}": count for name, one in updates.items() for reason, count in one.drops.items()}
    step = next(iter(updates.values())).step
    return Updated(step, metrics | _of_all([one.metrics for one in updates.values()]), drops)


def _of_all(policies: list[dict[str, float | None]]) -> dict[str, float | None]:
    """What is said of the update itself.

    The reward is the mean of the policies' means, for each counts once; the age of tokens is a mean over all of them.
    """

    def known(metric: str) -> list[float]:
        return [value for one in policies if (value := one.get(metric)) is not None]

    rewards = known("reward_mean")
    aged = [one for one in policies if one["staleness_mean"] is not None]
    num_aged = sum(one["num_trained_tokens"] or 0 for one in aged)
    age = sum((one["staleness_mean"] or 0) * (one["num_trained_tokens"] or 0) for one in aged)
    return {
        "reward_mean": sum(rewards) / len(rewards) if rewards else None,
        "learning_rate": policies[0]["learning_rate"],
        "staleness_mean": age / num_aged if num_aged else None,
        "staleness_max": max(known("staleness_max"), default=None),
        "skipped": min(known("skipped")),
        "nonfinite_gradient": max(known("nonfinite_gradient")),
        "nonfinite_loss": max(known("nonfinite_loss")),
        **{metric: sum(known(metric)) for metric in SUMS},
    }
