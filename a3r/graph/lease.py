"""One process at a time works on a study."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from a3r.errors import StudyBusyError
from swarm_engine import locks


@contextlib.contextmanager
def lease(path: Path, study_id: str) -> Iterator[None]:
    """Hold the study; the system lets go of it when this process ends, however it ends.

    Raises:
        StudyBusyError: another living process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    held = locks.hold(path, locks.LOOK_PATIENCE_S)
    if held is None:
        holder = locks.holder_of(path)
        who = f"process {holder}" if holder else "another process"
        raise StudyBusyError(
            f"{who} works on study {study_id}; wait for it, or stop it and run `a3r resume {study_id}`"
        )
    try:
        locks.sign(held)
        yield
    finally:
        os.close(held)
