"""Jobs as processes on this machine, each under a guard of its own (`supervise.py`) that outlives the submitter.

A job is a folder. `submit` writes spec.json; the guard holds `lock` while it runs, writes pid.json when it starts and
exit.json when it ends. Where a job stands is read off these files, so any later process can pick it up, and two of them
can't start it twice. At most `slots` jobs run at once; the others wait in order of submission.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, assert_never

from a3r.errors import JobError
from a3r.executor import supervise
from a3r.executor.base import JobSpec, JobState, JobStatus
from a3r.executor.supervise import Cause

MEMORY_PER_JOB_MB = 1500
"""A job is a client, a server's front and its worker; the worker holds PyTorch."""
CANCEL_TIMEOUT_S = 2 * supervise.GRACE_S + supervise.LEFTOVER_GRACE_S
POLL_S = 0.1


def default_slots() -> int:
    """Jobs that this machine bears at once: one a core, as far as the free memory goes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free = _free_memory_mb()
    return max(1, min(cores, free // MEMORY_PER_JOB_MB if free is not None else cores))


def _free_memory_mb() -> int | None:
    """None where the system does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) // 1024
    return None


class LocalExecutor:
    """Runs jobs here."""

    name = "local"

    def __init__(self, root: Path, slots: int | None = None, secrets: Mapping[str, str] | None = None) -> None:
        """See what there is to run on.

        Args:
            secrets: environment variables of every job that no file and no command line may hold.
        """
        if slots is not None and slots < 1:
            raise JobError(f"{slots} jobs at once would run nothing; give --jobs 1 or more")
        self.slots = slots or default_slots()
        self._root = root
        self._environment = {**os.environ, **(secrets or {})}
        self._closed: set[str] = set()
        """Keys of jobs that are known to have ended; they stay so."""

    def submit(self, key: str, spec: JobSpec) -> str:
        """See `Executor.submit`. The name is the key."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.+=-]*", key):
            raise JobError(f"{key!r} is no job key: letters, digits and ._+=- only, for it names a folder")
        folder = self._root / key
        folder.mkdir(parents=True, exist_ok=True)
        wanted = {
            "command": list(spec.command),
            "folder": spec.folder,
            "time_limit_s": spec.time_limit_s,
            "environment": dict(spec.environment),
        }
        there = _read_spec(folder)
        if there is None:
            supervise.write_whole(folder / "spec.json", wanted | {"submitted_at": time.time()})
        elif {name: there.get(name) for name in wanted} != wanted:
            raise JobError(
                f"job {key} was submitted before with another command or limit; a changed job needs a new key"
            )
        return key

    def poll(self, keys: Iterable[str]) -> dict[str, JobStatus]:
        """See `Executor.poll`."""
        wanted = set(keys)
        submitted = {key: spec for key in wanted if (spec := _read_spec(self._root / key))}
        statuses = {key: self._status(key) for key in submitted}
        for key, status in statuses.items():
            if status.state is JobState.RUNNING and (was := self._elsewhere(key)):
                raise JobError(
                    f"job {key} (process {status.pid}) still works in {was}, where this home was when it began; it is "
                    "ended, and goes on in the home as it is now with `a3r resume`"
                )
        others = [self._status(key) for key in self._open() if key not in wanted]
        running = sum(status.state is JobState.RUNNING for status in (*statuses.values(), *others))
        waiting = [key for key, status in statuses.items() if status.state is JobState.QUEUED]
        waiting.sort(key=lambda key: (submitted[key]["submitted_at"], key))
        for key in waiting[: max(0, self.slots - running)]:
            self._start(key)
            statuses[key] = self._status(key)
        return statuses

    def look(self, keys: Iterable[str]) -> dict[str, JobStatus]:
        """As `poll`, but starts nothing."""
        return {key: self._status(key) for key in keys if _read(self._root / key / "spec.json")}

    def cancel(self, keys: Iterable[str]) -> None:
        """See `Executor.cancel`."""
        wanted = [key for key in keys if not self._status(key).state.is_final]
        for key in wanted:
            # A full disk must not keep a job from being ended; the mark only keeps a waiting one from being started.
            with contextlib.suppress(OSError):
                (self._root / key / "cancel").touch()
            self._signal(key, signal.SIGTERM)
        deadline = time.monotonic() + CANCEL_TIMEOUT_S
        while any(self._status(key).state is JobState.RUNNING for key in wanted):
            if time.monotonic() > deadline:
                for key in wanted:
                    self._signal(key, signal.SIGKILL)
                deadline += CANCEL_TIMEOUT_S
            time.sleep(POLL_S)

    def list(self) -> list[str]:
        """See `Executor.list`; in order of submission."""
        specs = {path.parent.name: _read(path) for path in self._root.glob("*/spec.json")}
        return sorted(specs, key=lambda key: ((specs[key] or {}).get("submitted_at", 0.0), key))

    def _open(self) -> Iterator[str]:
        """Keys of the jobs that may still run: a home holds every job there ever was, most of them long ended."""
        with contextlib.suppress(FileNotFoundError), os.scandir(self._root) as folders:
            for folder in folders:
                if folder.name in self._closed or not folder.is_dir():
                    continue
                if os.path.exists(os.path.join(folder.path, "exit.json")):
                    self._closed.add(folder.name)
                else:
                    yield folder.name

    def tail(self, key: str, lines: int = 15) -> str:
        """See `Executor.tail`."""
        for name in ("stderr.log", "stdout.log"):
            with contextlib.suppress(OSError):
                if text := (self._root / key / name).read_text(encoding="utf-8", errors="replace").strip():
                    return "\n".join(text.splitlines()[-lines:])
        return ""

    def log(self, key: str) -> Path:
        """The file that a job's standard output goes to."""
        return self._root / key / "stdout.log"

    def _start(self, key: str) -> None:
        """Start a guard; when it returns the job is in the background and holds its lock."""
        folder = self._root / key
        with (folder / "guard.log").open("ab") as log:
            subprocess.run(
                [sys.executable, "-I", supervise.__file__, str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                check=False,
                start_new_session=True,
            )

    def _elsewhere(self, key: str) -> str | None:
        """The home that a job was started in, where that is another folder than this one."""
        was = (_read(self._root / key / "pid.json") or {}).get("home")
        is_here = was is None or (os.path.exists(was) and os.path.samefile(was, self._root.parent))
        return None if is_here else str(was)

    def _status(self, key: str) -> JobStatus:
        folder = self._root / key
        log = self.log(key)
        is_held = _is_held(folder)
        # A guard writes exit.json before it lets the lock go, so the files are read after the lock.
        ended, started = _read(folder / "exit.json"), _read(folder / "pid.json")
        if ended is not None and not is_held:
            return _ended(key, log, ended)
        if is_held:
            begun = started or {}
            return JobStatus(
                key, JobState.RUNNING, "running", log, pid=begun.get("pid"), started_at=begun.get("started_at")
            )
        if _alive(folder, "child.json"):
            return JobStatus(
                key, JobState.RUNNING, "runs without its guard", log, started_at=(started or {}).get("started_at")
            )
        if started is not None:
            cause = "it was started, runs no longer, and left no word of how it ended"
            return JobStatus(key, JobState.LOST, cause, log, pid=started["pid"], started_at=started["started_at"])
        if (folder / "cancel").exists():
            return JobStatus(key, JobState.CANCELLED, "cancelled before it started", log)
        return JobStatus(key, JobState.QUEUED, f"waits for one of {self.slots} places", log)

    def _signal(self, key: str, number: signal.Signals) -> None:
        """To the guard; where that is gone, to the job itself, and all of it."""
        folder = self._root / key
        with contextlib.suppress(ProcessLookupError):
            if guard := _alive(folder, "pid.json"):
                os.kill(guard, number)
            elif child := _alive(folder, "child.json"):
                os.killpg(child, number)


def _alive(folder: Path, name: str) -> int | None:
    """Number of the process that a file in a job's folder tells of, where it lives: this very process, not another
    that got its number, and working in this folder, not in the one that this is a copy of."""
    process = _read(folder / name)
    if process is None or not (folder / "lock").exists():
        return None
    here = supervise.lock_id(folder)
    if process.get("lock", here) != here:
        return None
    is_alive = supervise.started_at_tick(process["pid"]) == process["tick"] is not None
    return int(process["pid"]) if is_alive else None


def _is_held(folder: Path) -> bool:
    """Whether a guard holds the job's lock. Looking takes the lock for a moment, which a starting guard waits out."""
    if not (folder / "lock").exists():
        return False
    descriptor = supervise.lock(folder)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False


def _ended(key: str, log: Path, ended: dict[str, Any]) -> JobStatus:
    code, number = ended["exit_code"], ended["signal"]
    match Cause(ended["cause"]):
        case Cause.CANCELLED:
            state, cause = JobState.CANCELLED, "cancelled"
        case Cause.TIMEOUT:
            state, cause = JobState.TIMEOUT, "ran longer than its limit"
        case Cause.NOT_STARTED:
            state, cause = JobState.NOT_STARTED, f"could not be started: {ended['detail']}"
        case Cause.EXITED if number is not None:
            state, cause = JobState.FAILED, f"ended by signal {signal.Signals(number).name}"
        case Cause.EXITED:
            state, cause = JobState.FAILED if code else JobState.SUCCEEDED, f"exit code {code}"
        case never:
            assert_never(never)
    return JobStatus(
        key,
        state,
        cause,
        log,
        exit_code=code,
        signal=number,
        started_at=ended["started_at"],
        ended_at=ended["ended_at"],
    )


def _read_spec(folder: Path) -> dict[str, Any] | None:
    """A job as it was submitted, its places as they are now; None where it was not."""
    return supervise.read_spec(folder) if _read(folder / "spec.json") else None


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON file that is written whole; None where there is none."""
    try:
        value: dict[str, Any] = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise JobError(f"{path} is damaged ({error}); remove its folder to give the job up") from error
    return value
