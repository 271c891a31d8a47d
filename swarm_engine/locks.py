"""Locks that processes hold on folders, each by a file in it; the system lets go of one when its process ends,
however it ends.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path

LOOK_PATIENCE_S = 1.0
"""Who looks whether a lock is held takes it for a moment; one that is held for good is held for longer."""
POLL_S = 0.02


def hold(file: Path, patience_s: float = 0.0) -> int | None:
    """Take a lock, its file made where there is none, for its owner alone.

    Args:
        patience_s: how long to wait for somebody who holds it.

    Returns:
        A descriptor, whose end is that of the lock; None where somebody holds it still.

    Raises:
        OSError: the file can't be opened or locked.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + patience_s
    try:
        while not (is_ours := _take(descriptor)) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    except OSError:
        os.close(descriptor)
        raise
    if is_ours:
        return descriptor
    os.close(descriptor)
    return None


def sign(descriptor: int) -> None:
    """Say in the file of a lock who holds it."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)


def holder_of(file: Path) -> str:
    """The process that signed a lock last; empty where none has."""
    try:
        return file.read_bytes()[:32].decode(errors="replace").strip()
    except OSError:
        return ""


def is_held(file: Path) -> bool:
    """Whether a process holds a lock. Looking takes it for a moment, which `LOOK_PATIENCE_S` waits out."""
    try:
        descriptor = os.open(file, os.O_RDWR)
    except OSError:
        return False
    try:
        return not _take(descriptor)
    finally:
        os.close(descriptor)


def _take(descriptor: int) -> bool:
    """Lock a file for this process alone, or say that somebody else has."""
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
            return False
        raise
    return True
