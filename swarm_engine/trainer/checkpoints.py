"""Checkpoints of the policies in training: weights, optimizer, tokenizer and chat template, whole or not there.

Each policy has a folder of its name there. Nothing else is needed to go on. The learning rate is a function of the
step, and every random number is derived from what it is for, so neither has a state; which data came before is in the
journal, whose batches are replayed from the checkpoint's step on. See `swarm_engine.folders` for how a checkpoint gets
its place on disk.

Older checkpoints are removed only after a newer one is whole, and those of other runs never.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from swarm_engine.errors import CheckpointError, ModelError
from swarm_engine.folders import (
    MANIFEST,
    OPTIMIZER,
    Checkpoint,
    checkpoint_path,
    damage,
    describe,
    find_checkpoints,
    numbered_folders,
    remove_checkpoint,
    remove_partial,
    whole_folder,
    write_manifest,
)
from swarm_engine.models.loading import (
    BASE,
    DTYPE_KEYS,
    LoadedPolicy,
    load_adapter,
    read_json,
    read_tensors,
    save_policy,
    tokenizer_files,
)
from swarm_engine.models.lora import ADAPTER_CONFIG, peft_config
from swarm_engine.trainer.adamw import AdamW

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrainedWeights:
    """What a checkpoint keeps of a policy."""

    policy: LoadedPolicy
    optimizer: AdamW


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """The checkpoints of one run."""

    root: Path
    run_id: str
    """Of the run folder; a checkpoint of another run would not fit the journal."""
    keep_last: int = 3

    def save(
        self, step: int, trained: Mapping[str, TrainedWeights], protected_steps: Collection[int] = ()
    ) -> Checkpoint:
        """Write a checkpoint and remove the oldest beyond `keep_last`.

        Args:
            trained: by policy.
            protected_steps: checkpoints that stay however old they are.

        Raises:
            CheckpointError: the disk is full, the folder can't be written …; nothing older is touched then.
        """
        saved = Checkpoint(checkpoint_path(self.root, step), step, self.run_id)
        there = next((one for one in find_checkpoints(self.root) if one.path == saved.path), saved)
        if there.run_id != self.run_id:
            raise CheckpointError(f"{saved.path} is a checkpoint of another run; move it away")
        if damage(saved.path) is None:
            return saved  # the same step has the same weights
        try:
            with whole_folder(saved.path) as folder:
                for name, one in trained.items():
                    (folder / name).mkdir()
                    save_policy(one.policy, folder / name)
                    save_file(one.optimizer.state(), folder / name / OPTIMIZER)
                write_manifest(folder, step, self.run_id)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"checkpoint of step {step} could not be written under {self.root}: {error}; "
                "free space there, older checkpoints stand"
            ) from error
        self._prune({step, *protected_steps})
        return saved

    def newest(self) -> Checkpoint | None:
        """The newest whole checkpoint; says in the log what is wrong with newer ones.

        Raises:
            CheckpointError: there are checkpoints of another run.
        """
        ours = {one.path: one for one in find_checkpoints(self.root)}
        if foreign := [one for one in ours.values() if one.run_id != self.run_id]:
            raise CheckpointError(
                f"checkpoint {foreign[0].path} was made by another run, whose batches this run folder does not hold; "
                "move it away, or under the model root to start a run of its own from its weights"
            )
        for _, path in reversed(numbered_folders(self.root)):
            if (fault := damage(path)) is None and path in ours:
                return ours[path]
            log.warning("checkpoint %s is not whole: %s; going back to the one before", path, fault)
        return None

    def tidy(self) -> None:
        """Remove what a kill left of a checkpoint that was being written or removed."""
        remove_partial(self.root)
        for _, path in numbered_folders(self.root):
            if not (path / MANIFEST).exists():
                remove_checkpoint(path)

    def _prune(self, kept_steps: Collection[int]) -> None:
        ours = [one for one in find_checkpoints(self.root) if one.run_id == self.run_id]
        for one in ours[: -self.keep_last]:
            if one.step not in kept_steps:
                remove_checkpoint(one.path)
        self.tidy()


def load_checkpoint(checkpoint: Checkpoint, name: str, policy: LoadedPolicy, optimizer: AdamW) -> None:
    """Put a policy's weights and optimizer state of a checkpoint into the policy that they were made from.

    Raises:
        ModelError: it is a checkpoint of another model.
    """
    folder = checkpoint.folder(name)
    if difference := _difference(folder, policy):
        raise ModelError(
            f"checkpoint {folder} is of another model than {policy.tokenizer_dir}: {difference}; "
            "put the model back as it was, or use a new run folder"
        )
    if policy.adapter is None:
        policy.model.load_weights(read_tensors(folder))
    else:
        load_adapter(policy, folder)
    optimizer.load_state(load_file(folder / OPTIMIZER))


def _difference(folder: Path, policy: LoadedPolicy) -> str | None:
    """In what a checkpoint's model or tokenizer is not the policy's; None where it is the same."""
    if policy.adapter is None:
        described = [("config.json", policy.config_json)]
    else:
        base = {"model": policy.adapter.base, "sha256": policy.adapter.base_sha256}
        described = [(ADAPTER_CONFIG, peft_config(policy.adapter.lora, policy.adapter.base)), (BASE, base)]
    for name, here in described:
        there = read_json(folder / name)
        for key in sorted((there.keys() | here.keys()) - DTYPE_KEYS):
            if there.get(key) != here.get(key):
                return f"{key} is {there.get(key)!r} in its {name} and {here.get(key)!r} in the model's"
    then, now = tokenizer_files(folder), tokenizer_files(policy.tokenizer_dir)
    for name in dict.fromkeys([*then, *now]):
        if name not in then or name not in now or describe(folder / name) != describe(policy.tokenizer_dir / name):
            return f"its {name} differs"
    return None
