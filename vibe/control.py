"""The control for everything that is no learning: the same games, rewards and updates, with no link between them.

Every reward of an update goes to a random agent of a random episode of that update. A curve that still rises rises for
another reason than what was done well.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar, cast

from swarm_engine.client import Episode, Task
from swarm_engine.types import Outcome
from vibe.judging import Play

Key = TypeVar("Key", bound=Hashable)
Rewards = dict[str, float]
"""By agent."""


def deal(rewards: Mapping[Key, Rewards], seed: int) -> dict[Key, Rewards]:
    """Every reward to a random agent of a random episode; which ones there are does not change."""
    places = [(key, agent) for key, by_agent in rewards.items() for agent in by_agent]
    values = [rewards[key][agent] for key, agent in places]
    random.Random(seed).shuffle(values)
    dealt: dict[Key, Rewards] = {key: {} for key in rewards}
    for (key, agent), value in zip(places, values, strict=True):
        dealt[key][agent] = value
    return dealt


class Shuffled:
    """Plays as `play` does; an episode ends when all have come to their end, and with another's reward.

    So all episodes of the update have to run side by side. One that ends without a reward, for its environment failed,
    has nothing to change hands: it ends at once, and the others do not wait for it.
    """

    def __init__(self, play: Play, num_episodes: int, seed: int) -> None:
        self._play = play
        self._num_missing = num_episodes
        """Episodes that have neither handed rewards in nor left."""
        self._seed = seed
        self._substitutes = random.Random(seed)
        self._earned: dict[str, Rewards] = {}
        """By episode id."""
        self._dealt: dict[str, Rewards] = {}
        self._complete = asyncio.Event()

    async def __call__(self, episode: Episode, task: Task) -> None:
        """Play one episode and end it with what it was dealt."""
        await self._play(cast(Episode, Held(episode, self)), task)

    async def exchange(self, episode_id: str, earned: Rewards) -> Rewards:
        """Hand rewards in and, when everyone has, take others out."""
        self._earned[episode_id] = earned
        self._count_down()
        await self._complete.wait()
        if episode_id in self._dealt:
            return self._dealt[episode_id]
        # It was played in the place of one that got lost, after the rewards were dealt.
        values = [value for by_agent in self._dealt.values() for value in by_agent.values()]
        return {agent: self._substitutes.choice(values) for agent in earned}

    def leave(self) -> None:
        """An episode has no rewards to hand in; the exchange goes on without it."""
        self._count_down()

    def _count_down(self) -> None:
        self._num_missing -= 1
        if self._num_missing == 0:
            self._dealt = deal(dict(sorted(self._earned.items())), self._seed)
            self._complete.set()


class Held:
    """An episode whose end waits for the exchange; in everything else it is the episode."""

    def __init__(self, episode: Episode, shuffled: Shuffled) -> None:
        self._episode = episode
        self._shuffled = shuffled

    def __getattr__(self, name: str) -> Any:
        return getattr(self._episode, name)

    async def end(
        self, *, reward: Rewards | None, outcome: Outcome = Outcome.SUCCESS, metrics: Mapping[str, float] | None = None
    ) -> None:
        """End the episode with the reward it was dealt; at once and without one where it earned none."""
        if reward is None:
            self._shuffled.leave()
            await self._episode.end(reward=None, outcome=outcome, metrics=metrics)
            return
        dealt = await self._shuffled.exchange(self._episode.episode_id, reward)
        await self._episode.end(reward=dealt, outcome=outcome, metrics=metrics)
