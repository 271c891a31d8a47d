"""Folders that are whole or not there, and the checkpoints among them as both processes see them.

A folder is filled aside, synced and renamed, so a kill or a full disk leaves it out or complete. A checkpoint holds a
folder for each policy and a manifest, written last, with the hash of every file: one whose bytes changed afterwards is
found out before it is used. Nothing here needs torch, for the front lists and exports checkpoints while no worker runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swarm_engine.errors import shown

MANIFEST = "manifest.json"
OPTIMIZER = "optimizer.safetensors"
FORMAT = 3
MANIFEST_FIELDS = {"step": int, "run_id": str, "files": dict}
PARTIAL = ".partial"
"""Ends the name of a folder that is being filled, which begins with a dot."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder that says it is a checkpoint; `damage` tells whether it is one still."""

    path: Path
    step: int
    """Updates in its weights."""
    run_id: str
    """Of the run folder whose journal made it."""

    def folder(self, policy: str) -> Path:
        """Where it has a policy."""
        return self.path / policy


def checkpoint_path(root: Path, step: int) -> Path:
    """Where the checkpoint of a step belongs."""
    return root / f"step-{step:06d}"


def find_checkpoints(root: Path) -> list[Checkpoint]:
    """Every checkpoint with a manifest, oldest first. Their files are not looked into, for that takes long."""
    found = []
    for _, path in numbered_folders(root):
        with contextlib.suppress(OSError, ValueError):  # `damage` says what is wrong with it
            manifest = _read_manifest(path)
            found.append(Checkpoint(path, manifest["step"], manifest["run_id"]))
    return found


def numbered_folders(root: Path) -> list[tuple[int, Path]]:
    """Every folder named as a checkpoint, whole or not, lowest step first."""
    if not root.is_dir():
        return []
    found = [(re.fullmatch(r"step-(\d+)", path.name), path) for path in root.iterdir()]
    return sorted((int(match[1]), path) for match, path in found if match)


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint; None where every file is as its manifest says."""
    try:
        for name, described in _read_manifest(path)["files"].items():
            if not (path / name).is_file():
                return f"{name} is missing"
            if describe(path / name) != described:
                return f"{name} is not what was written"
    except FileNotFoundError:
        return f"it has no {MANIFEST}, so its writing or its removal was cut short"
    except (OSError, ValueError) as error:
        return f"its {MANIFEST} can't be read ({error})"
    return None


def write_manifest(folder: Path, step: int, run_id: str) -> None:
    """Seal a folder as a checkpoint: what is in it now is all there is."""
    inside = sorted(path for path in folder.rglob("*") if path.is_file())
    files = {path.relative_to(folder).as_posix(): describe(path) for path in inside}
    manifest = {"format": FORMAT, "step": step, "run_id": run_id, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def _read_manifest(folder: Path) -> dict[str, Any]:
    """A manifest of this version that is where it was written to.

    Raises:
        OSError, ValueError: there is none.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"this version reads format {FORMAT}")
    for name, kind in MANIFEST_FIELDS.items():
        if type(manifest.get(name)) is not kind or manifest[name] == {}:
            raise ValueError(f"its {name} is {shown(manifest.get(name))}")
    if (made_as := checkpoint_path(folder.parent, manifest["step"])) != folder:
        raise ValueError(f"it was made as {made_as.name}")
    return manifest


def describe(path: Path) -> dict[str, Any]:
    """Hash and length of a file."""
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": path.stat().st_size}


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to fill in the block; it becomes `target` when the block ends, and leaves nothing where it fails.

    What has the name already is replaced, so a caller who minds looks first.

    Raises:
        OSError: it can't be written.
    """
    aside = target.with_name(f".{target.name}{PARTIAL}")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        for path in (*aside.rglob("*"), aside):
            _sync(path)
        shutil.rmtree(target, ignore_errors=True)
        aside.rename(target)
        _sync(target.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def remove_partial(root: Path) -> None:
    """Remove what crashes left of folders that were being filled."""
    for path in root.glob(f".*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint. It loses its manifest first, so that a kill leaves no half of it that counts."""
    (path / MANIFEST).unlink(missing_ok=True)
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
