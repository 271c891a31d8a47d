"""One batch of judged episodes, one update of the weights.

What is learned from a batch is the algorithm's affair (`algorithms`, `samples`); how is the same for all. Rows are
scored unit by unit and each unit's share of the loss goes back at once. An algorithm whose objective needs whole
samples gets a first pass without gradient: its loss is differentiated by the log-probabilities alone, and the second
pass carries these coefficients to the weights. The result is that of one large graph.

Several ranks share the units of a step and nothing else: each adds the gradient of its own, and the denominators are
the whole batch's, so the sum over ranks is the gradient of one (`ranks`).

An update in which nothing is learned from any sample leaves the weights bit for bit as they were: neither decay nor
momentum moves them, and the optimizer's own step count stays. The policy version goes up all the same, for it numbers
batches.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from swarm_engine.config import Merge, OffPolicy, TrainerConfig
from swarm_engine.merger.trie import count_places
from swarm_engine.models.decoder import Decoder
from swarm_engine.models.loading import kind_of
from swarm_engine.protocol import Updated
from swarm_engine.trainer.adamw import AdamWConfig
from swarm_engine.trainer.algorithms import METHODS
from swarm_engine.trainer.loss import Tokens, k3, kl_penalty
from swarm_engine.trainer.off_policy import correct
from swarm_engine.trainer.ranks import Alone, Ranks
from swarm_engine.trainer.rows import TokenColumns, TrainedRow, trained_row, with_proximal
from swarm_engine.trainer.samples import Denominators, Sample, count_drops, make_samples
from swarm_engine.trainer.schedule import learning_rate
from swarm_engine.trainer.scoring import Scores
from swarm_engine.trainer.units import Unit, plan_rounds, plan_units
from swarm_engine.types import BatchRecord, Episode, FinishReason, Untrained


@dataclass(slots=True)
class Sums:
    """What an update adds up over its tokens; a token is in it once an epoch."""

    loss: float = 0.0
    """Of all optimizer steps."""
    num_losses: int = 0
    """Optimizer steps that were computed."""
    num_steps: int = 0
    """Optimizer steps that were taken."""
    gradient_norm: float = 0.0
    """The largest."""
    imitation: float = 0.0
    num_imitated: int = 0
    entropy: float = 0.0
    kl_sampling: float = 0.0
    kl_update: float = 0.0
    num_moved: int = 0
    """Tokens that were computed after their update had begun."""
    kl_reference: float = 0.0
    ratio_max: float = 0.0
    num_clipped: int = 0
    num_scored: int = 0
    num_computed: int = 0
    weight: float = 0.0
    """Of exp(proximal - sampling), unbounded, and of its square."""
    squared_weight: float = 0.0
    num_bounded: int = 0
    difference: float = 0.0
    """Of the absolute difference of sampler and trainer in nats, over tokens that the weights at hand sampled."""
    difference_max: float = 0.0
    num_current: int = 0

    def over(self, ranks: Ranks) -> Sums:
        """The same of all ranks' tokens."""
        names = [field.name for field in fields(self) if field.name not in OF_STEPS]
        values = torch.tensor([getattr(self, name) for name in names], dtype=torch.float64)
        totals, largest = ranks.total(values.clone()).tolist(), ranks.largest(values).tolist()
        found = dict(zip(names, totals, strict=True)) | {
            name: value for name, value in zip(names, largest, strict=True) if name.endswith("_max")
        }
        return replace(self, **{name: type(getattr(self, name))(value) for name, value in found.items()})


OF_STEPS = frozenset({"loss", "num_losses", "num_steps", "gradient_norm"})
"""What is of optimizer steps and not of tokens, so that every rank has it of all."""


class Trainer:
    """Owns the optimizer of one policy and applies one batch at a time."""

    def __init__(self, model: Decoder, config: TrainerConfig, ranks: Ranks | None = None) -> None:
        self.ranks = ranks or Alone()
        self.model = model
        config = config.resolved(kind_of(model.config), has_lora=model.has_branches)
        assert config.learning_rate is not None
        self.config = config
        self.knobs = config.knobs
        self.method = METHODS[config.algorithm]
        self.step = 0
        """Updates already in the weights."""
        self.optimizer = self.ranks.optimizer(
            {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad},
            AdamWConfig(config.learning_rate, config.beta1, config.beta2, config.weight_decay),
        )
        self.reference = self.ranks.frozen_copy(model) if config.kl_weight > 0 else None
        """The start weights, so a trainer is made before a checkpoint is loaded into its model."""

    def resume(self, step: int) -> None:
        """The model's weights were replaced by those of a step."""
        self.step = step

    def close(self) -> None:
        """Let go of whatever helped to train."""

    def update(self, record: BatchRecord, episodes: Sequence[Episode]) -> Updated:
        """Train on one batch and return its metrics; the weights change in place.

        Metrics of tokens are over those that are computed: the ones whose loss has a gradient. With neither KL nor
        entropy in the loss these are the groups whose rewards differ, and what is imitated.
        """
        start = time.perf_counter()
        version = record.step - 1
        samples = make_samples(episodes, self.config, version, self.model.config.max_context)
        metrics = batch_metrics(samples, episodes, self.config.merge)
        metrics |= group_metrics(samples) | staleness_metrics(samples, version)
        metrics |= self.token_metrics(self.learn(samples, version, record.seed))
        metrics["learning_rate"] = learning_rate(self.config, record.step)
        metrics["update_s"] = time.perf_counter() - start
        self.step = record.step
        finite = {name: value if value is None or math.isfinite(value) else None for name, value in metrics.items()}
        return Updated(record.step, finite, count_drops(samples))

    def learn(self, samples: Sequence[Sample], version: int, seed: int) -> Sums:
        """Take the optimizer steps of one update."""
        sums = Sums()
        if not any(sample.carries_loss for sample in samples):
            return sums
        rows = self.rows(samples)
        parts = list(plan_steps(samples, self.knobs.epochs or 1, self.knobs.minibatches or 1, seed))
        if len(parts) > 1:
            rows = with_proximal(rows, self.logprobs(rows, sums))
        for part in parts:
            if any(samples[index].carries_loss for index in part):
                self.take_step(self.weigh(rows, samples, part), version, sums)
        return sums.over(self.ranks) if self.ranks.size > 1 else sums

    def take_step(self, rows: Sequence[TrainedRow], version: int, sums: Sums) -> None:
        """One step of the optimizer; a loss or a gradient that is not finite moves nothing, nor does one of zero.

        A gradient of exactly zero everywhere means that every token was masked, clipped or certain, and that neither KL
        nor entropy pulls; where anything is left, rounding alone keeps the sum from zero. To skip it is right in any
        case: there is nothing in it to learn, and a step would move the weights by decay and momentum alone.

        A step that is taken leaves finite weights finite, so nobody looks through them: the gradient is finite and at
        most `max_grad_norm` long, its squares fit into float32, and decay takes less than the whole of a weight.
        """
        loss = self.accumulate_gradient(rows, version, sums)
        gradient_norm = self.optimizer.clip_gradient(self.config.max_grad_norm)
        sums.loss += loss
        sums.num_losses += 1
        sums.gradient_norm = max(sums.gradient_norm, gradient_norm, key=lambda norm: (not math.isfinite(norm), norm))
        if math.isfinite(loss) and math.isfinite(gradient_norm) and gradient_norm > 0:
            self.optimizer.step(learning_rate(self.config, version + 1))
            sums.num_steps += 1
        self.optimizer.zero_grad()

    def rows(self, samples: Sequence[Sample]) -> list[TrainedRow]:
        """The rows of a batch whose loss has a gradient."""
        is_regularized = self.config.kl_weight > 0 or self.config.entropy_weight > 0
        return [
            replace(trained_row(timeline, sample, self.knobs.teacher_weight or 0.0), sample=index)
            for index, sample in enumerate(samples)
            if sample.carries_loss or (sample.counts and is_regularized)
            for timeline in sample.timelines
            if timeline.num_trained
        ]

    def weigh(self, rows: Sequence[TrainedRow], samples: Sequence[Sample], part: Sequence[int]) -> list[TrainedRow]:
        """The rows of one optimizer step, each with its share of that step's denominators.

        Args:
            part: numbers of the step's samples.
        """
        of_step = [samples[index] for index in part]
        counted = Denominators.of([sample for sample in of_step if sample.counts], self.knobs)
        imitated = Denominators.of([sample for sample in of_step if sample.is_imitated], self.knobs)
        members, weighed = set(part), []
        for row in rows:
            if row.sample not in members:
                continue
            sample = samples[row.sample]
            weight = counted.token_weight(sample) if sample.counts else 0.0
            imitation = imitated.token_weight(sample) * (self.knobs.sft_weight or 0.0) if sample.is_imitated else 0.0
            weighed.append(replace(row, weight=weight, imitation_weight=imitation))
        return weighed

    @torch.no_grad()
    def logprobs(self, rows: Sequence[TrainedRow], sums: Sums) -> list[Tensor]:
        """Log-probabilities of each row's targets under the weights as they are."""
        found = [torch.empty(0)] * len(rows)
        for unit in self.units(rows):
            scores_N = unit.score(self.model).scores.logprobs_N
            if not unit.row_indices:
                continue
            parts = torch.split(scores_N, [len(rows[index].row.targets) for index in unit.row_indices])
            for index, part in zip(unit.row_indices, parts, strict=True):
                found[index] = part
            sums.num_computed += unit.num_computed
        return found if self.ranks.size == 1 else self.everybodys(found, rows)

    def everybodys(self, found: Sequence[Tensor], rows: Sequence[TrainedRow]) -> list[Tensor]:
        """What all ranks found of each row's targets; a row was computed by one rank alone."""
        counts = [len(row.row.targets) for row in rows]
        dtype = torch.promote_types(self.model.norm.dtype, torch.float32)  # that of scores
        everything_N = torch.zeros(sum(counts), dtype=dtype)
        for some, place_N in zip(found, torch.split(everything_N, counts), strict=True):
            if len(some):
                place_N.copy_(some)
        return list(torch.split(self.ranks.total(everything_N), counts))

    def units(self, rows: Sequence[TrainedRow]) -> list[Unit]:
        """What this rank computes of some rows, in order; a unit without rows only keeps step with other ranks."""
        plain, how, max_tokens = [row.row for row in rows], self.config.merge, self.config.microbatch_tokens
        if self.ranks.size == 1:
            return plan_units(plain, how, max_tokens)
        return [some[self.ranks.index] for some in plan_rounds(plain, how, max_tokens, self.ranks.size)]

    def accumulate_gradient(self, rows: Sequence[TrainedRow], version: int, sums: Sums) -> float:
        """Add the gradient of one optimizer step's loss to the parameters, unit by unit; return the loss."""
        total = 0.0
        coefficients: list[Tensor] | None = None
        if self.method.needs_whole_samples:
            total, coefficients = self.coefficients(rows, version, sums)
        has_entropy = self.config.entropy_weight > 0
        for unit in self.units(rows):
            if not unit.row_indices:
                self.keep_step(unit)
                continue
            some = [rows[index] for index in unit.row_indices]
            scored = unit.score(self.model, entropy_has_gradient=has_entropy)
            columns = TokenColumns.of(some, version, scored.scores.logprobs_N)
            if coefficients is None:
                loss = self.algorithm_loss(scored.scores.logprobs_N, columns, sums)
                known = 0.0
            else:
                coefficients_N = torch.cat([coefficients[index] for index in unit.row_indices])
                loss = (coefficients_N * scored.scores.logprobs_N).sum()
                known = float(loss.detach())  # right in its derivative only, and `total` has the value
            for term in self.regularizers(unit, scored.scores, columns, sums):
                loss = loss + term
            total += float(loss.detach()) - known
            scored.backward(loss)
            sums.num_computed += unit.num_computed
        return float(self.ranks.total(torch.tensor(total, dtype=torch.float64)))

    def keep_step(self, unit: Unit) -> None:
        """Go through the models as the other ranks do in this round, and learn nothing."""
        scored = unit.score(self.model)
        if self.reference is not None:
            with torch.no_grad():
                unit.score(self.reference)
        scored.backward(0.0 * scored.scores.logprobs_N.sum())

    def coefficients(self, rows: Sequence[TrainedRow], version: int, sums: Sums) -> tuple[float, list[Tensor]]:
        """This rank's part of the algorithm's loss of whole samples, and the derivative of the whole by each row's
        log-probabilities. Samples are scored by several ranks, so all take the loss of all and the first counts it."""
        logprobs = self.logprobs(rows, sums)
        leaf_N = torch.cat(logprobs).requires_grad_()
        is_first = self.ranks.index == 0
        loss = self.algorithm_loss(leaf_N, TokenColumns.of(rows, version, leaf_N), sums if is_first else Sums())
        (gradient_N,) = torch.autograd.grad(loss, leaf_N)
        coefficients = list(torch.split(gradient_N, [len(some) for some in logprobs]))
        return float(loss.detach()) if is_first else 0.0, coefficients

    def algorithm_loss(self, policy_N: Tensor, columns: TokenColumns, sums: Sums) -> Tensor:
        """The algorithm's loss of some tokens, their share of the step's; what can be said of them goes into `sums`."""
        detached_N = policy_N.detach()
        proximal_N = detached_N if columns.proximal_N is None else columns.proximal_N
        is_decoupled = self.knobs.off_policy in (OffPolicy.TRUNCATED, OffPolicy.MASKED)
        old_N = proximal_N if is_decoupled else columns.sampling_N
        objective = self.method.objective(Tokens(policy_N, old_N, columns.advantages_N, columns.samples_N), self.knobs)
        differences_N = (proximal_N - columns.sampling_N).double()
        values_N = objective.values_N
        if is_decoupled:
            bounded_N, is_bounded_N = correct(torch.exp(differences_N), self.knobs)
            values_N = bounded_N.to(values_N.dtype) * values_N
            sums.num_bounded += int(is_bounded_N.sum())
        loss = -(columns.weights_N * values_N).sum()
        if self.knobs.sft_weight:
            loss = loss - (columns.imitation_N * policy_N).sum()
            is_imitated_N = columns.imitation_N > 0
            sums.imitation -= float(detached_N[is_imitated_N].double().sum())
            sums.num_imitated += int(is_imitated_N.sum())
        # KL(sampling || proximal), whose tokens these are, so the two change places; then KL(proximal || policy).
        sums.kl_sampling += float(k3(columns.sampling_N.double(), proximal_N.double()).sum())
        if columns.proximal_N is not None:
            sums.kl_update += float(k3(columns.proximal_N.double(), detached_N.double()).sum())
            sums.num_moved += len(policy_N)
        sums.ratio_max = max(sums.ratio_max, float(objective.ratio_N.max()))
        sums.num_clipped += int(objective.is_clipped_N.sum())
        sums.num_scored += len(policy_N)
        sums.weight += float(torch.exp(differences_N).sum())
        sums.squared_weight += float(torch.exp(2 * differences_N).sum())
        current_N = differences_N[columns.is_current_N].abs()
        if len(current_N):
            sums.difference += float(current_N.sum())
            sums.difference_max = max(sums.difference_max, float(current_N.max()))
            sums.num_current += len(current_N)
        return loss

    def regularizers(self, unit: Unit, scores: Scores, columns: TokenColumns, sums: Sums) -> Iterator[Tensor]:
        """What does not depend on rewards: the terms' share of the step's loss."""
        sums.entropy += float(scores.entropies_N.detach().double().sum())
        if self.reference is not None:
            with torch.no_grad():
                reference_N = unit.score(self.reference).scores.logprobs_N
            penalty_N = kl_penalty(scores.logprobs_N, reference_N)
            sums.kl_reference += float(penalty_N.detach().double().sum())
            yield self.config.kl_weight * (columns.weights_N * penalty_N).sum()
        if self.config.entropy_weight > 0:
            yield -self.config.entropy_weight * (columns.weights_N * scores.entropies_N).sum()

    def token_metrics(self, sums: Sums) -> dict[str, float | None]:
        """What can be said of the tokens that were computed; None where there were none."""
        is_finite = math.isfinite(sums.gradient_norm)
        has_imitation, has_correction = bool(self.knobs.sft_weight), bool(self.knobs.off_policy_high)
        squared = sums.num_scored * sums.squared_weight
        return {
            "loss": mean(sums.loss, sums.num_losses),
            "imitation_loss": mean(sums.imitation, sums.num_imitated) if has_imitation else None,
            "grad_norm": sums.gradient_norm if sums.num_losses else None,
            "entropy": mean(sums.entropy, sums.num_scored),
            "kl_sampling": mean(sums.kl_sampling, sums.num_scored),
            "kl_update": mean(sums.kl_update, sums.num_moved),
            "kl_reference": mean(sums.kl_reference, sums.num_scored) if self.reference else None,
            "ratio_max": sums.ratio_max if sums.num_scored else None,
            "clip_fraction": mean(sums.num_clipped, sums.num_scored),
            "off_policy_fraction": mean(sums.num_bounded, sums.num_scored) if has_correction else None,
            "effective_sample_size": sums.weight**2 / squared if squared else None,
            "sampler_difference_mean": mean(sums.difference, sums.num_current),
            "sampler_difference_max": sums.difference_max if sums.num_current else None,
            "num_computed_tokens": float(sums.num_computed),
            "optimizer_steps": float(sums.num_steps),
            "skipped": float(sums.num_steps == 0),
            "nonfinite_gradient": float(not is_finite),
            "nonfinite_loss": float(not math.isfinite(sums.loss)),
        }


def plan_steps(samples: Sequence[Sample], epochs: int, minibatches: int, seed: int) -> Iterator[list[int]]:
    """Numbers of the samples of each optimizer step, in order.

    Minibatches are cut by samples, so that neither turns nor tokens make more steps; they differ by one sample at most.
    """
    takes_part = [index for index, sample in enumerate(samples) if sample.counts or sample.is_imitated]
    draw = random.Random(seed)
    minibatches = min(minibatches, len(takes_part))
    for _ in range(epochs):
        order = takes_part if minibatches == 1 else draw.sample(takes_part, len(takes_part))
        for number in range(minibatches):
            bounds = [len(order) * (number + offset) // minibatches for offset in (0, 1)]
            yield sorted(order[slice(*bounds)])


def group_metrics(samples: Sequence[Sample]) -> dict[str, float | None]:
    """How many groups got one reward for all, of those whose rewards were compared."""
    groups = {(sample.group_id, sample.agent) for sample in samples if sample.is_compared}
    flat = {(sample.group_id, sample.agent) for sample in samples if sample.is_flat}
    return {"zero_variance_fraction": mean(len(flat), len(groups))}


def staleness_metrics(samples: Sequence[Sample], version: int) -> dict[str, float | None]:
    """How old the tokens in the denominators are, in updates."""
    ages = [age for sample in samples if sample.counts for age in sample.staleness(version)]
    return {"staleness_mean": mean(sum(ages), len(ages)), "staleness_max": float(max(ages)) if ages else None}


def batch_metrics(samples: Sequence[Sample], episodes: Sequence[Episode], how: Merge) -> dict[str, float | None]:
    """What can be said of a batch before it is computed. Rewards are per episode and agent."""
    counted = [sample for sample in samples if sample.counts]
    rewards = [sample.reward for sample in samples if sample.is_compared and sample.reward is not None]
    reward_mean = mean(math.fsum(rewards), len(rewards))
    deviations = [] if reward_mean is None else [(reward - reward_mean) ** 2 for reward in rewards]
    variance = mean(math.fsum(deviations), len(deviations))
    flat = {(sample.group_id, sample.agent) for sample in samples if sample.is_flat}
    calls = [call for episode in episodes for call in episode.calls]
    untrained = Counter(call.untrained_because for call in calls)
    # Trained or not: a share of the trained ones alone would hide the cut calls that carry no loss.
    whole = [call for call in calls if call.finish_reason is not FinishReason.CANCELLED]
    return {
        "reward_mean": reward_mean,
        "reward_std": None if variance is None else math.sqrt(variance),
        "reward_min": min(rewards, default=None),
        "zero_variance_groups": float(len(flat)),
        "identical_reply_groups": float(_count_identical(counted)),
        "num_calls": float(len(calls)),
        "num_trained_tokens": float(sum(sample.num_trained for sample in counted)),
        "truncated_fraction": mean(sum(call.finish_reason is FinishReason.LENGTH for call in whole), len(whole)),
        "merge_ratio": mean(sum(sample.num_raw_tokens for sample in counted), num_merged_tokens(counted, how)),
        "sampling_entropy": sampling_entropy(counted),
        "kl_teacher": teacher_kl(counted),
        "out_of_context_tokens": float(sum(line.num_out_of_context for sample in counted for line in sample.timelines)),
        **{f"{reason}_calls": float(untrained[reason]) for reason in Untrained if reason is not Untrained.FROZEN},
    }


def sampling_entropy(samples: Sequence[Sample]) -> float | None:
    """Entropy in nats a token, estimated by the surprise of what was sampled, so that flat groups have one too."""
    spans = [span for sample in samples for line in sample.timelines for span in line.spans if span.is_trained]
    surprises = [-logprob for span in spans for logprob in span.logprobs]
    return mean(math.fsum(surprises), len(surprises))


def teacher_kl(samples: Sequence[Sample]) -> float | None:
    """KL(policy || teacher) in nats a token, estimated on the trained ones; None where no teacher was asked."""
    taught = [span for sample in samples for line in sample.timelines for span in line.spans if span.is_trained]
    differences = [
        sampling - teacher
        for span in taught
        if span.teacher_logprobs is not None
        for sampling, teacher in zip(span.logprobs, span.teacher_logprobs, strict=True)
    ]
    return mean(math.fsum(differences), len(differences))


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
    return sum(len(members) > 1 and len(set(members)) == 1 for members in replies.values())


def mean(total: float, count: int) -> float | None:
    """The mean, or None where there is nothing to take it of."""
    return total / count if count else None
