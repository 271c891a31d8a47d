"""Checkpoints that are whole or not there: weights, optimizer, step, tokenizer.

A checkpoint is written into a folder aside, its manifest last, everything synced, and then renamed. A folder without a
manifest, or whose files are not those the manifest hashed, is no checkpoint. Random numbers need no state: each is
derived from what it is for.

Older checkpoints are removed only after a newer one is whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from swarm_engine.errors import CheckpointError
from swarm_engine.models.loading import LoadedPolicy, read_tensors, save_policy
from swarm_engine.trainer.adamw import AdamW

KEPT = 3
MANIFEST = "manifest.json"
OPTIMIZER = "optimizer.safetensors"
FORMAT = 1

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    path: Path
    step: int
    """Updates in its weights."""


def save_checkpoint(root: Path, step: int, policy: LoadedPolicy, optimizer: AdamW) -> Checkpoint:
    """Write a checkpoint of `step` under `root` and remove the oldest beyond `KEPT`.

    Raises:
        CheckpointError: the disk is full, the folder can't be written …; nothing older is touched then.
    """
    target = root / f"step-{step:06d}"
    if is_whole(target):
        return Checkpoint(target, step)  # the same step has the same weights
    aside = root / f".step-{step:06d}.partial"
    try:
        root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        save_policy(policy, aside)
        save_file(optimizer.state(), aside / OPTIMIZER)
        files = {path.name: _describe(path) for path in sorted(aside.iterdir())}
        manifest = {"format": FORMAT, "step": step, "files": files}
        (aside / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        for path in (*aside.iterdir(), aside):
            _sync(path)
        shutil.rmtree(target, ignore_errors=True)  # what a crash cut short; a whole one was returned above
        aside.rename(target)
        _sync(root)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint of step {step} could not be written under {root}: {error}; "
            "free space there, older checkpoints stand"
        ) from error
    _prune(root)
    return Checkpoint(target, step)


def newest_checkpoint(root: Path) -> Checkpoint | None:
    """The newest whole checkpoint; says in the log which newer ones are not."""
    for step, path in sorted(_candidates(root), reverse=True):
        if is_whole(path):
            return Checkpoint(path, step)
        log.warning("checkpoint %s is incomplete; going back to the one before", path)
    return None


def load_checkpoint(checkpoint: Checkpoint, policy: LoadedPolicy, optimizer: AdamW) -> None:
    """Put the weights and the optimizer's state of a checkpoint into a policy of the same shape.

    Raises:
        ModelError: it is a checkpoint of another model.
    """
    policy.model.load_weights(read_tensors(checkpoint.path))
    optimizer.load_state(load_file(checkpoint.path / OPTIMIZER))


def is_whole(path: Path) -> bool:
    """Whether every file is as the manifest, which was written last, says."""
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        return manifest["format"] == FORMAT and all(
            _describe(path / name) == described for name, described in manifest["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": path.stat().st_size}


def _candidates(root: Path) -> list[tuple[int, Path]]:
    if not root.is_dir():
        return []
    found = [(re.fullmatch(r"step-(\d+)", path.name), path) for path in root.iterdir()]
    return [(int(match[1]), path) for match, path in found if match]


def _prune(root: Path) -> None:
    """Remove the oldest beyond `KEPT`, and what crashes left. A checkpoint loses its manifest first."""
    for _, path in sorted(_candidates(root))[:-KEPT]:
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)
    for path in root.glob(".step-*.partial"):
        shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    """Force a file, or the names in a folder, to disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows can't open folders, and orders renames itself
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
