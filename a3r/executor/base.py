"""What every executor can do, and the words it answers in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol


class JobState(StrEnum):
    """Where a job is."""

    QUEUED = "queued"
    """Accepted; waits for a free place."""
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    """Ended with exit code 0."""
    FAILED = "failed"
    """Ended with another exit code, or by a signal nobody here sent."""
    TIMEOUT = "timeout"
    """Ended because it ran longer than its limit."""
    CANCELLED = "cancelled"
    NOT_STARTED = "not_started"
    """Its program or its folder is not there, so nothing of it ran: no result, and nothing that waiting would mend."""
    LOST = "lost"
    """Was started, does not run, and left no word of how it ended: the machine went down, or its guard was killed."""

    @property
    def is_final(self) -> bool:
        """Whether it stays so."""
        return self not in {JobState.QUEUED, JobState.RUNNING}


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What to run. Two submissions under one key must agree in all of it."""

    command: tuple[str, ...]
    """The program and its arguments; no shell reads it. `python` is the interpreter that this runs in."""
    folder: str
    """Where it runs."""
    time_limit_s: float
    """Wall time, from its start."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """On top of the submitter's environment."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job as it is now."""

    key: str
    state: JobState
    cause: str
    """How it came to this state, in words."""
    log: Path
    """Its standard output."""
    pid: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    """Number of the signal that ended it; None where it ended by itself."""
    started_at: float | None = None
    """Unix seconds."""
    ended_at: float | None = None

    @property
    def seconds(self) -> float:
        """Wall time it ran for; 0 where it has not ended."""
        return self.ended_at - self.started_at if self.started_at and self.ended_at else 0.0


class Executor(Protocol):
    """Runs jobs somewhere."""

    name: str

    def submit(self, key: str, spec: JobSpec) -> str:
        """Accept a job and return the name it goes by there. The same key is the same job, however often submitted.

        Raises:
            JobError: the key belongs to a job with another spec.
        """
        ...

    def poll(self, keys: Iterable[str]) -> dict[str, JobStatus]:
        """Start what waits and has room, then say where each of these jobs is. Unknown keys are left out."""
        ...

    def cancel(self, keys: Iterable[str]) -> None:
        """End these jobs, with everything they started, and return when they have ended."""
        ...

    def list(self) -> list[str]:
        """Keys of every job that was ever submitted here."""
        ...

    def tail(self, key: str, lines: int = 15) -> str:
        """The end of what a job said: its errors, or its output where there are none."""
        ...
