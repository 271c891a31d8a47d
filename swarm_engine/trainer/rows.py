"""Timelines as the trainer reads them: which of their tokens are scored, and what each of these carries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from swarm_engine.trainer.samples import Sample
from swarm_engine.trainer.scoring import Row
from swarm_engine.types import Span, Timeline


@dataclass(frozen=True, slots=True)
class TrainedRow:
    """A timeline as the trainer reads it."""

    row: Row
    sampling_logprobs: tuple[float, ...]
    """Of each target, in nats."""
    policy_versions: tuple[int, ...]
    """Of the weights that sampled each target."""
    advantages: tuple[float, ...]
    """Of each target."""
    sample: int = 0
    """Number of its sample in the batch."""
    weight: float = 0.0
    """Of each target in the algorithm's loss, and in the regularizers."""
    imitation_weight: float = 0.0
    """Of each target's negative log-likelihood."""
    proximal_logprobs: tuple[float, ...] | None = None
    """Of each target, in nats, under the weights that the update began with; None where these are the ones at hand."""


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """The targets of some rows, row after row, as columns of shape (N,)."""

    sampling_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    imitation_N: Tensor
    samples_N: Tensor
    is_current_N: Tensor
    """Where the weights that sampled the token are those the update began with."""
    proximal_N: Tensor | None

    @staticmethod
    def of(rows: Sequence[TrainedRow], version: int, like: Tensor) -> TokenColumns:
        """Of rows that all have proximal log-probabilities, or none of which has."""
        counts = torch.tensor([len(row.row.targets) for row in rows])
        proximal = [row.proximal_logprobs for row in rows if row.proximal_logprobs is not None]
        assert len(proximal) in (0, len(rows))
        versions = [sampled_by for row in rows for sampled_by in row.policy_versions]
        return TokenColumns(
            sampling_N=like.new_tensor([logprob for row in rows for logprob in row.sampling_logprobs]),
            advantages_N=like.new_tensor([advantage for row in rows for advantage in row.advantages]),
            weights_N=like.new_tensor([row.weight for row in rows]).repeat_interleave(counts),
            imitation_N=like.new_tensor([row.imitation_weight for row in rows]).repeat_interleave(counts),
            samples_N=torch.tensor([row.sample for row in rows]).repeat_interleave(counts),
            is_current_N=torch.tensor([sampled_by == version for sampled_by in versions]),
            proximal_N=like.new_tensor([logprob for some in proximal for logprob in some]) if proximal else None,
        )


def trained_row(timeline: Timeline, sample: Sample, teacher_weight: float = 0.0) -> TrainedRow:
    """Read a timeline of a sample: exactly the tokens of its trained spans are targets.

    Args:
        teacher_weight: of what the teacher would rather have seen, beside the advantage that rewards give.
    """
    spans = [span for span in timeline.spans if span.is_trained]
    return TrainedRow(
        row=row_of(timeline),
        sampling_logprobs=tuple(logprob for span in spans for logprob in span.logprobs),
        policy_versions=tuple(version for span in spans for version in span.policy_versions),
        advantages=tuple(advantage for span in spans for advantage in _advantages(span, sample, teacher_weight)),
    )


def _advantages(span: Span, sample: Sample, teacher_weight: float) -> list[float]:
    """Of each token of a span. A teacher adds log(teacher / sampling), whose mean is -KL(policy || teacher): it is
    distilled on the policy's own samples (Agarwal et al. 2024, arXiv:2306.13649)."""
    rewarded = sample.advantage + sample.step_advantages.get(span.call_id, 0.0)
    if span.teacher_logprobs is None or not teacher_weight:
        return [rewarded] * len(span.logprobs)
    pairs = zip(span.teacher_logprobs, span.logprobs, strict=True)
    return [rewarded + teacher_weight * (teacher - sampling) for teacher, sampling in pairs]


def row_of(timeline: Timeline) -> Row:
    """A timeline's tokens, and those of its trained spans as targets."""
    spans = [span for span in timeline.spans if span.is_trained]
    return Row(
        tokens=timeline.tokens,
        targets=tuple(place for span in spans for place in range(span.start, span.end)),
        temperatures=tuple(span.temperature for span in spans for _ in span.logprobs),
    )


def with_proximal(rows: Sequence[TrainedRow], logprobs: Sequence[Tensor]) -> list[TrainedRow]:
    """The rows with the log-probabilities that the update began with."""
    return [replace(row, proximal_logprobs=tuple(some.tolist())) for row, some in zip(rows, logprobs, strict=True)]
