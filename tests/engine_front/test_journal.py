"""The journal on a real disk."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from swarm_engine.config import BestBy
from swarm_engine.errors import JournalDamagedError, JournalError, JournalLockedError
from swarm_engine.server import journal as journals
from swarm_engine.server.journal import BatchWrite, EpisodeRow, EventWrite, Journal, MetaWrite, UnpoolWrite
from swarm_engine.server.journal_file import explain
from swarm_engine.types import BatchRecord, Mode


def episode(name: str, place: int = 0, position: int = 1, *, is_pooled: bool = True) -> EpisodeRow:
    return EpisodeRow(
        episode_id=name,
        mode=Mode.TRAIN,
        task_id="task",
        group_id=f"task#{position}",
        place=place,
        attempt=0,
        position=position,
        is_pooled=is_pooled,
        rewards={"main": 1.0},
        request="{}",
        record=b'{"a":1}',
    )


def within(path: Path, work: Callable[[Journal], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        journal = Journal(path / "journal.db", clock=lambda: 12.5)
        try:
            await work(journal)
        finally:
            await journal.close()

    asyncio.run(main())


def test_events_are_numbered_without_a_gap_and_survive_a_new_start(tmp_path: Path) -> None:
    async def write(journal: Journal) -> None:
        await asyncio.gather(*(journal.append(EventWrite.of("kind", number=number)) for number in range(50)))

    async def read(journal: Journal) -> None:
        found = await journal.events_after(0)
        assert [event.seq for event in found] == list(range(1, 101))
        assert [json.loads(event.payload)["number"] for event in found] == [*range(50), *range(50)]
        assert json.loads(found[0].as_json()) == {"seq": 1, "at": 12.5, "kind": "kind", "payload": {"number": 0}}
        assert [event.seq for event in await journal.events_after(97)] == [98, 99, 100]

    within(tmp_path, write)
    within(tmp_path, write)
    within(tmp_path, read)


def test_a_write_that_was_answered_is_seen_by_another_process(tmp_path: Path) -> None:
    async def work(journal: Journal) -> None:
        await journal.append(episode("e1"), EventWrite.of("episode", episode_id="e1"))
        other = sqlite3.connect(tmp_path / "journal.db")
        assert other.execute("SELECT episode_id FROM episodes").fetchall() == [("e1",)]
        other.close()

    within(tmp_path, work)


LOOK = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1])
print(*(row[0] for row in database.execute("SELECT episode_id FROM episodes ORDER BY 1")))
database.close()
"""


def look_from_outside(path: Path) -> list[str]:
    """The episodes that another process finds, which opens the journal, reads and closes it."""
    command = [sys.executable, "-I", "-S", "-c", LOOK, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_another_process_that_looks_and_leaves_takes_nothing_away(tmp_path: Path) -> None:
    """It must not take itself for the last user and delete the log that the journal goes on writing into."""

    async def work(journal: Journal) -> None:
        await journal.append(episode("e1"))
        assert look_from_outside(journal.path) == ["e1"]
        await journal.append(episode("e2", 1))
        assert look_from_outside(journal.path) == ["e1", "e2"]
        open_files = [os.readlink(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd") if has_target(one)]
        assert not [one for one in open_files if str(tmp_path) in one and one.endswith("(deleted)")]

    within(tmp_path, work)


def has_target(descriptor: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")  # the one that listed them is closed again


def test_a_lock_of_others_delays_writes_and_fails_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "WRITER_TIMEOUT_S", 0.02)

    async def work(journal: Journal) -> None:
        await journal.append(episode("e1"))
        other = sqlite3.connect(journal.path, isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        ended = journal.append(episode("e2", 1), EventWrite.of("episode"))
        while journal.locked_since is None:
            await asyncio.sleep(0.01)
        assert [one.episode_id for one in journal.kept()] == ["e1"]
        assert (await journal.episode("e1")) is not None, "readers don't wait for a writer"
        monkeypatch.setattr(journals, "LOCK_PATIENCE_S", 0.0)
        with pytest.raises(JournalLockedError, match=r"held the journal .*journal\.db locked for 0 s; end it"):
            await journal.until_written(ended)
        assert not ended.done()
        other.execute("ROLLBACK")
        other.close()
        await ended
        assert journal.error is None
        assert [one.episode_id for one in journal.kept()] == ["e1", "e2"]

    within(tmp_path, work)


def test_a_journal_that_is_closed_under_a_lock_ends_soon_and_says_what_it_did_not_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "WRITER_TIMEOUT_S", 0.02)
    monkeypatch.setattr(journals, "CLOSE_PATIENCE_S", 0.1)

    async def main() -> None:
        journal = Journal(tmp_path / "journal.db")
        await journal.flush()
        other = sqlite3.connect(journal.path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        unwritten = journal.append(episode("e1"))
        await journal.close()
        with pytest.raises(JournalLockedError, match="is locked by another program"):
            await unwritten
        other.close()

    asyncio.run(main())


# Damage


def written(path: Path) -> None:
    """A journal with two open episodes and a trained one, all of it in the file and none in its log."""

    async def work(journal: Journal) -> None:
        await journal.append(*(episode(f"e{number}", number) for number in range(3)), MetaWrite("key", "x" * 9000))
        await journal.append(BatchWrite(BatchRecord(1, ("e0",), 5)), EventWrite.of("state", to="ROLLING"))

    path.mkdir(exist_ok=True)
    within(path, work)


def read_all(path: Path) -> None:
    """Open a journal and read everything that a start reads."""

    async def work(journal: Journal) -> None:
        journal.last_state()
        journal.open_episodes()
        for record in journal.batches_after(0):
            journal.episodes_of(record)
        journal.step_metrics()
        await journal.events_after(0)

    within(path, work)


def in_sql(statement: str) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        database = sqlite3.connect(path)
        with database:
            database.execute(statement)
        database.close()

    return damage


def in_bytes(offset: int, what: bytes) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[offset : offset + len(what)] = what
        path.write_bytes(content)

    return damage


def beside(name: str, what: bytes) -> Callable[[Path], object]:
    return lambda path: path.with_name(name).write_bytes(what)


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def emptied_after_use(path: Path) -> None:
    path.write_bytes(b"")
    (path.parent / "checkpoints").mkdir()


def emptied_beside_its_log(path: Path) -> None:
    path.write_bytes(b"")
    path.with_name("journal.db-wal").write_bytes(b"\x37\x7f\x06\x82" + bytes(28))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (in_bytes(0, b"garbage" * 20), "its first page is not that of an SQLite database"),
        (lambda path: os.truncate(path, 3 * 4096), r"(?i)page|malformed"),
        (lambda path: os.truncate(path, 50), "malformed, it is 50 bytes long"),
        (in_bytes(2 * 4096, b"\xff" * 4096), r"(?i)page 3|malformed"),
        (emptied_after_use, "empty or missing, and the run folder has been used"),
        (emptied_beside_its_log, "empty or missing, its write-ahead log is there"),
        (beside("journal.db-wal", b"garbage" * 1000), r"journal\.db-wal is damaged: the header"),
        (in_sql("DROP TABLE batches"), "table batches is missing"),
        (in_sql("UPDATE episodes SET record = x'0102' WHERE episode_id = 'e1'"), "table episodes, row e1: Error -3"),
        (in_sql("UPDATE episodes SET rewards = '{' WHERE episode_id = 'e2'"), "table episodes, row e2: Expecting"),
        (in_sql("UPDATE episodes SET rewards = '[1]' WHERE episode_id = 'e2'"), r"row e2: rewards are \[1\]"),
        (in_sql("UPDATE episodes SET mode = 'play' WHERE episode_id = 'e0'"), "row e0: 'play' is not a valid Mode"),
        (in_sql("DELETE FROM episodes WHERE episode_id = 'e0'"), "row e0 of batch 1 is missing"),
        (in_sql("UPDATE batches SET episode_ids = 'e0'"), "table batches, row 1: Expecting value"),
        (in_sql("UPDATE events SET payload = '{\"to'"), "table events, row 1: Unterminated string"),
        (in_sql("UPDATE events SET payload = '{', kind = 'step'"), "table events, row 1: its payload is no JSON"),
        (in_sql("UPDATE events SET payload = '{', kind = 'claim'"), "table events, row 1: its payload is no JSON"),
    ],
)
def test_a_damaged_journal_is_named_with_the_place_and_the_way_out(
    tmp_path: Path, damage: Callable[[Path], object], told: str
) -> None:
    written(tmp_path)
    damage(tmp_path / "journal.db")
    with pytest.raises(JournalDamagedError, match=told) as caught:
        read_all(tmp_path)
    assert str(tmp_path / "journal.db") in caught.value.message
    assert "--run-dir" in caught.value.hint


def test_a_payload_whose_value_is_another_one_is_damage_too(tmp_path: Path) -> None:
    payload = {"mode": "eval", "tags": "no object", "rewards": {"main": 1.0}, "outcome": "success", "policy_version": 0}

    async def work(journal: Journal) -> None:
        await journal.append(EventWrite.of("episode", **payload))
        with pytest.raises(JournalDamagedError, match="table events: a value in a payload"):
            journal.rewards_by_version(BestBy.EVALUATION)

    within(tmp_path, work)


def test_a_damaged_journal_that_is_gone_meanwhile_is_named_and_not_made_anew(tmp_path: Path) -> None:
    error = sqlite3.DatabaseError("database disk image is malformed")
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    told = explain(error, tmp_path / "journal.db")
    assert isinstance(told, JournalDamagedError)
    assert "malformed, its size can't be told (No such file or directory)" in told.message
    assert [*tmp_path.iterdir()] == []


def test_what_can_not_be_opened_at_all_is_named(tmp_path: Path) -> None:
    written(tmp_path)
    as_folder(tmp_path / "journal.db")
    with pytest.raises(JournalError, match=r"journal\.db can't be used \(a folder has its name\)"):
        read_all(tmp_path)


def test_a_database_of_another_program_is_left_as_it_is(tmp_path: Path) -> None:
    in_sql("CREATE TABLE recipes (name TEXT)")(tmp_path / "journal.db")
    with pytest.raises(JournalError, match="a database of another program, it has recipes"):
        read_all(tmp_path)


def test_a_batch_takes_its_episodes_and_gives_them_back_in_its_order(tmp_path: Path) -> None:
    async def work(journal: Journal) -> None:
        await journal.append(*(episode(f"e{number}", number) for number in range(3)))
        record = BatchRecord(step=1, episode_ids=("e2", "e0"), seed=2**63 - 1)
        await journal.append(BatchWrite(record))
        assert [row.episode_id for row in journal.open_episodes()] == ["e1"]
        assert [row.episode_id for row in journal.episodes_of(record)] == ["e2", "e0"]
        assert journal.batches_after(0) == [record]
        assert journal.batches_after(1) == []
        assert journal.last_step() == 1
        assert journal.closed_groups() == {"task#1": "task"}

    within(tmp_path, work)


def test_episodes_of_a_group_that_was_given_up_are_not_offered_again(tmp_path: Path) -> None:
    async def work(journal: Journal) -> None:
        await journal.append(episode("e1"), episode("e2", position=2), episode("e3", position=3, is_pooled=False))
        await journal.append(UnpoolWrite(("e1",)))
        assert [row.episode_id for row in journal.open_episodes()] == ["e2"]
        assert journal.closed_groups() == {"task#1": "task"}
        assert journal.next_position() == 4

    within(tmp_path, work)


def test_an_episode_can_be_written_once_only_and_a_failed_write_leaves_nothing_by_half(tmp_path: Path) -> None:
    async def work(journal: Journal) -> None:
        await journal.append(episode("e1"))
        with pytest.raises(JournalError, match="UNIQUE"):
            await journal.append(EventWrite.of("episode"), episode("e1"))
        assert await journal.events_after(0) == []
        with pytest.raises(JournalError):
            await journal.append(EventWrite.of("later"))
        journal.reopen()
        await journal.append(EventWrite.of("again"))
        assert [event.kind for event in await journal.events_after(0)] == ["again"]

    within(tmp_path, work)


def test_what_is_queued_behind_a_failed_commit_fails_too_even_before_the_loop_knows(tmp_path: Path) -> None:
    async def main() -> None:
        has_begun, may_go_on, has_begun_again = threading.Event(), threading.Event(), threading.Event()

        def clock() -> float:
            (has_begun_again if has_begun.is_set() else has_begun).set()
            may_go_on.wait()
            return 12.5

        journal = Journal(tmp_path / "journal.db", clock=clock)
        await journal.append(episode("e1"))
        refused = journal.append(EventWrite.of("refused"), episode("e1"))
        has_begun.wait()
        behind = journal.append(EventWrite.of("behind"))
        may_go_on.set()
        # The loop stands still here, so it can't have told the writer anything.
        assert not has_begun_again.wait(0.3)
        for failed in (refused, behind):
            with pytest.raises(JournalError, match="UNIQUE"):
                await failed
        journal.reopen()
        await journal.append(EventWrite.of("again"))
        assert journal.error is None
        assert [event.kind for event in await journal.events_after(0)] == ["again"]
        await journal.close()

    asyncio.run(main())


def test_a_full_disk_fails_the_write_with_a_way_out_and_keeps_what_was_answered(tmp_path: Path) -> None:
    errors: list[JournalError] = []

    async def main() -> None:
        journal = Journal(tmp_path / "journal.db", on_error=errors.append)
        await journal.append(EventWrite.of("kept"))
        # SQLite's own limit on the file's pages: the same SQLITE_FULL that a full disk gives.
        database = journal._writer_database
        (pages,) = database.execute("PRAGMA page_count").fetchone()
        database.execute(f"PRAGMA max_page_count={pages + 2}")
        with pytest.raises(JournalError, match=r"is full.*make room") as caught:
            await journal.append(EventWrite.of("too much", text="x" * 100_000))
        assert caught.value.status == 507
        assert len(errors) == 1
        assert [event.kind for event in await journal.events_after(0)] == ["kept"]
        journal.reopen()
        await journal.append(EventWrite.of("after making room"))
        assert [event.seq for event in await journal.events_after(0)] == [1, 2]
        await journal.close()

    asyncio.run(main())


def test_a_journal_of_another_version_is_refused(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "journal.db")
    database.execute("PRAGMA user_version=99")
    database.close()

    async def main() -> None:
        with pytest.raises(JournalError, match=r"another version .journal 99, this one reads 3"):
            Journal(tmp_path / "journal.db")

    asyncio.run(main())


def test_an_event_with_a_number_that_is_not_finite_is_refused_where_it_is_made() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        EventWrite.of("step", loss=float("nan"))


def test_an_event_is_one_line_for_every_reader() -> None:
    assert EventWrite.of("claim", task_id="a\u2028b\u0085c").payload == r'{"task_id":"a\u2028b\u0085c"}'


def test_named_values_are_replaced(tmp_path: Path) -> None:
    async def work(journal: Journal) -> None:
        assert journal.meta("key") is None
        await journal.append(MetaWrite("key", "one"))
        await journal.append(MetaWrite("key", "two"))
        assert journal.meta("key") == "two"

    within(tmp_path, work)


def test_a_batch_counts_for_the_weights_that_sampled_it_on_average(tmp_path: Path) -> None:
    """Steps 2 and 3 were both sampled by version 1, step 3 by nine tokens in ten; step 4 says nothing of ages."""

    async def check(journal: Journal) -> None:
        for step, reward, staleness in ((1, 0.5, 0.0), (2, 1.0, 0.0), (3, 2.0, 0.9), (4, 4.0, None), (5, None, 0.0)):
            metrics = {"reward_mean": reward, "staleness_mean": staleness}
            await journal.append(EventWrite.of("step", step=step, metrics=metrics))
        assert journal.rewards_by_version(BestBy.REWARD) == {0: 0.5, 1: 1.5, 3: 4.0}

    within(tmp_path, check)
