"""One process at a time works on a study."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from a3r.errors import StudyBusyError
from a3r.executor import supervise


@contextlib.contextmanager
def lease(path: Path, study_id: str) -> Iterator[None]:
    """Hold the study; the system lets go of it when this process ends, however it ends.

    Raises:
        StudyBusyError: another living process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + supervise.LOCK_PATIENCE_S  # who asks whether it is held takes it for a moment
    while (held := supervise.lock(path.parent)) is None and time.monotonic() < deadline:
        time.sleep(supervise.POLL_S / 5)
    if held is None:
        try:
            holder = path.read_text().strip()
        except OSError:
            holder = ""
        who = f"process {holder}" if holder else "another process"
        raise StudyBusyError(
            f"{who} works on study {study_id}; wait for it, or stop it and run `a3r resume {study_id}`"
        )
    try:
        os.ftruncate(held, 0)
        os.pwrite(held, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(held)
