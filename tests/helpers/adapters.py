"""Adapters that have an effect, for tests."""

from __future__ import annotations

import torch

from swarm_engine.config import LoraConfig, Target
from swarm_engine.models.decoder import Decoder


def fill(model: Decoder, seed: int = 0, spread: float = 0.1) -> Decoder:
    """Give every branch's B random numbers, as training would."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, branch in model.named_branches():
            branch.b_O_R.copy_(torch.randn(branch.b_O_R.shape, generator=draw) * spread)
    return model


def adapted(base: Decoder, *targets: str, rank: int = 4, seed: int = 0) -> Decoder:
    """A model with filled branches beside `base`; without targets they are beside every projection."""
    named = tuple(map(Target, targets)) or tuple(Target)
    return fill(base.adapted(LoraConfig(rank=rank, alpha=8.0, targets=named), seed), seed)
