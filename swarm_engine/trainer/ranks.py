"""The processes that train one policy together, as its trainer sees them.

Every rank is given every batch and goes through an update in the same steps: which samples are learned from, what they
weigh and where an optimizer step ends is a function of the batch alone. What differs is which rows a rank computes;
whatever is summed over rows is then summed over ranks. `Alone` is the trainer that has nobody to sum with; what takes
several is `swarm_engine.trainer.sharding`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from swarm_engine.models.decoder import Decoder
from swarm_engine.trainer.adamw import AdamW, AdamWConfig


class Ranks(Protocol):
    """One rank among the others. Where it says *together*, every rank has to call at the same point of its work."""

    @property
    def index(self) -> int:
        """Which one this is, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def total(self, values: Tensor) -> Tensor:
        """The sum over ranks, together; the argument may be written to."""
        ...

    def largest(self, values: Tensor) -> Tensor:
        """The maximum over ranks, together; the argument may be written to."""
        ...

    def optimizer(self, parameters: Mapping[str, nn.Parameter], config: AdamWConfig) -> AdamW:
        """An optimizer of what this rank holds of the parameters."""
        ...

    def frozen_copy(self, model: Decoder) -> Decoder:
        """A model of the same weights that nobody trains, held as this one is, together."""
        ...


@dataclass(frozen=True, slots=True)
class Alone:
    """The only rank."""

    index: int = 0
    size: int = 1

    def total(self, values: Tensor) -> Tensor:
        return values

    def largest(self, values: Tensor) -> Tensor:
        return values

    def optimizer(self, parameters: Mapping[str, nn.Parameter], config: AdamWConfig) -> AdamW:
        return AdamW(parameters, config)

    def frozen_copy(self, model: Decoder) -> Decoder:
        return frozen_copy(model)


def frozen_copy(model: Decoder) -> Decoder:
    """A model with these weights for good; it shares those that are frozen here too."""
    shared = {id(one): one for one in model.parameters() if not one.requires_grad}
    return copy.deepcopy(model, shared).requires_grad_(False)
