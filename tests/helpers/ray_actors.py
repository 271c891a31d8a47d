"""The processes that Ray runs for an engine, as the system sees them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

WAIT_S = 60.0


def actors(kind: str) -> list[psutil.Process]:
    """The actors of a class."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(word.startswith(f"ray::{kind}") for word in process.info["cmdline"] or ())
    ]


@contextmanager
def no_actor_left() -> Iterator[None]:
    """What is done within leaves no actor of an engine."""
    yield
    deadline = time.monotonic() + WAIT_S
    while actors("RankActor") or actors("VllmActor"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
