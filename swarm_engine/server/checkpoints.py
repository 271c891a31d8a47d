"""The run folder's checkpoints as the front sees them: what each has earned, which is the best, exports of one.

Rewards come from the journal, for they are known only after a checkpoint is written.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from swarm_engine.config import BestBy
from swarm_engine.errors import CheckpointError, NotFoundError
from swarm_engine.folders import OPTIMIZER, Checkpoint, damage, find_checkpoints, whole_folder
from swarm_engine.server.journal import Journal


@dataclass(frozen=True, slots=True)
class RatedCheckpoint:
    """A checkpoint and what its weights earned."""

    checkpoint: Checkpoint
    reward: float | None
    """In training; None until the next update."""
    evaluation: float | None
    """None where no eval episode was judged."""
    is_best: bool


def best_step(steps: Iterable[int], rewards: Mapping[int, float]) -> int | None:
    """The step with the highest reward, of equal ones the earliest; one without a reward is never the best."""
    rated = [step for step in steps if step in rewards]
    return min(rated, key=lambda step: (-rewards[step], step), default=None)


def rate_checkpoints(root: Path, journal: Journal, best_by: BestBy | None) -> list[RatedCheckpoint]:
    """The checkpoints on disk, oldest first. Reads the whole journal, so not on the event loop."""
    found = find_checkpoints(root)
    rewards = {by: journal.rewards_by_version(by) for by in BestBy}
    steps = [one.step for one in found]
    if best_by is None:
        best_by = BestBy.EVALUATION if any(step in rewards[BestBy.EVALUATION] for step in steps) else BestBy.REWARD
    best = best_step(steps, rewards[best_by])
    return [
        RatedCheckpoint(
            checkpoint=one,
            reward=rewards[BestBy.REWARD].get(one.step),
            evaluation=rewards[BestBy.EVALUATION].get(one.step),
            is_best=one.step == best,
        )
        for one in found
    ]


def best_checkpoint(root: Path, journal: Journal, best_by: BestBy | None) -> Checkpoint | None:
    """The best checkpoint on disk, or None where none has a reward; not on the event loop."""
    return next((one.checkpoint for one in rate_checkpoints(root, journal, best_by) if one.is_best), None)


def export_checkpoint(checkpoint: Checkpoint, policy: str, target: Path) -> None:
    """Copy what transformers reads of a policy out of a checkpoint; never over something else.

    Raises:
        CheckpointError: the checkpoint is damaged, or the copy can't be written.
        NotFoundError: it does not hold the policy.
    """
    if fault := damage(checkpoint.path):
        raise CheckpointError(f"checkpoint {checkpoint.path} is not whole: {fault}", "export another step")
    source = checkpoint.folder(policy)
    if not source.is_dir():
        raise NotFoundError(
            f"checkpoint {checkpoint.path} does not hold policy {policy!r}: it is frozen",
            "export it without a step",
        )
    try:
        with whole_folder(target) as folder:
            for path in source.iterdir():
                if path.name != OPTIMIZER:
                    shutil.copyfile(path, folder / path.name)
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {checkpoint.path} could not be exported to {target}: {error}", "make room and ask again"
        ) from error
