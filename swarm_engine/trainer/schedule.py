"""The learning rate of an update, from its number alone, so that a run that goes on has no state to restore."""

from __future__ import annotations

import math
from typing import assert_never

from swarm_engine.config import Schedule, TrainerConfig


def learning_rate(config: TrainerConfig, step: int) -> float:
    """The rate of the update that makes the weights of `step`, which is 1 for the first.

    Skipped updates count too, for the step numbers batches. A schedule that falls is at zero from the update after
    `total_updates` on.

    Args:
        config: resolved, see `TrainerConfig.resolved`.
    """
    assert config.learning_rate is not None
    assert config.warmup_updates is not None
    if step <= config.warmup_updates:
        return config.learning_rate * step / (config.warmup_updates + 1)
    if config.lr_schedule is Schedule.CONSTANT:
        return config.learning_rate
    progress = min(1.0, (step - 1 - config.warmup_updates) / (config.total_updates - config.warmup_updates))
    match config.lr_schedule:
        case Schedule.LINEAR:
            return config.learning_rate * (1 - progress)
        case Schedule.COSINE:
            return config.learning_rate * (1 + math.cos(math.pi * progress)) / 2
        case _:
            assert_never(config.lr_schedule)
