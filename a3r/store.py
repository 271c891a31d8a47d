"""What the graph writes to the experiment log and reads back. Thin; one transaction a function, all repeatable.

The checkpoint of the graph holds ids only; whatever a node needs to know it reads here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlmodel import Session, col, func, or_, select

from a3r.errors import A3RError, UsageError
from a3r.estimates import ANALYSIS, STUDY_CODE, Draft, Measurement, RunRecord, code_sha
from a3r.executor import Executor, JobStatus
from a3r.executor import JobState as HereState
from a3r.integrity import Facts
from a3r.prereg.plan import Arm, Direction, Plan, Source, StageKind, load_locked
from experiments_db import models, queries, writes
from experiments_db.engine import Database

MAX_LOSSES = 3
"""So often a run may be lost before it is given up; one that fails by itself is not tried again, for failing is its
result, and one that the user stopped goes on however often."""
RESULTS_FILE = "results.json"
CAUSE_LINES = 3
"""Lines of a failed job's output that its row keeps."""
LOST_STATES = (models.JobState.LOST, models.JobState.PREEMPTED)
SKIPPED, NOT_FINITE_GRADIENT = "skipped", "nonfinite_gradient"
"""The engine's metrics, 1 where they hold: the update changed no weight; it did not because of its gradient."""


@dataclass(frozen=True, slots=True)
class RunView:
    """One run with its newest job."""

    experiment_id: str
    key: str
    arm: str
    seed: int
    stage: int
    status: models.ExperimentStatus
    reason: str | None
    """Why it failed or was quarantined."""
    run_dir: Path
    blueprint_id: str
    job_id: str | None
    job_key: str | None
    job_state: models.JobState | None
    attempt: int
    """0 before the first."""
    seconds: float
    """Wall time of all its jobs that ended."""
    num_lost: int = 0
    """Its jobs that were lost or preempted."""

    @property
    def is_settled(self) -> bool:
        """Whether it will not be started again by itself."""
        if self.job_state is None or not self.job_state.is_terminal:
            return False
        return not self.wants_another_attempt

    @property
    def wants_another_attempt(self) -> bool:
        """Its job was lost or cancelled: the run itself has no result yet."""
        if self.job_state is models.JobState.CANCELLED:
            return True
        return self.job_state in LOST_STATES and self.num_lost < MAX_LOSSES


def create_study(
    database: Database, question: str, fingerprint: Mapping[str, Any], graph_version: str, wishes: Mapping[str, Any]
) -> str:
    """A new study in draft; returns its id.

    Args:
        wishes: fields of `Wishes`.
    """
    with database.write() as session:
        return writes.create_study(
            session,
            models.StudyKind.RESEARCH,
            question,
            code_sha=code_sha(STUDY_CODE),
            env_fingerprint=fingerprint,
            graph_version=graph_version,
            wishes=wishes,
        )


def study(database: Database, study_id: str) -> models.Study:
    """The row of a research study, by its id, or the beginning or end of it.

    Raises:
        UsageError: there is none, or several fit.
    """
    wanted = study_id.strip().upper()
    with database.read() as session:
        ids = col(models.Study.id)
        fits = or_(ids.startswith(wanted, autoescape=True), ids.endswith(wanted, autoescape=True))
        found = session.exec(
            select(models.Study).where(fits, bool(wanted), models.Study.kind == models.StudyKind.RESEARCH)
        ).all()
        if len(found) == 1:
            return found[0]
        recent = session.exec(
            select(models.Study)
            .where(models.Study.kind == models.StudyKind.RESEARCH)
            .order_by(col(models.Study.created_at).desc())
            .limit(5)
        ).all()
    names = "; ".join(f"{row.id} ({row.question[:60]})" for row in recent) or "there is none yet"
    problem = "fits several studies" if found else "is no study here"
    raise UsageError(f"{study_id!r} {problem}. The newest: {names}")


def set_status(database: Database, study_id: str, status: models.StudyStatus, reason: str | None = None) -> None:
    """Say where the study stands."""
    with database.write() as session:
        writes.set_study_status(session, study_id, status, reason)


def lock(database: Database, study_id: str, plan: Plan) -> str:
    """Fix the plan and everything that follows from it as rows; returns its hash."""
    with database.write() as session:
        prereg = writes.add_prereg(session, study_id, plan.model_dump(mode="json"))
        for assumption in plan.assumptions:
            is_stated = assumption.source is not Source.DEFAULT
            source = models.AssumptionSource.USER if is_stated else models.AssumptionSource.DEFAULT
            writes.add_assumption(session, study_id, assumption.text, source)
        levels = plan.factor.levels
        is_ordered = all(isinstance(level, int | float) and not isinstance(level, bool) for level in levels)
        kind = models.FactorKind.ORDINAL if is_ordered else models.FactorKind.CATEGORICAL
        writes.add_factor(session, prereg, plan.factor.path, list(levels), kind)
        directions = {
            Direction.BETTER: models.Direction.BETTER,
            Direction.WORSE: models.Direction.WORSE,
            Direction.DIFFERENT: models.Direction.DIFFERENT,
        }
        for hypothesis in plan.hypotheses:
            writes.add_hypothesis(
                session,
                prereg,
                hypothesis.code,
                hypothesis.statement,
                estimand=plan.metric.kind.value,
                direction=directions[hypothesis.expected],
                arm_key=hypothesis.arm,
                delta_equiv=plan.metric.margin,
            )
        row = writes.get(session, models.Prereg, prereg)
        assert row.sha256 == plan.sha256, "the plan's canonical JSON is not the one that was locked"
        return row.sha256


def prereg(database: Database, study_id: str) -> models.Prereg:
    """The locked plan's row.

    Raises:
        A3RError: nothing is locked yet.
    """
    with database.read() as session:
        row = session.exec(
            select(models.Prereg).where(models.Prereg.study_id == study_id).order_by(col(models.Prereg.version).desc())
        ).first()
    if row is None:
        raise A3RError(f"study {study_id} has no locked plan; `a3r resume {study_id}` goes on with it")
    return row


def plan_of(database: Database, study_id: str) -> Plan:
    """The locked plan.

    Raises:
        A3RError: nothing is locked yet, or the plan is not what was locked.
    """
    row = prereg(database, study_id)
    try:
        return load_locked(row.canonical_json, row.sha256)
    except ValueError as error:
        raise A3RError(f"study {study_id}: {error}") from error


@dataclass(frozen=True, slots=True)
class Batch:
    """The runs of one stage: some arms at some seeds."""

    n: int
    kind: StageKind
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]


def batch_of(plan: Plan, stage: int) -> Batch:
    """Stage 0 is the reference alone, 1 the other arms, 2 every arm at the extra seeds."""
    match stage:
        case 0:
            return Batch(0, StageKind.NOISE_FLOOR, (plan.reference,), plan.seeds)
        case 1:
            return Batch(1, StageKind.COMPARE, plan.treated, plan.seeds)
        case 2:
            return Batch(2, StageKind.COMPARE, plan.arms, plan.extra_seeds)
        case _:
            raise AssertionError(f"a plan of two looks has no stage {stage}")


def draw_up(
    database: Database,
    study_id: str,
    plan: Plan,
    batch: Batch,
    run_dirs: Mapping[tuple[str, int], Path],
    template_sha: str,
) -> None:
    """The stage, a blueprint for each of its arms, and its runs, as rows."""
    hypotheses = {hypothesis.arm: hypothesis for hypothesis in plan.hypotheses}
    with database.write() as session:
        locked = session.exec(select(models.Prereg).where(models.Prereg.study_id == study_id)).one()
        stage = writes.add_stage(
            session,
            locked.id,
            batch.n,
            models.StageKind(batch.kind.value),
            seeds_policy={"seeds": list(batch.seeds), "shared_by": [arm.key for arm in plan.arms]},
            max_jobs=plan.budget.parallel,
        )
        codes = {
            row.code: row.id
            for row in session.exec(select(models.Hypothesis).where(models.Hypothesis.prereg_id == locked.id))
        }
        for arm in batch.arms:
            hypothesis = hypotheses.get(arm.key)
            expected = {"direction": hypothesis.expected.value, "statement": hypothesis.statement} if hypothesis else {}
            blueprint = writes.add_blueprint(
                session,
                stage,
                arm.key,
                objective=_objective(plan, arm, batch),
                template_id=plan.template.name,
                template_version=plan.template.version,
                template_sha=template_sha,
                params={**arm.settings, **{f"rules.{name}": value for name, value in arm.rules.items()}},
                controls={
                    **plan.controls.settings,
                    **{f"rules.{name}": value for name, value in plan.controls.rules.items()},
                },
                hypothesis_id=codes[hypothesis.code] if hypothesis else None,
                expected=expected,
                environment={"OMP_NUM_THREADS": "1"},
                command=["python", "train.py", "--json"],
                outputs=["results.json", "record.jsonl", "journal.db", "checkpoints/"],
                resource={"cores": 1, "gpus": 0},
                time_limit_s=plan.budget.job_limit_s,
                metrics=[plan.metric.kind.value],
                notes=f"Locked by {plan.sha256}.",
            )
            for seed in batch.seeds:
                writes.add_experiment(
                    session,
                    blueprint,
                    f"{study_id}-{arm.key}-s{seed}",
                    seed_train=seed,
                    run_dir=str(run_dirs[arm.key, seed]),
                )


def _objective(plan: Plan, arm: Arm, batch: Batch) -> str:
    level = f"{plan.factor.label} {arm.level}"
    match batch.n:
        case 0:
            return f"How far runs at {level} differ by their seed alone, before another level is tried."
        case 1:
            return f"What {plan.metric.kind.value} comes to at {level}, over the seeds of the reference."
        case _:
            return f"More seeds at {level}, as the locked tree asked."


def runs(database: Database, study_id: str, stage: int | None = None) -> list[RunView]:
    """The study's runs, in order of stage, arm and seed; of one stage where it is given."""
    with database.read() as session:
        rows = session.exec(
            select(models.Experiment, models.Blueprint, models.Stage)
            .join(models.Blueprint, col(models.Experiment.blueprint_id) == col(models.Blueprint.id))
            .join(models.Stage, col(models.Blueprint.stage_id) == col(models.Stage.id))
            .join(models.Prereg, col(models.Stage.prereg_id) == col(models.Prereg.id))
            .where(models.Prereg.study_id == study_id)
            .order_by(col(models.Stage.n), col(models.Blueprint.arm_key), col(models.Experiment.seed_train))
        ).all()
        found: list[RunView] = []
        for experiment, blueprint, row in rows:
            if stage is not None and row.n != stage:
                continue
            jobs = session.exec(
                select(models.Job).where(models.Job.experiment_id == experiment.id).order_by(col(models.Job.attempt))
            ).all()
            newest = jobs[-1] if jobs else None
            found.append(
                RunView(
                    experiment_id=experiment.id,
                    key=experiment.key,
                    arm=blueprint.arm_key,
                    seed=experiment.seed_train,
                    stage=row.n,
                    status=experiment.status,
                    reason=experiment.quarantine_reason or (newest.state_cause if newest else None),
                    run_dir=Path(experiment.run_dir or "."),
                    blueprint_id=blueprint.id,
                    job_id=newest.id if newest else None,
                    job_key=newest.key if newest else None,
                    job_state=newest.state if newest else None,
                    attempt=newest.attempt if newest else 0,
                    seconds=math.fsum(
                        (job.ended_at - job.started_at).total_seconds()
                        for job in jobs
                        if job.started_at and job.ended_at
                    ),
                    num_lost=sum(job.state in LOST_STATES for job in jobs),
                )
            )
    return found


def command_of(database: Database, blueprint_id: str) -> tuple[list[str], dict[str, str], float]:
    """A blueprint's command, environment and time limit in seconds."""
    with database.read() as session:
        row = writes.get(session, models.Blueprint, blueprint_id)
        assert row.time_limit_s is not None, "a study's blueprints have a time limit"
        return (
            [str(word) for word in row.command],
            {str(k): str(v) for k, v in row.environment.items()},
            row.time_limit_s,
        )


def intend(database: Database, run: RunView, backend: str) -> tuple[str, str, models.JobState]:
    """The run's open job, or a new attempt written down before it is started: id, key, state."""
    attempt = run.attempt
    if run.job_state is None or run.job_state.is_terminal:
        attempt += 1
    with database.write() as session:
        job_id = writes.add_job(session, run.experiment_id, attempt=attempt, backend=backend)
        job = writes.get(session, models.Job, job_id)
        return job.id, job.key, job.state


def take_over(database: Database, job_id: str) -> int:
    """Become the one that writes about a job."""
    with database.write() as session:
        return writes.take_over(session, job_id)


def submitted(database: Database, job_id: str, fencing: int, backend_id: str, log: Path) -> None:
    """The executor has the job."""
    with database.write() as session:
        if writes.get(session, models.Job, job_id).state is models.JobState.INTENT:
            writes.record_job(
                session,
                job_id,
                models.JobState.SUBMITTED,
                fencing=fencing,
                backend_id=backend_id,
                log_path=str(log),
            )


_STATES = {
    HereState.QUEUED: models.JobState.QUEUED,
    HereState.RUNNING: models.JobState.RUNNING,
    HereState.SUCCEEDED: models.JobState.SUCCEEDED,
    HereState.FAILED: models.JobState.FAILED_CODE,
    HereState.TIMEOUT: models.JobState.TIMEOUT,
    HereState.CANCELLED: models.JobState.CANCELLED,
    HereState.LOST: models.JobState.LOST,
}


def observe(
    database: Database, job_id: str, fencing: int, status: JobStatus, cause: str, state: models.JobState
) -> bool:
    """Write down how a job stands; returns whether that was news."""
    with database.write() as session:
        job = writes.get(session, models.Job, job_id)
        changed = False
        for step, moment in ((models.JobState.RUNNING, status.started_at), (state, status.ended_at)):
            if job.state is not step and writes.can_move(job.state, step) and (step is state or moment is not None):
                at = datetime.fromtimestamp(moment, UTC) if moment is not None else None
                changed |= writes.record_job(
                    session,
                    job_id,
                    step,
                    fencing=fencing,
                    cause=cause,
                    at=at,
                    exit_code=status.exit_code,
                    signal=status.signal,
                )
        return changed


def state_of(status: JobStatus) -> models.JobState:
    """The executor's word for a job as the log's."""
    if status.state is HereState.FAILED and status.signal == 9:
        return models.JobState.FAILED_OOM
    return _STATES[status.state]


def judged(executor: Executor, status: JobStatus, run_dir: Path) -> tuple[models.JobState, str]:
    """How a job stands, and why. Exit code 0 without results is a failure: silence is no success."""
    state = state_of(status)
    if status.state is HereState.SUCCEEDED and not (run_dir / RESULTS_FILE).exists():
        return models.JobState.FAILED_CODE, f"exit code 0, but it left no {RESULTS_FILE}"
    if status.state is HereState.FAILED:
        said = executor.tail(status.key, CAUSE_LINES)
        return state, f"{status.cause}: {said}" if said else status.cause
    return state, status.cause


def records(database: Database, plan: Plan, views: Iterable[RunView]) -> list[RunRecord]:
    """The held-out scores of these runs, as they are in the log."""
    with database.read() as session:
        return [_record(session, plan, view) for view in views]


def _record(session: Session, plan: Plan, view: RunView) -> RunRecord:
    settings = plan.settings_of(plan.arm(view.arm))
    group, tasks = settings["trainer.group_size"], settings["trainer.tasks_per_update"]
    assert isinstance(group, int)
    assert isinstance(tasks, int)
    evaluations = session.exec(
        select(models.EvalRun)
        .where(
            models.EvalRun.experiment_id == view.experiment_id,
            models.EvalRun.split_name == plan.metric.split,
            models.EvalRun.temperature == plan.metric.temperature,
        )
        .order_by(col(models.EvalRun.step), col(models.EvalRun.label))
    ).all()
    measured: dict[int, Measurement] = {}
    for evaluation in evaluations:
        # Columns, not rows: a study reads its scores at every step, and has tens of thousands of them.
        items = session.exec(
            select(models.EvalItem.item_id, models.EvalItem.score).where(models.EvalItem.eval_run_id == evaluation.id)
        )
        scores: dict[str, list[float]] = {}
        for item_id, score in items:
            if score is not None:
                scores.setdefault(item_id, []).append(score)
        if scores:
            means = {name: math.fsum(scores[name]) / len(scores[name]) for name in sorted(scores)}
            measured[evaluation.step] = Measurement(evaluation.step, evaluation.step * group * tasks, means)
    failure = None
    if view.status is not models.ExperimentStatus.DONE:
        failure = view.reason or view.status.value
    return RunRecord(view.experiment_id, view.arm, view.seed, tuple(measured.values()), failure)


def store_estimates(database: Database, study_id: str, stage: int, drafts: Sequence[Draft]) -> dict[str, str]:
    """Keep numbers as rows; returns their ids by key."""
    with database.write() as session:
        row = session.exec(
            select(models.Stage)
            .join(models.Prereg, col(models.Stage.prereg_id) == col(models.Prereg.id))
            .where(models.Prereg.study_id == study_id, models.Stage.n == stage)
        ).one()
        return {
            draft.key: writes.add_estimate(
                session,
                study_id,
                draft.key,
                estimand=draft.estimand,
                method=draft.method,
                value=draft.value,
                experiments=draft.experiments,
                stage_id=row.id,
                unit=draft.unit,
                ci_lo=draft.ci[0] if draft.ci else None,
                ci_hi=draft.ci[1] if draft.ci else None,
                level=draft.level,
                se_seed=draft.se_seed,
                se_eval=draft.se_eval,
                n_seeds=draft.n_seeds,
                n_items=draft.n_items,
                p=draft.p,
                p_adj=draft.p_adj,
                family=draft.family,
                params=draft.params,
                query_sql=QUERY,
                analysis_sha=code_sha(ANALYSIS),
                inputs_sha=draft.inputs_sha,
            )
            for draft in drafts
        }


QUERY = (
    "SELECT r.experiment_id, r.step, i.item_id, i.sample, i.score FROM eval_item i "
    "JOIN eval_run r ON r.id = i.eval_run_id "
    "JOIN estimate_input e ON e.experiment_id = r.experiment_id "
    "WHERE e.estimate_id = :estimate_id ORDER BY r.experiment_id, r.step, i.item_id, i.sample"
)
"""Reads the scores behind an estimate."""


def estimates(database: Database, study_id: str) -> dict[str, models.Estimate]:
    """Every number of the study, by key."""
    with database.read() as session:
        rows = session.exec(select(models.Estimate).where(models.Estimate.study_id == study_id)).all()
    return {row.key: row for row in rows}


def decisions(database: Database, study_id: str) -> list[tuple[int, models.Decision]]:
    """Every decision with the number of its stage, in order."""
    with database.read() as session:
        rows = session.exec(
            select(models.Stage.n, models.Decision)
            .join(models.Stage, col(models.Decision.stage_id) == col(models.Stage.id))
            .join(models.Prereg, col(models.Stage.prereg_id) == col(models.Prereg.id))
            .where(models.Prereg.study_id == study_id)
            .order_by(col(models.Stage.n), col(models.Decision.n))
        ).all()
    return [(n, decision) for n, decision in rows]


def stage_id(database: Database, study_id: str, stage: int) -> str:
    """The row of a stage."""
    with database.read() as session:
        return session.exec(
            select(models.Stage.id)
            .join(models.Prereg, col(models.Stage.prereg_id) == col(models.Prereg.id))
            .where(models.Prereg.study_id == study_id, models.Stage.n == stage)
        ).one()


def claims(database: Database, study_id: str) -> list[models.Claim]:
    """The study's claims, in order."""
    with database.read() as session:
        return list(
            session.exec(
                select(models.Claim).where(models.Claim.study_id == study_id).order_by(col(models.Claim.key))
            ).all()
        )


def hypotheses(database: Database, study_id: str) -> dict[str, models.Hypothesis]:
    """The study's hypotheses, by code."""
    with database.read() as session:
        rows = session.exec(
            select(models.Hypothesis)
            .join(models.Prereg, col(models.Hypothesis.prereg_id) == col(models.Prereg.id))
            .where(models.Prereg.study_id == study_id)
        ).all()
    return {row.code: row for row in rows}


def findings(database: Database, ids: Iterable[str]) -> list[models.AuditFinding]:
    """What integrity checks found about these rows."""
    with database.read() as session:
        return list(
            session.exec(
                select(models.AuditFinding)
                .where(col(models.AuditFinding.target_id).in_(list(ids)))
                .order_by(col(models.AuditFinding.detector), col(models.AuditFinding.message))
            ).all()
        )


def facts(database: Database, experiment_id: str) -> Facts:
    """What the log says of a run beside its scores."""
    with database.read() as session:
        config = session.exec(
            select(models.EngineEvent)
            .where(models.EngineEvent.experiment_id == experiment_id, models.EngineEvent.kind == "config")
            .order_by(col(models.EngineEvent.at).desc())
        ).first()
        trained = session.exec(
            select(func.count())
            .select_from(models.EpisodeRow)
            .where(
                models.EpisodeRow.experiment_id == experiment_id,
                models.EpisodeRow.mode == "train",
                col(models.EpisodeRow.trained_step).is_not(None),
            )
        ).one()
        marks = (models.ValueMark.NAN, models.ValueMark.POSITIVE_INFINITY, models.ValueMark.NEGATIVE_INFINITY)
        names = session.exec(
            select(models.MetricPoint.name)
            .where(models.MetricPoint.experiment_id == experiment_id, col(models.MetricPoint.mark).in_(marks))
            .distinct()
        ).all()
        curves = queries.all_curves(session, experiment_id)
    # The engine reports no NaN: a metric that is no finite number comes as null, and these two say why.
    steps = {
        name: {point.step for point in curves[name].points if point.value} if name in curves else set()
        for name in (SKIPPED, NOT_FINITE_GRADIENT)
    }
    every = {point.step for curve in curves.values() for point in curve.points}
    return Facts(
        config=config.payload.get("config") if config else None,
        num_trained=trained or None,
        not_finite=tuple(sorted(names)),
        num_gradients=len(every - steps[SKIPPED] | steps[NOT_FINITE_GRADIENT]),
        num_not_finite_gradients=len(steps[NOT_FINITE_GRADIENT]),
    )
