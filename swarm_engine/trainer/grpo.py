"""Group-relative policy optimization: one batch of judged episodes, one step of the optimizer.

The loss is PPO's clipped surrogate over advantages measured inside each group; see `loss`, `advantages`, `samples`. An
update in which every advantage is zero leaves the weights bit for bit as they were: neither decay nor momentum moves
them, and the optimizer's own step count stays. The policy version goes up all the same, for it numbers batches.
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from swarm_engine.config import Merge, TrainerConfig
from swarm_engine.merger.trie import count_places
from swarm_engine.models.decoder import Decoder
from swarm_engine.protocol import Updated
from swarm_engine.trainer.adamw import AdamW, AdamWConfig
from swarm_engine.trainer.loss import kl_penalty, policy_loss
from swarm_engine.trainer.samples import Drop, Sample, count_drops, make_samples, token_weight
from swarm_engine.trainer.schedule import learning_rate
from swarm_engine.trainer.scoring import Row, Scores
from swarm_engine.trainer.units import Unit, plan_units
from swarm_engine.types import BatchRecord, Episode, FinishReason, Timeline, Untrained


@dataclass(frozen=True, slots=True)
class TrainedRow:
    """A timeline as the trainer reads it."""

    row: Row
    sampling_logprobs: tuple[float, ...]
    """Of each target, in nats."""
    advantage: float
    weight: float
    """Of each target in the batch's loss."""


@dataclass(slots=True)
class Sums:
    """What an update adds up over its micro-batches."""

    loss: float = 0.0
    entropy: float = 0.0
    kl_sampling: float = 0.0
    kl_reference: float = 0.0
    ratio_max: float = 0.0
    num_clipped: int = 0
    num_scored: int = 0
    num_computed: int = 0


class GrpoTrainer:
    """Owns the optimizer of one policy and applies one batch at a time."""

    def __init__(self, model: Decoder, config: TrainerConfig) -> None:
        self.model = model
        self.config = config
        self.step = 0
        """Updates already in the weights."""
        self.optimizer = AdamW(
            dict(model.named_parameters()),
            AdamWConfig(config.learning_rate, config.beta1, config.beta2, config.weight_decay),
        )
        self.reference = copy.deepcopy(model).requires_grad_(False) if config.kl_weight > 0 else None
        """The start weights, so a trainer is made before a checkpoint is loaded into its model."""

    def update(self, record: BatchRecord, episodes: Sequence[Episode]) -> Updated:
        """Train on one batch and return its metrics; the weights change in place.

        `entropy`, `kl_sampling`, `ratio_max` and `clip_fraction` are over the tokens that are computed: those whose
        loss has a gradient. With neither KL nor entropy in the loss these are the groups whose rewards differ.
        """
        start = time.perf_counter()
        samples = make_samples(episodes, self.config.merge, normalize_by_std=self.config.normalize_by_std)
        rows = self.rows(samples)
        metrics = batch_metrics(samples, episodes, self.config.merge)
        rate = learning_rate(self.config, record.step)
        has_advantage = any(sample.advantage for sample in samples)
        if has_advantage:
            sums = self.accumulate_gradient(rows)
            gradient_norm = self.optimizer.clip_gradient(self.config.max_grad_norm)
            if math.isfinite(gradient_norm):
                self.optimizer.step(rate)
            self.optimizer.zero_grad()
        else:
            sums, gradient_norm = Sums(), None
        metrics |= {
            "loss": sums.loss if has_advantage else None,
            "grad_norm": gradient_norm,
            "learning_rate": rate,
            "entropy": mean(sums.entropy, sums.num_scored),
            "kl_sampling": mean(sums.kl_sampling, sums.num_scored),
            "kl_reference": mean(sums.kl_reference, sums.num_scored) if self.reference else None,
            "ratio_max": sums.ratio_max if sums.num_scored else None,
            "clip_fraction": mean(sums.num_clipped, sums.num_scored),
            "num_computed_tokens": float(sums.num_computed),
            "skipped": float(gradient_norm is None or not math.isfinite(gradient_norm)),
            "nonfinite_gradient": float(gradient_norm is not None and not math.isfinite(gradient_norm)),
            "update_s": time.perf_counter() - start,
        }
        self.step = record.step
        finite = {name: value if value is None or math.isfinite(value) else None for name, value in metrics.items()}
        return Updated(record.step, finite, count_drops(samples))

    def rows(self, samples: Sequence[Sample]) -> list[TrainedRow]:
        """The rows of a batch whose loss has a gradient, each with its share of the batch's denominators."""
        counted = [sample for sample in samples if sample.counts]
        num_tokens = sum(sample.num_trained for sample in counted)
        is_regularized = self.config.kl_weight > 0 or self.config.entropy_weight > 0
        rows: list[TrainedRow] = []
        for sample in counted:
            if sample.advantage == 0 and not is_regularized:
                continue
            weight = token_weight(sample, self.config.aggregation, len(counted), num_tokens)
            rows += [
                trained_row(timeline, sample.advantage, weight) for timeline in sample.timelines if timeline.num_trained
            ]
        return rows

    def accumulate_gradient(self, rows: Sequence[TrainedRow]) -> Sums:
        """Add the gradient of the batch's loss to the parameters, unit by unit."""
        sums = Sums()
        has_entropy = self.config.entropy_weight > 0
        for unit in plan_units([row.row for row in rows], self.config.merge, self.config.microbatch_tokens):
            some = [rows[place] for place in unit.places]
            scored = unit.score(self.model, entropy_has_gradient=has_entropy)
            scored.backward(self._loss(some, unit, scored.scores, sums))
            sums.num_computed += unit.num_computed
        return sums

    def _loss(self, rows: Sequence[TrainedRow], unit: Unit, scores: Scores, sums: Sums) -> Tensor:
        """The loss of some rows, their share of the batch's; what can be said of them goes into `sums`."""
        config = self.config
        policy_N = scores.logprobs_N
        counts = torch.tensor([len(row.row.targets) for row in rows])
        sampling_N = policy_N.new_tensor([logprob for row in rows for logprob in row.sampling_logprobs])
        advantages_N = policy_N.new_tensor([row.advantage for row in rows]).repeat_interleave(counts)
        weights_N = policy_N.new_tensor([row.weight for row in rows]).repeat_interleave(counts)
        terms = policy_loss(
            policy_N,
            sampling_N,
            advantages_N,
            weights_N,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
        )
        loss = terms.loss
        if self.reference is not None:
            with torch.no_grad():
                reference_N = unit.score(self.reference).scores.logprobs_N
            penalty_N = kl_penalty(policy_N, reference_N)
            loss = loss + config.kl_weight * (weights_N * penalty_N).sum()
            sums.kl_reference += float(penalty_N.detach().double().sum())
        if config.entropy_weight > 0:
            loss = loss - config.entropy_weight * (weights_N * scores.entropies_N).sum()
        sums.loss += float(loss.detach())
        sums.entropy += float(scores.entropies_N.detach().double().sum())
        # KL(sampling || policy), whose tokens these are, so policy and sampling change places.
        sums.kl_sampling += float(kl_penalty(sampling_N, policy_N.detach()).double().sum())
        sums.ratio_max = max(sums.ratio_max, float(terms.ratio_N.max()))
        sums.num_clipped += int(terms.is_clipped_N.sum())
        sums.num_scored += len(policy_N)
        return loss


def trained_row(timeline: Timeline, advantage: float, weight: float) -> TrainedRow:
    """Read a timeline: exactly the tokens of its trained spans are targets."""
    spans = [span for span in timeline.spans if span.is_trained]
    row = Row(
        tokens=timeline.tokens,
        targets=tuple(place for span in spans for place in range(span.start, span.end)),
        temperatures=tuple(span.temperature for span in spans for _ in span.logprobs),
    )
    return TrainedRow(row, tuple(logprob for span in spans for logprob in span.logprobs), advantage, weight)


def batch_metrics(samples: Sequence[Sample], episodes: Sequence[Episode], how: Merge) -> dict[str, float | None]:
    """What can be said of a batch before it is computed. Rewards are per episode and agent."""
    counted = [sample for sample in samples if sample.counts]
    rewards = [sample.reward for sample in counted if sample.reward is not None]
    reward_mean = mean(math.fsum(rewards), len(rewards))
    deviations = [] if reward_mean is None else [(reward - reward_mean) ** 2 for reward in rewards]
    variance = mean(math.fsum(deviations), len(deviations))
    flat = {(sample.group_id, sample.agent) for sample in samples if sample.drop is Drop.ZERO_VARIANCE}
    calls = [call for episode in episodes for call in episode.calls]
    untrained = Counter(call.untrained_because for call in calls)
    # Trained or not: a share of the trained ones alone would hide the cut calls that carry no loss.
    whole = [call for call in calls if call.finish_reason is not FinishReason.CANCELLED]
    return {
        "reward_mean": reward_mean,
        "reward_std": None if variance is None else math.sqrt(variance),
        "zero_variance_groups": float(len(flat)),
        "identical_reply_groups": float(_count_identical(counted)),
        "num_trained_tokens": float(sum(sample.num_trained for sample in counted)),
        "truncated_fraction": mean(sum(call.finish_reason is FinishReason.LENGTH for call in whole), len(whole)),
        "merge_ratio": mean(sum(sample.num_raw_tokens for sample in counted), num_merged_tokens(counted, how)),
        **{f"{reason}_calls": float(untrained[reason]) for reason in Untrained},
    }


def num_merged_tokens(samples: Sequence[Sample], how: Merge) -> int:
    """Tokens of the samples' timelines after merging."""
    timelines = [timeline for sample in samples for timeline in sample.timelines]
    if how is Merge.TREE:
        return count_places([np.array(timeline.tokens, np.int32) for timeline in timelines])
    return sum(len(timeline.tokens) for timeline in timelines)


def _count_identical(samples: Sequence[Sample]) -> int:
    """Groups of an agent whose every member sampled the same tokens: a shared seed, or a policy that has collapsed.

    Unlike the groups of zero variance, a judge that is noisy gives these an advantage, and it is noise.
    """
    replies: defaultdict[tuple[str, str], list[tuple[tuple[int, ...], ...]]] = defaultdict(list)
    for sample in samples:
        sampled = tuple(line.tokens[span.start : span.end] for line in sample.timelines for span in line.spans)
        replies[sample.group_id, sample.agent].append(sampled)
    return sum(len(set(members)) == 1 for members in replies.values())


def mean(total: float, count: int) -> float | None:
    """The mean, or None where there is nothing to take it of."""
    return total / count if count else None
