"""What the events of a swarm server say, as rows: the inner half of the collector, without a network.

`store` writes some events and everything that follows from them in the caller's transaction. It reads what the rows
say (`Book`), takes in one event after another, which is pure (`take_in`), and writes what changed. An event's own row
makes sure that it is taken in once. One that can't be read is kept as it came, and nothing follows from it.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked
from sqlalchemy import ColumnElement, Connection, Table, bindparam, func, insert, update
from sqlalchemy import select as sa_select
from sqlmodel import Session, col, select

from experiments_db.models import (
    Blueprint,
    EngineEvent,
    Experiment,
    Fault,
    MetricPoint,
    OwnerType,
    Row,
    Split,
    Stage,
    ValueMark,
)
from experiments_db.ulid import new_ulid
from experiments_db.writes import add_artifact

log = logging.getLogger(__name__)

_EVENTS = Row.metadata.tables["engine_event"]
_EPISODES = Row.metadata.tables["episode"]
_EVAL_RUNS = Row.metadata.tables["eval_run"]
_EVAL_ITEMS = Row.metadata.tables["eval_item"]
_POINTS = Row.metadata.tables["metric_point"]
_WARNINGS = Row.metadata.tables["health_warning"]

DEFAULT_SPLIT = "eval"
"""Split of evaluation episodes that name none."""
CHECKPOINT = "checkpoint"
"""Kind of the artifacts that checkpoints become."""
SERVER_ENDED = "server_ended"
"""Why episodes were dropped that ran when their server was started again."""
SQL_VARIABLES = 500
"""Names in one statement; databases take a limited number."""

Mode = Literal["train", "eval", "debug"]


@checked(frozen=True)
class Event:
    """One numbered event of a server."""

    seq: Annotated[int, Field(ge=1)]
    at: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Unix seconds, by the server's clock."""
    kind: str
    payload: dict[str, Any]


@checked(frozen=True)
class Claimed:
    """Payload of `claim`."""

    episode_id: str
    task_id: str
    group_id: str
    index: int
    mode: Mode
    tags: dict[str, str] = Field(default_factory=dict)
    policy_version: int | None = None


@checked(frozen=True)
class Ended:
    """Payload of `episode`."""

    episode_id: str
    task_id: str
    group_id: str
    index: int
    mode: Mode
    rewards: dict[str, float | None]
    outcome: str
    policy_version: int
    tags: dict[str, str] = Field(default_factory=dict)
    metrics: dict[str, float | None] = Field(default_factory=dict)
    num_calls: int | None = None
    num_prompt_tokens: int | None = None
    num_sampled_tokens: int | None = None
    seconds: float | None = None
    num_refused: int | None = None
    last_refusal: str | None = None
    frozen_agents: list[str] = Field(default_factory=list)
    """Opponents and judges: their rewards are kept and count in no score."""


@checked(frozen=True)
class Dropped:
    """Payload of `drop`."""

    episode_id: str
    reason: str
    num_refused: int | None = None
    """Named where the episode had no end that says so."""
    last_refusal: str | None = None


@checked(frozen=True)
class Batch:
    """Payload of `batch`."""

    step: int
    episode_ids: list[str]


@checked(frozen=True)
class Warned:
    """One of the warnings in the payload of `step`."""

    policy: str
    kind: str
    value: float | None
    message: str


@checked(frozen=True)
class Stepped:
    """Payload of `step`."""

    step: int
    metrics: dict[str, float | None]
    drops: dict[str, int] = Field(default_factory=dict)
    seconds: float | None = None
    health: list[Warned] = Field(default_factory=list)
    num_refused: int | None = None


@checked(frozen=True)
class Saved:
    """Payload of `checkpoint`."""

    step: int
    path: str | None = None
    error: str | None = None


Payload = Claimed | Ended | Dropped | Batch | Stepped | Saved

event_adapter: TypeAdapter[Event] = TypeAdapter(Event)
_PAYLOADS: dict[str, TypeAdapter[Any]] = {
    "claim": TypeAdapter(Claimed),
    "episode": TypeAdapter(Ended),
    "drop": TypeAdapter(Dropped),
    "batch": TypeAdapter(Batch),
    "step": TypeAdapter(Stepped),
    "checkpoint": TypeAdapter(Saved),
}
"""Kinds that rows follow from. Others are only kept."""


# Pure


def mark_of(value: float | None) -> tuple[float | None, ValueMark]:
    """A number as the two columns that hold it on every database."""
    if value is None:
        return None, ValueMark.ABSENT
    if math.isnan(value):
        return None, ValueMark.NAN
    if math.isinf(value):
        return None, ValueMark.POSITIVE_INFINITY if value > 0 else ValueMark.NEGATIVE_INFINITY
    if value == 0 and math.copysign(1, value) < 0:
        return 0.0, ValueMark.NEGATIVE_ZERO
    return value, ValueMark.FINITE


def number_of(value: float | None, mark: ValueMark) -> float | None:
    """The number behind the two columns; None where there was none."""
    match mark:
        case ValueMark.ABSENT:
            return None
        case ValueMark.NAN:
            return math.nan
        case ValueMark.POSITIVE_INFINITY:
            return math.inf
        case ValueMark.NEGATIVE_INFINITY:
            return -math.inf
        case ValueMark.NEGATIVE_ZERO:
            return -0.0
        case ValueMark.FINITE:
            return value


def json_safe(value: Any) -> Any:
    """The same with `NaN`, `Infinity` and `-Infinity` as texts, which JSON and every database can hold."""
    match value:
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case dict():
            return {str(name): json_safe(item) for name, item in value.items()}
        case list() | tuple():
            return [json_safe(item) for item in value]
        case _:
            return value


def score_of(rewards: Mapping[str, float | None]) -> float | None:
    """Mean reward of the agents that were judged; None where nobody was."""
    judged = [reward for reward in rewards.values() if reward is not None and math.isfinite(reward)]
    return math.fsum(judged) / len(judged) if judged else None


def fault_of(outcome: str, score: float | None) -> Fault:
    """Whose fault an ending was. An agent that failed may still have been judged; a failed environment has no score."""
    if outcome in ("agent_error", "timeout"):
        return Fault.POLICY
    return Fault.ENV if outcome == "env_error" or score is None else Fault.NONE


def metrics_of(step: Stepped) -> dict[str, float | None]:
    """Every number of a step by name; drops as `drops.REASON`, wall seconds as `seconds`, refused calls where the
    server counts them.
    """
    refused = {} if step.num_refused is None else {"num_refused": float(step.num_refused)}
    return {
        **step.metrics,
        **{f"drops.{reason}": float(count) for reason, count in step.drops.items()},
        "seconds": step.seconds,
        **refused,
    }


def read_payload(event: Event) -> Payload | None:
    """The event's payload, or None where nothing follows from it or it can't be read."""
    adapter = _PAYLOADS.get(event.kind)
    if adapter is None:
        return None
    try:
        payload: Payload = adapter.validate_python(event.payload)
    except ValidationError as error:
        log.warning("event %d (%s) can't be read, it is kept as it came: %s", event.seq, event.kind, error)
        return None
    return payload


# What rows say


@dataclass(slots=True)
class Episode:
    """A row of `episode`, by the names of its columns."""

    id: str
    experiment_id: str
    episode_id: str
    task_id: str
    group_id: str
    group_index: int
    mode: str
    tags: dict[str, Any]
    policy_version: int | None
    claimed_at: datetime | None = None
    ended_at: datetime | None = None
    outcome: str | None = None
    rewards: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    num_calls: int | None = None
    num_prompt_tokens: int | None = None
    num_sampled_tokens: int | None = None
    seconds: float | None = None
    trained_step: int | None = None
    drop_reason: str | None = None
    num_refused: int | None = None
    last_refusal: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether it was neither ended nor dropped."""
        return self.ended_at is None and self.drop_reason is None


@dataclass(frozen=True, slots=True)
class EvaluationKey:
    """What makes evaluation episodes one measurement."""

    step: int
    split_name: str
    temperature: float
    label: str


@dataclass(slots=True)
class Evaluation:
    """A row of `eval_run`, by the names of its columns."""

    id: str
    experiment_id: str
    step: int
    split_name: str
    temperature: float
    label: str
    started_at: datetime
    split_id: str | None = None
    k: int = 0
    n_attempted: int = 0
    n_valid: int = 0
    n_policy_fault: int = 0
    n_env_fault: int = 0
    checkpoint_sha: str | None = None

    @property
    def key(self) -> EvaluationKey:
        """What it is found by."""
        return EvaluationKey(self.step, self.split_name, self.temperature, self.label)


@dataclass(slots=True)
class Book:
    """What the rows of a run say, as far as some events touch it, and what is to be written."""

    experiment_id: str
    first_at: float | None = None
    """Time of the run's first event, in Unix seconds; None before it."""
    segment: int = 0
    last_step: int = 0
    """Last step of the newest segment; 0 before the first."""
    split_id: str | None = None
    """Held-out split of the run's stage; None where it names none."""
    split_name: str | None = None
    episodes: dict[str, Episode] = field(default_factory=dict)
    """By `episode_id`."""
    evaluations: dict[EvaluationKey, Evaluation] = field(default_factory=dict)
    num_samples: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Attempts by (id of the evaluation, item)."""
    old_ids: frozenset[str] = frozenset()
    """Rows that are in the database already."""
    touched: set[str] = field(default_factory=set)
    """Ids of episodes and evaluations that changed."""
    events: list[dict[str, Any]] = field(default_factory=list)
    points: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[dict[str, Any]] = field(default_factory=list)
    items: list[dict[str, Any]] = field(default_factory=list)
    checkpoints: list[tuple[int, str]] = field(default_factory=list)
    """(step, path) of each."""


# What follows from an event; pure


def take_in(book: Book, server_id: str, event: Event, payload: Payload | None) -> None:
    """Add an event to the book, and everything that follows from its payload as `read_payload` read it."""
    at = datetime.fromtimestamp(event.at, UTC)
    book.events.append(
        {
            "server_id": server_id,
            "seq": event.seq,
            "experiment_id": book.experiment_id,
            "at": at,
            "kind": event.kind,
            "payload": json_safe(event.payload),
        }
    )
    if book.first_at is None:
        book.first_at = event.at
    if event.kind == "server":
        _drop_orphans(book)
    match payload:
        case Claimed() as claimed:
            _claim(book, claimed, at)
        case Ended() as ended:
            _end(book, ended, at)
        case Dropped() as dropped:
            _drop(book, dropped, at)
        case Batch(step, episode_ids):
            _batch(book, step, episode_ids)
        case Stepped() as stepped:
            _step(book, stepped, event.at - book.first_at)
        case Saved(step, str() as path, None):
            book.checkpoints.append((step, path))
        case Saved() | None:
            pass  # a checkpoint that failed is an event, and the older one stands


def _claim(book: Book, claimed: Claimed, at: datetime) -> None:
    _episode(book, claimed).claimed_at = at


def _end(book: Book, ended: Ended, at: datetime) -> None:
    episode = _episode(book, ended)
    episode.tags = ended.tags
    episode.policy_version = ended.policy_version
    episode.ended_at = at
    episode.outcome = ended.outcome
    episode.rewards = json_safe(ended.rewards)
    episode.metrics = json_safe(ended.metrics)
    episode.num_calls = ended.num_calls
    episode.num_prompt_tokens = ended.num_prompt_tokens
    episode.num_sampled_tokens = ended.num_sampled_tokens
    episode.seconds = ended.seconds
    episode.num_refused, episode.last_refusal = ended.num_refused, ended.last_refusal
    if ended.mode == "eval":
        score = score_of({agent: one for agent, one in ended.rewards.items() if agent not in ended.frozen_agents})
        _count(book, episode, at, score, fault_of(ended.outcome, score))


def _episode(book: Book, payload: Claimed | Ended) -> Episode:
    """The episode of an event, new where nothing was heard of it before."""
    episode = book.episodes.get(payload.episode_id)
    if episode is None:
        episode = Episode(
            id=new_ulid(),
            experiment_id=book.experiment_id,
            episode_id=payload.episode_id,
            task_id=payload.task_id,
            group_id=payload.group_id,
            group_index=payload.index,
            mode=payload.mode,
            tags=payload.tags,
            policy_version=payload.policy_version,
        )
        book.episodes[payload.episode_id] = episode
    book.touched.add(episode.id)
    return episode


def _drop(book: Book, dropped: Dropped, at: datetime) -> None:
    episode, reason = book.episodes.get(dropped.episode_id), dropped.reason
    if episode is None:
        log.warning("episode %s was dropped (%s), but its claim is not in the log", dropped.episode_id, reason)
        return
    was_open = episode.is_open
    episode.drop_reason = reason
    if dropped.num_refused is not None:
        episode.num_refused, episode.last_refusal = dropped.num_refused, dropped.last_refusal
    book.touched.add(episode.id)
    if episode.mode == "eval" and was_open and episode.policy_version is not None:
        _count(book, episode, at, None, Fault.POLICY if reason == "timeout" else Fault.ENV)


def _drop_orphans(book: Book) -> None:
    """Episodes that were running when their server ended are gone with it."""
    for episode in book.episodes.values():
        if episode.is_open:
            episode.drop_reason = SERVER_ENDED
            book.touched.add(episode.id)


def _batch(book: Book, step: int, episode_ids: Iterable[str]) -> None:
    for episode_id in episode_ids:
        if (episode := book.episodes.get(episode_id)) is not None:
            episode.trained_step = step
            book.touched.add(episode.id)


def _step(book: Book, stepped: Stepped, wall_s: float) -> None:
    """What a step says. One that is not after the last begins a new segment: training went back."""
    if stepped.step <= book.last_step:
        book.segment += 1
    book.last_step = stepped.step
    for name, number in metrics_of(stepped).items():
        value, mark = mark_of(number)
        book.points.append(
            {
                "id": new_ulid(),
                "experiment_id": book.experiment_id,
                "name": name,
                "segment": book.segment,
                "step": stepped.step,
                "wall_s": wall_s,
                "value": value,
                "mark": mark,
            }
        )
    for warning in stepped.health:
        book.warnings.append(
            {
                "id": new_ulid(),
                "experiment_id": book.experiment_id,
                "segment": book.segment,
                "step": stepped.step,
                "policy": warning.policy,
                "kind": warning.kind,
                "value": mark_of(warning.value)[0],
                "message": warning.message,
            }
        )


def _count(book: Book, episode: Episode, at: datetime, score: float | None, fault: Fault) -> None:
    """One more attempt of an evaluation."""
    evaluation = _evaluation(book, episode, at)
    sample = book.num_samples[evaluation.id, episode.task_id]
    book.num_samples[evaluation.id, episode.task_id] += 1
    book.items.append(
        {
            "id": new_ulid(),
            "eval_run_id": evaluation.id,
            "item_id": episode.task_id,
            "sample": sample,
            "score": score,
            "fault": fault,
            "tokens": episode.num_sampled_tokens,
            "episode_row_id": episode.id,
        }
    )
    evaluation.k = max(evaluation.k, sample + 1)
    evaluation.n_attempted += 1
    evaluation.n_valid += fault is Fault.NONE
    evaluation.n_policy_fault += fault is Fault.POLICY
    evaluation.n_env_fault += fault is Fault.ENV


def _evaluation(book: Book, episode: Episode, at: datetime) -> Evaluation:
    """The measurement that an episode belongs to, by its tags and the weights that played it."""
    key = EvaluationKey(
        step=episode.policy_version or 0,
        split_name=episode.tags.get("split", DEFAULT_SPLIT),
        temperature=_temperature(episode),
        label=episode.tags.get("label", ""),
    )
    evaluation = book.evaluations.get(key)
    if evaluation is None:
        evaluation = Evaluation(
            id=new_ulid(),
            experiment_id=book.experiment_id,
            step=key.step,
            split_name=key.split_name,
            temperature=key.temperature,
            label=key.label,
            started_at=at,
            split_id=book.split_id if key.split_name == book.split_name else None,
        )
        book.evaluations[key] = evaluation
    book.touched.add(evaluation.id)
    return evaluation


def _temperature(episode: Episode) -> float:
    """The temperature that an evaluation episode is tagged with; 1, the sampler's default, where it has none."""
    text = episode.tags.get("temperature", "1")
    try:
        temperature = float(text)
    except ValueError:
        temperature = math.nan
    if not 0 <= temperature < math.inf:
        log.warning("episode %s is tagged with temperature %r; taken as 1", episode.episode_id, text)
        return 1.0
    return temperature


# Reading and writing


def store(session: Session, experiment_id: str, server_id: str, events: Sequence[Event]) -> int:
    """Write events and everything that follows from them; returns how many were not written before.

    Raises:
        ConflictError: another collector wrote one of them meanwhile; nothing of this transaction counts, do it again.
    """
    new = _new_among(session, server_id, events)
    if new:
        payloads = [read_payload(event) for event in new]
        is_restart = any(event.kind == "server" for event in new)
        book = _read(session, experiment_id, [one for one in payloads if one is not None], with_open=is_restart)
        for event, payload in zip(new, payloads, strict=True):
            take_in(book, server_id, event, payload)
        _write(session, book)
    return len(new)


def _new_among(session: Session, server_id: str, events: Sequence[Event]) -> list[Event]:
    """The events that are not in the database, in order of their numbers."""
    if not events:
        return []
    numbers = [event.seq for event in events]
    known = set(
        session.exec(
            select(EngineEvent.seq).where(
                EngineEvent.server_id == server_id, col(EngineEvent.seq).between(min(numbers), max(numbers))
            )
        )
    )
    new = {event.seq: event for event in events if event.seq not in known}
    return [new[seq] for seq in sorted(new)]


def _read(session: Session, experiment_id: str, payloads: Sequence[Payload], *, with_open: bool) -> Book:
    """What the rows say, as far as these payloads touch it.

    Args:
        with_open: with every episode that was neither ended nor dropped.
    """
    book = Book(experiment_id)
    first_at = session.exec(select(func.min(EngineEvent.at)).where(EngineEvent.experiment_id == experiment_id)).one()
    book.first_at = first_at.timestamp() if first_at else None
    newest = session.exec(
        select(MetricPoint.segment, func.max(MetricPoint.step))
        .where(MetricPoint.experiment_id == experiment_id)
        .group_by(col(MetricPoint.segment))
        .order_by(col(MetricPoint.segment).desc())
    ).first()
    if newest is not None:
        book.segment, book.last_step = newest
    split = session.exec(
        select(Split.id, Split.name)
        .join(Stage, col(Stage.eval_split_id) == col(Split.id))
        .join(Blueprint, col(Blueprint.stage_id) == col(Stage.id))
        .join(Experiment, col(Experiment.blueprint_id) == col(Blueprint.id))
        .where(Experiment.id == experiment_id)
    ).first()
    if split is not None:
        book.split_id, book.split_name = split
    connection = session.connection()
    _read_episodes(connection, book, payloads, with_open=with_open)
    _read_evaluations(connection, book, payloads)
    book.old_ids = frozenset([row.id for row in book.episodes.values()] + [row.id for row in book.evaluations.values()])
    return book


def _read_episodes(connection: Connection, book: Book, payloads: Iterable[Payload], *, with_open: bool) -> None:
    named: set[str] = set()
    for payload in payloads:
        match payload:
            case Batch(_, episode_ids):
                named.update(episode_ids)
            case Claimed() | Ended() | Dropped():
                named.add(payload.episode_id)
            case Stepped() | Saved():
                pass
    names = sorted(named)
    wanted: list[ColumnElement[bool]] = [
        _EPISODES.c.episode_id.in_(names[at : at + SQL_VARIABLES]) for at in range(0, len(names), SQL_VARIABLES)
    ]
    if with_open:
        wanted.append(_EPISODES.c.ended_at.is_(None) & _EPISODES.c.drop_reason.is_(None))
    for condition in wanted:
        query = sa_select(_EPISODES).where(_EPISODES.c.experiment_id == book.experiment_id, condition)
        for row in connection.execute(query).mappings():
            book.episodes[row["episode_id"]] = Episode(**row)


def _read_evaluations(connection: Connection, book: Book, payloads: Iterable[Payload]) -> None:
    steps = {payload.policy_version for payload in payloads if isinstance(payload, Ended) and payload.mode == "eval"}
    steps |= {episode.policy_version or 0 for episode in book.episodes.values() if episode.mode == "eval"}
    if not steps:
        return
    of_these = (_EVAL_RUNS.c.experiment_id == book.experiment_id) & _EVAL_RUNS.c.step.in_(steps)
    for row in connection.execute(sa_select(_EVAL_RUNS).where(of_these)).mappings():
        evaluation = Evaluation(**row)
        book.evaluations[evaluation.key] = evaluation
    counted = connection.execute(
        sa_select(_EVAL_ITEMS.c.eval_run_id, _EVAL_ITEMS.c.item_id, func.count())
        .join(_EVAL_RUNS, _EVAL_RUNS.c.id == _EVAL_ITEMS.c.eval_run_id)
        .where(of_these)
        .group_by(_EVAL_ITEMS.c.eval_run_id, _EVAL_ITEMS.c.item_id)
    )
    book.num_samples.update({(eval_run, item): count for eval_run, item, count in counted})


def _write(session: Session, book: Book) -> None:
    """Write what is new or changed, parents first."""
    connection = session.connection()
    _insert(connection, _EVENTS, book.events)
    for table, rows in (
        (_EPISODES, list(book.episodes.values())),
        (_EVAL_RUNS, list(book.evaluations.values())),
    ):
        touched = [_columns(row) for row in rows if row.id in book.touched]
        _insert(connection, table, [row for row in touched if row["id"] not in book.old_ids])
        _update(connection, table, [row for row in touched if row["id"] in book.old_ids])
    _insert(connection, _EVAL_ITEMS, book.items)
    _insert(connection, _POINTS, book.points)
    _insert(connection, _WARNINGS, book.warnings)
    for step, path in book.checkpoints:
        add_artifact(session, OwnerType.EXPERIMENT, book.experiment_id, CHECKPOINT, path, step=step)


def _columns(row: Episode | Evaluation) -> dict[str, Any]:
    return {name: getattr(row, name) for name in row.__slots__}


def _insert(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    if rows:
        connection.execute(insert(table), rows)


def _update(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    if rows:
        columns: dict[str, ColumnElement[Any]] = {name: bindparam(f"new_{name}") for name in rows[0] if name != "id"}
        connection.execute(
            update(table).where(table.c.id == bindparam("row_id")).values(columns),
            [{"row_id": row["id"]} | {f"new_{name}": value for name, value in row.items()} for row in rows],
        )
