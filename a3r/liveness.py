"""Says of runs and studies on record that they are interrupted, where the process that worked on them is gone.

One that is killed, loses its machine or finds the disk full can't write down that it has ended, and its row would say
`running` for ever. Who works on something holds a lock in its folder, and the system lets go of that when the process
ends, however it ends: no number of a process is asked about, which another process may have by now.
"""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from sqlmodel import col, select

from a3r import store
from a3r.executor import LocalExecutor
from a3r.paths import Home
from experiments_db import writes
from experiments_db.engine import Database
from experiments_db.errors import StaleWriterError, UnavailableError
from experiments_db.models import Experiment, Job, JobState, Study, StudyKind, StudyStatus
from swarm_engine.locks import is_held
from vibe.run_folder import COMMAND_LOCK_FILE

GONE = "its process ended without a word: it was killed, or could not write any more"


def note_the_dead(database: Database, home: Home) -> None:
    """Bring the rows of what nobody works on any more up to what is so. Where they can't be written they stay."""
    with contextlib.suppress(UnavailableError, StaleWriterError):
        _runs_of_vibe(database, home)
        _studies(database, home)


def _runs_of_vibe(database: Database, home: Home) -> None:
    with database.read() as session:
        # Only runs of `vibe` have a job without a place in an executor's queue.
        rows = session.exec(
            select(Job, Experiment)
            .join(Experiment, col(Experiment.id) == col(Job.experiment_id))
            .where(col(Job.state).in_([JobState.SUBMITTED, JobState.RUNNING]), col(Job.backend_id).is_(None))
        ).all()
    for job, experiment in rows:
        if experiment.run_dir is None or not _is_let_go(
            database, home.place(experiment.run_dir) / COMMAND_LOCK_FILE, job.host
        ):
            continue
        with database.write() as session:
            if writes.get(session, Job, job.id).state is job.state:  # nobody has gone on with it since
                fencing = writes.take_over(session, job.id)
                writes.record_job(session, job.id, JobState.LOST, fencing=fencing, cause=GONE)


def _studies(database: Database, home: Home) -> None:
    with database.read() as session:
        open_ones = (StudyStatus.LOCKED, StudyStatus.RUNNING)
        studies = session.exec(
            select(Study).where(Study.kind == StudyKind.RESEARCH, col(Study.status).in_(open_ones))
        ).all()
    executor = LocalExecutor(home.jobs, slots=1)
    for study in studies:
        lock = home.study(study.id).lock
        # A study that another home or machine works on has no lock here.
        if not lock.exists() or is_held(lock):
            continue
        runs = [run for run in store.runs(database, study.id) if run.job_key and run.job_state is JobState.RUNNING]
        statuses = executor.look(run.job_key for run in runs if run.job_key)
        for run in runs:
            assert run.job_id
            assert run.job_key
            status = statuses.get(run.job_key)
            if status is not None and status.state.is_final:
                state, cause = store.judged(executor, status, home.place(run.run_dir))
                store.observe(database, run.job_id, store.take_over(database, run.job_id), status, cause, state)
        store.set_status(database, study.id, StudyStatus.PAUSED, f"{GONE}; go on with: a3r resume {study.id}")


def _is_let_go(database: Database, lock: Path, host: str | None) -> bool:
    """Whether nobody holds a lock any more. A file of SQLite is on a local disk, so whoever writes rows in it is here;
    a database server has rows of other machines, whose locks can't be seen."""
    if database.engine.dialect.name != "sqlite" and (host != socket.gethostname() or not lock.exists()):
        return False
    return not is_held(lock)
