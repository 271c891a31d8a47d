"""What `vibe train` does: write a project or take one, run its train.py, keep rows of it, show what came of it.

The training itself is the project's own program in a process of its own, as a person would start it; this module only
listens to its JSON lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from rich.console import Console
from rich.text import Text
from sqlmodel import Session

from experiments_db.engine import Database, default_url, open_database
from experiments_db.errors import ExperimentsDbError
from experiments_db.home import HOME_VARIABLE, home_folder, stored
from experiments_db.models import JobState, StudyKind
from experiments_db.plots import plot_runs
from experiments_db.queries import HELD_OUT, find_single_run, is_measured
from experiments_db.ulid import new_ulid
from experiments_db.writes import SINGLE_KEY, Attempt, begin_attempt, create_single_run, record_job
from swarm_engine.signals import ending_signals, leave_dead_terminal
from vibe import screen
from vibe.embedded import check_named
from vibe.errors import INTERRUPTED, StoppedError, TrainingFailedError, printable
from vibe.project import RESULTS_FILE, code_of, refuse_if_edited
from vibe.record import RECORD_FILE, Event, event_text, last, read
from vibe.run_folder import COMMAND_LOCK_FILE, how_to_go_on, locked, refuse_if_taken
from vibe.writing import Request, Written, take, write_from_words

RUNS = "runs"
"""Folder of A3R_HOME."""
LOG_FILE = "train.log"
PYTHON = "python"
"""Stands for this interpreter in a row's command."""
CURVE_FILE = "curve.png"


def train_project(request: Request) -> None:
    """Write the project, or take the one that is there; train on it, show what was learned.

    Raises:
        VibeError: with the exit code of the command.
        KeyboardInterrupt: after the training has ended in order.
    """
    check_named(request.swarm_url, request.token_file)
    written = write_from_words(request) if request.project is None else take(request, request.project)
    run_dir = (request.run_dir or home_folder() / RUNS / new_ulid()).resolve()
    with locked(run_dir, COMMAND_LOCK_FILE), going_on_in(run_dir), open_database() as database:
        refuse_if_taken(run_dir)
        if (code := last(list(read(run_dir / RECORD_FILE)), "code")) is not None:
            refuse_if_edited(code, code_of(written.folder), f"the run in {run_dir}")
        experiment, attempt = begin(database, request, written, run_dir)
        with recorded(database, attempt):
            watch(request, written, run_dir, experiment)
        draw(database, experiment, written, run_dir)
    show_results(request, written, run_dir, experiment)


def begin(database: Database, request: Request, written: Written, run_dir: Path) -> tuple[str, Attempt]:
    """Write the run down before it starts: its id, and the job that this process reports on.

    The caller holds the run's folder, so an open job is one whose process was killed.
    """
    spec = written.spec
    question = request.description if request.project is None else " ".join(spec.source_sentences) or spec.title
    controls = {"config": spec.config.model_dump(mode="json"), "training": spec.training.model_dump(mode="json")}
    if written.edited:  # so that its runs are never counted among those of the template's own game
        controls["edited"] = dict(written.edited)
    home = home_folder()
    with database.write() as session:
        key, words = recorded_as(session, run_dir, command(request, written, run_dir), home)
        experiment = create_single_run(
            session,
            StudyKind.VIBE,
            question,
            spec.template,
            spec.rules,
            key=key,
            seed_train=spec.config.seed,
            template_version=spec.template_version,
            template_sha=written.sha256,
            controls=controls,
            objective=f"train on {spec.title}",
            command=words,
            metrics=["reward_mean", "held-out reward"],
            run_dir=stored(run_dir, home),
        )
        attempt = begin_attempt(session, experiment)
        if attempt.state is not JobState.INTENT:
            record_job(session, attempt.job_id, JobState.LOST, fencing=attempt.fencing, cause="its process was killed")
            attempt = begin_attempt(session, experiment)
        record_job(
            session,
            attempt.job_id,
            JobState.SUBMITTED,
            fencing=attempt.fencing,
            host=socket.gethostname(),
            log_path=stored(run_dir / LOG_FILE, home),
        )
    return experiment, attempt


def recorded_as(session: Session, run_dir: Path, words: Sequence[str], home: Path) -> tuple[str, list[str]]:
    """The key and the command of a run's rows: those it was begun with, wherever the project and the home lie by now.

    Rows with numbers that the folder knows nothing of are of a run whose folder was removed; this one is another.

    Args:
        words: of the command as it is started now.
    """
    key = stored(run_dir, home)
    if found := find_single_run(session, run_dir, home):
        run, blueprint = found
        if any(read(run_dir / RECORD_FILE)) or not is_measured(session, run.id):
            return run.key.removeprefix(SINGLE_KEY), [str(word) for word in blueprint.command]
        key = f"{key} {new_ulid()}"
    # The interpreter may be another one when the run goes on.
    return key, [PYTHON, *(stored(Path(word), home) if Path(word).is_absolute() else word for word in words[1:])]


def command(request: Request, written: Written, run_dir: Path) -> list[str]:
    """How the project's training is started, without the rows it writes."""
    words = [sys.executable, str(written.folder.resolve() / "train.py"), "--run-dir", str(run_dir), "--json"]
    if request.swarm_url and request.token_file:
        words += ["--swarm", request.swarm_url, "--token-file", str(request.token_file.resolve())]
    if request.project is not None:  # a project that was written for this command has them in its spec.json
        words += [word for path, value in request.settings.items() for word in ("--set", f"{path}={value}")]
    return words


@contextlib.contextmanager
def going_on_in(run_dir: Path) -> Iterator[None]:
    """Say how to go on where the disk or the experiment log ends the command: the run's folder may be one it chose."""
    try:
        yield
    except (OSError, ExperimentsDbError) as error:
        raise TrainingFailedError(f"{error}; {how_to_go_on(run_dir)}", 1) from error


@contextlib.contextmanager
def recorded(database: Database, attempt: Attempt) -> Iterator[None]:
    """Write down how the training ends, whichever way it does."""

    def report(state: JobState, cause: str | None = None, exit_code: int | None = None) -> None:
        with database.write() as session:
            record_job(session, attempt.job_id, state, fencing=attempt.fencing, cause=cause, exit_code=exit_code)

    report(JobState.RUNNING)
    try:
        yield
    except StoppedError:
        report(JobState.CANCELLED, "interrupted", INTERRUPTED)
        raise
    except TrainingFailedError as error:
        report(JobState.FAILED_CODE, str(error).splitlines()[0], error.exit_code)
        raise
    except BaseException as error:
        report(JobState.FAILED_CODE, f"{type(error).__name__}: {error}")
        raise
    report(JobState.SUCCEEDED, exit_code=0)


def watch(request: Request, written: Written, run_dir: Path, experiment: str) -> None:
    """Run the project's training and show it as it goes; on Ctrl-C it ends in order.

    Raises:
        TrainingFailedError: it ended with an error, which the message repeats.
        StoppedError: it was asked to stop, and has.
    """
    spec = written.spec
    words = [
        *command(request, written, run_dir),
        "--experiment",
        experiment,
        "--db",
        default_url(),
        "--exit-with-stdin",
        *(["--go-on"] if request.goes_on else []),
    ]
    with (run_dir / LOG_FILE).open("ab") as log, Forwarded() as signals:
        start_of_log = log.tell()
        # A session of its own, so that one Ctrl-C reaches it once: through here. Where this program ends in whatever
        # way, the pipe ends, and with it the training.
        child = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=os.environ | {HOME_VARIABLE: str(home_folder())},
            encoding="utf-8",
            errors="replace",  # the project's own code may print anything
            start_new_session=True,
        )
        signals.to(child.pid)
        try:
            assert child.stdin
            assert child.stdout
            with child.stdin:
                with (
                    child.stdout as lines,
                    screen.screen(Console(), spec.title, spec.training.updates, as_json=request.as_json) as shown,
                ):
                    for line in lines:
                        shown.show(event_of(line))
                child.wait()
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
    if child.returncode == 0:
        return  # also where a signal came too late to stop anything
    if signals.num_received:
        raise StoppedError(f"stopped; {how_to_go_on(run_dir)}")
    said = (run_dir / LOG_FILE).read_bytes()[start_of_log:].decode(errors="replace").strip()
    message = said.removeprefix("error: ") or f"the training ended with code {child.returncode}"
    raise TrainingFailedError(message, child.returncode if child.returncode > 0 else 1)


def event_of(line: str) -> Event:
    """What a line of a training's output says; one that the project's own code printed is said as it is."""
    try:
        event = json.loads(line)
        # The project's code may print JSON too; what can't be put in words or written again is no event of ours.
        if isinstance(event, dict) and isinstance(event["event"], str):
            event_text(event)
            json.dumps(event, ensure_ascii=False).encode()
            return event
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        pass  # it is shown as it is
    return {"event": "phase", "text": printable(line.rstrip("\n"))}


class Forwarded:
    """While the block runs, signals that ask for the end go to a child's process group and don't end this program."""

    def __init__(self) -> None:
        self.num_received = 0
        self._group: int | None = None
        self._waiting: int | None = None
        """A signal that came before the child did."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in ending_signals():
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def to(self, group: int) -> None:
        """The process group that gets the signals from now on."""
        self._group = group
        if self._waiting is not None:
            self._send(self._waiting)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        leave_dead_terminal()
        self.num_received += 1
        if self._group is None:
            self._waiting = number
        else:
            self._send(number)

    def _send(self, number: int) -> None:
        assert self._group is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._group, number)


def draw(database: Database, experiment: str, written: Written, run_dir: Path) -> None:
    """The held-out curve of the run, beside what scripted players earn; none where an edited train.py measured none."""
    record = list(read(run_dir / RECORD_FILE))
    if not any(event["event"] == "evaluation" for event in record):
        return
    levels = [event for event in record if event["event"] == "level"]
    across = {screen.level_name(level): level["mean"] for level in levels}
    with database.read() as session:
        plot_runs(session, [experiment], HELD_OUT, run_dir / CURVE_FILE, levels=across, title=written.spec.title)


def show_results(request: Request, written: Written, run_dir: Path, experiment: str) -> None:
    """Before and after, three games, the curve, and where everything is."""
    record = list(read(run_dir / RECORD_FILE))
    evaluations = [event for event in record if event["event"] == "evaluation"]
    levels = [event for event in record if event["event"] == "level"]
    curve = run_dir / CURVE_FILE
    sampled = [event for event in evaluations if event["temperature"] == 1]
    if request.as_json:
        screen.emit(
            {
                "event": "result",
                "run": experiment,
                "project": str(written.folder.resolve()),
                "run_dir": str(run_dir),
                "results": str(run_dir / RESULTS_FILE),
                "curve": str(curve) if curve.exists() else None,
                "evaluations": [event for event in evaluations if event["label"] != "during"],
                "levels": levels,
            }
        )
        return
    console = Console()
    for panel in screen.games(sampled[-1]["samples"] if sampled else ()):
        console.print(panel)
    console.print(screen.results(evaluations, levels))
    for name, value in (
        ("run", experiment),
        ("project", written.folder.resolve()),
        ("curve", curve),
        ("results", run_dir / RESULTS_FILE),
    ):
        if isinstance(value, Path) and not value.exists():
            continue
        console.print(Text(f"{name:<8} {value}"), soft_wrap=True)
