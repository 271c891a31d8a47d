"""Adding to the experiment log. Every function may be called twice: the second call finds the row of the first.

A row is named by its key or its place (study and version, stage and arm …). Asked to add one that is there, a function
returns its id where the content agrees and raises ConflictError where it does not, so that a step that crashed between
writing and remembering is simply done again. All take a session of `Database.write()` and return ids; what they add is
committed when that block ends.

    with database.write() as session:
        study = create_study(session, StudyKind.RESEARCH, "Does a group size of 8 learn faster than 4?")
        prereg = add_prereg(session, study, plan)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, TypeVar, assert_never

from sqlalchemy import update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError
from sqlmodel import Session, col, select

from experiments_db.columns import canonical_json, sha256_of, utc_now
from experiments_db.errors import ConflictError, NotFoundError, StaleWriterError, TransitionError, first_line
from experiments_db.intervals import LEVEL
from experiments_db.models import (
    Amendment,
    Artifact,
    Assumption,
    AssumptionSource,
    AuditFinding,
    Blueprint,
    Claim,
    ClaimEvidence,
    ClaimForm,
    ClaimStatus,
    ClaimStrength,
    Decision,
    DecisionEstimate,
    Direction,
    Estimate,
    EstimateInput,
    Experiment,
    ExperimentStatus,
    Factor,
    FactorKind,
    Hypothesis,
    HypothesisRole,
    Job,
    JobEvent,
    JobState,
    OwnerType,
    Prereg,
    Relation,
    Row,
    RunRole,
    Severity,
    Stage,
    StageKind,
    Study,
    StudyKind,
    StudyStatus,
)
from experiments_db.ulid import new_ulid

R = TypeVar("R", bound=Row)

SINGLE_ARM = "single"
SINGLE_KEY = "single:"
"""Begins the key of a run of its own."""
"""Arm of a run that is compared with nothing."""

_ORDER = {state: place for place, state in enumerate(JobState)}


# Studies and plans


def create_study(
    session: Session,
    kind: StudyKind,
    question: str,
    *,
    key: str | None = None,
    owner: str | None = None,
    budget: Mapping[str, Any] | None = None,
    code_sha: str | None = None,
    env_fingerprint: Mapping[str, Any] | None = None,
    graph_version: str | None = None,
    wishes: Mapping[str, Any] | None = None,
) -> str:
    """A new study in `draft`; with a key, the one study of that key."""
    study = Study(
        kind=kind,
        question=question,
        key=key,
        owner=owner,
        budget=dict(budget or {}),
        code_sha=code_sha,
        env_fingerprint=dict(env_fingerprint or {}),
        graph_version=graph_version,
        wishes=dict(wishes or {}),
    )
    if key is None:
        session.add(study)
        session.flush()
        return study.id
    return _put(session, study, by=("key",), same=("kind", "question")).id


def set_study_status(session: Session, study_id: str, status: StudyStatus, reason: str | None = None) -> None:
    """Say where a study stands. `done`, `failed` and `abandoned` also note the time."""
    study = get(session, Study, study_id)
    is_end = status in (StudyStatus.DONE, StudyStatus.FAILED, StudyStatus.ABANDONED)
    if study.status != status:
        study.finished_at = utc_now() if is_end else None
    study.status = status
    study.status_reason = reason
    session.add(study)
    session.flush()


def add_assumption(
    session: Session, study_id: str, text: str, source: AssumptionSource, confirmed_by: str | None = None
) -> str:
    """Something the question left open, and who filled it in."""
    row = Assumption(study_id=study_id, text=text, source=source, confirmed_by=confirmed_by)
    return _put(session, row, by=("study_id", "text"), same=("source",)).id


def add_prereg(session: Session, study_id: str, plan: Mapping[str, Any], *, version: int = 1) -> str:
    """Lock a plan by the SHA-256 of its canonical JSON. A study in `draft` becomes `locked`.

    Raises:
        ConflictError: the version is taken by another plan; use `amend`.
        ValueError: the plan holds a number that is not finite.
    """
    text = canonical_json(plan)
    row = Prereg(study_id=study_id, version=version, canonical_json=text, sha256=sha256_of(text))
    prereg = _put(session, row, by=("study_id", "version"), same=("sha256",))
    if get(session, Study, study_id).status is StudyStatus.DRAFT:
        set_study_status(session, study_id, StudyStatus.LOCKED)
    return prereg.id


def amend(
    session: Session, prereg_id: str, plan: Mapping[str, Any], *, reason: str, data_seen: bool, approved_by: str
) -> str:
    """Lock a changed plan as the next version and record why; returns the id of the new Prereg."""
    before = get(session, Prereg, prereg_id)
    new_id = add_prereg(session, before.study_id, plan, version=before.version + 1)
    after = get(session, Prereg, new_id)
    row = Amendment(
        prereg_id=prereg_id,
        before_sha=before.sha256,
        after_sha=after.sha256,
        reason=reason,
        data_seen=data_seen,
        approved_by=approved_by,
    )
    _put(session, row, by=("prereg_id", "after_sha"), same=("reason", "data_seen"))
    return new_id


def add_hypothesis(
    session: Session,
    prereg_id: str,
    code: str,
    statement: str,
    *,
    estimand: str,
    direction: Direction,
    arm_key: str | None = None,
    delta_min: float | None = None,
    delta_equiv: float | None = None,
    family: str = "primary",
    role: HypothesisRole = HypothesisRole.PRIMARY,
) -> str:
    """What is expected of one arm; `code` is `H1`, `H2` … within the plan."""
    row = Hypothesis(
        prereg_id=prereg_id,
        code=code,
        arm_key=arm_key,
        statement=statement,
        estimand=estimand,
        direction=direction,
        delta_min=delta_min,
        delta_equiv=delta_equiv,
        family=family,
        role=role,
    )
    same = ("arm_key", "statement", "estimand", "direction", "delta_min", "delta_equiv", "family", "role")
    return _put(session, row, by=("prereg_id", "code"), same=same).id


def add_factor(
    session: Session, prereg_id: str, name: str, levels: Sequence[Any], kind: FactorKind, unit: str | None = None
) -> str:
    """What differs between arms on purpose; `name` is a dotted path such as `trainer.group_size`."""
    row = Factor(prereg_id=prereg_id, name=name, levels=list(levels), kind=kind, unit=unit)
    return _put(session, row, by=("prereg_id", "name"), same=("levels", "kind", "unit")).id


# Stages, blueprints, runs


def add_stage(
    session: Session,
    prereg_id: str,
    n: int,
    kind: StageKind,
    *,
    rungs: Sequence[Any] = (),
    seeds_policy: Mapping[str, Any] | None = None,
    eval_split_id: str | None = None,
    max_jobs: int | None = None,
) -> str:
    """The plan's stage number `n`, from 0."""
    row = Stage(
        prereg_id=prereg_id,
        n=n,
        kind=kind,
        rungs=list(rungs),
        seeds_policy=dict(seeds_policy or {}),
        eval_split_id=eval_split_id,
        max_jobs=max_jobs,
    )
    return _put(session, row, by=("prereg_id", "n"), same=("kind", "rungs", "seeds_policy", "eval_split_id")).id


def add_blueprint(
    session: Session,
    stage_id: str,
    arm_key: str,
    *,
    objective: str,
    template_id: str,
    template_version: str | None = None,
    template_sha: str | None = None,
    params: Mapping[str, Any] | None = None,
    controls: Mapping[str, Any] | None = None,
    hypothesis_id: str | None = None,
    expected: Mapping[str, Any] | None = None,
    environment: Mapping[str, Any] | None = None,
    command: Sequence[str] = (),
    outputs: Sequence[str] = (),
    resource: Mapping[str, Any] | None = None,
    time_limit_s: float | None = None,
    metrics: Sequence[str] = (),
    notes: str | None = None,
) -> str:
    """Everything a worker needs to run one arm of a stage."""
    content: dict[str, Any] = {
        "objective": objective,
        "expected": dict(expected or {}),
        "template_id": template_id,
        "template_version": template_version,
        "template_sha": template_sha,
        "params": dict(params or {}),
        "controls": dict(controls or {}),
        "environment": dict(environment or {}),
        "command": list(command),
        "outputs": list(outputs),
        "resource": dict(resource or {}),
        "time_limit_s": time_limit_s,
        "metrics": list(metrics),
        "notes": notes,
    }
    row = Blueprint(
        stage_id=stage_id,
        arm_key=arm_key,
        hypothesis_id=hypothesis_id,
        sha256=sha256_of(canonical_json({"arm_key": arm_key, **content})),
        **content,
    )
    return _put(session, row, by=("stage_id", "arm_key"), same=("hypothesis_id", *content)).id


def add_experiment(
    session: Session,
    blueprint_id: str,
    key: str,
    *,
    seed_train: int,
    seed_env: int | None = None,
    seed_eval: int | None = None,
    rung: int = 0,
    role: RunRole = RunRole.SELECT,
    run_dir: str | None = None,
) -> str:
    """One run of an arm. The same key is the same run."""
    row = Experiment(
        blueprint_id=blueprint_id,
        key=key,
        seed_train=seed_train,
        seed_env=seed_env,
        seed_eval=seed_eval,
        rung=rung,
        role=role,
        run_dir=run_dir,
    )
    same = ("blueprint_id", "seed_train", "seed_env", "seed_eval", "rung", "role")
    return _put(session, row, by=("key",), same=same).id


def set_run_dir(session: Session, experiment_id: str, run_dir: str) -> None:
    """Say where a run's files are."""
    get(session, Experiment, experiment_id).run_dir = run_dir
    session.flush()


def quarantine(session: Session, experiment_id: str, reason: str) -> None:
    """Take a run out of the estimates, for good. It stays in the log and is counted."""
    experiment = get(session, Experiment, experiment_id)
    experiment.status = ExperimentStatus.QUARANTINED
    experiment.quarantine_reason = reason
    session.flush()


def create_single_run(
    session: Session,
    kind: StudyKind | str,
    question: str,
    template: str,
    params: Mapping[str, Any],
    *,
    key: str | None = None,
    seed_train: int = 0,
    template_version: str | None = None,
    template_sha: str | None = None,
    controls: Mapping[str, Any] | None = None,
    objective: str | None = None,
    command: Sequence[str] = (),
    metrics: Sequence[str] = (),
    run_dir: str | None = None,
    code_sha: str | None = None,
    env_fingerprint: Mapping[str, Any] | None = None,
) -> str:
    """A run that compares nothing, with the study, plan, stage and blueprint it hangs under; returns the run's id.

    Start it with `begin_attempt`. With a key (a run's folder, say) a second call finds the first one's run.

    Raises:
        ConflictError: the key names a run with other settings.
    """
    name = key if key is not None else new_ulid()
    study = create_study(
        session,
        StudyKind(kind),
        question,
        key=SINGLE_KEY + name,
        code_sha=code_sha,
        env_fingerprint=env_fingerprint,
    )
    plan = {
        "format": "single-run-1",
        "question": question,
        "template": template,
        "template_version": template_version,
        "params": dict(params),
        "controls": dict(controls or {}),
        "seed_train": seed_train,
    }
    try:
        prereg = add_prereg(session, study, plan)
    except ConflictError as error:
        raise ConflictError(
            f"run {name!r} was begun with other settings; give it the same ones to go on, or start a new run elsewhere"
        ) from error
    stage = add_stage(session, prereg, 0, StageKind.SINGLE)
    blueprint = add_blueprint(
        session,
        stage,
        SINGLE_ARM,
        objective=objective or question,
        template_id=template,
        template_version=template_version,
        template_sha=template_sha,
        params=params,
        controls=controls,
        command=command,
        metrics=metrics,
    )
    return add_experiment(session, blueprint, SINGLE_KEY + name, seed_train=seed_train, run_dir=run_dir)


# Jobs


@dataclass(frozen=True, slots=True)
class Attempt:
    """A job that this process writes about until another one takes it over."""

    job_id: str
    key: str
    """What the backend is to know it by."""
    attempt: int
    state: JobState
    fencing: int
    """Goes with every write; see `take_over`."""


def add_job(session: Session, experiment_id: str, *, attempt: int = 1, backend: str = "local") -> str:
    """Write down the intent to run an experiment, before anything is started."""
    experiment = get(session, Experiment, experiment_id)
    row = Job(experiment_id=experiment_id, attempt=attempt, key=f"{experiment.key}.{attempt}", backend=backend)
    job, is_new = _put_once(session, row, by=("experiment_id", "attempt"), same=("key", "backend"))
    if is_new:
        session.add(JobEvent(job_id=job.id, kind="state", payload={"from": None, "to": JobState.INTENT}))
        session.flush()
    return job.id


def take_over(session: Session, job_id: str) -> int:
    """Become the only process that writes about a job; returns the number to write with.

    Whoever wrote about it before gets StaleWriterError from now on, so a process that was thought dead can't overwrite
    what its successor found out.
    """
    session.execute(update(Job).where(col(Job.id) == job_id).values(fencing=col(Job.fencing) + 1))
    job = get(session, Job, job_id)
    session.refresh(job)
    session.add(JobEvent(job_id=job_id, kind="takeover", payload={"fencing": job.fencing}))
    session.flush()
    return job.fencing


def begin_attempt(session: Session, experiment_id: str, *, backend: str = "local") -> Attempt:
    """Take over the run's open job, or write down a next attempt where there is none.

    A job whose process is known to be gone should be recorded as LOST first; it is then followed by a new attempt.
    """
    newest = session.exec(
        select(Job).where(Job.experiment_id == experiment_id).order_by(col(Job.attempt).desc())
    ).first()
    if newest is not None and not newest.state.is_terminal:
        job_id = newest.id
    else:
        job_id = add_job(session, experiment_id, attempt=newest.attempt + 1 if newest else 1, backend=backend)
    fencing = take_over(session, job_id)
    job = get(session, Job, job_id)
    return Attempt(job.id, job.key, job.attempt, job.state, fencing)


def record_job(
    session: Session,
    job_id: str,
    state: JobState,
    *,
    fencing: int,
    cause: str | None = None,
    at: datetime | None = None,
    backend_id: str | None = None,
    host: str | None = None,
    exit_code: int | None = None,
    signal: int | None = None,
    log_path: str | None = None,
    gpus: Sequence[Any] | None = None,
    cost_gpu_s: float | None = None,
) -> bool:
    """Move a job to a state, forwards only; states that nobody saw may be skipped. Its run's status follows.

    Args:
        fencing: from `take_over`.
        at: when it happened; None is now.
    Returns:
        Whether anything changed: False where the job is in that state already.
    Raises:
        StaleWriterError: another process has taken the job over.
        TransitionError: the job has ended, is further already, or was never submitted and can't have run.
    """
    job = get(session, Job, job_id)
    # Lock the row, or another process could move it between the look and the write; SQLite's writers hold all of it.
    session.refresh(job, with_for_update=True)
    if fencing < job.fencing:
        raise StaleWriterError(
            f"job {job.key} was taken over: this process writes with number {fencing}, the job is at {job.fencing}; "
            "stop here, the other process goes on"
        )
    if fencing > job.fencing:
        raise ValueError(f"number {fencing} was never given out for job {job.key}, it is at {job.fencing}; take_over()")
    if state is job.state:
        return False
    _check_transition(job, state)
    moment = at or utc_now()
    before, job.state, job.state_cause = job.state, state, cause
    given = {
        "backend_id": backend_id,
        "host": host,
        "exit_code": exit_code,
        "signal": signal,
        "log_path": log_path,
        "gpus": list(gpus) if gpus is not None else None,
        "cost_gpu_s": cost_gpu_s,
        "submitted_at": moment if state is JobState.SUBMITTED else None,
        "started_at": moment if state is JobState.RUNNING else None,
        "ended_at": moment if state.is_terminal else None,
    }
    for name, value in given.items():
        if value is not None:
            setattr(job, name, value)
    payload = {"from": before, "to": state, "cause": cause, "exit_code": exit_code, "signal": signal}
    session.add(JobEvent(job_id=job_id, at=moment, kind="state", payload=payload))
    _follow(get(session, Experiment, job.experiment_id), state, moment)
    session.flush()
    return True


def heartbeat(session: Session, job_id: str, *, fencing: int, at: datetime | None = None) -> None:
    """Say that a job is alive.

    Raises:
        StaleWriterError: another process has taken the job over.
    """
    job = get(session, Job, job_id)
    session.refresh(job, with_for_update=True)
    if fencing < job.fencing:
        raise StaleWriterError(f"job {job.key} was taken over: number {fencing} is behind {job.fencing}")
    job.heartbeat_at = at or utc_now()
    session.flush()


def can_move(before: JobState, after: JobState) -> bool:
    """Whether a job may go from one state to another: forwards only, from an end nowhere, to a result once sent."""
    if before.is_terminal or _ORDER[after] <= _ORDER[before]:
        return False
    never_ran = before is JobState.INTENT and after in (JobState.SUCCEEDED, JobState.FAILED_NAN, JobState.FAILED_OOM)
    return not never_ran


def _check_transition(job: Job, state: JobState) -> None:
    if can_move(job.state, state):
        return
    if job.state.is_terminal:
        way_out = "an end is written once; begin another attempt"
    elif job.state is JobState.INTENT:
        way_out = "record SUBMITTED with its backend_id first"
    else:
        way_out = "jobs only move forwards"
    raise TransitionError(f"job {job.key} is {job.state} and can't become {state}; {way_out}")


def _follow(experiment: Experiment, state: JobState, moment: datetime) -> None:
    """The run's status after its newest job came to a state."""
    if experiment.status is ExperimentStatus.QUARANTINED:
        return
    match state:
        case JobState.INTENT | JobState.SUBMITTED | JobState.QUEUED:
            status = ExperimentStatus.PLANNED
        case JobState.RUNNING:
            status = ExperimentStatus.RUNNING
        case JobState.SUCCEEDED:
            status = ExperimentStatus.DONE
        case JobState.FAILED_CODE | JobState.FAILED_OOM | JobState.FAILED_NAN | JobState.TIMEOUT:
            status = ExperimentStatus.FAILED
        case JobState.PREEMPTED | JobState.LOST:
            status = ExperimentStatus.INTERRUPTED
        case JobState.CANCELLED:
            status = ExperimentStatus.CANCELLED
        case other:
            assert_never(other)
    experiment.status = status
    experiment.finished_at = moment if state.is_terminal else None


# Results


def add_artifact(
    session: Session,
    owner_type: OwnerType,
    owner_id: str,
    kind: str,
    path: str,
    *,
    sha256: str | None = None,
    num_bytes: int | None = None,
    step: int | None = None,
) -> str:
    """A file that belongs to a row. Written again with other content, the row tells of the newest."""
    row = Artifact(owner_type=owner_type, owner_id=owner_id, kind=kind, path=path)
    artifact = _put(session, row, by=("owner_type", "owner_id", "kind", "path"), same=())
    artifact.sha256, artifact.bytes, artifact.step = sha256, num_bytes, step
    session.flush()
    return artifact.id


def add_estimate(
    session: Session,
    study_id: str,
    key: str,
    *,
    estimand: str,
    method: str,
    value: float | None,
    experiments: Sequence[str] = (),
    stage_id: str | None = None,
    hypothesis_id: str | None = None,
    role: RunRole = RunRole.SELECT,
    unit: str = "reward",
    ci_lo: float | None = None,
    ci_hi: float | None = None,
    level: float = LEVEL,
    se_seed: float | None = None,
    se_eval: float | None = None,
    n_seeds: int = 0,
    n_items: int = 0,
    p: float | None = None,
    p_adj: float | None = None,
    family: str | None = None,
    params: Mapping[str, Any] | None = None,
    query_sql: str = "",
    analysis_sha: str | None = None,
    inputs_sha: str | None = None,
) -> str:
    """A computed number with the runs it was computed from. Infinite bounds are stored as None.

    Raises:
        ConflictError: the key holds another number, or a confirmation rests on a run that was used to select.
    """
    row = Estimate(
        study_id=study_id,
        key=key,
        stage_id=stage_id,
        hypothesis_id=hypothesis_id,
        role=role,
        estimand=estimand,
        method=method,
        value=_finite(value),
        unit=unit,
        ci_lo=_finite(ci_lo),
        ci_hi=_finite(ci_hi),
        level=level,
        se_seed=_finite(se_seed),
        se_eval=_finite(se_eval),
        n_seeds=n_seeds,
        n_items=n_items,
        p=_finite(p),
        p_adj=_finite(p_adj),
        family=family,
        params=dict(params or {}),
        query_sql=query_sql,
        analysis_sha=analysis_sha,
        inputs_sha=inputs_sha,
    )
    numbers = ("value", "ci_lo", "ci_hi", "level", "se_seed", "se_eval", "n_seeds", "n_items", "p", "p_adj")
    same = ("role", "estimand", "method", "unit", "inputs_sha", *numbers)
    estimate = _put(session, row, by=("study_id", "key"), same=same)
    for experiment_id in experiments:
        link = EstimateInput(estimate_id=estimate.id, experiment_id=experiment_id)
        _put(session, link, by=("estimate_id", "experiment_id"), same=())
    return estimate.id


def add_decision(
    session: Session,
    stage_id: str,
    *,
    node_id: str,
    branch: str,
    predicate_trace: Sequence[Any],
    estimates: Sequence[str] = (),
    arm_key: str | None = None,
    n: int = 0,
    auto: bool = True,
    overridden_by: str | None = None,
    comment: str | None = None,
) -> str:
    """What the tree said after a stage, with its trace; `n` counts the decisions of the stage from 0."""
    row = Decision(
        stage_id=stage_id,
        n=n,
        node_id=node_id,
        branch=branch,
        predicate_trace=list(predicate_trace),
        auto=auto,
        overridden_by=overridden_by,
        comment=comment,
        arm_key=arm_key,
    )
    same = ("node_id", "branch", "predicate_trace", "auto", "overridden_by", "arm_key")
    decision = _put(session, row, by=("stage_id", "n"), same=same)
    for estimate_id in estimates:
        link = DecisionEstimate(decision_id=decision.id, estimate_id=estimate_id)
        _put(session, link, by=("decision_id", "estimate_id"), same=())
    return decision.id


@dataclass(frozen=True, slots=True)
class Evidence:
    """A row that a claim rests on."""

    target: Estimate | Experiment | Artifact | str
    """The row, or the id of an estimate."""
    relation: Relation = Relation.SUPPORTS


def add_claim(
    session: Session,
    study_id: str,
    key: str,
    *,
    form: ClaimForm,
    text_template: str,
    strength: ClaimStrength,
    slots: Mapping[str, str] | None = None,
    hypothesis_id: str | None = None,
    caveats: Sequence[str] = (),
    evidence: Sequence[Evidence] = (),
    status: ClaimStatus = ClaimStatus.DRAFT,
) -> str:
    """A sentence of the report with the rows it rests on.

    Args:
        slots: estimate id by the name of the slot in `text_template`.
    Raises:
        NotFoundError: a slot names no estimate.
        ConflictError: the key holds another claim, or `confirmed` without a confirming estimate, or with a finding of
            high severity open.
    """
    for slot, estimate_id in (slots or {}).items():
        if session.get(Estimate, estimate_id) is None:
            raise NotFoundError(f"slot {slot!r} of claim {key!r} names estimate {estimate_id!r}, which does not exist")
    row = Claim(
        study_id=study_id,
        key=key,
        form=form,
        text_template=text_template,
        strength=ClaimStrength.SUPPORTED if strength is ClaimStrength.CONFIRMED else strength,
        slots=dict(slots or {}),
        hypothesis_id=hypothesis_id,
        caveats=list(caveats),
    )
    claim = _put(session, row, by=("study_id", "key"), same=("form", "text_template", "slots", "caveats"))
    for one in evidence:
        match one.target:
            case str() as estimate_id:
                link, by = ClaimEvidence(estimate_id=estimate_id), "estimate_id"
            case Estimate() as estimate:
                link, by = ClaimEvidence(estimate_id=estimate.id), "estimate_id"
            case Experiment() as experiment:
                link, by = ClaimEvidence(experiment_id=experiment.id), "experiment_id"
            case Artifact() as artifact:
                link, by = ClaimEvidence(artifact_id=artifact.id), "artifact_id"
            case other:
                assert_never(other)
        link.claim_id, link.relation = claim.id, one.relation
        _put(session, link, by=("claim_id", by), same=("relation",))
    # A claim is confirmed once its evidence is there: the database looks at it when the strength changes.
    claim.strength, claim.status = strength, status
    _flush(session)
    return claim.id


def add_finding(
    session: Session,
    target_type: OwnerType,
    target_id: str,
    *,
    detector: str,
    severity: Severity,
    message: str,
    evidence_artifact_id: str | None = None,
) -> str:
    """Something that looks wrong with a row. The same finding of the same detector is one row."""
    row = AuditFinding(
        target_type=target_type,
        target_id=target_id,
        detector=detector,
        severity=severity,
        message=message,
        evidence_artifact_id=evidence_artifact_id,
    )
    return _put(session, row, by=("target_type", "target_id", "detector", "message"), same=("severity",)).id


# How it is done


def get(session: Session, table: type[R], row_id: str) -> R:
    """The row with this id.

    Raises:
        NotFoundError: there is none.
    """
    row = session.get(table, row_id)
    if row is None:
        raise NotFoundError(f"there is no {table.__tablename__} {row_id!r} in this database")
    return row


def _put(session: Session, row: R, *, by: Sequence[str], same: Sequence[str]) -> R:
    """The row that `by` names: the one that is there where it agrees in `same`, else this one, added."""
    return _put_once(session, row, by=by, same=same)[0]


def _put_once(session: Session, row: R, *, by: Sequence[str], same: Sequence[str]) -> tuple[R, bool]:
    """As `_put`, and whether the row was added now."""
    is_new = False
    there = _find(session, row, by)
    if there is None:
        is_new = insert_once(session, row)
        there = _find(session, row, by)
    if there is None:
        raise ConflictError(f"another {row.__tablename__} is there in place of the one with {_named(row, by)}")
    for name in same:
        if getattr(there, name) != getattr(row, name):
            raise ConflictError(
                f"{row.__tablename__} with {_named(row, by)} is there with {name} = {_short(getattr(there, name))}, "
                f"this one has {_short(getattr(row, name))}; use another name for another row"
            )
    return there, is_new


def insert_once(session: Session, row: Row) -> bool:
    """Add a row unless one with the same key is there, also where another process adds it in the same moment."""
    session.flush()
    table = Row.metadata.tables[str(row.__tablename__)]
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    values = {column.name: getattr(row, column.name) for column in table.columns}
    # Without the option the driver for PostgreSQL is not asked how many rows an INSERT made.
    statement = insert(table).on_conflict_do_nothing().execution_options(preserve_rowcount=True)
    try:
        return session.connection().execute(statement, values).rowcount == 1
    except IntegrityError as error:
        raise ConflictError(f"the database refuses this {row.__tablename__}: {first_line(error.orig)}") from error


def _find(session: Session, row: R, by: Sequence[str]) -> R | None:
    table = type(row)
    return session.exec(select(table).where(*(getattr(table, name) == getattr(row, name) for name in by))).first()


def _flush(session: Session) -> None:
    try:
        session.flush()
    except IntegrityError as error:
        raise ConflictError(f"the database refuses a row: {first_line(error.orig)}") from error


def _named(row: Row, by: Sequence[str]) -> str:
    return ", ".join(f"{name} {_short(getattr(row, name))}" for name in by)


def _short(value: object) -> str:
    text = repr(str(value) if isinstance(value, StrEnum) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _finite(value: float | None) -> float | None:
    """None for what is no finite number; the columns of an estimate have no other word for it."""
    return value if value is not None and abs(value) < float("inf") else None
