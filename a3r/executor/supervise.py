"""The guard of one job: `python supervise.py FOLDER` runs the command in FOLDER/spec.json and writes down how it ended.

It goes into the background once it has the job, and outlives whoever submitted it. It holds FOLDER/lock while it lives,
so that a second guard for the same job ends at once and anybody can see that the job runs; it keeps the wall-time
limit, ends the whole process tree, and leaves FOLDER/exit.json. Standard library only: it starts fast and depends on
nothing that a job may break. So its lock is its own: `swarm_engine.locks` may be where `python -I` does not look.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import time
import urllib.parse
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any

GRACE_S = 15.0
"""Between asking a job to end and insisting: it closes its server and its journal."""
LEFTOVER_GRACE_S = 2.0
"""What a job started and left behind ends by itself within this, or is ended."""
LOCK_PATIENCE_S = 2.0
"""Whoever asks how the job stands holds the lock for a moment; a guard that runs it holds it for good."""
PYTHON = "python"
"""As the first word of a command: the interpreter that this runs in."""
HOME_VARIABLE, SQLITE = "A3R_HOME", "sqlite:///"
POLL_S = 0.1
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class Cause(StrEnum):
    """What ended a job, as exit.json says."""

    EXITED = "exited"
    """It ended by itself, with an exit code or by a signal."""
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    NOT_STARTED = "not_started"


def started_at_tick(pid: int) -> str | None:
    """What tells two processes with one number apart: when the process started. None where it does not run.

    One that has ended and that nobody waits for is still in the table, for good in a container without an init.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else f"{boot}:{fields[19]}"
    except (FileNotFoundError, ProcessLookupError):  # the second where it ends while its file is read
        if Path("/proc/self/stat").exists():
            return None
    shown = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return shown.stdout.strip() or None


def write_whole(path: Path, value: dict[str, Any]) -> None:
    """All of a JSON file or nothing of it, on disk before this returns."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("w") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def read_spec(folder: Path) -> dict[str, Any]:
    """A job as it was submitted, its places in the home that its folder lies in now.

    The home may have been moved or copied since; what it was called is the job's A3R_HOME.
    """
    spec: dict[str, Any] = json.loads((folder / "spec.json").read_bytes())
    then, now = spec["environment"].get(HOME_VARIABLE), str(home_of(folder))

    def moved(word: str) -> str:
        for start, written in (("", str), (SQLITE, str), (SQLITE, _quoted)):
            if then is not None and f"{word}/".startswith(f"{start}{written(then)}/"):
                return f"{start}{written(now)}{word.removeprefix(start + written(then))}"
        return word

    environment = {name: moved(value) for name, value in spec["environment"].items()}
    return spec | {
        "command": [moved(word) for word in spec["command"]],
        "folder": moved(spec["folder"]),
        "environment": environment,
    }


def _quoted(path: str) -> str:
    """As SQLAlchemy writes a file's path in a URL, from some version on."""
    return urllib.parse.quote(path, safe=" +/")


def home_of(folder: Path) -> Path:
    """The home that a job's folder, HOME/jobs/KEY, lies in."""
    return folder.absolute().parent.parent


def lock_id(folder: Path) -> str:
    """Tells the lock of a job from that of its copy, under which nothing runs."""
    found = (folder / "lock").stat()
    return f"{found.st_dev}:{found.st_ino}"


def lock(folder: Path) -> int | None:
    """Take the job's lock and return its descriptor; None where somebody holds it."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def main(folder: Path) -> int:
    """Run the job, unless it was started before. Returns when the job is in the background and pid.json is written."""
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while (held := lock(folder)) is None and time.monotonic() < deadline:
        time.sleep(POLL_S / 5)
    if held is None or any((folder / name).exists() for name in ("pid.json", "exit.json", "cancel")):
        return 0
    ready, tell = os.pipe()
    if os.fork():
        os.close(tell)
        os.read(ready, 1)
        return 0
    os.close(ready)
    os.setsid()
    _guard(folder, tell)
    return 0


def _guard(folder: Path, tell: int) -> None:
    """In the background: run the job and write down how it ended."""
    _adopt_orphans()
    asked: list[int] = []

    def ask(number: int, _frame: FrameType | None) -> None:
        asked.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, ask)
    spec, home = read_spec(folder), str(home_of(folder))
    # By names relative to it from here on: the home may be moved while the job runs.
    os.chdir(folder)
    folder = Path()
    started = time.time()
    write_whole(folder / "pid.json", {**_who(os.getpid(), folder), "home": home, "started_at": started})
    os.close(tell)
    ended = _run(folder, spec, asked)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = {"cpu_s": usage.ru_utime + usage.ru_stime, "max_rss_kb": usage.ru_maxrss}
    write_whole(folder / "exit.json", {**ended, **used, "started_at": started, "ended_at": time.time()})


def _who(pid: int, folder: Path) -> dict[str, Any]:
    return {"pid": pid, "tick": started_at_tick(pid), "lock": lock_id(folder)}


def _run(folder: Path, spec: dict[str, Any], asked: list[int]) -> dict[str, Any]:
    """Start the command, wait for its end or bring it about, and clear up what it left behind."""
    with (folder / "stdout.log").open("ab") as out, (folder / "stderr.log").open("ab") as errors:
        try:
            child = subprocess.Popen(
                [sys.executable if spec["command"][0] == PYTHON else spec["command"][0], *spec["command"][1:]],
                cwd=spec["folder"],
                env={**os.environ, **spec["environment"]},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                start_new_session=True,
                preexec_fn=functools.partial(_die_with, os.getpid()),
            )
        except OSError as error:
            return {"cause": Cause.NOT_STARTED, "detail": str(error), "exit_code": None, "signal": None}
    write_whole(folder / "child.json", _who(child.pid, folder))
    cause = Cause.EXITED
    deadline = time.monotonic() + spec["time_limit_s"]
    while True:
        with suppress(subprocess.TimeoutExpired):
            child.wait(POLL_S)
            break
        if asked or time.monotonic() > deadline:
            cause = Cause.CANCELLED if asked else Cause.TIMEOUT
            _end(child)
            break
    _end_leftovers()
    code = child.returncode
    return {"cause": cause, "exit_code": code if code >= 0 else None, "signal": -code if code < 0 else None}


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ask the job's process group to end, then insist."""
    for number, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(patience)
            return


def _end_leftovers() -> None:
    """Wait for what the job started and did not wait for, then end it.

    Orphans become children of this process (Linux), so none can hide in a session of its own. They come up one
    generation at a time, therefore the loop.
    """
    deadline = time.monotonic() + LEFTOVER_GRACE_S
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            if time.monotonic() > deadline:
                for child in _children():
                    with suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
            time.sleep(POLL_S / 2)


def _children() -> list[int]:
    with suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return []


def _prctl(option: int, value: int) -> None:
    """Linux only; elsewhere orphans go to init, and a job must end what it starts."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _adopt_orphans() -> None:
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _die_with(parent: int) -> None:
    """Run in the child before it becomes the job; this process has one thread, so nothing is held over the fork."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # which ended before the kernel was asked
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
