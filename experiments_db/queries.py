"""Reading the experiment log: runs, their curves, what they measured. Plain functions that return frozen values.

All take a session of `Database.read()`. A run is an experiment: one arm with its seeds. Intervals are at 95 %:
of the likelihood over held-out tasks within a run, of Student's t over runs within an arm; see `intervals.py`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, assert_never

from sqlalchemy import Select, func
from sqlalchemy import select as sa_select
from sqlmodel import Session, col, select

from experiments_db.columns import canonical_json
from experiments_db.derive import CHECKPOINT, number_of
from experiments_db.errors import NotFoundError
from experiments_db.home import place
from experiments_db.intervals import Interval, likelihood_interval, t_interval
from experiments_db.models import (
    Artifact,
    AuditFinding,
    Blueprint,
    EngineEvent,
    EpisodeRow,
    EvalItem,
    EvalRun,
    Experiment,
    ExperimentStatus,
    HealthWarning,
    Job,
    JobState,
    MetricPoint,
    Prereg,
    RunRole,
    Severity,
    Stage,
    StageKind,
    Study,
    StudyKind,
    ValueMark,
)
from experiments_db.writes import SINGLE_KEY

REWARD = "reward_mean"
"""The engine's metric of the training reward."""
HELD_OUT = "heldout"
"""Asks for the held-out curve where a metric's name is asked for."""
DROPS = "drops."
"""Begins the names of the metrics that count what a step left out."""
OPTIMIZER_STEPS = "optimizer_steps"
"""The engine's metric of how many optimizer steps an update took; 1 where it reports none."""


class _OfStep(Protocol):
    """A row that a run has of a step."""

    @property
    def experiment_id(self) -> str: ...
    @property
    def segment(self) -> int: ...
    @property
    def step(self) -> int: ...


OfStep = TypeVar("OfStep", bound=_OfStep)


class Axis(StrEnum):
    """What a curve runs over."""

    STEP = "step"
    """Updates of the policy: one per batch, the same axis for rewards, losses and evaluations."""
    EPISODES = "episodes"
    """Training episodes that went into the weights."""
    WALL_S = "wall_s"
    """Seconds since the run began."""
    OPTIMIZER_STEPS = "optimizer_steps"
    """Steps of the optimizer, where an update takes several."""


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a training curve."""

    x: float
    """In the unit of the curve's axis."""
    step: int
    value: float | None
    """None where the engine had none; NaN and infinities as they were."""
    mark: ValueMark

    @property
    def is_finite(self) -> bool:
        """Whether it can be drawn."""
        return self.value is not None and math.isfinite(self.value)


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric of one run, as it counts: where training went back, what was done again replaces what was before."""

    experiment_id: str
    metric: str
    axis: Axis
    points: tuple[Point, ...]
    """In order of steps, each once."""
    num_resumes: int
    """How often training went back to an earlier step."""

    @property
    def num_not_finite(self) -> int:
        """How many values can't be drawn."""
        return sum(not point.is_finite for point in self.points)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What one policy of a run earned on held-out tasks."""

    step: int
    """Updates in its weights."""
    x: float
    """The same in the unit of the axis that was asked for."""
    split: str
    temperature: float
    label: str
    """What it was for; several are joined by `+`."""
    reward: Interval | None
    """Mean over tasks, each the mean of its judged attempts; None where nothing was judged."""
    num_attempted: int
    num_valid: int
    num_policy_faults: int
    num_env_faults: int


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run as a line of a table."""

    id: str
    study_id: str
    study_kind: StudyKind
    question: str
    stage_kind: StageKind
    template: str
    arm: str
    seed: int
    role: RunRole
    status: ExperimentStatus
    status_reason: str | None
    """Why it failed or is in quarantine."""
    steps: int
    """Updates done."""
    rewards: tuple[float | None, ...]
    """Training reward after each update; None where it was not finite."""
    before: Evaluation | None
    """First evaluation, at temperature 1 where there is one."""
    after: Evaluation | None
    """Last one on the same split at the same temperature; None while there is only one."""
    warned_of: tuple[str, ...]
    """Kinds of the engine's warnings; `warnings` has the rest of them."""
    run_dir: str | None
    created_at: datetime
    finished_at: datetime | None

    @property
    def short_id(self) -> str:
        """The end of the id, which `find_run` takes too: beginnings are alike for runs of one hour."""
        return self.id[-SHORT:]

    @property
    def last_reward(self) -> float | None:
        """Training reward of the last update."""
        return self.rewards[-1] if self.rewards else None


SHORT = 8
"""Letters of a short id: 40 random bits."""


@dataclass(frozen=True, slots=True)
class Warned:
    """What the engine said was going wrong with one policy of a run, over all steps after which it said so."""

    kind: str
    policy: str
    """Empty where the run names none."""
    first_step: int
    last_step: int
    num_steps: int
    """Fewer than there are from the first to the last where it was over meanwhile."""
    value: float | None
    """After the last of them; None where it was not finite, or is in the message alone."""
    message: str
    """After the last of them: what was found, the limit, and the way out."""


@dataclass(frozen=True, slots=True)
class JobSummary:
    """One attempt at a run."""

    key: str
    attempt: int
    backend: str
    state: JobState
    cause: str | None
    exit_code: int | None
    started_at: datetime | None
    ended_at: datetime | None
    log_path: str | None


@dataclass(frozen=True, slots=True)
class Finding:
    """An open or settled doubt about a run."""

    detector: str
    severity: Severity
    message: str
    is_open: bool


@dataclass(frozen=True, slots=True)
class RunDetail:
    """Everything about one run."""

    summary: RunSummary
    objective: str
    settings: Mapping[str, Any]
    """Controls and the arm's own, by dotted path."""
    plan_sha256: str
    jobs: tuple[JobSummary, ...]
    evaluations: tuple[Evaluation, ...]
    metrics: Mapping[str, float | None]
    """Last value of each metric."""
    num_episodes: Mapping[str, int]
    """By mode, all that were claimed."""
    drops: Mapping[str, int]
    """Episodes that were not used, by reason."""
    left_out: Mapping[str, int]
    """What updates did without, by reason: those episodes, and those that came into a batch and taught nothing."""
    warnings: tuple[Warned, ...]
    checkpoints: tuple[str, ...]
    files: tuple[tuple[str, str], ...]
    """(kind, path) of its other artifacts."""
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class ArmSummary:
    """The runs of one arm together; the unit is the run."""

    arm: str
    """Its label; see `by_arm`."""
    template: str
    num_runs: int
    num_failed: int
    """Runs that ended without a result or are in quarantine. They are in no mean, so look at this number first."""
    num_unfinished: int
    """Runs that have not ended yet; they are in no mean either."""
    before: Interval | None
    after: Interval | None
    rise: Interval | None
    """After minus before, run by run."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs side by side."""

    runs: tuple[RunSummary, ...]
    differing: Mapping[str, tuple[Any, ...]]
    """Settings that are not the same in all of them, in the order of the runs; None where a run has no such setting."""
    arms: tuple[ArmSummary, ...]


FAILED = (ExperimentStatus.FAILED, ExperimentStatus.CANCELLED, ExperimentStatus.QUARANTINED)


# Runs


def list_runs(
    session: Session,
    *,
    study_id: str | None = None,
    template: str | None = None,
    status: ExperimentStatus | None = None,
    ids: Sequence[str] | None = None,
    limit: int | None = None,
    home: Path | None = None,
) -> list[RunSummary]:
    """The runs that fit, newest study first, within a study in order of stages, arms and seeds.

    Args:
        ids: only these; None means all.
        limit: at most so many of the newest runs.
        home: where places are told in; None tells them as the rows name them.
    """
    query = _runs().order_by(col(Experiment.id).desc())
    if study_id is not None:
        query = query.where(col(Study.id) == study_id)
    if template is not None:
        query = query.where(col(Blueprint.template_id) == template)
    if status is not None:
        query = query.where(col(Experiment.status) == status)
    if ids is not None:
        query = query.where(col(Experiment.id).in_(ids))
    if limit is not None:
        query = query.limit(limit)
    rows = session.execute(query).all()
    found = [experiment.id for experiment, *_ in rows]
    rewards = _rewards(session, found)
    ends = _first_and_last(session, found)
    causes = _causes(session, found)
    warned = _warned_of(session, found)
    summaries = []
    for experiment, blueprint, stage, study in rows:
        before, after = ends.get(experiment.id, (None, None))
        summary = RunSummary(
            id=experiment.id,
            study_id=study.id,
            study_kind=study.kind,
            question=study.question,
            stage_kind=stage.kind,
            template=blueprint.template_id,
            arm=blueprint.arm_key,
            seed=experiment.seed_train,
            role=experiment.role,
            status=experiment.status,
            status_reason=experiment.quarantine_reason or causes.get(experiment.id),
            steps=rewards[experiment.id][0],
            rewards=rewards[experiment.id][1],
            before=before,
            after=after,
            warned_of=warned[experiment.id],
            run_dir=_place(experiment.run_dir, home),
            created_at=experiment.created_at,
            finished_at=experiment.finished_at,
        )
        summaries.append((stage.n, summary))
    in_study = sorted(summaries, key=lambda pair: (pair[0], natural(pair[1].arm), pair[1].seed, pair[1].id))
    return [summary for _, summary in sorted(in_study, key=lambda pair: pair[1].study_id, reverse=True)]


def num_runs_by_template(session: Session) -> dict[str, int]:
    """How many runs each template has, by name; those that have some."""
    template = col(Blueprint.template_id)
    query = sa_select(template, func.count()).join(Experiment, col(Experiment.blueprint_id) == col(Blueprint.id))
    return dict(session.execute(query.group_by(template).order_by(template)).all())


def find_run(session: Session, text: str) -> str:
    """The id of the run that a user means: its whole id, or enough of its beginning or end.

    Raises:
        NotFoundError: no run, or several; the message names some.
    """
    wanted = text.strip().upper()
    ids = list(session.exec(select(Experiment.id).order_by(col(Experiment.id).desc())))
    found = [one for one in ids if wanted and (one.startswith(wanted) or one.endswith(wanted))]
    if len(found) == 1 or wanted in found:
        return wanted if wanted in found else found[0]
    if found:
        raise NotFoundError(f"{text!r} fits {len(found)} runs: {', '.join(found[:3])} …; give more of the id")
    newest = f"the newest is {ids[0]}" if ids else "there are none yet"
    raise NotFoundError(f"there is no run {text!r}; {newest}. `a3r runs` lists them")


def find_single_run(session: Session, run_dir: Path, home: Path) -> tuple[Experiment, Blueprint] | None:
    """The newest run of its own (`create_single_run`) whose files lie in a folder, whatever its home was called then.

    Args:
        run_dir: with no symbolic link in it.
    """
    rows = session.exec(
        select(Experiment, Blueprint)
        .join(Blueprint, col(Blueprint.id) == col(Experiment.blueprint_id))
        .where(
            col(Experiment.key).startswith(SINGLE_KEY), col(Experiment.run_dir).endswith(run_dir.name, autoescape=True)
        )
        .order_by(col(Experiment.id).desc())
    )
    for run, blueprint in rows:
        if run.run_dir is not None and place(run.run_dir, home).resolve() == run_dir:
            return run, blueprint
    return None


def is_measured(session: Session, experiment_id: str) -> bool:
    """Whether a run has a number: a metric of an update, or an evaluation."""
    return any(
        session.exec(select(table.id).where(table.experiment_id == experiment_id).limit(1)).first()
        for table in (MetricPoint, EvalRun)
    )


def _place(stored: str | None, home: Path | None) -> str | None:
    return stored if stored is None or home is None else str(place(stored, home))


def show_run(session: Session, experiment_id: str, home: Path | None = None) -> RunDetail:
    """Everything about one run.

    Args:
        home: where places are told in; None tells them as the rows name them.
    Raises:
        NotFoundError: there is no such run.
    """
    (summary,) = _all_of(session, [experiment_id], home)
    experiment = session.get_one(Experiment, experiment_id)
    blueprint = session.get_one(Blueprint, experiment.blueprint_id)
    prereg = session.get_one(Prereg, session.get_one(Stage, blueprint.stage_id).prereg_id)
    jobs = session.exec(select(Job).where(Job.experiment_id == experiment_id).order_by(col(Job.attempt))).all()
    artifacts = session.exec(
        select(Artifact).where(Artifact.owner_id == experiment_id).order_by(col(Artifact.step), col(Artifact.id))
    ).all()
    files = [
        (artifact.kind, artifact.path if home is None else str(place(artifact.path, home))) for artifact in artifacts
    ]
    findings = session.exec(select(AuditFinding).where(AuditFinding.target_id == experiment_id)).all()
    modes = session.exec(
        select(EpisodeRow.mode, func.count()).where(EpisodeRow.experiment_id == experiment_id).group_by(EpisodeRow.mode)
    ).all()
    drops = session.exec(
        select(EpisodeRow.drop_reason, func.count())
        .where(EpisodeRow.experiment_id == experiment_id, col(EpisodeRow.drop_reason).is_not(None))
        .group_by(col(EpisodeRow.drop_reason))
    ).all()
    return RunDetail(
        summary=summary,
        objective=blueprint.objective,
        settings=_settings(blueprint),
        plan_sha256=prereg.sha256,
        jobs=tuple(
            JobSummary(
                key=job.key,
                attempt=job.attempt,
                backend=job.backend,
                state=job.state,
                cause=job.state_cause,
                exit_code=job.exit_code,
                started_at=job.started_at,
                ended_at=job.ended_at,
                log_path=_place(job.log_path, home),
            )
            for job in jobs
        ),
        evaluations=tuple(evaluations(session, experiment_id)),
        metrics={name: curve.points[-1].value for name, curve in all_curves(session, experiment_id).items()},
        num_episodes=dict(sorted(modes)),
        drops={str(reason): count for reason, count in sorted(drops, key=str)},
        left_out=left_out(session, [experiment_id])[experiment_id],
        warnings=warnings(session, [experiment_id])[experiment_id],
        checkpoints=tuple(path for kind, path in files if kind == CHECKPOINT),
        files=tuple((kind, path) for kind, path in files if kind != CHECKPOINT),
        findings=tuple(
            Finding(one.detector, one.severity, one.message, is_open=one.resolved_by is None) for one in findings
        ),
    )


def warnings(session: Session, ids: Sequence[str]) -> dict[str, tuple[Warned, ...]]:
    """What the engine warned of in each of these runs, as it counts: of steps done again, what was said the last time.

    By policy and first step.
    """
    rows = session.exec(
        select(HealthWarning)
        .where(col(HealthWarning.experiment_id).in_(ids))
        .order_by(col(HealthWarning.segment), col(HealthWarning.step), col(HealthWarning.id))
    ).all()
    return {
        one: tuple(
            Warned(own[-1].kind, own[-1].policy, own[0].step, own[-1].step, len(own), own[-1].value, own[-1].message)
            for own in alike
        )
        for one, alike in _alike(session, ids, rows).items()
    }


class _Kind(NamedTuple):
    """What a list of runs shows of a warning."""

    experiment_id: str
    segment: int
    step: int
    policy: str
    kind: str


def _warned_of(session: Session, ids: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Kinds of the `warnings` of each of these runs, in their order."""
    shown = (col(getattr(HealthWarning, name)) for name in _Kind._fields)
    rows = session.execute(
        sa_select(*shown)
        .where(col(HealthWarning.experiment_id).in_(ids))
        .order_by(col(HealthWarning.segment), col(HealthWarning.step), col(HealthWarning.id))
    ).all()
    alike = _alike(session, ids, [_Kind(*row) for row in rows])
    return {one: tuple(dict.fromkeys(own[0].kind for own in groups)) for one, groups in alike.items()}


AnyWarning = TypeVar("AnyWarning", HealthWarning, _Kind)


def _alike(session: Session, ids: Sequence[str], rows: Sequence[AnyWarning]) -> dict[str, list[list[AnyWarning]]]:
    """The warnings of each run that count, those of one policy and kind together, by policy and first step."""
    found: dict[str, list[list[AnyWarning]]] = {}
    for one, own in _counting(session, ids, rows).items():
        alike: dict[tuple[str, str], list[AnyWarning]] = defaultdict(list)
        for row in own:
            alike[row.policy, row.kind].append(row)
        found[one] = sorted(alike.values(), key=lambda group: (group[0].policy, group[0].step))
    return found


def left_out(session: Session, ids: Sequence[str]) -> dict[str, dict[str, int]]:
    """What the updates of each of these runs did without, by reason; of steps done again, what counts."""
    rows = session.exec(
        select(MetricPoint).where(
            col(MetricPoint.experiment_id).in_(ids), col(MetricPoint.name).startswith(DROPS, autoescape=True)
        )
    ).all()
    found: dict[str, dict[str, int]] = {}
    for one, own in _counting(session, ids, rows).items():
        counts: Counter[str] = Counter()
        for row in own:
            counts[row.name.removeprefix(DROPS)] += int(row.value or 0)
        found[one] = dict(sorted(counts.items()))
    return found


def compare_runs(session: Session, ids: Sequence[str]) -> Comparison:
    """Runs side by side: what differs in their settings, and each arm's runs together.

    Raises:
        NotFoundError: one of the runs does not exist.
    """
    runs = _all_of(session, ids)
    by_run = _settings_of(session, runs)
    settings = [by_run[run.id] | {"template": run.template, "seed": run.seed} for run in runs]
    names = sorted({name for one in settings for name in one})
    rows = {name: tuple(one.get(name) for one in settings) for name in names}
    differing = {name: row for name, row in rows.items() if any(value != row[0] for value in row)}
    arms = tuple(_arm(label, own) for label, own in by_arm(session, runs).items())
    return Comparison(tuple(runs), differing, arms)


def by_arm(session: Session, runs: Sequence[RunSummary]) -> dict[str, list[RunSummary]]:
    """Runs that differ in nothing but seeds, by a label that no two of these groups share, in order of labels.

    Runs of other games or settings are never put together, whatever their arms are called.
    """
    settings = _settings_of(session, runs)
    alike: dict[tuple[str, str, str], list[RunSummary]] = defaultdict(list)
    for run in runs:
        name = "" if run.stage_kind is StageKind.SINGLE else run.arm
        alike[run.template, name, canonical_json(settings[run.id])].append(run)
    several_games = len({template for template, _, _ in alike}) > 1
    names = Counter((template, name) for template, name, _ in alike)
    found: dict[str, list[RunSummary]] = {}
    for (template, name, _), own in alike.items():
        label = name or f"run {own[0].short_id}"
        if name and names[template, name] > 1:
            label = f"{label} (study {own[0].study_id[-SHORT:]})"
        if several_games:
            label = f"{template}, {label}"
        found[label if label not in found else f"{label} (run {own[0].short_id} …)"] = own
    return dict(sorted(found.items(), key=lambda pair: natural(pair[0])))


def _arm(label: str, runs: Sequence[RunSummary]) -> ArmSummary:
    whole = [run for run in runs if run.status is ExperimentStatus.DONE]
    num_failed = sum(run.status in FAILED for run in runs)
    before = {run.id: run.before.reward.mean for run in whole if run.before and run.before.reward}
    after = {run.id: run.after.reward.mean for run in whole if run.after and run.after.reward}
    return ArmSummary(
        arm=label,
        template=runs[0].template,
        num_runs=len(runs),
        num_failed=num_failed,
        num_unfinished=len(runs) - len(whole) - num_failed,
        before=t_interval(list(before.values())),
        after=t_interval(list(after.values())),
        rise=t_interval([mean - before[run] for run, mean in after.items() if run in before]),
    )


# Curves


def curves(session: Session, experiment_id: str, metric: str, axis: Axis = Axis.STEP) -> Curve:
    """One metric of a run along an axis.

    Raises:
        NotFoundError: the run has no such metric; the message names those it has.
    """
    every = all_curves(session, experiment_id, axis)
    if metric not in every:
        names = ", ".join(every) or "none yet"
        raise NotFoundError(f"run {experiment_id} has no metric {metric!r}; it has: {names}")
    return every[metric]


def all_curves(session: Session, experiment_id: str, axis: Axis = Axis.STEP) -> dict[str, Curve]:
    """Every metric of a run along an axis, by name."""
    rows = session.exec(
        select(MetricPoint)
        .where(MetricPoint.experiment_id == experiment_id)
        .order_by(col(MetricPoint.name), col(MetricPoint.segment), col(MetricPoint.step))
    ).all()
    by_name: dict[str, list[MetricPoint]] = defaultdict(list)
    for row in rows:
        by_name[row.name].append(row)
    starts = segment_starts(rows)
    places = _Places(session, experiment_id, axis)
    return {
        name: Curve(
            experiment_id=experiment_id,
            metric=name,
            axis=axis,
            points=tuple(
                Point(places.of(row.step, row.wall_s), row.step, number_of(row.value, row.mark), row.mark)
                for row in newest(own, starts)
            ),
            num_resumes=max(starts, default=0),
        )
        for name, own in by_name.items()
    }


def segment_starts(rows: Iterable[MetricPoint]) -> dict[int, int]:
    """First step of each segment."""
    starts: dict[int, int] = {}
    for row in rows:
        starts[row.segment] = min(row.step, starts.get(row.segment, row.step))
    return starts


def newest(rows: Iterable[OfStep], starts: Mapping[int, int]) -> list[OfStep]:
    """The rows that count, in order of steps: a segment replaces everything earlier ones have from its start on.

    Args:
        starts: first step of every segment of the run, whatever its metric.
    """
    kept = [row for row in rows if all(row.step < start for segment, start in starts.items() if segment > row.segment)]
    return sorted(kept, key=lambda row: row.step)


def _counting(session: Session, ids: Sequence[str], rows: Iterable[OfStep]) -> dict[str, list[OfStep]]:
    """The rows that count, by run, in order of steps."""
    by_run: defaultdict[str, list[OfStep]] = defaultdict(list)
    for row in rows:
        by_run[row.experiment_id].append(row)
    starts = _segment_starts(session, ids)
    return {one: newest(by_run[one], starts[one]) for one in ids}


def _segment_starts(session: Session, ids: Sequence[str]) -> defaultdict[str, dict[int, int]]:
    """First step of each segment, by run."""
    rows = session.exec(
        select(MetricPoint.experiment_id, MetricPoint.segment, func.min(MetricPoint.step))
        .where(col(MetricPoint.experiment_id).in_(ids))
        .group_by(col(MetricPoint.experiment_id), col(MetricPoint.segment))
    ).all()
    starts: defaultdict[str, dict[int, int]] = defaultdict(dict)
    for experiment_id, segment, step in rows:
        starts[experiment_id][segment] = step
    return starts


def evaluations(
    session: Session,
    experiment_id: str,
    *,
    split: str | None = None,
    temperature: float | None = None,
    axis: Axis = Axis.STEP,
) -> list[Evaluation]:
    """Every measurement of a run, by split, temperature and step. Those of the same weights are pooled."""
    pools = _pools(session, [experiment_id], split=split, temperature=temperature)
    return list(_measured(session, pools, axis).values())


def held_out_curve(
    session: Session,
    experiment_id: str,
    *,
    split: str | None = None,
    temperature: float | None = None,
    axis: Axis = Axis.STEP,
) -> list[Evaluation]:
    """The held-out measurements of a run along training, on one split at one temperature.

    Args:
        split: None takes the one that was measured most often.
        temperature: None takes 1 where it was measured, else the highest.
    """
    pools = _pools(session, [experiment_id], split=split, temperature=temperature)
    return list(_measured(session, {pool: pools[pool] for pool in _main_line(list(pools))}, axis).values())


class _Places:
    """Where the steps of a run lie on an axis."""

    def __init__(self, session: Session, experiment_id: str, axis: Axis) -> None:
        self._axis = axis
        each: dict[int, float] = {}
        match axis:
            case Axis.EPISODES:
                counted = session.exec(
                    select(EpisodeRow.trained_step, func.count())
                    .where(EpisodeRow.experiment_id == experiment_id, col(EpisodeRow.trained_step).is_not(None))
                    .group_by(col(EpisodeRow.trained_step))
                ).all()
                each = {step: count for step, count in counted if step is not None}
            case Axis.OPTIMIZER_STEPS:
                rows = session.exec(select(MetricPoint).where(MetricPoint.experiment_id == experiment_id)).all()
                own = newest([row for row in rows if row.name == OPTIMIZER_STEPS], segment_starts(rows))
                each = dict.fromkeys((row.step for row in rows), 1.0)
                each |= {row.step: row.value for row in own if row.value is not None}
            case Axis.STEP | Axis.WALL_S:
                pass
            case other:
                assert_never(other)
        self._steps = sorted(each)
        self._totals = list(accumulate((each[step] for step in self._steps), initial=0.0))

    def of(self, step: int, wall_s: float) -> float:
        """The place of the weights after `step`, reached `wall_s` seconds after the run began."""
        match self._axis:
            case Axis.STEP:
                return float(step)
            case Axis.WALL_S:
                return wall_s
            case Axis.EPISODES | Axis.OPTIMIZER_STEPS:
                return float(self._totals[bisect_right(self._steps, step)])
            case other:
                assert_never(other)


# How it is done


def natural(text: str) -> tuple[tuple[int, float, str], ...]:
    """A key that sorts `arm=8` before `arm=16`."""
    parts: list[tuple[int, float, str]] = []
    for word in text.replace("=", " = ").split():
        try:
            parts.append((0, float(word), ""))
        except ValueError:
            parts.append((1, 0.0, word))
    return tuple(parts)


def _runs() -> Select[Experiment, Blueprint, Stage, Study]:
    return (
        sa_select(Experiment, Blueprint, Stage, Study)
        .join(Blueprint, col(Blueprint.id) == col(Experiment.blueprint_id))
        .join(Stage, col(Stage.id) == col(Blueprint.stage_id))
        .join(Prereg, col(Prereg.id) == col(Stage.prereg_id))
        .join(Study, col(Study.id) == col(Prereg.study_id))
    )


def _all_of(session: Session, ids: Sequence[str], home: Path | None = None) -> list[RunSummary]:
    """The summaries of these runs, in this order."""
    found = {run.id: run for run in list_runs(session, ids=ids, home=home)}
    if missing := [one for one in ids if one not in found]:
        raise NotFoundError(f"there is no run {missing[0]!r}; `a3r runs` lists them")
    return [found[one] for one in ids]


def _settings_of(session: Session, runs: Sequence[RunSummary]) -> dict[str, dict[str, Any]]:
    """The settings of each run, by its id."""
    rows = session.exec(
        select(Experiment.id, Blueprint)
        .join(Blueprint, col(Blueprint.id) == col(Experiment.blueprint_id))
        .where(col(Experiment.id).in_([run.id for run in runs]))
    ).all()
    return {experiment_id: _settings(blueprint) for experiment_id, blueprint in rows}


def _settings(blueprint: Blueprint) -> dict[str, Any]:
    """Controls and params by dotted path, nested objects opened."""

    def opened(prefix: str, value: Any) -> Iterable[tuple[str, Any]]:
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                yield from opened(f"{prefix}.{name}" if prefix else str(name), inner)
        elif prefix:
            yield prefix, value

    return dict(sorted({**dict(opened("", blueprint.controls)), **dict(opened("", blueprint.params))}.items()))


class _Reward(NamedTuple):
    """What a list of runs shows of a training reward."""

    experiment_id: str
    segment: int
    step: int
    value: float | None


def _rewards(session: Session, ids: Sequence[str]) -> dict[str, tuple[int, tuple[float | None, ...]]]:
    """Updates done and training rewards, by run."""
    steps: dict[str, int] = dict.fromkeys(ids, 0)
    steps |= dict(
        session.exec(
            select(MetricPoint.experiment_id, func.max(MetricPoint.step))
            .where(col(MetricPoint.experiment_id).in_(ids))
            .group_by(col(MetricPoint.experiment_id))
        ).all()
    )
    shown = (col(getattr(MetricPoint, name)) for name in _Reward._fields)
    found = session.execute(
        sa_select(*shown).where(col(MetricPoint.experiment_id).in_(ids), col(MetricPoint.name) == REWARD)
    ).all()
    rows = _counting(session, ids, [_Reward(*row) for row in found])
    return {one: (steps[one], tuple(row.value for row in rows[one])) for one in ids}


def _causes(session: Session, ids: Sequence[str]) -> dict[str, str]:
    """What the newest job of each run said about its end, where it said something."""
    rows = session.exec(
        select(Job.experiment_id, Job.state, Job.state_cause)
        .where(col(Job.experiment_id).in_(ids))
        .order_by(col(Job.attempt))
    ).all()
    last = {experiment_id: (JobState(state), cause) for experiment_id, state, cause in rows}
    return {
        one: f"{state}: {cause}" if cause else str(state)
        for one, (state, cause) in last.items()
        if state.is_terminal and state is not JobState.SUCCEEDED
    }


class _Pool(NamedTuple):
    """Measurements that count as one: of the same weights, on the same split, at the same temperature."""

    experiment_id: str
    split: str
    temperature: float
    step: int


def _pools(
    session: Session, ids: Sequence[str], *, split: str | None = None, temperature: float | None = None
) -> dict[_Pool, list[EvalRun]]:
    """Every measurement of these runs, in order of the pools."""
    query = select(EvalRun).where(col(EvalRun.experiment_id).in_(ids)).order_by(col(EvalRun.id))
    if split is not None:
        query = query.where(EvalRun.split_name == split)
    if temperature is not None:
        query = query.where(EvalRun.temperature == temperature)
    found: dict[_Pool, list[EvalRun]] = defaultdict(list)
    for row in session.exec(query).all():
        found[_Pool(row.experiment_id, row.split_name, row.temperature, row.step)].append(row)
    return {pool: found[pool] for pool in sorted(found)}


def _measured(
    session: Session, pools: Mapping[_Pool, Sequence[EvalRun]], axis: Axis = Axis.STEP
) -> dict[_Pool, Evaluation]:
    """What these measurements come to."""
    scores = _scores(session, [row.id for rows in pools.values() for row in rows])
    ids = sorted({pool.experiment_id for pool in pools})
    places = {one: _Places(session, one, axis) for one in ids}
    starts = _first_events(session, ids) if axis is Axis.WALL_S else {}
    found: dict[_Pool, Evaluation] = {}
    for pool, rows in pools.items():
        totals: defaultdict[str, float] = defaultdict(float)
        counts: Counter[str] = Counter()
        for row in rows:
            for item_id, total, count in scores[row.id]:
                totals[item_id] += total
                counts[item_id] += count
        began = starts.get(pool.experiment_id, rows[0].started_at)
        found[pool] = Evaluation(
            step=pool.step,
            x=places[pool.experiment_id].of(pool.step, (rows[0].started_at - began).total_seconds()),
            split=pool.split,
            temperature=pool.temperature,
            label="+".join(row.label for row in rows if row.label),
            reward=likelihood_interval([totals[item_id] / count for item_id, count in counts.items()]),
            num_attempted=sum(row.n_attempted for row in rows),
            num_valid=sum(row.n_valid for row in rows),
            num_policy_faults=sum(row.n_policy_fault for row in rows),
            num_env_faults=sum(row.n_env_fault for row in rows),
        )
    return found


def _scores(session: Session, eval_run_ids: Sequence[str]) -> dict[str, list[tuple[str, float, int]]]:
    """(item, sum of its scores, how many) by evaluation; items without a score are left out."""
    rows = session.exec(
        select(EvalItem.eval_run_id, EvalItem.item_id, func.sum(EvalItem.score), func.count(col(EvalItem.score)))
        .where(col(EvalItem.eval_run_id).in_(eval_run_ids), col(EvalItem.score).is_not(None))
        .group_by(EvalItem.eval_run_id, EvalItem.item_id)
    ).all()
    found: dict[str, list[tuple[str, float, int]]] = defaultdict(list)
    for eval_run_id, item_id, total, count in rows:
        found[eval_run_id].append((item_id, float(total or 0.0), count))
    return found


def _first_events(session: Session, ids: Sequence[str]) -> dict[str, datetime]:
    return dict(
        session.exec(
            select(EngineEvent.experiment_id, func.min(EngineEvent.at))
            .where(col(EngineEvent.experiment_id).in_(ids))
            .group_by(col(EngineEvent.experiment_id))
        ).all()
    )


def _main_line(pools: Sequence[_Pool]) -> list[_Pool]:
    """Those on the split that was measured most often, at temperature 1 where it was measured, else at the highest."""
    if not pools:
        return []
    split = Counter(pool.split for pool in pools).most_common(1)[0][0]
    temperatures = {pool.temperature for pool in pools if pool.split == split}
    temperature = 1.0 if 1.0 in temperatures else max(temperatures)
    return [pool for pool in pools if pool.split == split and pool.temperature == temperature]


def _first_and_last(session: Session, ids: Sequence[str]) -> dict[str, tuple[Evaluation | None, Evaluation | None]]:
    """Before and after, by run."""
    pools = _pools(session, ids)
    by_run: dict[str, list[_Pool]] = defaultdict(list)
    for pool in pools:
        by_run[pool.experiment_id].append(pool)
    lines = {one: _main_line(own) for one, own in by_run.items()}
    measured = _measured(session, {pool: pools[pool] for line in lines.values() for pool in (line[0], line[-1])})
    return {one: (measured[line[0]], measured[line[-1]] if len(line) > 1 else None) for one, line in lines.items()}
