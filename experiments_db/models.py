"""The tables of the experiment log.

    Study ── Prereg ── Stage ── Blueprint ── Experiment ── Job ── JobEvent
      │        ├ Hypothesis, Factor, Amendment   ├ MetricPoint        training curves
      │        └ (immutable)                     ├ HealthWarning      what went wrong on the way
      │                                          ├ EvalRun ── EvalItem held-out results
      ├ Estimate ── EstimateInput ───────────────┤
      ├ Decision ── DecisionEstimate             ├ Episode            what was played
      └ Claim ── ClaimEvidence                   └ EngineEvent        the stream all of it came from

Every run hangs under this tree, also a single `vibe train`. Rows say what happened and are not tidied up: failed jobs,
dropped episodes and numbers that are not finite are rows as well. Later versions add tables, columns and members of the
closed sets; they rename none.

Ids are ULIDs, moments are in UTC, seconds end in `_s`. JSON columns hold canonical text (`columns.canonical_json`).
The rules that SQL can keep are CHECKs here and triggers in the migration; `writes.py` keeps the others.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any, ClassVar

from sqlalchemy import BigInteger, CheckConstraint, Double, MetaData, Text, UniqueConstraint
from sqlalchemy.orm import declared_attr
from sqlmodel import Field, SQLModel

from experiments_db.columns import CanonicalJson, Id, Sha256, UtcDateTime, closed, snake_case, utc_now
from experiments_db.intervals import LEVEL
from experiments_db.ulid import new_ulid


class StudyKind(StrEnum):
    """What a study came from."""

    RESEARCH = "research"
    """A question asked of `a3r research`."""
    VIBE = "vibe"
    """A description given to `vibe train`."""


class StudyStatus(StrEnum):
    """Where a study stands."""

    DRAFT = "draft"
    LOCKED = "locked"
    """The plan is fixed by its hash, nothing has run."""
    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    FAILED = "failed"
    ABANDONED = "abandoned"


class AssumptionSource(StrEnum):
    """Who an assumption comes from."""

    USER = "user"
    LLM = "llm"
    DEFAULT = "default"


class Direction(StrEnum):
    """What a hypothesis expects of an arm against the reference."""

    BETTER = "better"
    WORSE = "worse"
    DIFFERENT = "different"
    EQUIVALENT = "equivalent"


class HypothesisRole(StrEnum):
    """How much weight a hypothesis carries."""

    PRIMARY = "primary"
    SECONDARY = "secondary"
    EXPLORATORY = "exploratory"


class FactorKind(StrEnum):
    """What the levels of a factor are."""

    ORDINAL = "ordinal"
    CATEGORICAL = "categorical"
    CONTINUOUS = "continuous"


class StageKind(StrEnum):
    """What a stage is for."""

    NOISE_FLOOR = "noise_floor"
    """The reference alone over seeds: how far equal runs differ."""
    SCREEN = "screen"
    COMPARE = "compare"
    """Arms against the reference over the same seeds."""
    REFINE = "refine"
    CONFIRM = "confirm"
    """Fresh seeds on the sealed split."""
    DIAGNOSTIC = "diagnostic"
    SINGLE = "single"
    """One training that compares nothing."""


class SplitRole(StrEnum):
    """What the items of a split may be used for."""

    TRAIN = "train"
    VAL = "val"
    TEST_SCREEN = "test_screen"
    TEST_SEALED = "test_sealed"
    """Opened for confirmation only; `Split.opened_at` says when."""


class RunRole(StrEnum):
    """Whether data chose something or confirm what was chosen. An estimate never mixes the two."""

    SELECT = "select"
    CONFIRM = "confirm"


class ExperimentStatus(StrEnum):
    """Where a run stands. It follows the run's newest job; `quarantined` is set by an integrity check and stays."""

    PLANNED = "planned"
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    """The job was lost or preempted; another attempt may go on."""
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    QUARANTINED = "quarantined"
    """Kept and counted, and in no estimate; `quarantine_reason` says why."""


class JobState(StrEnum):
    """Where a job stands: INTENT → SUBMITTED → QUEUED → RUNNING → one of the eight ends, which is written once."""

    INTENT = "INTENT"
    """Written down before anything is started, so that a crash in between starts it once."""
    SUBMITTED = "SUBMITTED"
    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED_CODE = "FAILED_CODE"
    FAILED_OOM = "FAILED_OOM"
    FAILED_NAN = "FAILED_NAN"
    """Training diverged. That is data, never retried into a success."""
    TIMEOUT = "TIMEOUT"
    PREEMPTED = "PREEMPTED"
    CANCELLED = "CANCELLED"
    LOST = "LOST"
    """No heartbeat, and the backend does not know it."""

    @property
    def is_terminal(self) -> bool:
        """Whether it is an end."""
        return self not in _OPEN_STATES


_OPEN_STATES = (JobState.INTENT, JobState.SUBMITTED, JobState.QUEUED, JobState.RUNNING)


class OwnerType(StrEnum):
    """What kind of row an artifact or a finding belongs to."""

    STUDY = "study"
    PREREG = "prereg"
    STAGE = "stage"
    BLUEPRINT = "blueprint"
    EXPERIMENT = "experiment"
    JOB = "job"
    EVAL_RUN = "eval_run"
    ESTIMATE = "estimate"
    DECISION = "decision"
    CLAIM = "claim"


class ValueMark(StrEnum):
    """What a recorded number is, where the number alone can't say it on every database."""

    FINITE = "finite"
    NAN = "nan"
    POSITIVE_INFINITY = "inf"
    NEGATIVE_INFINITY = "-inf"
    NEGATIVE_ZERO = "-0"
    """Stored as 0, for SQLite drops the sign."""
    ABSENT = "absent"
    """The engine reported null: there was nothing to measure, or the number was not finite."""


class Fault(StrEnum):
    """Whose fault it is that an episode did not end by the rules of its game."""

    NONE = "none"
    POLICY = "policy"
    """The agent failed or ran out of time."""
    ENV = "env"
    """The environment or the judge failed; there is no score."""


class ClaimForm(StrEnum):
    """What a claim says."""

    SUPERIOR = "superior"
    INFERIOR = "inferior"
    EQUIVALENT = "equivalent"
    INCONCLUSIVE = "inconclusive"
    THRESHOLD = "threshold"
    TREND = "trend"
    DESCRIPTIVE = "descriptive"


class ClaimStrength(StrEnum):
    """How well a claim stands, weakest first."""

    DESCRIPTIVE = "descriptive"
    """One seed."""
    EXPLORATORY = "exploratory"
    SUPPORTED = "supported"
    CONFIRMED = "confirmed"
    """Fresh seeds on the sealed split, no open finding of high severity."""


class ClaimStatus(StrEnum):
    """Whether a claim was recomputed from its rows."""

    DRAFT = "draft"
    VERIFIED = "verified"
    WITHDRAWN = "withdrawn"


class Relation(StrEnum):
    """What a piece of evidence does to a claim."""

    SUPPORTS = "supports"
    CONTRADICTS = "contradicts"
    CONTEXT = "context"


class BudgetKind(StrEnum):
    """What is spent."""

    USD = "usd"
    TOKENS = "tokens"
    GPU_S = "gpu_s"
    WALL_S = "wall_s"
    JOBS = "jobs"


class BudgetState(StrEnum):
    """Where an amount stands: reserved first, then spent or released."""

    RESERVED = "reserved"
    SPENT = "spent"
    RELEASED = "released"


class Severity(StrEnum):
    """How bad a finding is."""

    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"
    """Keeps a claim from being confirmed while it is open."""


class Row(SQLModel):
    """Base of every table."""

    @declared_attr.directive
    def __tablename__(cls) -> str:
        return snake_case(cls.__name__)

    metadata: ClassVar[MetaData] = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


def _id() -> Any:
    return Field(default_factory=new_ulid, primary_key=True, sa_type=Id)


def _ref(column: str, *, primary_key: bool = False, index: bool = True) -> Any:
    """A reference that every row has."""
    return Field(foreign_key=column, primary_key=primary_key, index=index and not primary_key, sa_type=Id)


def _ref_or_none(column: str) -> Any:
    return Field(default=None, foreign_key=column, index=True, sa_type=Id, nullable=True)


def _now() -> Any:
    return Field(default_factory=utc_now, sa_type=UtcDateTime)


def _moment_or_none() -> Any:
    return Field(default=None, sa_type=UtcDateTime, nullable=True)


def _object() -> Any:
    return Field(default_factory=dict, sa_type=CanonicalJson)


def _list() -> Any:
    return Field(default_factory=list, sa_type=CanonicalJson)


def _number_or_none() -> Any:
    return Field(default=None, sa_type=Double, nullable=True)


def _number(default: float = 0.0) -> Any:
    return Field(default=default, sa_type=Double)


def _count(default: int = 0) -> Any:
    return Field(default=default, sa_type=BigInteger)


class Study(Row, table=True):
    """One question, or one description, and everything done about it."""

    id: str = _id()
    kind: StudyKind = Field(sa_type=closed(StudyKind))
    question: str = Field(sa_type=Text)
    """What the user typed."""
    status: StudyStatus = Field(default=StudyStatus.DRAFT, sa_type=closed(StudyStatus))
    status_reason: str | None = Field(default=None, sa_type=Text)
    owner: str | None = None
    budget: dict[str, Any] = _object()
    """Limits by `BudgetKind`."""
    code_sha: str | None = None
    """Hash of the code that plans, analyses, decides and claims, as it was when the study began."""
    env_fingerprint: dict[str, Any] = _object()
    """Python, packages, machine: what a repeat needs to be the same."""
    graph_version: str | None = None
    """Of the research graph that began it; another one refuses to go on."""
    key: str | None = Field(default=None, unique=True)
    """Names the study for its maker, so that making it twice makes one; None never matches another."""
    created_at: datetime = _now()
    finished_at: datetime | None = _moment_or_none()
    wishes: dict[str, Any] = _object()
    """What was asked for beside the question, such as a number of seeds, by name."""


class Assumption(Row, table=True):
    """Something the question left open, and who filled it in."""

    id: str = _id()
    study_id: str = _ref("study.id")
    text: str = Field(sa_type=Text)
    source: AssumptionSource = Field(sa_type=closed(AssumptionSource))
    confirmed_by: str | None = None
    """Who agreed to it; None while nobody was asked."""


class Prereg(Row, table=True):
    """A plan, fixed before the first run. The row can't be changed or deleted; a new plan is a new version."""

    __table_args__ = (
        UniqueConstraint("study_id", "version"),
        CheckConstraint("length(sha256) = 64", name="sha256"),
        CheckConstraint("version >= 1", name="version"),
    )

    id: str = _id()
    study_id: str = _ref("study.id", index=False)
    version: int = 1
    canonical_json: str = Field(sa_type=Text)
    """The whole plan, as `columns.canonical_json` writes it."""
    sha256: str = Field(sa_type=Sha256)
    """Of `canonical_json` in UTF-8; reports quote it."""
    locked_at: datetime = _now()


class Amendment(Row, table=True):
    """A change of plan. Claims that rest on it are exploratory."""

    __table_args__ = (UniqueConstraint("prereg_id", "after_sha"),)

    id: str = _id()
    prereg_id: str = _ref("prereg.id", index=False)
    """The plan that was changed."""
    before_sha: str = Field(sa_type=Sha256)
    after_sha: str = Field(sa_type=Sha256)
    reason: str = Field(sa_type=Text)
    data_seen: bool
    """Whether results were known when it was made."""
    approved_by: str
    at: datetime = _now()


class Hypothesis(Row, table=True):
    """What is expected of one arm, written down before it runs."""

    __table_args__ = (UniqueConstraint("prereg_id", "code"),)

    id: str = _id()
    prereg_id: str = _ref("prereg.id", index=False)
    code: str
    """`H1`, `H2` …"""
    arm_key: str | None = None
    statement: str = Field(sa_type=Text)
    estimand: str
    """The number it is about."""
    direction: Direction = Field(sa_type=closed(Direction))
    delta_min: float | None = _number_or_none()
    """Smallest difference of interest, in the unit of the estimand."""
    delta_equiv: float | None = _number_or_none()
    """Largest difference that does not matter, in the unit of the estimand."""
    family: str = "primary"
    """Hypotheses whose p values are adjusted together."""
    role: HypothesisRole = Field(default=HypothesisRole.PRIMARY, sa_type=closed(HypothesisRole))


class Factor(Row, table=True):
    """What differs between arms on purpose."""

    __table_args__ = (UniqueConstraint("prereg_id", "name"),)

    id: str = _id()
    prereg_id: str = _ref("prereg.id", index=False)
    name: str
    """`trainer.group_size`: a dotted path into the blueprint's params."""
    levels: list[Any] = _list()
    kind: FactorKind = Field(sa_type=closed(FactorKind))
    unit: str | None = None


class Split(Row, table=True):
    """A set of items that runs are trained or measured on."""

    __table_args__ = (UniqueConstraint("name", "content_sha"),)

    id: str = _id()
    name: str
    """As evaluation episodes are tagged: `heldout`."""
    role: SplitRole = Field(sa_type=closed(SplitRole))
    content_sha: str = Field(sa_type=Sha256)
    """Of the items' ids, so that two studies mean the same items."""
    n: int
    """Items in it."""
    opened_at: datetime | None = _moment_or_none()
    """First use of a sealed split; None while it is sealed."""


class Stage(Row, table=True):
    """Runs that are started together and judged together."""

    __table_args__ = (UniqueConstraint("prereg_id", "n"),)

    id: str = _id()
    prereg_id: str = _ref("prereg.id", index=False)
    n: int
    """Place in the plan, from 0."""
    kind: StageKind = Field(sa_type=closed(StageKind))
    rungs: list[Any] = _list()
    """Successive halving: arms, seeds and updates of each rung; empty where all runs are full length."""
    seeds_policy: dict[str, Any] = _object()
    """Which seeds the arms share and how more are drawn."""
    eval_split_id: str | None = _ref_or_none("split.id")
    max_jobs: int | None = None
    """Runs side by side; None leaves it to the executor."""
    created_at: datetime = _now()


class Blueprint(Row, table=True):
    """Everything a worker needs to run one arm: the contract between who plans and who runs."""

    __table_args__ = (UniqueConstraint("stage_id", "arm_key"), CheckConstraint("length(sha256) = 64", name="sha256"))

    id: str = _id()
    stage_id: str = _ref("stage.id", index=False)
    arm_key: str
    """Names the arm in tables and curves: `group_size=8`."""
    objective: str = Field(sa_type=Text)
    hypothesis_id: str | None = _ref_or_none("hypothesis.id")
    expected: dict[str, Any] = _object()
    """The result the hypothesis predicts."""
    template_id: str
    """The game: a name under `templates/`."""
    template_version: str | None = None
    template_sha: str | None = None
    """Of the template's files."""
    params: dict[str, Any] = _object()
    """What differs in this arm, by dotted path."""
    controls: dict[str, Any] = _object()
    """What is the same in every arm, by dotted path."""
    environment: dict[str, Any] = _object()
    """Packages and machine the run needs."""
    command: list[Any] = _list()
    """Words of the launch command; seed and folders are added by the executor."""
    outputs: list[Any] = _list()
    """Files the run leaves in its folder."""
    resource: dict[str, Any] = _object()
    """`cores`, `memory_bytes`, `gpus`."""
    time_limit_s: float | None = _number_or_none()
    """Wall seconds of a run; None means no limit."""
    metrics: list[Any] = _list()
    """Names of the metrics that are read from it."""
    notes: str | None = Field(default=None, sa_type=Text)
    sha256: str = Field(sa_type=Sha256)
    """Of the canonical JSON of all of the above but ids."""


class Experiment(Row, table=True):
    """One training run: an arm with its seeds. What people call a run; its id is what tables show."""

    id: str = _id()
    blueprint_id: str = _ref("blueprint.id")
    seed_train: int = Field(sa_type=BigInteger)
    """Seed of the engine: weights are the same for all, sampling and batches are not."""
    seed_env: int | None = Field(default=None, sa_type=BigInteger)
    """Seed of the training tasks; None where it follows from `seed_train`."""
    seed_eval: int | None = Field(default=None, sa_type=BigInteger)
    """Seed of the held-out tasks; None where all runs are measured on the same ones."""
    rung: int = 0
    key: str = Field(unique=True)
    """Names the run for its maker: the same key is the same run, whatever crashes."""
    role: RunRole = Field(default=RunRole.SELECT, sa_type=closed(RunRole))
    status: ExperimentStatus = Field(default=ExperimentStatus.PLANNED, sa_type=closed(ExperimentStatus))
    quarantine_reason: str | None = Field(default=None, sa_type=Text)
    run_dir: str | None = Field(default=None, sa_type=Text)
    """Folder with its project, journal, checkpoints and logs."""
    created_at: datetime = _now()
    finished_at: datetime | None = _moment_or_none()


class Job(Row, table=True):
    """One attempt at running an experiment."""

    __table_args__ = (
        UniqueConstraint("experiment_id", "attempt"),
        CheckConstraint("attempt >= 1", name="attempt"),
        CheckConstraint("fencing >= 0", name="fencing"),
    )

    id: str = _id()
    experiment_id: str = _ref("experiment.id", index=False)
    attempt: int = 1
    key: str = Field(unique=True)
    """What the backend knows it by: `{experiment key}.{attempt}`. Same key, same job."""
    backend: str = "local"
    backend_id: str | None = None
    """The backend's own name for it: a process id, a Ray submission id."""
    state: JobState = Field(default=JobState.INTENT, sa_type=closed(JobState))
    state_cause: str | None = Field(default=None, sa_type=Text)
    exit_code: int | None = None
    signal: int | None = None
    """Number of the signal that ended it."""
    host: str | None = None
    gpus: list[Any] = _list()
    submitted_at: datetime | None = _moment_or_none()
    started_at: datetime | None = _moment_or_none()
    ended_at: datetime | None = _moment_or_none()
    heartbeat_at: datetime | None = _moment_or_none()
    log_path: str | None = Field(default=None, sa_type=Text)
    cost_gpu_s: float = _number()
    """GPUs times seconds."""
    fencing: int = 0
    """Rises each time a process takes the job over; writes with a smaller number are refused."""
    created_at: datetime = _now()


class JobEvent(Row, table=True):
    """Something that happened to a job. Rows are only ever added."""

    id: str = _id()
    job_id: str = _ref("job.id")
    at: datetime = _now()
    kind: str
    """`state`, `takeover`, `heartbeat_missed` …"""
    payload: dict[str, Any] = _object()


class Artifact(Row, table=True):
    """A file that belongs to a row."""

    __table_args__ = (UniqueConstraint("owner_type", "owner_id", "kind", "path"),)

    id: str = _id()
    owner_type: OwnerType = Field(sa_type=closed(OwnerType))
    owner_id: str = Field(sa_type=Id)
    kind: str
    """`checkpoint`, `report`, `log`, `curve`, `episodes` …"""
    path: str = Field(sa_type=Text)
    sha256: str | None = Field(default=None, sa_type=Sha256)
    """Of the content; None for a folder or a file on another machine."""
    bytes: int | None = Field(default=None, sa_type=BigInteger)
    step: int | None = Field(default=None, sa_type=BigInteger)
    """Updates in its weights, for checkpoints."""
    created_at: datetime = _now()


class EngineEvent(Row, table=True):
    """One numbered event of a swarm server, as it came. The other rows of a run are derived from these, once."""

    __table_args__ = (CheckConstraint("seq >= 1", name="seq"),)

    server_id: str = Field(primary_key=True)
    seq: int = Field(primary_key=True, sa_type=BigInteger, sa_column_kwargs={"autoincrement": False})
    """The server's own number of it."""
    experiment_id: str = _ref("experiment.id")
    at: datetime = Field(sa_type=UtcDateTime)
    """By the server's clock."""
    kind: str
    payload: dict[str, Any] = _object()
    """Numbers that are not finite are the texts `NaN`, `Infinity` and `-Infinity`."""


class MetricPoint(Row, table=True):
    """One metric of one update."""

    __table_args__ = (
        UniqueConstraint("experiment_id", "name", "segment", "step"),
        CheckConstraint("(value IS NOT NULL) = (mark IN ('finite', '-0'))", name="value"),
    )

    id: str = _id()
    experiment_id: str = _ref("experiment.id", index=False)
    name: str
    """As the engine names it: `reward_mean`, `entropy` …; `drops.REASON` counts what the step left out."""
    segment: int = 0
    """Rises by one each time the steps start again from an earlier one; a curve takes the newest."""
    step: int = Field(sa_type=BigInteger)
    """Updates done, from 1."""
    wall_s: float = _number()
    """Seconds since the run's first event, by the server's clock."""
    value: float | None = _number_or_none()
    """None where the number was not finite; `mark` says what it was."""
    mark: ValueMark = Field(default=ValueMark.FINITE, sa_type=closed(ValueMark))


class HealthWarning(Row, table=True):
    """One thing that the engine said was going wrong after one update."""

    __table_args__ = (UniqueConstraint("experiment_id", "segment", "step", "policy", "kind"),)

    id: str = _id()
    experiment_id: str = _ref("experiment.id", index=False)
    segment: int = 0
    """As in MetricPoint."""
    step: int = Field(sa_type=BigInteger)
    """Updates done, from 1."""
    policy: str = ""
    """Empty where the update named none."""
    kind: str
    """As the engine names it: `entropy_collapse`, `kl_spike` …"""
    value: float | None = _number_or_none()
    """What was found, in the unit of its kind; None where it was not finite, or stands in the message alone."""
    message: str = Field(sa_type=Text)
    """What was found, the limit, and the way out."""


class EpisodeRow(Row, table=True):
    """One episode: claimed, then ended or dropped. Tokens are in the engine's journal, not here."""

    __tablename__ = "episode"
    __table_args__ = (UniqueConstraint("experiment_id", "episode_id"),)

    id: str = _id()
    experiment_id: str = _ref("experiment.id", index=False)
    episode_id: str
    """The engine's name for it."""
    task_id: str
    group_id: str
    group_index: int
    """Place in its group, from 0."""
    mode: str
    """`train`, `eval` or `debug`."""
    tags: dict[str, Any] = _object()
    claimed_at: datetime | None = _moment_or_none()
    ended_at: datetime | None = _moment_or_none()
    """None while it runs, and for good where it was dropped."""
    outcome: str | None = None
    """How the engine says it ended; None while it runs."""
    rewards: dict[str, Any] = _object()
    """By agent; null where it was not judged."""
    metrics: dict[str, Any] = _object()
    policy_version: int | None = Field(default=None, sa_type=BigInteger)
    """Updates in the weights that played it."""
    num_calls: int | None = None
    num_prompt_tokens: int | None = Field(default=None, sa_type=BigInteger)
    num_sampled_tokens: int | None = Field(default=None, sa_type=BigInteger)
    seconds: float | None = _number_or_none()
    """From its claim to its end, by the server."""
    trained_step: int | None = Field(default=None, sa_type=BigInteger)
    """The update it was part of; None for all but train episodes that made it into a batch."""
    drop_reason: str | None = None
    """Why it was not used."""
    num_refused: int | None = Field(default=None, sa_type=BigInteger)
    """Calls that got an error instead of a reply; None where the server did not count them."""
    last_refusal: str | None = Field(default=None, sa_type=Text)
    """What the last of them was told, after its HTTP status."""


class EvalRun(Row, table=True):
    """One measurement of one policy: the episodes of `eval` mode with the same tags and weights."""

    __table_args__ = (
        UniqueConstraint("experiment_id", "step", "split_name", "temperature", "label"),
        CheckConstraint("n_attempted = n_valid + n_policy_fault + n_env_fault", name="counts"),
        CheckConstraint("n_valid >= 0 AND n_policy_fault >= 0 AND n_env_fault >= 0", name="not_negative"),
    )

    id: str = _id()
    experiment_id: str = _ref("experiment.id", index=False)
    step: int = Field(sa_type=BigInteger)
    """Updates in the weights that were measured."""
    split_name: str
    split_id: str | None = _ref_or_none("split.id")
    label: str = ""
    """What the measurement was for: `before`, `curve`, `after` …"""
    k: int = 0
    """Samples of the item that has most."""
    temperature: float = _number(1.0)
    """Of the sampler; 0 is greedy."""
    n_attempted: int = 0
    """Episodes that ended or were dropped."""
    n_valid: int = 0
    n_policy_fault: int = 0
    n_env_fault: int = 0
    checkpoint_sha: str | None = Field(default=None, sa_type=Sha256)
    started_at: datetime = _now()


class EvalItem(Row, table=True):
    """One attempt at one held-out item: the atom of evidence."""

    __table_args__ = (UniqueConstraint("eval_run_id", "item_id", "sample"),)

    id: str = _id()
    eval_run_id: str = _ref("eval_run.id", index=False)
    item_id: str
    """The task; attempts at one item are not independent of each other."""
    sample: int
    """Which attempt at the item, from 0."""
    score: float | None = _number_or_none()
    """Mean reward of the judged agents; None where nobody was judged."""
    fault: Fault = Field(default=Fault.NONE, sa_type=closed(Fault))
    tokens: int | None = Field(default=None, sa_type=BigInteger)
    """Tokens the policy sampled."""
    episode_row_id: str | None = _ref_or_none("episode.id")
    trace_artifact_id: str | None = _ref_or_none("artifact.id")


class Estimate(Row, table=True):
    """A number computed from rows, with its interval and how to compute it again."""

    __table_args__ = (UniqueConstraint("study_id", "key"), CheckConstraint("level > 0 AND level < 1", name="level"))

    id: str = _id()
    study_id: str = _ref("study.id", index=False)
    key: str
    """Names it within the study, so that computing it twice makes one row."""
    stage_id: str | None = _ref_or_none("stage.id")
    hypothesis_id: str | None = _ref_or_none("hypothesis.id")
    role: RunRole = Field(default=RunRole.SELECT, sa_type=closed(RunRole))
    """`confirm` only where every run behind it is a confirmation run."""
    estimand: str
    query_sql: str = Field(default="", sa_type=Text)
    """Reads the numbers it was computed from."""
    method: str
    """`paired_t`, `welch_t`, `wilson` …"""
    params: dict[str, Any] = _object()
    value: float | None = _number_or_none()
    """None where it can't be computed, which `params` explains."""
    unit: str = "reward"
    ci_lo: float | None = _number_or_none()
    """None means no bound."""
    ci_hi: float | None = _number_or_none()
    level: float = _number(LEVEL)
    """Coverage of the interval."""
    se_seed: float | None = _number_or_none()
    """Standard error from training seeds, in `unit`."""
    se_eval: float | None = _number_or_none()
    """Standard error from evaluation items, in `unit`."""
    n_seeds: int = 0
    n_items: int = 0
    p: float | None = _number_or_none()
    p_adj: float | None = _number_or_none()
    """Adjusted over the family."""
    family: str | None = None
    analysis_sha: str | None = None
    """Version of the code that computed it."""
    inputs_sha: str | None = Field(default=None, sa_type=Sha256)
    """Of the numbers it was computed from."""
    created_at: datetime = _now()


class EstimateInput(Row, table=True):
    """A run that an estimate was computed from."""

    estimate_id: str = _ref("estimate.id", primary_key=True)
    experiment_id: str = _ref("experiment.id", primary_key=True)


class Decision(Row, table=True):
    """What the locked tree said after a stage, and the trace of how."""

    __table_args__ = (UniqueConstraint("stage_id", "n"),)

    id: str = _id()
    stage_id: str = _ref("stage.id", index=False)
    n: int = 0
    """Decisions of a stage count from 0."""
    node_id: str
    """The node of the tree that fired."""
    predicate_trace: list[Any] = _list()
    """Every node that was asked: its predicate, the numbers it saw, true, false or undecided."""
    branch: str
    auto: bool = True
    """Taken by code; False where a person chose."""
    overridden_by: str | None = None
    """Who took another branch than the tree; claims that rest on it are exploratory."""
    comment: str | None = Field(default=None, sa_type=Text)
    at: datetime = _now()
    arm_key: str | None = None
    """The arm it is about; None in rows of before this column, about the reference alone."""


class DecisionEstimate(Row, table=True):
    """An estimate that a decision read."""

    decision_id: str = _ref("decision.id", primary_key=True)
    estimate_id: str = _ref("estimate.id", primary_key=True)


class Claim(Row, table=True):
    """A sentence of the report, with slots instead of numbers."""

    __table_args__ = (UniqueConstraint("study_id", "key"),)

    id: str = _id()
    study_id: str = _ref("study.id", index=False)
    key: str
    """Names it within the study."""
    hypothesis_id: str | None = _ref_or_none("hypothesis.id")
    form: ClaimForm = Field(sa_type=closed(ClaimForm))
    text_template: str = Field(sa_type=Text)
    slots: dict[str, Any] = _object()
    """Slot name to estimate id."""
    strength: ClaimStrength = Field(sa_type=closed(ClaimStrength))
    caveats: list[Any] = _list()
    status: ClaimStatus = Field(default=ClaimStatus.DRAFT, sa_type=closed(ClaimStatus))
    created_at: datetime = _now()


class ClaimEvidence(Row, table=True):
    """A row that a claim rests on: exactly one of the three."""

    __table_args__ = (
        UniqueConstraint("claim_id", "estimate_id"),
        UniqueConstraint("claim_id", "experiment_id"),
        UniqueConstraint("claim_id", "artifact_id"),
        CheckConstraint(
            "CASE WHEN estimate_id IS NULL THEN 0 ELSE 1 END + CASE WHEN experiment_id IS NULL THEN 0 ELSE 1 END"
            " + CASE WHEN artifact_id IS NULL THEN 0 ELSE 1 END = 1",
            name="one_target",
        ),
    )

    id: str = _id()
    claim_id: str = _ref("claim.id", index=False)
    relation: Relation = Field(default=Relation.SUPPORTS, sa_type=closed(Relation))
    estimate_id: str | None = _ref_or_none("estimate.id")
    experiment_id: str | None = _ref_or_none("experiment.id")
    artifact_id: str | None = _ref_or_none("artifact.id")


class LLMCall(Row, table=True):
    """One request to a language model that plans or writes, and what it cost."""

    __tablename__ = "llm_call"

    id: str = _id()
    study_id: str | None = _ref_or_none("study.id")
    node: str
    """The node of the graph, or the step of `vibe`, that asked."""
    model: str
    prompt_sha: str = Field(sa_type=Sha256)
    response_artifact_id: str | None = _ref_or_none("artifact.id")
    tokens_in: int = _count()
    tokens_out: int = _count()
    usd: float | None = _number_or_none()
    """None where the price is not known."""
    cache_hit: bool = False
    at: datetime = _now()


class BudgetEntry(Row, table=True):
    """An amount of a study's budget, reserved before it is spent."""

    __table_args__ = (UniqueConstraint("study_id", "kind", "ref"), CheckConstraint("amount >= 0", name="amount"))

    id: str = _id()
    study_id: str = _ref("study.id", index=False)
    kind: BudgetKind = Field(sa_type=closed(BudgetKind))
    amount: float = _number()
    """In the unit of its kind."""
    state: BudgetState = Field(default=BudgetState.RESERVED, sa_type=closed(BudgetState))
    ref: str
    """What it is for: the id of a job or a call."""
    at: datetime = _now()


class AuditFinding(Row, table=True):
    """Something that looks wrong: a reward that can be had for nothing, a run that is not what its blueprint says."""

    id: str = _id()
    target_type: OwnerType = Field(sa_type=closed(OwnerType))
    target_id: str = Field(sa_type=Id, index=True)
    detector: str
    """The check that found it."""
    severity: Severity = Field(sa_type=closed(Severity))
    message: str = Field(sa_type=Text)
    evidence_artifact_id: str | None = _ref_or_none("artifact.id")
    resolved_by: str | None = None
    """Who settled it; None while it is open."""
    resolved_at: datetime | None = _moment_or_none()
    at: datetime = _now()


class Note(Row, table=True):
    """A lesson to remember across studies."""

    id: str = _id()
    scope: str
    """What it is about: `template:tictactoe`, `global` …"""
    text: str = Field(sa_type=Text)
    evidence: list[Any] = _list()
    """Ids of the rows it rests on."""
    at: datetime = _now()
