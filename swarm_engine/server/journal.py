"""The front's memory on disk: numbered events, completed episodes with their calls, batch records.

SQLite in WAL mode with full sync. One thread writes; everything that queued up while the last commit ran goes into the
next one, so a hundred episodes that end together cost one sync. A write is answered after its commit. When a commit
fails, nothing of it is on disk, everything queued behind it fails too, and the journal takes no more until it is opened
again: what was promised is there, and nothing is there by half.

Other programs may look into the file while it is written, and lock it. Nothing of this process but SQLite may open it
then: POSIX drops all locks that a process has on a file when it closes any descriptor of it, and a program that closes
the file next takes itself for its last user and deletes the live write-ahead log. A lock of others fails nothing; what
is queued waits for its end. The event loop reads from memory alone, for it answers `/status` meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import queue
import sqlite3
import threading
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, assert_never

from swarm_engine.config import BestBy
from swarm_engine.errors import JournalDamagedError, JournalError, JournalLockedError, ServerClosingError
from swarm_engine.server.journal_file import (
    LOCK_PATIENCE_S,
    check_before_opening,
    damaged,
    explain,
    is_locked,
    open_database,
)
from swarm_engine.server.pool import PooledEpisode, Seat
from swarm_engine.types import BatchRecord, Mode

log = logging.getLogger(__name__)

T = TypeVar("T")

WRITER_TIMEOUT_S = 1.0
"""How long the writer waits for others' locks before it looks whether it is to end, and waits again."""
CLOSE_PATIENCE_S = 5.0
"""A journal that is closed while others hold it locked waits this long; what was queued then fails."""
TELL_AFTER_S = 5.0
"""A lock of others that lasts longer is told about in the log."""

RECENT_EVENTS = 8192
"""Events kept in memory for those who follow the stream closely; older ones are read from disk."""


@dataclass(frozen=True, slots=True)
class Event:
    """One numbered event of this run folder."""

    seq: int
    at: float
    """Unix time in seconds."""
    kind: str
    payload: str
    """JSON."""

    def as_json(self) -> str:
        """The event as one JSON object."""
        return f'{{"seq":{self.seq},"at":{self.at!r},"kind":{json.dumps(self.kind)},"payload":{self.payload}}}'


@dataclass(frozen=True, slots=True)
class EventWrite:
    """An event to append; its number and time are given at the commit."""

    kind: str
    payload: str
    """JSON."""

    @staticmethod
    def of(kind: str, **payload: Any) -> EventWrite:
        """An event from its parts.

        Raises:
            ValueError: a number in it is not finite.
        """
        return EventWrite(kind, dumps(payload))


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """A completed episode as it lies in the journal."""

    episode_id: str
    mode: Mode
    task_id: str
    group_id: str
    place: int
    attempt: int
    position: int
    is_pooled: bool
    rewards: Mapping[str, float | None]
    request: str
    """The `end` it was answered with, normalised: the same again is the same episode, another one a conflict."""
    record: bytes
    """An `EpisodeRecord` as JSON."""

    def pooled(self) -> PooledEpisode:
        """The episode as the next batch sees it."""
        seat = Seat(self.group_id, self.task_id, self.place, self.attempt, self.position)
        return PooledEpisode(self.episode_id, seat, self.rewards)


@dataclass(frozen=True, slots=True)
class BatchWrite:
    """A batch about to be trained; marks its episodes as taken."""

    record: BatchRecord
    taught: Mapping[str, Sequence[float]] | None = None
    """What a teacher said of its calls, log-probabilities in nats by call id; None where none was asked."""


@dataclass(frozen=True, slots=True)
class UnpoolWrite:
    """Episodes that will not be trained after all: their group was given up."""

    episode_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MetaWrite:
    """A named value of the run folder."""

    key: str
    value: str


Write = EventWrite | EpisodeRow | BatchWrite | UnpoolWrite | MetaWrite


@dataclass(slots=True)
class _Job:
    writes: Sequence[Write]
    done: asyncio.Future[None]
    opening: int
    """Which opening of the journal it was queued in."""


class Journal:
    """The journal of one run folder.

    Its writes, coroutines and what it holds in memory (`meta`, `kept`, `last_step` …) belong to the event loop's
    thread. What reads rows says so and is called on another.
    """

    def __init__(
        self,
        path: Path,
        *,
        on_error: Callable[[JournalError], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self.error: JournalError | None = None
        """Why it takes no more writes; None while it does."""
        self.is_closed = False
        self._opening = 0
        self._failed: tuple[int, JournalError] | None = None
        """The last opening in which a commit failed, and how; the writer's thread alone sets it, for the loop learns of
        a failure later than the next job is taken."""
        self._on_error = on_error
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        check_before_opening(path)
        self._writer_database = self._open_writer()
        self._reader = open_database(path)
        self._reader_lock = threading.Lock()
        self.locked_since: float | None = None
        """Since when others keep the writer waiting, by the monotonic clock; None while they don't."""
        self._gives_up_at: float | None = None
        """When a closing journal stops waiting for others, by the monotonic clock."""
        self._meta: dict[str, str] = dict(self._read("SELECT key, value FROM meta"))
        self._kept = {row.episode_id: row for row in self._read_kept()}
        ((last_step, has_checkpoint, last_seq),) = self._read(
            "SELECT (SELECT coalesce(max(step), 0) FROM batches),"
            " EXISTS (SELECT 1 FROM events WHERE kind = 'checkpoint'), (SELECT coalesce(max(seq), 0) FROM events)"
        )
        self._last_step: int = last_step
        self._has_checkpoint = bool(has_checkpoint)
        self.last_seq: int = last_seq
        """Number of the last event on disk."""
        self._written_seq = last_seq
        """The same for the writer's thread, which knows it earlier."""
        self._recent: deque[Event] = deque(maxlen=RECENT_EVENTS)
        self._grown = asyncio.Event()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_loop, name="journal", daemon=True)
        self._thread.start()

    # Writing

    def append(self, *writes: Write) -> asyncio.Future[None]:
        """Queue writes that are committed together; the future is done when they are on disk.

        The future raises JournalError where they could not be kept; `on_error` is called too, so a caller who needs no
        answer may ignore it.
        """
        done: asyncio.Future[None] = self._loop.create_future()
        # A write nobody waits for must not warn about an exception that `on_error` has reported.
        done.add_done_callback(lambda future: future.cancelled() or future.exception())
        if self.error is not None:
            done.set_exception(self.error)
        else:
            self._jobs.put(_Job(writes, done, self._opening))
        return done

    async def flush(self) -> None:
        """Wait until what was queued before is on disk, or was reported as failed."""
        await asyncio.wait({self.append()})

    async def close(self) -> None:
        """Write what is queued and close the file; those who follow the events are let go."""
        self._gives_up_at = time.monotonic() + CLOSE_PATIENCE_S
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)
        # The writer's last answers are on their way to this loop; they come before what is queued now.
        await asyncio.sleep(0)
        self.is_closed = True
        self._grown.set()
        with self._reader_lock:
            self._reader.close()
        self._writer_database.close()

    def reopen(self) -> None:
        """Take writes again after an error, on a fresh connection; `on_error` hears where it still can't be written."""
        if self.error is not None:
            self.error = None
            self._opening += 1

    async def until_written(self, written: asyncio.Future[T]) -> T:
        """The result of what `append` gave, or of a task that waits for it.

        Raises:
            JournalLockedError: see `check_lock`; it goes on being written.
            JournalError: it could not be written.
        """
        while not (await asyncio.wait({written}, timeout=WRITER_TIMEOUT_S))[0]:
            self.check_lock()
        return await written

    def check_lock(self) -> None:
        """See whether what waits for the disk has waited too long.

        Raises:
            JournalLockedError: others have held the file for longer than LOCK_PATIENCE_S. Nothing is lost by it: what
                is queued is written as soon as they let go.
        """
        since = self.locked_since
        if since is not None and (waited := time.monotonic() - since) > LOCK_PATIENCE_S:
            raise JournalLockedError(
                f"another program has held the journal {self.path} locked for {waited:.0f} s",
                "end it (`fuser` names those that have the file open) and ask again: what waits is written then",
            )

    def _write_loop(self) -> None:
        while True:
            jobs, is_last = self._next_jobs()
            if jobs:
                self._commit(jobs)
            if is_last:
                return

    def _next_jobs(self) -> tuple[list[_Job], bool]:
        """Everything that is queued, after waiting for the first; and whether it is the last."""
        jobs: list[_Job] = []
        job = self._jobs.get()
        while job is not None:
            jobs.append(job)
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return jobs, False
        return jobs, True

    def _commit(self, jobs: list[_Job]) -> None:
        """One transaction for all jobs, but those behind a failed one; runs on the writer's thread."""
        if self._failed is not None:
            opening, failed = self._failed
            if behind := [job for job in jobs if job.opening == opening]:
                self._loop.call_soon_threadsafe(self._committed, behind, [], failed)
            jobs = jobs[len(behind) :]
        if jobs:
            events: list[Event] = []
            error: JournalError | None = None
            try:
                if self._failed is not None:
                    self._reconnect()
                events = self._transact_when_free(jobs)
            except sqlite3.Error as failure:
                error = explain(failure, self.path)
            except JournalError as failure:
                error = failure
            if error is not None:
                self._failed = jobs[-1].opening, error
            self._loop.call_soon_threadsafe(self._committed, jobs, events, error)

    def _reconnect(self) -> None:
        """A fresh connection for the writer: what was wrong with the file may have been put right."""
        self._writer_database.close()
        self._writer_database = self._open_writer()
        self._failed = None

    def _open_writer(self) -> sqlite3.Connection:
        database = open_database(self.path)
        database.execute(f"PRAGMA busy_timeout={int(WRITER_TIMEOUT_S * 1000)}")
        return database

    def _transact_when_free(self, jobs: list[_Job]) -> list[Event]:
        """Wait as long as others hold the file locked; it fails nothing, and what is queued stays in order."""
        is_told = False
        try:
            while True:
                try:
                    return self._transact(jobs)
                except sqlite3.Error as error:
                    now = time.monotonic()
                    if not is_locked(error) or (self._gives_up_at is not None and now >= self._gives_up_at):
                        raise
                if self.locked_since is None:
                    self.locked_since = now - WRITER_TIMEOUT_S
                if not is_told and now - self.locked_since > TELL_AFTER_S:
                    is_told = True
                    log.warning("another program holds %s locked; what ends now waits for it", self.path)
        finally:
            self.locked_since = None

    def _transact(self, jobs: list[_Job]) -> list[Event]:
        database = self._writer_database
        events: list[Event] = []
        try:
            database.execute("BEGIN IMMEDIATE")
            seq = self._written_seq
            for job in jobs:
                for write in job.writes:
                    if isinstance(write, EventWrite):
                        seq += 1
                        event = Event(seq, self._clock(), write.kind, write.payload)
                        events.append(event)
                        database.execute(
                            "INSERT INTO events VALUES (?, ?, ?, ?)", (event.seq, event.at, event.kind, event.payload)
                        )
                    else:
                        _write(database, write)
            database.execute("COMMIT")
        except sqlite3.Error:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise
        self._written_seq = seq
        return events

    def _committed(self, jobs: list[_Job], events: list[Event], error: JournalError | None) -> None:
        """Answer the callers; runs on the loop's thread."""
        if error is None:
            for write in (write for job in jobs for write in job.writes):
                self._note(write)
        for job in jobs:
            if job.done.done():
                continue
            if error is None:
                job.done.set_result(None)
            else:
                job.done.set_exception(error)
        if error is not None and jobs[-1].opening == self._opening:
            is_news = self.error is None
            self.error = error
            if is_news:
                self._on_error(error)
        if events:
            self.last_seq = events[-1].seq
            self._recent.extend(events)
            self._grown.set()
            self._grown = asyncio.Event()

    def _note(self, write: Write) -> None:
        """Keep in memory what the loop asks for of a write that is on disk."""
        match write:
            case EventWrite():
                self._has_checkpoint |= write.kind == "checkpoint"
            case EpisodeRow():
                if write.is_pooled:
                    self._kept[write.episode_id] = write.pooled()
            case BatchWrite():
                self._last_step = write.record.step
                for episode_id in write.record.episode_ids:
                    self._kept.pop(episode_id, None)
            case UnpoolWrite():
                for episode_id in write.episode_ids:
                    self._kept.pop(episode_id, None)
            case MetaWrite():
                self._meta[write.key] = write.value

    # Reading

    async def events_after(self, seq: int, limit: int = 1000) -> list[Event]:
        """Up to `limit` events with a higher number, in order."""
        if seq >= self.last_seq:
            return []
        if self._recent and self._recent[0].seq <= seq + 1:
            start = seq + 1 - self._recent[0].seq
            return list(islice(self._recent, start, start + limit))
        rows = await asyncio.to_thread(
            self._read,
            "SELECT seq, at, kind, payload, json_valid(payload) FROM events WHERE seq > ? ORDER BY seq LIMIT ?",
            (seq, limit),
        )
        for number, *_, is_json in rows:
            if not is_json:
                raise _no_json(self.path, number)
        return [Event(*row[:4]) for row in rows]

    @property
    def grown(self) -> asyncio.Event:
        """Set at the next commit that brings events; take it before reading."""
        return self._grown

    def _read(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """Rows, for a thread that may wait.

        Raises:
            JournalError: they can't be read.
            ServerClosingError: the journal is closed.
        """
        with self._reader_lock:
            try:
                return self._reader.execute(sql, parameters).fetchall()
            except sqlite3.Error as error:
                if self.is_closed:
                    # Nothing is wrong with it: a request came while the server was going down.
                    raise ServerClosingError from error
                if "malformed JSON" not in str(error):
                    raise explain(error, self.path) from error
        # Only events' payloads are taken apart in SQL.
        for (seq,) in self._read("SELECT seq FROM events WHERE NOT json_valid(payload) LIMIT 1"):
            raise _no_json(self.path, seq)
        raise damaged(self.path, "table events: a value in a payload is another one than was written")

    @contextlib.contextmanager
    def reading(self, table: str, row: object) -> Iterator[None]:
        """Around what takes a value of a row apart.

        Raises:
            JournalDamagedError: it is not what was written.
        """
        try:
            yield
        except (ValueError, TypeError, KeyError, AttributeError, zlib.error) as error:
            what = (str(error).splitlines() or [type(error).__name__])[0]
            raise damaged(self.path, f"table {table}, row {row}: {what}") from error

    def meta(self, key: str) -> str | None:
        """A named value of the run folder."""
        return self._meta.get(key)

    async def episode(self, episode_id: str) -> EpisodeRow | None:
        """A completed episode, or None."""
        rows = await asyncio.to_thread(self._episodes, " WHERE episode_id = ?", (episode_id,))
        return rows[0] if rows else None

    def _episodes(self, where: str, parameters: Sequence[Any] = ()) -> list[EpisodeRow]:
        found = []
        for row in self._read(_EPISODE_COLUMNS + where, parameters):
            with self.reading("episodes", row[0]):
                found.append(_episode_row(row))
        return found

    def open_episodes(self) -> list[EpisodeRow]:
        """Completed episodes that no batch has taken, in order of places; for a thread."""
        return self._episodes(" WHERE is_pooled = 1 AND step IS NULL ORDER BY position, place")

    def kept(self) -> list[PooledEpisode]:
        """The same episodes as the next batch sees them, without what they hold."""
        return sorted(self._kept.values(), key=lambda episode: (episode.seat.position, episode.seat.index))

    def _read_kept(self) -> list[PooledEpisode]:
        rows = self._read(
            "SELECT episode_id, group_id, task_id, place, attempt, position, rewards FROM episodes"
            " WHERE is_pooled = 1 AND step IS NULL"
        )
        found = []
        for episode_id, *seat, rewards in rows:
            with self.reading("episodes", episode_id):
                found.append(PooledEpisode(episode_id, Seat(*seat), _rewards(rewards)))
        return found

    def episodes_of(self, record: BatchRecord) -> list[EpisodeRow]:
        """The episodes of a batch, in its order; for a thread."""
        by_id = {row.episode_id: row for row in self._episodes(" WHERE step = ?", (record.step,))}
        if missing := [one for one in record.episode_ids if one not in by_id]:
            raise damaged(self.path, f"table episodes: row {missing[0]} of batch {record.step} is missing")
        return [by_id[episode_id] for episode_id in record.episode_ids]

    def batches_after(self, step: int) -> list[BatchRecord]:
        """Batches of later updates, in order; for a thread."""
        found = []
        for number, episode_ids, seed in self._read(
            "SELECT step, episode_ids, seed FROM batches WHERE step > ? ORDER BY step", (step,)
        ):
            with self.reading("batches", number):
                found.append(BatchRecord(number, tuple(json.loads(episode_ids)), seed))
        return found

    def taught(self, step: int) -> dict[str, tuple[float, ...]]:
        """What a teacher said of a batch's calls, by call id; for a thread."""
        ((taught,),) = self._read("SELECT taught FROM batches WHERE step = ?", (step,))
        if taught is None:
            return {}
        with self.reading("batches", step):
            return {call_id: tuple(logprobs) for call_id, logprobs in json.loads(zlib.decompress(taught)).items()}

    def last_state(self) -> str | None:
        """The state that the last `state` event went to; for a thread."""
        for seq, payload in self._read(
            "SELECT seq, payload FROM events WHERE kind = 'state' ORDER BY seq DESC LIMIT 1"
        ):
            with self.reading("events", seq):
                return str(json.loads(payload)["to"])
        return None

    def is_untouched(self) -> bool:
        """Whether it holds neither a batch nor an episode that a batch may take, nor a checkpoint."""
        return not (self._last_step or self._kept or self._has_checkpoint)

    def last_step(self) -> int:
        """Step of the last batch; 0 before the first."""
        return self._last_step

    def steps_reported(self, after: int) -> set[int]:
        """Steps later than `after` whose `step` event is on disk; for a thread."""
        rows = self._read(
            "SELECT json_extract(payload, '$.step') FROM events WHERE kind = 'step'"
            " AND seq > coalesce((SELECT max(seq) FROM events WHERE kind = 'step'"
            " AND json_extract(payload, '$.step') <= ?), 0)",
            (after,),
        )
        return {int(step) for (step,) in rows}

    def step_metrics(self) -> list[dict[str, float | None]]:
        """Metrics of every update that was reported, in order; for a thread."""
        rows = self._read("SELECT json_extract(payload, '$.metrics') FROM events WHERE kind = 'step' ORDER BY seq")
        return [json.loads(metrics) for (metrics,) in rows]

    def completed_by_task(self) -> dict[str, int]:
        """Completed train episodes, by task, that a batch has taken or will take; for a thread."""
        sql = "SELECT task_id, count(*) FROM episodes WHERE mode = 'train' AND is_pooled = 1 GROUP BY task_id"
        return dict(self._read(sql))

    def rewards_by_version(self, by: BestBy) -> dict[int, float]:
        """Mean reward, over episodes and agents, that each version of the weights earned; for a thread.

        Agents that spoke through frozen policies are left out. Of evaluations of several kinds, by their tags less
        `label`, those count that most versions have: greedy play and sampling earn different rewards.
        """
        match by:
            case BestBy.REWARD:  # an update's batch was sampled by the weights before it, less how old its tokens are
                sql = (
                    "SELECT json_extract(payload, '$.step') - 1 -"
                    " CAST(round(coalesce(json_extract(payload, '$.metrics.staleness_mean'), 0)) AS INTEGER) version,"
                    " avg(json_extract(payload, '$.metrics.reward_mean')) FROM events WHERE kind = 'step'"
                    " GROUP BY version"
                )
            case BestBy.EVALUATION:
                sql = (
                    "SELECT json_extract(payload, '$.policy_version') AS version, avg(rewards.value),"
                    # Before, during and after a training the same is played.
                    " json_remove(json_extract(payload, '$.tags'), '$.label') AS tags"
                    " FROM events, json_each(payload, '$.rewards') AS rewards"
                    " WHERE kind = 'episode' AND json_extract(payload, '$.mode') = 'eval'"
                    " AND json_extract(payload, '$.outcome') <> 'env_error' AND NOT EXISTS"
                    " (SELECT 1 FROM json_each(payload, '$.frozen_agents') AS frozen WHERE frozen.value = rewards.key)"
                    " GROUP BY version, tags"
                )
                found: defaultdict[str, dict[int, float]] = defaultdict(dict)
                for version, reward, tags in self._read(sql):
                    if reward is not None:
                        found[str(tags)][int(version)] = float(reward)
                return max(found.values(), key=len, default={})
            case _:
                assert_never(by)
        return {int(version): float(reward) for version, reward in self._read(sql) if reward is not None}

    def closed_groups(self) -> dict[str, str]:
        """Task by group, for train groups that a batch has taken or that were given up; for a thread."""
        rows = self._read("SELECT DISTINCT group_id, task_id FROM episodes WHERE step IS NOT NULL OR is_pooled = -1")
        return dict(rows)

    def next_position(self) -> int:
        """One past the highest position of a train group; for a thread."""
        (position,) = self._read("SELECT coalesce(max(position), 0) + 1 FROM episodes WHERE mode = 'train'")[0]
        return int(position)

    def loose_groups(self) -> dict[tuple[Mode, str], tuple[str, int]]:
        """Task and number of places given, by mode and group, outside training; for a thread."""
        rows = self._read(
            "SELECT mode, group_id, min(task_id), max(place) + 1 FROM episodes WHERE mode <> 'train'"
            " GROUP BY mode, group_id"
        )
        return {(Mode(mode), group_id): (task_id, count) for mode, group_id, task_id, count in rows}


_EPISODE_COLUMNS = (
    "SELECT episode_id, mode, task_id, group_id, place, attempt, position, is_pooled, rewards, request, record"
    " FROM episodes"
)


def _episode_row(row: tuple[Any, ...]) -> EpisodeRow:
    episode_id, mode, task_id, group_id, place, attempt, position, is_pooled, rewards, request, record = row
    return EpisodeRow(
        episode_id=episode_id,
        mode=Mode(mode),
        task_id=task_id,
        group_id=group_id,
        place=place,
        attempt=attempt,
        position=position,
        is_pooled=is_pooled == 1,
        rewards=_rewards(rewards),
        request=request,
        record=zlib.decompress(record),
    )


def _no_json(path: Path, seq: int) -> JournalDamagedError:
    return damaged(path, f"table events, row {seq}: its payload is no JSON")


def _rewards(text: str) -> dict[str, float | None]:
    rewards = json.loads(text)
    if not isinstance(rewards, dict):
        raise ValueError(f"rewards are {text[:40]}")
    return rewards


def _write(database: sqlite3.Connection, write: EpisodeRow | BatchWrite | UnpoolWrite | MetaWrite) -> None:
    match write:
        case EpisodeRow():
            database.execute(
                "INSERT INTO episodes VALUES (?, ?, ?, ?, ?, ?, ?, NULL, ?, ?, ?, ?)",
                (
                    write.episode_id,
                    write.mode,
                    write.task_id,
                    write.group_id,
                    write.place,
                    write.attempt,
                    write.position,
                    int(write.is_pooled),
                    dumps(write.rewards),
                    write.request,
                    zlib.compress(write.record, 1),
                ),
            )
        case BatchWrite(record, taught):
            said = None if taught is None else zlib.compress(dumps(taught).encode())
            database.execute(
                "INSERT INTO batches VALUES (?, ?, ?, ?)", (record.step, dumps(record.episode_ids), record.seed, said)
            )
            database.executemany(
                "UPDATE episodes SET step = ? WHERE episode_id = ? AND step IS NULL",
                [(record.step, episode_id) for episode_id in record.episode_ids],
            )
        case UnpoolWrite(episode_ids):
            database.executemany(
                "UPDATE episodes SET is_pooled = -1 WHERE episode_id = ?", [(episode_id,) for episode_id in episode_ids]
            )
        case MetaWrite(key, value):
            database.execute(
                "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value", (key, value)
            )


def dumps(value: Any) -> str:
    """Compact JSON in ASCII that refuses NaN and infinity.

    Many readers of event streams end a line at U+2028 or U+0085 too; escaped, those can't break an event in two.
    """
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
