"""A lab whose trainings are fake and whose everything else is real: graph, database, and, where asked for, processes.

Effects map an arm's key (or `*`) to what `fake_project/train.py` reads.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fake_project import train
from small_catalogue import CATALOGUE

from a3r import store
from a3r.executor import JobSpec, JobState, JobStatus, LocalExecutor, supervise
from a3r.graph.driver import drive
from a3r.graph.state import GRAPH_VERSION, Approval, Deps
from a3r.paths import Home
from a3r.prereg.plan import Arm, Plan
from a3r.workshop import nested
from experiments_db.engine import open_database
from experiments_db.models import StudyStatus

DEFAULTS: dict[str, Any] = {"start": 0.3, "rise": 0.4, "sd": 0.02, "games": 20}


class FakeWorkshop:
    """Copies the fake project and says what its runs shall come to."""

    def __init__(self, effects: dict[str, Any]) -> None:
        self.effects = effects

    def template_sha(self, plan: Plan) -> str:
        return hashlib.sha256(plan.template.name.encode()).hexdigest()

    def build(self, plan: Plan, arm: Arm, folder: Path) -> str:
        settings = nested(plan.settings_of(arm))
        effects = DEFAULTS | self.effects.get("*", {}) | self.effects.get(arm.key, {})
        effects |= {
            "arm": arm.key,
            "updates": settings["training"]["updates"],
            "eval_every": settings["training"]["eval_every"],
            "games": plan.controls.evaluation_games,
            "trainer": settings["trainer"],
        }
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(train.__file__, folder / "train.py")
        supervise.write_whole(folder / "effects.json", effects)
        return hashlib.sha256(json.dumps(effects, sort_keys=True).encode()).hexdigest()


class InProcessExecutor:
    """Runs a job when somebody looks at it again, in this process: the fake project takes milliseconds, a start of
    Python does not. At the first look it waits, so that the graph waits too."""

    name = "in-process"
    slots = 2

    def __init__(self, root: Path) -> None:
        self._root = root
        self._specs: dict[str, JobSpec] = {}
        self._seen: set[str] = set()
        self._ended: dict[str, JobStatus] = {}

    def submit(self, key: str, spec: JobSpec) -> str:
        self._specs.setdefault(key, spec)
        return key

    def poll(self, keys: Iterable[str]) -> dict[str, JobStatus]:
        return {key: self._look(key) for key in keys if key in self._specs}

    def cancel(self, keys: Iterable[str]) -> None:
        for key in keys:
            status = JobStatus(key, JobState.CANCELLED, "cancelled", self._root / key / "stdout.log")
            self._ended.setdefault(key, status)

    def list(self) -> list[str]:
        return [*self._specs]

    def tail(self, key: str, lines: int = 15) -> str:
        return "\n".join((self._root / key / "stderr.log").read_text().splitlines()[-lines:])

    def _look(self, key: str) -> JobStatus:
        if key not in self._seen:
            self._seen.add(key)
            return JobStatus(key, JobState.QUEUED, "waits", self._root / key / "stdout.log")
        if key not in self._ended:
            spec, folder = self._specs[key], self._root / key
            folder.mkdir(parents=True)
            started = time.time()
            with (
                contextlib.chdir(spec.folder),
                (folder / "stdout.log").open("w") as out,
                (folder / "stderr.log").open("w") as errors,
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(errors),
            ):
                code = train.main(list(spec.command[2:]))
            state = JobState.FAILED if code else JobState.SUCCEEDED
            self._ended[key] = JobStatus(
                key,
                state,
                f"exit code {code}",
                folder / "stdout.log",
                exit_code=code,
                started_at=started,
                ended_at=time.time(),
            )
        return self._ended[key]


class Lab:
    """A home, and what it takes to run studies there."""

    def __init__(self, root: Path, effects: dict[str, Any] | None = None, processes: int = 0) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.deps = Deps(
            database=open_database(home=root),
            home=Home(root),
            executor=LocalExecutor(root / "jobs", processes) if processes else InProcessExecutor(root / "jobs"),
            catalogue=CATALOGUE,
            workshop=FakeWorkshop(effects or {}),
            tell=lambda kind, /, **fields: self.told.append((kind, fields)),
        )

    def begin(self, question: str, **wishes: Any) -> str:
        asked = {"seeds": None, "extra_seeds": 2, "updates": 5, "eval_games": 10, "minutes": None, "parallel": 2}
        study = store.create_study(self.deps.database, question, {"python": "3"}, GRAPH_VERSION, asked | wishes)
        self.deps.home.study(study).root.mkdir(parents=True)
        return study

    def go(self, study: str, *, is_approved: bool = True) -> StudyStatus:
        return drive(study, self.deps, lambda _: Approval(is_approved, "test"))


def go_on(home: Path, study: str, effects: dict[str, Any]) -> None:
    """What a process of its own does: go on with a study, its jobs being real processes."""
    Lab(home, effects, processes=3).go(study)


class PowerCut(BaseException):
    """Ends a driver without its having time for anything."""


def begin_and_cut_power(lab: Lab, question: str) -> str:
    """A study with one job that was killed at work and two that wait, as nobody had time to end them."""
    study, tell = lab.begin(question), lab.deps.tell

    def cut(kind: str, /, **fields: Any) -> None:
        tell(kind, **fields)
        if kind == "jobs" and any(status.pid for status in fields["statuses"].values()):
            raise PowerCut

    lab.deps.tell = cut
    with contextlib.suppress(PowerCut):
        lab.go(study)
        raise AssertionError("the study ended before the power was cut")
    lab.deps.tell = tell
    return study


def end_jobs(home: Path) -> None:
    """Kill every job of a home and whatever watches it."""
    for name in ("pid.json", "child.json"):
        for path in home.glob(f"jobs/*/{name}"):
            pid = json.loads(path.read_text())["pid"]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            while supervise.started_at_tick(pid):
                time.sleep(0.01)
