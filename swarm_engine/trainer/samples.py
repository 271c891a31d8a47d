"""From episodes to samples: who takes part in the update, with what advantage, and how much each token weighs.

A sample is what one agent did in one episode. Baselines, sequence means and drops belong to samples, never to
timelines, so that merging them changes nothing.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import assert_never

from swarm_engine.config import Aggregation, Knobs, TrainerConfig
from swarm_engine.merger import merge
from swarm_engine.trainer.algorithms import METHODS, Method, Scope
from swarm_engine.trainer.algorithms.dapo import overlong_punishment
from swarm_engine.trainer.algorithms.sft import is_worth_imitating
from swarm_engine.types import Episode, Outcome, Timeline, Untrained

LARGEST_REWARD = 1e100
"""Beyond it the squares of a group's rewards overflow, and a reward says no more than infinity does."""

UNACTED = frozenset({Untrained.CANCELLED, Untrained.UNUSED_RETRY})
"""Replies that nobody acted on, so that a reward for one says nothing of any other."""


class Drop(StrEnum):
    """Why a sample carries no loss."""

    ENV_ERROR = "env_error"
    """The environment failed: nobody's fault, and no word on the policy."""
    UNJUDGED = "unjudged"
    """No reward for this agent, or one that is not a number or beyond `LARGEST_REWARD`; of its steps too."""
    UNTRAINED = "untrained"
    """No token of it may be trained: all greedy, cancelled or unused, or it made no call at all."""
    STALE = "stale"
    """Its oldest trained token is of weights more than `max_staleness` updates ago."""
    ALONE = "alone"
    """The only sample of its group and agent that could be compared; raw reward is never trained on."""
    ZERO_VARIANCE = "zero_variance"
    """Its whole group got the same reward. It still counts in the denominators and in the regularizers, except where
    the algorithm says otherwise."""
    UNREWARDED = "unrewarded"
    """Its reward is not above zero, so imitation leaves it out."""


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
    step_rewards: Mapping[str, float] = field(default_factory=dict)
    """By call id, for calls of this agent."""
    call_ids: tuple[str, ...] = ()
    """Its calls, in order of arrival."""
    prompts: tuple[int, ...] = ()
    """For each of them a number that it shares with those of the same prompt: choices of one ask, and retries. Empty
    where no step has a reward, for then nobody asks."""
    advantage: float = 0.0
    """Of every token."""
    step_advantages: Mapping[str, float] = field(default_factory=dict)
    """By call id, to be added for the tokens of that call."""
    drop: Drop | None = None
    counts: bool = False
    """Whether its tokens are in the denominators."""
    is_flat: bool = False
    """Whether its whole group got the same reward, so that rewards teach nothing; a teacher still may."""
    is_imitated: bool = False
    """Whether its likelihood is raised besides; see `sft_weight`."""
    is_taught: bool = False
    """Whether a teacher adds to what its tokens are worth, so that it learns without any other to compare with too."""

    @property
    def num_trained(self) -> int:
        """Tokens that may carry a loss."""
        return sum(timeline.num_trained for timeline in self.timelines)

    @property
    def has_teacher(self) -> bool:
        """Whether a teacher was asked about it."""
        return any(span.teacher_logprobs is not None for line in self.timelines for span in line.spans)

    @property
    def is_compared(self) -> bool:
        """Whether its reward was measured against others, whatever came of it."""
        return self.drop in (None, Drop.ZERO_VARIANCE, Drop.UNREWARDED)

    @property
    def has_advantage(self) -> bool:
        """Whether any token of it has one."""
        return self.advantage != 0 or any(self.step_advantages.values())

    @property
    def carries_loss(self) -> bool:
        """Whether anything is learned from it."""
        return self.has_advantage or self.is_imitated or self.is_taught

    def staleness(self, version: int) -> list[int]:
        """Updates between the weights that sampled each trained token and those of `version`."""
        return [
            version - sampled_by
            for timeline in self.timelines
            for span in timeline.spans
            if span.is_trained
            for sampled_by in span.policy_versions
        ]


def make_samples(
    episodes: Sequence[Episode], config: TrainerConfig, version: int, max_context: int | None = None
) -> list[Sample]:
    """One sample per episode and agent, in order, with its advantage or the reason it has none.

    Baselines are per agent, over judged samples with something to train: a rejected reply must not move the baseline of
    its siblings.

    Args:
        version: updates in the weights about to be trained.
        max_context: tokens that the model takes; no merged timeline has more.
    """
    knobs, method = config.knobs, METHODS[config.algorithm]
    samples = [
        _sample(episode, agent, config, version, max_context) for episode in episodes for agent in _agents(episode)
    ]
    compared: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for index, sample in enumerate(samples):
        if sample.drop is None:
            compared[_scope_of(sample, method)].append(index)
    for indices in compared.values():
        for index, judged in zip(indices, judge([samples[index] for index in indices], method, knobs), strict=True):
            samples[index] = judged
    return samples


def judge(samples: Sequence[Sample], method: Method, knobs: Knobs) -> list[Sample]:
    """Give samples that are measured against each other their advantages, or the reason that they have none."""
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    advantages = method.advantages(rewards, knobs)
    if knobs.overlong_limit is not None and knobs.overlong_margin is not None and any(advantages):
        limit, margin = knobs.overlong_limit, knobs.overlong_margin
        lengths = [sample.num_trained for sample in samples]
        punished = [
            reward + overlong_punishment(length, limit, margin) for reward, length in zip(rewards, lengths, strict=True)
        ]
        advantages = method.advantages(punished, knobs)
    steps = [{} for _ in samples] if method.scope is Scope.ITSELF else step_advantages(samples, method, knobs)
    is_alone = len(samples) == 1 and method.scope is not Scope.ITSELF
    is_flat = not is_alone and not any(advantages) and not any(any(step.values()) for step in steps)
    judged = []
    for sample, advantage, step in zip(samples, advantages, steps, strict=True):
        is_taught = bool(knobs.teacher_weight) and sample.has_teacher
        if is_taught:
            changed = replace(sample, advantage=advantage, step_advantages=step, counts=True, is_taught=True)
        elif is_alone:
            changed = replace(sample, drop=Drop.ALONE)
        elif method.scope is Scope.ITSELF and advantage == 0:
            changed = replace(sample, drop=Drop.UNREWARDED)
        elif is_flat:
            changed = replace(sample, drop=Drop.ZERO_VARIANCE, counts=method.counts_flat_groups)
        else:
            changed = replace(sample, advantage=advantage, step_advantages=step, counts=True)
        is_imitated = bool(knobs.sft_weight) and sample.reward is not None and is_worth_imitating(sample.reward)
        is_one_of_alike = is_flat and method.scope is not Scope.ITSELF
        judged.append(replace(changed, is_imitated=is_imitated, is_flat=is_one_of_alike))
    return judged


def step_advantages(samples: Sequence[Sample], method: Method, knobs: Knobs) -> list[dict[str, float]]:
    """Process supervision (Shao et al. 2024, arXiv:2402.03300, section 4.1.3), by call id for each sample.

    The rewards of all steps of all samples are measured against each other; a call gets the sum of its own and of those
    of the later calls of its agent. A call without a reward adds nothing and still gets what comes later. Calls of one
    prompt stand beside each other, so none is later than another.
    """
    measured = iter(method.advantages([reward for sample in samples for reward in sample.step_rewards.values()], knobs))
    found: list[dict[str, float]] = []
    for sample in samples:
        own = {call_id: next(measured) for call_id in sample.step_rewards}
        to_go: dict[str, float] = {}
        later, total = dict[int, float](), 0.0
        """By prompt, and of all."""
        for call_id, prompt in reversed(list(zip(sample.call_ids, sample.prompts, strict=True))) if own else ():
            worth = own.get(call_id, 0.0)
            beside = prompt in later
            to_go[call_id] = worth + (math.fsum(later[one] for one in later if one != prompt) if beside else total)
            later[prompt] = later.get(prompt, 0.0) + worth
            total += worth
        found.append(to_go)
    return found


def count_drops(samples: Sequence[Sample]) -> dict[str, int]:
    """Episodes none of whose agents carries a loss, by the reason of the first agent."""
    by_episode: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_episode[sample.episode_id].append(sample)
    return dict(
        Counter(
            str(agents[0].drop)
            for agents in by_episode.values()
            if all(sample.drop is not None and not sample.is_imitated for sample in agents)
        )
    )


@dataclass(frozen=True, slots=True)
class Denominators:
    """Of one optimizer step: what the sums over its tokens are divided by."""

    knobs: Knobs
    num_samples: int
    num_tokens: int

    @staticmethod
    def of(samples: Sequence[Sample], knobs: Knobs) -> Denominators:
        """Over these samples, whatever micro-batches they come in."""
        return Denominators(knobs, len(samples), sum(sample.num_trained for sample in samples))

    def token_weight(self, sample: Sample) -> float:
        """What each trained token of `sample` weighs in the loss, however its timelines merged."""
        match self.knobs.aggregation:
            case Aggregation.TOKEN_MEAN:
                return 1.0 / self.num_tokens
            case Aggregation.SEQUENCE_MEAN:
                return 1.0 / (self.num_samples * sample.num_trained)
            case Aggregation.CONSTANT:
                assert self.knobs.loss_length is not None
                return 1.0 / (self.num_samples * self.knobs.loss_length)
            case _:
                assert_never(self.knobs.aggregation)


def _agents(episode: Episode) -> list[str]:
    """Whoever spoke or was judged."""
    return list(dict.fromkeys([*(call.agent for call in episode.calls), *episode.rewards]))


def _scope_of(sample: Sample, method: Method) -> tuple[str, ...]:
    """What samples that are measured against each other have in common."""
    match method.scope:
        case Scope.GROUP:
            return (sample.agent, sample.group_id)
        case Scope.BATCH:
            return (sample.agent,)
        case Scope.ITSELF:
            return (sample.agent, sample.group_id, sample.episode_id)
        case _:
            assert_never(method.scope)


def _sample(episode: Episode, agent: str, config: TrainerConfig, version: int, max_context: int | None) -> Sample:
    calls = [call for call in episode.calls if call.agent == agent]
    raw = [call.timeline() for call in calls]
    reward = episode.rewards.get(agent)
    steps = {
        call.call_id: episode.step_rewards[call.call_id]
        for call in calls
        if call.call_id in episode.step_rewards and call.untrained_because not in UNACTED
    }
    prompts: dict[tuple[int, ...], int] = {}
    sample = Sample(
        episode_id=episode.episode_id,
        group_id=episode.group_id,
        agent=agent,
        reward=reward,
        timelines=merge(raw, config.merge, max_context),
        num_raw_tokens=sum(len(timeline.tokens) for timeline in raw),
        step_rewards=steps,
        call_ids=tuple(call.call_id for call in calls),
        prompts=tuple(prompts.setdefault(call.prompt_ids, len(prompts)) for call in calls) if steps else (),
    )
    drop: Drop | None = None
    if episode.outcome is Outcome.ENV_ERROR:
        drop = Drop.ENV_ERROR
    elif reward is None or not all(abs(value) <= LARGEST_REWARD for value in (reward, *steps.values())):
        drop = Drop.UNJUDGED
    elif sample.num_trained == 0:
        drop = Drop.UNTRAINED
    elif config.max_staleness is not None and max(sample.staleness(version)) > config.max_staleness:
        drop = Drop.STALE
    return replace(sample, drop=drop)
