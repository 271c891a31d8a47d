"""Which of a process's children is which."""

from __future__ import annotations

import contextlib

import psutil


def children_with(argument: str, pid: int | None = None, *, recursive: bool = False) -> list[psutil.Process]:
    """The living children of a process, this one by default, that were started with an argument; or all below it."""
    found = []
    for child in psutil.Process(pid).children(recursive=recursive):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile, or has nobody yet who waits for it
            if argument in child.cmdline():
                found.append(child)
    return found
