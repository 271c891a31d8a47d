"""The folder of one run: one training at a time works in it, and a finished one is left as it is."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from experiments_db.home import home_folder
from swarm_engine import locks
from vibe.errors import UsageError
from vibe.project import RESULTS_FILE

LOCK_FILE = "run.lock"
COMMAND_LOCK_FILE = "command.lock"
"""Held by a command while it starts a training and writes down how that ends; the training itself holds the other."""


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Make a folder and what lacks above it; of that, A3R_HOME is for its owner alone.

    `mkdir` alone would give the mode to the last folder and leave the home it lies in open to everyone.

    Args:
        mode: of the folder itself.
    """
    home = home_folder()
    if folder.absolute().is_relative_to(home):
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.mkdir(parents=True, exist_ok=True, mode=mode)


@contextlib.contextmanager
def locked(run_dir: Path, file_name: str = LOCK_FILE) -> Iterator[None]:
    """Hold a run's folder while the block runs; the system lets go of it when the process ends, however it ends.

    Args:
        file_name: which of its locks.
    Raises:
        UsageError: another training holds it, it is finished, or it can't be made.
    """
    try:
        make_folder(run_dir, 0o700)
        held = locks.hold(run_dir / file_name, locks.LOOK_PATIENCE_S)
    except OSError as error:
        raise UsageError(
            f"the run's folder {run_dir} can't be used ({error.strerror}); name another: --run-dir"
        ) from error
    if held is None:
        raise UsageError(
            f"another training (process {locks.holder_of(run_dir / file_name) or 'unknown'}) works in {run_dir}; wait "
            "for it, or name another folder: --run-dir"
        )
    try:
        if (run_dir / RESULTS_FILE).exists():
            raise UsageError(
                f"the run in {run_dir} is finished, see {RESULTS_FILE} there; name another folder: --run-dir"
            )
        locks.sign(held)
        yield
    finally:
        os.close(held)


def how_to_go_on(run_dir: Path) -> str:
    """What a run that ended too early says last."""
    return f"nothing that was played or trained is lost: the same command with --run-dir {run_dir} goes on from here"


def refuse_if_taken(run_dir: Path) -> None:
    """Raise what `locked` would."""
    with locked(run_dir):
        pass
