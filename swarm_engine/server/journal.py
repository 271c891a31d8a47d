"""The front's memory on disk: numbered events, completed episodes with their calls, batch records.

SQLite in WAL mode with full sync. One thread writes; everything that queued up while the last commit ran goes into the
next one, so a hundred episodes that end together cost one sync. A write is answered after its commit. When a commit
fails, nothing of it is on disk, everything queued behind it fails too, and the journal takes no more until it is opened
again: what was promised is there, and nothing is there by half.
"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import sqlite3
import threading
import time
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, assert_never

from swarm_engine.config import BestBy
from swarm_engine.errors import JournalError
from swarm_engine.server.pool import PooledEpisode, Seat
from swarm_engine.types import BatchRecord, Mode

SCHEMA_VERSION = 3
SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, payload TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS episodes (
    episode_id TEXT PRIMARY KEY,
    mode TEXT NOT NULL,
    task_id TEXT NOT NULL,
    group_id TEXT NOT NULL,
    place INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    position INTEGER NOT NULL,
    step INTEGER,                -- of the batch that took it; NULL until then
    is_pooled INTEGER NOT NULL,  -- 1 holds a place of a batch, 0 never did, -1 gave it up with its group
    rewards TEXT NOT NULL,
    request TEXT NOT NULL,       -- the `end` it was answered with, normalised
    record BLOB NOT NULL         -- zlib over an EpisodeRecord as JSON
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS episodes_open ON episodes (position, place) WHERE is_pooled = 1 AND step IS NULL;
CREATE INDEX IF NOT EXISTS episodes_of_group ON episodes (mode, group_id);
CREATE INDEX IF NOT EXISTS episodes_of_step ON episodes (step) WHERE step IS NOT NULL;
CREATE INDEX IF NOT EXISTS events_by_kind ON events (kind, seq);
CREATE TABLE IF NOT EXISTS batches (
    step INTEGER PRIMARY KEY,
    episode_ids TEXT NOT NULL,
    seed INTEGER NOT NULL,
    taught BLOB                  -- zlib over what a teacher said, as JSON by call id; NULL where none was asked
);
"""

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


def open_database(path: Path) -> sqlite3.Connection:
    """A connection with the journal's settings, its tables made where they are missing.

    Raises:
        JournalError: the file can't be opened or was written by another version.
    """
    try:
        # Its keys open episodes, so it is its owner's alone; SQLite gives its side files the same mode.
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as error:
        raise JournalError(
            f"the journal {path} can't be opened ({error.strerror})", "check the folder", code="journal_unwritable"
        ) from error
    try:
        database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        (version,) = database.execute("PRAGMA user_version").fetchone()
        if version not in (0, SCHEMA_VERSION):  # 0 is a new file
            raise JournalError(
                f"{path} was written by another version (journal {version}, this one reads {SCHEMA_VERSION})",
                "use that version, or another run folder",
                code="journal_version",
            )
        database.executescript(SCHEMA)
        database.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
    except sqlite3.Error as error:
        raise _explain(error, path) from error
    return database


def _explain(error: sqlite3.Error, path: Path) -> JournalError:
    """The journal's error for one of SQLite's."""
    what = str(error)
    if "full" in what:
        return JournalError(
            f"the disk that holds {path} is full, the last write was not kept",
            "make room on it and start the engine again; everything answered before is in the journal",
        )
    return JournalError(
        f"the journal {path} can't be written ({what})",
        "check the disk and the folder's permissions, then start the engine again",
        code="journal_unwritable",
    )


class Journal:
    """The journal of one run folder.

    Its writes, coroutines and short looks (`meta`, `kept`, `last_step` …) belong to the event loop's thread. What reads
    many rows says so and is called on another, for the loop answers `/status` meanwhile.
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
        self._writer_database = open_database(path)
        self._loop_reader = open_database(path)
        """For what is read on the event loop: a few rows, and never behind a thread's long query."""
        self._reader = open_database(path)
        self._reader_lock = threading.Lock()
        (last,) = self._loop_reader.execute("SELECT coalesce(max(seq), 0) FROM events").fetchone()
        self.last_seq: int = last
        """Number of the last event on disk."""
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
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)
        # The writer's last answers are on their way to this loop; they come before what is queued now.
        await asyncio.sleep(0)
        self.is_closed = True
        self._grown.set()
        self._loop_reader.close()
        with self._reader_lock:
            self._reader.close()
        self._writer_database.close()

    def reopen(self) -> None:
        """Take writes again after an error, on a fresh connection.

        Raises:
            JournalError: it still can't be written.
        """
        if self.error is None:
            return
        self._writer_database.close()
        self._writer_database = open_database(self.path)
        self.error = None
        self._opening += 1

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
            opening, error = self._failed
            if behind := [job for job in jobs if job.opening == opening]:
                self._loop.call_soon_threadsafe(self._committed, behind, [], error)
            jobs = jobs[len(behind) :]
        if jobs:
            try:
                self._loop.call_soon_threadsafe(self._committed, jobs, self._transact(jobs), None)
            except sqlite3.Error as failure:
                error = _explain(failure, self.path)
                self._failed = jobs[-1].opening, error
                self._loop.call_soon_threadsafe(self._committed, jobs, [], error)

    def _transact(self, jobs: list[_Job]) -> list[Event]:
        database = self._writer_database
        events: list[Event] = []
        try:
            database.execute("BEGIN IMMEDIATE")
            seq = self.last_seq
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
        self.last_seq = seq
        return events

    def _committed(self, jobs: list[_Job], events: list[Event], error: JournalError | None) -> None:
        """Answer the callers; runs on the loop's thread."""
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
            self._recent.extend(events)
            self._grown.set()
            self._grown = asyncio.Event()

    # Reading

    async def events_after(self, seq: int, limit: int = 1000) -> list[Event]:
        """Up to `limit` events with a higher number, in order."""
        if seq >= self.last_seq:
            return []
        if self._recent and self._recent[0].seq <= seq + 1:
            start = seq + 1 - self._recent[0].seq
            return list(islice(self._recent, start, start + limit))
        rows = await asyncio.to_thread(
            self._read, "SELECT seq, at, kind, payload FROM events WHERE seq > ? ORDER BY seq LIMIT ?", (seq, limit)
        )
        return [Event(*row) for row in rows]

    @property
    def grown(self) -> asyncio.Event:
        """Set at the next commit that brings events; take it before reading."""
        return self._grown

    def _read(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """Rows, for a thread that may wait."""
        with self._reader_lock:
            return self._reader.execute(sql, parameters).fetchall()

    def _peek(self, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """Rows, for the event loop's thread."""
        return self._loop_reader.execute(sql, parameters).fetchall()

    def meta(self, key: str) -> str | None:
        """A named value of the run folder."""
        rows = self._peek("SELECT value FROM meta WHERE key = ?", (key,))
        return rows[0][0] if rows else None

    async def episode(self, episode_id: str) -> EpisodeRow | None:
        """A completed episode, or None."""
        rows = await asyncio.to_thread(self._read, _EPISODE_COLUMNS + " WHERE episode_id = ?", (episode_id,))
        return _episode_row(rows[0]) if rows else None

    def open_episodes(self) -> list[EpisodeRow]:
        """Completed episodes that no batch has taken, in order of places; for a thread."""
        rows = self._read(_EPISODE_COLUMNS + " WHERE is_pooled = 1 AND step IS NULL ORDER BY position, place")
        return [_episode_row(row) for row in rows]

    def kept(self) -> list[PooledEpisode]:
        """The same episodes as the next batch sees them, without what they hold: a short look."""
        rows = self._peek(
            "SELECT episode_id, group_id, task_id, place, attempt, position, rewards FROM episodes"
            " WHERE is_pooled = 1 AND step IS NULL ORDER BY position, place"
        )
        return [PooledEpisode(episode_id, Seat(*seat), json.loads(rewards)) for episode_id, *seat, rewards in rows]

    def episodes_of(self, record: BatchRecord) -> list[EpisodeRow]:
        """The episodes of a batch, in its order; for a thread."""
        rows = self._read(_EPISODE_COLUMNS + " WHERE step = ?", (record.step,))
        by_id = {row.episode_id: row for row in map(_episode_row, rows)}
        return [by_id[episode_id] for episode_id in record.episode_ids]

    def batches_after(self, step: int) -> list[BatchRecord]:
        """Batches of later updates, in order; for a thread."""
        rows = self._read("SELECT step, episode_ids, seed FROM batches WHERE step > ? ORDER BY step", (step,))
        return [BatchRecord(step, tuple(json.loads(episode_ids)), seed) for step, episode_ids, seed in rows]

    def taught(self, step: int) -> dict[str, tuple[float, ...]]:
        """What a teacher said of a batch's calls, by call id; for a thread."""
        ((taught,),) = self._read("SELECT taught FROM batches WHERE step = ?", (step,))
        if taught is None:
            return {}
        return {call_id: tuple(logprobs) for call_id, logprobs in json.loads(zlib.decompress(taught)).items()}

    def last_state(self) -> str | None:
        """The state that the last `state` event went to."""
        rows = self._peek("SELECT payload FROM events WHERE kind = 'state' ORDER BY seq DESC LIMIT 1")
        return json.loads(rows[0][0])["to"] if rows else None

    def is_untouched(self) -> bool:
        """Whether it holds neither a batch nor an episode that a batch may take, nor a checkpoint."""
        (is_touched,) = self._peek(
            "SELECT EXISTS (SELECT 1 FROM batches)"
            " OR EXISTS (SELECT 1 FROM episodes WHERE mode = 'train' AND is_pooled = 1)"
            " OR EXISTS (SELECT 1 FROM events WHERE kind = 'checkpoint')"
        )[0]
        return not is_touched

    def last_step(self) -> int:
        """Step of the last batch; 0 before the first."""
        (step,) = self._peek("SELECT coalesce(max(step), 0) FROM batches")[0]
        return int(step)

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
        rewards=json.loads(rewards),
        request=request,
        record=zlib.decompress(record),
    )


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
