"""From episodes to samples: who takes part in the update, with what advantage, and how much each token weighs.

A sample is what one agent did in one episode. Baselines, sequence means and drops belong to samples, never to
timelines, so that merging them changes nothing.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never

from swarm_engine.config import Aggregation, Merge
from swarm_engine.merger import merge
from swarm_engine.trainer.advantages import group_advantages
from swarm_engine.types import Episode, Outcome, Timeline


class Drop(StrEnum):
    """Why a sample carries no loss."""

    ENV_ERROR = "env_error"
    """The environment failed: nobody's fault, and no word on the policy."""
    UNJUDGED = "unjudged"
    """No finite reward for this agent."""
    UNTRAINED = "untrained"
    """No token of it may be trained: all greedy, cancelled or unused, or it made no call at all."""
    ALONE = "alone"
    """The only judged sample of its group and agent; raw reward is never trained on."""
    ZERO_VARIANCE = "zero_variance"
    """Its whole group got the same reward. It still counts in the denominators and in the regularizers."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What one agent did in one episode."""

    episode_id: str
    group_id: str
    agent: str
    reward: float | None
    timelines: tuple[Timeline, ...]
    """After merging."""
    num_raw_tokens: int
    """Tokens of the timelines before merging."""
    advantage: float = 0.0
    drop: Drop | None = None

    @property
    def num_trained(self) -> int:
        """Tokens that may carry a loss."""
        return sum(timeline.num_trained for timeline in self.timelines)

    @property
    def counts(self) -> bool:
        """Whether its tokens are in the denominators."""
        return self.drop in (None, Drop.ZERO_VARIANCE)


def make_samples(episodes: Sequence[Episode], how: Merge, *, normalize_by_std: bool) -> list[Sample]:
    """One sample per episode and agent, in order, with its advantage or the reason it has none.

    Baselines are per group and agent, over judged samples with something to train: a rejected reply must not move the
    baseline of its siblings.
    """
    samples = [_sample(episode, agent, how) for episode in episodes for agent in _agents(episode)]
    groups: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for place, sample in enumerate(samples):
        if sample.drop is None:
            groups[sample.group_id, sample.agent].append(place)
    for places in groups.values():
        rewards = [samples[place].reward for place in places]
        advantages = group_advantages(
            [reward for reward in rewards if reward is not None], normalize_by_std=normalize_by_std
        )
        reason = Drop.ALONE if len(places) == 1 else None if any(advantages) else Drop.ZERO_VARIANCE
        for place, advantage in zip(places, advantages, strict=True):
            samples[place] = replace(samples[place], advantage=advantage, drop=reason)
    return samples


def count_drops(samples: Sequence[Sample]) -> dict[str, int]:
    """Episodes none of whose agents carries a loss, by the reason of the first agent."""
    by_episode: defaultdict[str, list[Drop | None]] = defaultdict(list)
    for sample in samples:
        by_episode[sample.episode_id].append(sample.drop)
    return dict(Counter(str(drops[0]) for drops in by_episode.values() if drops[0] is not None and all(drops)))


def token_weight(sample: Sample, aggregation: Aggregation, num_samples: int, num_tokens: int) -> float:
    """What each trained token of `sample` weighs in the loss.

    The weights of all trained tokens of a batch sum to one, whatever the micro-batches and however timelines merged.

    Args:
        num_samples: samples in the whole batch that count.
        num_tokens: their trained tokens.
    """
    match aggregation:
        case Aggregation.TOKEN_MEAN:
            return 1.0 / num_tokens
        case Aggregation.SEQUENCE_MEAN:
            return 1.0 / (num_samples * sample.num_trained)
        case _:
            assert_never(aggregation)


def _agents(episode: Episode) -> list[str]:
    """Whoever spoke or was judged."""
    return list(dict.fromkeys([*(call.agent for call in episode.calls), *episode.rewards]))


def _sample(episode: Episode, agent: str, how: Merge) -> Sample:
    raw = [call.timeline() for call in episode.calls if call.agent == agent]
    reward = episode.rewards.get(agent)
    drop: Drop | None = None
    if episode.outcome is Outcome.ENV_ERROR:
        drop = Drop.ENV_ERROR
    elif reward is None or not math.isfinite(reward):
        drop = Drop.UNJUDGED
    elif not any(timeline.num_trained for timeline in raw):
        drop = Drop.UNTRAINED
    return Sample(
        episode_id=episode.episode_id,
        group_id=episode.group_id,
        agent=agent,
        reward=reward,
        timelines=merge(raw, how),
        num_raw_tokens=sum(len(timeline.tokens) for timeline in raw),
        drop=drop,
    )
