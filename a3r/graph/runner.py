"""Runner: has a stage's runs done, exactly once, whatever crashes, and waits for them outside the graph.

Every run is written down as a job before anything is started (`intend`) and submitted under that job's key, which is
the same job to the executor however often it arrives. Waiting is an interrupt: the driver watches the jobs and wakes
the graph when one has ended.
"""

from __future__ import annotations

from typing import Literal

from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import Command, interrupt

from a3r import store
from a3r.executor import JobSpec, JobStatus
from a3r.executor import JobState as HereState
from a3r.graph.state import Deps, StudyState
from a3r.store import RunView
from experiments_db import writes
from experiments_db.errors import StaleWriterError
from experiments_db.models import JobState, OwnerType


def runner(deps: Deps) -> CompiledStateGraph[StudyState, None, StudyState, StudyState]:
    """The runner's graph."""

    def submit(state: StudyState) -> StudyState:
        """Hand every run that has no job, or needs another one, to the executor."""
        for run in store.runs(deps.database, state["study_id"], state["stage"]):
            if run.is_settled:
                continue
            job_id, key, job_state = store.intend(deps.database, run, deps.executor.name)
            if job_state is JobState.INTENT:
                backend_id = deps.executor.submit(key, job_spec(deps, state, run))
                log = deps.home.jobs / key / "stdout.log"
                store.submitted(deps.database, job_id, fence(deps, job_id), backend_id, log)
                deps.tell("submitted", job=key, arm=run.arm, seed=run.seed)
        return {}

    def reconcile(state: StudyState) -> Command[Literal["submit", "wait", "collect"]]:
        """Write down how the jobs stand. Jobs and rows may disagree after a crash; what the executor says is so."""
        runs = store.runs(deps.database, state["study_id"], state["stage"])
        observe(deps, runs)
        runs = store.runs(deps.database, state["study_id"], state["stage"])
        if any(run.wants_another_attempt or run.job_state in {None, JobState.INTENT} for run in runs):
            return Command(goto="submit")
        return Command(goto="collect" if all(run.is_settled for run in runs) else "wait")

    def wait(state: StudyState) -> StudyState:
        """Nothing happens here but waiting: a node that is resumed runs again from its start."""
        interrupt({"kind": "jobs", "stage": state["stage"]})
        return {}

    def collect(state: StudyState) -> StudyState:
        """Results came as events while the runs ran; what is left is to note the files they leave."""
        for run in store.runs(deps.database, state["study_id"], state["stage"]):
            results = run.run_dir / store.RESULTS_FILE
            if results.exists():
                with deps.database.write() as session:
                    writes.add_artifact(session, OwnerType.EXPERIMENT, run.experiment_id, "results", str(results))
        return {}

    graph = StateGraph(StudyState)
    graph.add_node("submit", submit)
    graph.add_node("reconcile", reconcile)
    graph.add_node("wait", wait)
    graph.add_node("collect", collect)
    graph.add_edge(START, "submit")
    graph.add_edge("submit", "reconcile")
    graph.add_edge("wait", "reconcile")
    graph.add_edge("collect", END)
    return graph.compile()


def job_spec(deps: Deps, state: StudyState, run: RunView) -> JobSpec:
    """What the executor is to run: the blueprint's command, and where, for which seed and rows."""
    command, environment, limit = store.command_of(deps.database, run.blueprint_id)
    database, _ = deps.database.for_child()
    program = [deps.python if word == "python" else word for word in command]
    return JobSpec(
        command=(
            *program,
            *("--run-dir", str(run.run_dir)),
            *("--seed", str(run.seed)),
            *("--experiment", run.experiment_id),
            *("--db", database),
            "--go-on",  # the arms of a plan are compared at the same number of updates
        ),
        folder=str(deps.paths(state).project(run.arm)),
        time_limit_s=limit,
        environment={**environment, "A3R_HOME": str(deps.home.root)},
    )


def observe(deps: Deps, runs: list[RunView]) -> None:
    """Bring the rows of open jobs up to what the executor knows."""
    open_jobs = {
        run.job_key: run for run in runs if run.job_key and run.job_state is not None and not run.job_state.is_terminal
    }
    statuses = deps.executor.poll(open_jobs)
    for key, run in open_jobs.items():
        assert run.job_id is not None
        if key not in statuses and run.job_state is JobState.INTENT:
            continue
        gone = JobStatus(key, HereState.LOST, "the executor does not know it any more", deps.home.jobs / key)
        status = statuses.get(key, gone)
        state, cause = store.judged(deps.executor, status, run.run_dir)
        if state is JobState.QUEUED and run.job_state is not JobState.SUBMITTED:
            continue
        try:
            news = store.observe(deps.database, run.job_id, fence(deps, run.job_id), status, cause, state)
        except StaleWriterError:
            # Somebody took the job over since: its number is read anew, and the next look is ours again.
            deps.fences.pop(run.job_id, None)
            raise
        if news and state.is_terminal:
            deps.tell("job_ended", job=key, arm=run.arm, seed=run.seed, state=state, cause=cause, s=status.seconds)


def fence(deps: Deps, job_id: str) -> int:
    """The number this process writes about a job with."""
    if job_id not in deps.fences:
        deps.fences[job_id] = store.take_over(deps.database, job_id)
    return deps.fences[job_id]
