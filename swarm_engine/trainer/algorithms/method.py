"""What an algorithm is to the trainer: what rewards are measured against, and what a token is worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from swarm_engine.config import Knobs
from swarm_engine.trainer.loss import Objective, Tokens


class Scope(StrEnum):
    """Which samples of an agent a reward is measured against."""

    GROUP = "group"
    BATCH = "batch"
    ITSELF = "itself"
    """None: it is taken as it is."""


@dataclass(frozen=True, slots=True)
class Method:
    """One algorithm."""

    advantages: Callable[[Sequence[float], Knobs], list[float]]
    """Of the rewards of one scope, each of one sample. Finite, and all zero where there is nothing to compare."""
    objective: Callable[[Tokens, Knobs], Objective]
    scope: Scope = Scope.GROUP
    needs_whole_samples: bool = False
    """The objective of a token depends on the other tokens of its sample, which may be in other micro-batches."""
    counts_flat_groups: bool = True
    """Samples of a group without an advantage are in the denominators and in the regularizers."""
