"""Locks of folders: one holds, others look or wait, and nothing but its end lets go."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from swarm_engine import locks
from swarm_engine.errors import RunDirError
from swarm_engine.server.serve import RunDirLock


def test_one_holds_a_lock_and_others_see_whose_it_is(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    assert not locks.is_held(file)
    assert not file.exists(), "looking makes none"
    assert locks.holder_of(file) == ""
    held = locks.hold(file)
    assert held is not None
    locks.sign(held)
    assert locks.is_held(file)
    assert locks.hold(file) is None
    assert locks.hold(file, patience_s=0.05) is None
    assert locks.holder_of(file) == str(os.getpid())
    os.close(held)
    assert not locks.is_held(file)
    again = locks.hold(file)
    assert again is not None
    os.close(again)


def test_a_disk_without_locks_is_not_taken_for_another_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(RunDirError, match=r"can't be used \(No locks available\)"):
        RunDirLock(tmp_path)
