"""Runs a study's graph until it ends, waiting outside it for people and for jobs.

The driver can be killed at any moment. What it knows is in the checkpoint (where the graph stands) and in the database
(what is so); `drive` called again goes on.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.types import Command
from langsmith.run_helpers import tracing_context

from a3r import store
from a3r.errors import A3RError, StoppedError, StudyVersionError, UsageError
from a3r.graph.build import build_graph
from a3r.graph.leader import load_draft
from a3r.graph.lease import lease
from a3r.graph.runner import observe
from a3r.graph.state import GRAPH_VERSION, Approval, Deps, StudyState
from a3r.prereg.plan import Plan
from a3r.store import RunView
from experiments_db.engine import BUSY_TIMEOUT_S
from experiments_db.errors import ExperimentsDbError
from experiments_db.models import ExperimentStatus, StudyStatus

POLL_S = 0.5
"""Between two looks at the jobs. Nothing depends on it but how fast an ended job is noticed."""
MAX_SUPERSTEPS = 10_000
TRACING_VARIABLES = ("LANGCHAIN_", "LANGSMITH_")
"""Beginnings of their names."""
ENDED = (StudyStatus.DONE, StudyStatus.FAILED, StudyStatus.ABANDONED)


Ask = Callable[[Plan], Approval]
"""Shows a plan and returns what was said about it; may wait for a person."""


def drive(study_id: str, deps: Deps, ask: Ask) -> StudyStatus:
    """Run or go on with a study to its end; returns where it then stands.

    Raises:
        StudyBusyError: another process works on it.
        StudyVersionError: another version of the graph began it.
        StoppedError: the user stopped it; its running jobs were cancelled, and it can go on.
        A3RError: a step failed; the message says what to do. The study can go on once that is done.
    """
    paths = deps.home.study(study_id)
    row = store.study(deps.database, study_id)
    if row.graph_version != GRAPH_VERSION:
        raise StudyVersionError(
            f"study {study_id} was begun by version {row.graph_version} of the research graph, this is version "
            f"{GRAPH_VERSION}; finish it with the A3R that began it, or ask the question again"
        )
    if row.status in ENDED:
        return row.status
    refuse_elsewhere(study_id, deps)
    with (
        untraced(),
        lease(paths.lock, study_id),
        saver(paths.checkpoints) as checkpointer,
        _no_job_unwatched(study_id, deps),
    ):
        if row.status is StudyStatus.PAUSED:
            store.set_status(deps.database, study_id, StudyStatus.RUNNING)
        graph = build_graph(deps, checkpointer)
        config: RunnableConfig = {
            "configurable": {"thread_id": study_id},
            "recursion_limit": MAX_SUPERSTEPS,
            "max_concurrency": 1,
        }
        try:
            _run(graph, config, study_id, deps, ask)
        except KeyboardInterrupt:
            raise _stop(study_id, deps) from None
        except UsageError as error:
            store.set_status(deps.database, study_id, StudyStatus.ABANDONED, str(error))
            raise
        except A3RError as error:
            store.set_status(deps.database, study_id, StudyStatus.PAUSED, str(error))
            raise
    # That the graph ended is no proof: the database has to say so.
    status = store.study(deps.database, study_id).status
    if status not in ENDED:
        raise A3RError(f"the graph of study {study_id} ended, but the study is {status}; run `a3r resume {study_id}`")
    return status


def refuse_elsewhere(study_id: str, deps: Deps) -> None:
    """See that the files of a study that has begun are in the home that is open, before anything is written there.

    Raises:
        UsageError: they are not.
    """
    paths = deps.home.study(study_id)
    for run in store.runs(deps.database, study_id):
        lies = deps.home.place(run.run_dir)
        if lies.resolve() != paths.run(run.arm, run.seed).resolve() or not paths.checkpoints.exists():
            raise UsageError(
                f"study {study_id} was begun in another home than {deps.home.root}, which has no {paths.checkpoints} "
                f"to go on from (run {run.experiment_id} is in {lies}); name its home with --home, or copy all of it "
                "there"
            )


@contextlib.contextmanager
def untraced() -> Iterator[None]:
    """Whatever the environment says of tracing for other programs, LangGraph sends nothing of a study anywhere.

    Its jobs inherit none of it either.
    """
    taken = {name: os.environ.pop(name) for name in [*os.environ] if name.startswith(TRACING_VARIABLES)}
    try:
        # The tracer remembers what it once read of the environment; this goes before it.
        with tracing_context(enabled=False):
            yield
    finally:
        os.environ.update(taken)


@contextlib.contextmanager
def _no_job_unwatched(study_id: str, deps: Deps) -> Iterator[None]:
    """After an error nobody watches the study's jobs, so they end; they go on from their last update on resume.

    How they ended is written down now: a job that could not be started would stop the study again when it goes on.
    """
    try:
        yield
    except StoppedError:
        raise
    except Exception:
        deps.executor.cancel(key for key in deps.executor.list() if key.startswith(study_id))
        with contextlib.suppress(ExperimentsDbError):  # where the error was the database's, that one is told
            observe(deps, _open_runs(store.runs(deps.database, study_id)))
        raise


@contextlib.contextmanager
def saver(path: Path) -> Iterator[SqliteSaver]:
    """The checkpoints of one study, in a file of their own. Nothing but plain values is read back from it.

    Raises:
        A3RError: the file can't be used. Only it raises SQLite's own errors in the block; the database's have words.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    resume = f"a3r resume {path.parent.name}"
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, check_same_thread=False)) as connection:
            connection.execute("PRAGMA synchronous=FULL")
            yield SqliteSaver(connection, serde=JsonPlusSerializer(allowed_msgpack_modules=None))
    except sqlite3.Error as error:
        what = str(error)
        if "malformed" in what or "not a database" in what:
            way_out = f"put back a copy of it and `{resume}`, or ask the question again; no run is lost by it"
            raise A3RError(f"the study's checkpoint {path} is damaged ({what}); {way_out}") from error
        way_out = "make room" if "full" in what else "see who holds or may write it"
        raise A3RError(f"the study's checkpoint {path} can't be used ({what}); {way_out}, then `{resume}`") from error


def _run(graph: Any, config: RunnableConfig, study_id: str, deps: Deps, ask: Ask) -> None:
    """Invoke, answer what the graph waits for, invoke again.

    Whether it waits is what an invocation returns, never what a snapshot says: that lists what was answered too, and
    leaves out what a kill between two steps kept. So a study that goes on is invoked first.
    """
    snapshot = graph.get_state(config)
    given: StudyState | Command[Any] | None = None
    if snapshot.metadata is None:
        given = {"study_id": study_id, "graph_version": GRAPH_VERSION}
    elif snapshot.values and snapshot.values["graph_version"] != GRAPH_VERSION:
        raise StudyVersionError(
            f"the checkpoint of study {study_id} is of graph version {snapshot.values['graph_version']}, "
            f"this is {GRAPH_VERSION}"
        )
    while waits := graph.invoke(given, config, durability="sync").get("__interrupt__"):
        (asked,) = waits
        answer = _answer(asked.value, study_id, deps, ask)
        # By the interrupt's id: a bare answer that is an empty dict would not count as one.
        given = Command(resume={asked.id: answer})


def _answer(waiting: dict[str, Any], study_id: str, deps: Deps, ask: Ask) -> dict[str, Any]:
    """Wait for what the graph waits for."""
    if waiting["kind"] == "approve":
        state: StudyState = {"study_id": study_id, "plan_sha": waiting["plan_sha"]}
        said = ask(load_draft(deps, state))
        return {"is_approved": said.is_approved, "by": said.by}
    assert waiting["kind"] == "jobs", waiting
    _watch(study_id, waiting["stage"], deps)
    return {}


def _watch(study_id: str, stage: int, deps: Deps) -> None:
    """Until a job of the stage has ended; not at all where none is open: a kill may come after all were collected."""
    plan = store.plan_of(deps.database, study_id)
    every = store.runs(deps.database, study_id)
    runs = [run for run in every if run.stage == stage and run.job_key and not run.is_settled]
    keys = [run.job_key for run in runs if run.job_key]
    while keys:
        statuses = deps.executor.poll(keys)
        deps.tell("jobs", stage=stage, plan=plan, every=every, runs=runs, statuses=statuses)
        if len(statuses) < len(keys) or any(status.state.is_final for status in statuses.values()):
            return
        time.sleep(POLL_S)


def _open_runs(runs: list[RunView]) -> list[RunView]:
    """Those with a job that has not ended, as far as the rows know."""
    return [run for run in runs if run.job_key and run.job_state is not None and not run.job_state.is_terminal]


def _stop(study_id: str, deps: Deps) -> StoppedError:
    """End the running jobs, write that down, and say how to go on."""
    runs = store.runs(deps.database, study_id)
    going = _open_runs(runs)
    deps.tell("stopping", jobs=len(going))
    deps.executor.cancel([run.job_key for run in going if run.job_key])
    observe(deps, going)
    store.set_status(deps.database, study_id, StudyStatus.PAUSED, "stopped by the user")
    kept = sum(run.status is ExperimentStatus.DONE for run in runs)
    return StoppedError(
        f"stopped. {kept} finished runs are kept, {len(going)} were cancelled and go on from their last update. "
        f"Go on with: a3r resume {study_id}"
    )
