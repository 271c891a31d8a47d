"""What rewards say: about an episode, about a scripted player, about whether there is anything to learn from."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from swarm_engine.client import Episode, Task
from swarm_engine.types import Outcome
from vibe.envs import Env

MIN_SHARE_WITH_VARIANCE = 1 / 3
"""Fewer groups with different rewards than this, and a policy of this size learns nothing in the time there is."""
NUM_PROBE_GROUPS = 24
"""Groups the share is measured on; the standard error of a share of a half is then a tenth."""

Play = Callable[[Episode, Task], Awaitable[None]]
"""Plays one episode of a task and ends it."""


def is_judged(rewards: Mapping[str, float | None], outcome: Outcome | str) -> bool:
    """Whether an episode counts: the environment worked and somebody got a reward."""
    return outcome != Outcome.ENV_ERROR and any(reward is not None for reward in rewards.values())


def mean_reward(rewards: Mapping[str, float | None]) -> float:
    """What a judged episode is worth: the mean over its judged agents."""
    judged = [reward for reward in rewards.values() if reward is not None]
    return sum(judged) / len(judged)


def share_with_variance(rewards_by_group: Sequence[Sequence[float]]) -> float:
    """Share of groups whose rewards differ at all; 0 where there is no group.

    Args:
        rewards_by_group: of one agent in the attempts at one game, for every such pair.
    """
    return sum(len(set(rewards)) > 1 for rewards in rewards_by_group) / max(len(rewards_by_group), 1)


async def scripted_rewards(env: Env, player: str, games: Iterable[int]) -> list[float]:
    """What a scripted player earns in the games of these seeds, in order."""
    rewards = []
    for seed in games:
        turn = await env.reset(seed)
        while "rewards" not in turn:
            turn = await env.step(await env.suggest(player))
        rewards.append(mean_reward(turn["rewards"]))
    return rewards
