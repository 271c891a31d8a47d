"""How many connections a server may hold: each is an open file, and of those a process has a limit.

Where it is reached, the system's own way is to reset connections without a word. So some files are kept back: past the
limit a newcomer takes the place of the connection that was idle the longest, and where all are busy it is told so and
may ask for the status alone.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable
from typing import Protocol

RESERVE = 128
"""Files for the journal, the worker, checkpoints, a teacher, and for newcomers while others are being closed."""
SAY_AGAIN_S = 60.0

log = logging.getLogger(__name__)


class Member(Protocol):
    """A connection."""

    is_spare: bool
    """Whether it came when all others were busy."""
    idle_since: float
    """Seconds, monotonic."""

    @property
    def is_idle(self) -> bool:
        """Whether it is open and has no request that is being answered."""

    def make_room(self) -> None:
        """End."""


class Crowd:
    """The connections of a server."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        """How many there may be; None where nothing bounds them."""
        self.num_closed = 0
        """Idle ones that made room."""
        self.num_refused = 0
        """Requests that found all connections busy."""
        self._said_at = -SAY_AGAIN_S

    def admit(self, newcomer: Member, others: Iterable[Member], count: int) -> None:
        """Make room for a new connection, or mark it as one too many; `count` is how many are open with it."""
        if self.limit is None or count <= self.limit:
            return
        idle = [other for other in others if other is not newcomer and other.is_idle]
        if idle:
            self.num_closed += 1
            min(idle, key=lambda one: one.idle_since).make_room()
        else:
            newcomer.is_spare = True
        now = time.monotonic()
        if now - self._said_at >= SAY_AGAIN_S:
            self._said_at = now
            log.warning(
                "%d connections are open, and the limit of open files leaves room for %d: idle ones are closed for new "
                "ones, and where all are busy new requests are refused; raise the limit (ulimit -Hn, LimitNOFILE= of "
                "systemd, --ulimit nofile= of docker) and start the server again",
                count,
                self.limit,
            )

    def as_status(self, count: int) -> dict[str, int | None]:
        """What the status tells."""
        return {"open": count, "limit": self.limit, "closed": self.num_closed, "refused": self.num_refused}


def raise_file_limit() -> None:
    """Let this process, and those that it starts, open as many files as they may.

    The usual soft limit of 1,024 is for programs that wait by `select`; none of ours does.
    """
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:  # macOS names a hard limit that it does not grant
            log.warning("the limit of open files stays at %d, for the system refuses %d (%s)", soft, hard, error)


def connection_limit() -> int | None:
    """How many connections the limit of open files leaves room for."""
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if soft == resource.RLIM_INFINITY else max(soft - RESERVE, soft // 2)
