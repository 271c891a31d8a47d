"""The journal as a file: how it is opened, what can be wrong with it, and what to do then.

Every fault names the file, the place in it and the way out; see `journal` for what is in it.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import sqlite3
from pathlib import Path
from urllib.parse import unquote

from swarm_engine.errors import JournalDamagedError, JournalError, JournalLockedError

LOCK_PATIENCE_S = 45.0
"""Others may hold the file locked for this long. Then whoever waits for it is told so; what was queued is still written
as soon as they let go."""
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

NAMES = {kind: frozenset(re.findall(rf"CREATE {kind} IF NOT EXISTS (\w+)", SCHEMA)) for kind in ("TABLE", "INDEX")}
"""What the schema makes."""
WAL_MAGIC = (b"\x37\x7f\x06\x82", b"\x37\x7f\x06\x83")
"""A write-ahead log of SQLite begins with one of these."""
WAL_HEADER_BYTES = 32
TEACHER_KEY = "teacher_authorization"
"""Key of the row of `meta` with the base_url and the authorization of a teacher whose URL held a password."""
_CREDENTIALS = re.compile(r'"base_url":"(?P<scheme>https?://)(?P<user>(?:[^"/?#\\]|\\.)*)@(?P<rest>(?:[^"\\]|\\.)*)"')
RESTORE = "put back a copy of it, or take another run folder (--run-dir); the checkpoints beside it are not touched"


def open_database(path: Path) -> sqlite3.Connection:
    """A connection with the journal's settings, its tables made where the file is new.

    Raises:
        JournalError: the file can't be opened, is damaged, or was written by another version.
    """
    try:
        # Its keys open episodes, so it is its owner's alone; SQLite gives its side files the same mode. Only ever for a
        # file that is not there yet: closing a descriptor of one that is in use would drop SQLite's locks on it.
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except FileExistsError:
        pass
    except OSError as error:
        raise JournalError(
            f"the journal {path} can't be made ({error.strerror})",
            "check the folder, or take another (--run-dir)",
            code="journal_unwritable",
        ) from error
    try:
        database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=LOCK_PATIENCE_S)
        try:
            _set_up(database, path)
        except (sqlite3.Error, JournalError):
            database.close()
            raise
    except sqlite3.Error as error:
        raise explain(error, path) from error
    return database


def _set_up(database: sqlite3.Connection, path: Path) -> None:
    (mode,) = database.execute("PRAGMA journal_mode=WAL").fetchone()
    if mode != "wal":
        raise JournalError(
            f"the journal {path} can't have a write-ahead log (SQLite says {mode!r})",
            "its disk lacks shared memory, as network disks do: take a run folder on a local one (--run-dir)",
            code="journal_unwritable",
        )
    database.execute("PRAGMA synchronous=FULL")
    _bring_up_to_date(database, path)
    _take_out_credentials(database)


def _bring_up_to_date(database: sqlite3.Connection, path: Path) -> None:
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version not in (0, SCHEMA_VERSION):
        raise JournalError(
            f"{path} was written by another version (journal {version}, this one reads {SCHEMA_VERSION})",
            "use that version, or another run folder",
            code="journal_version",
        )
    there = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'")}
    missing = sorted(NAMES["TABLE"] - there)
    if version == SCHEMA_VERSION and missing:
        raise damaged(path, f"table {missing[0]} is missing")
    if strangers := sorted(there - NAMES["TABLE"] - NAMES["INDEX"]) if version == 0 else []:
        raise JournalError(
            f"{path} is a database of another program, it has {strangers[0]}", "take another run folder (--run-dir)"
        )
    if version == 0 or not there >= NAMES["INDEX"]:
        # One transaction, so that a kill leaves all of it or nothing. Two servers never do this at once: a run folder
        # is locked.
        database.executescript(f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;")


def _take_out_credentials(database: sqlite3.Connection) -> None:
    """Take user name and password out of the teacher's URL, which earlier versions took and showed.

    They go on being sent, from a row that is never shown, where the teacher is still the one at that URL.
    """
    rows = database.execute(
        "SELECT value FROM meta WHERE key = 'config' AND typeof(value) = 'text' AND value LIKE '%@%' UNION ALL"
        " SELECT payload FROM events WHERE kind = 'config' AND typeof(payload) = 'text' AND payload LIKE '%@%'"
    )
    texts = [text for (text,) in rows]
    found = [match for match in map(_CREDENTIALS.search, texts) if match]
    if not found:
        return
    newest = found[0]  # of the config that the run goes on with, where that one has any
    base_url, credentials = (json.loads(f'"{text}"') for text in (newest["scheme"] + newest["rest"], newest["user"]))
    known = {"base_url": base_url, "authorization": f"Basic {base64.b64encode(unquote(credentials).encode()).decode()}"}
    with database:
        database.execute("BEGIN IMMEDIATE")
        database.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (TEACHER_KEY, json.dumps(known)))
        for credentials in {match["user"] for match in found}:
            change = (f"//{credentials}@", "//")
            database.execute("UPDATE meta SET value = replace(value, ?, ?) WHERE key = 'config'", change)
            # Errors about the teacher name it too.
            kinds = "kind IN ('config', 'state')"
            database.execute(f"UPDATE events SET payload = replace(payload, ?, ?) WHERE {kinds}", change)


def check_before_opening(path: Path) -> None:
    """See what SQLite would pass over in silence; before this process has a connection.

    A write-ahead log that it can't read is to SQLite an empty one, and one beside an empty file is deleted: what was
    committed last would be gone without a word.

    Raises:
        JournalDamagedError: it would.
    """
    wal = path.with_name(path.name + "-wal")
    is_empty = not path.exists() or path.stat().st_size == 0
    if is_empty and (path.parent / "checkpoints").is_dir():
        raise damaged(path, "the file is empty or missing, and the run folder has been used")
    try:
        with wal.open("rb") as file:
            header = file.read(WAL_HEADER_BYTES)
    except OSError:
        return  # opening it says more
    if header and is_empty:
        raise damaged(path, "the file is empty or missing, its write-ahead log is there")
    # All zeros is what a power cut may leave of a log that nothing was committed to yet.
    if header.strip(b"\0") and header[:4] not in WAL_MAGIC:
        raise damaged(
            wal,
            "the header is no write-ahead log's",
            "put back a copy of the journal and this file, or take another run folder (--run-dir); without this file "
            "the journal is as it was some time before the end, so what was answered last would be missing",
        )


def is_locked(error: sqlite3.Error) -> bool:
    """Whether it says no more than that others use the file now."""
    return _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)


def _code(error: sqlite3.Error) -> int | None:
    """SQLite's primary result code; None where the error is not SQLite's."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


def damaged(path: Path, where: str, way_out: str = RESTORE) -> JournalDamagedError:
    """The error for a file in which something is not as it was written."""
    return JournalDamagedError(f"the journal {path} is damaged: {where}", way_out)


def explain(error: sqlite3.Error, path: Path) -> JournalError:
    """The journal's error for one of SQLite's."""
    if is_locked(error):
        return JournalLockedError(
            f"the journal {path} is locked by another program",
            "end the one that holds it (`fuser` names those that have it open), then start again",
        )
    code, what = _code(error), str(error)
    if code == sqlite3.SQLITE_FULL:
        return JournalError(
            f"the disk that holds {path} is full, the last write was not kept",
            "make room on it and start the engine again; everything answered before is in the journal",
        )
    if code == sqlite3.SQLITE_NOTADB:
        return damaged(path, "its first page is not that of an SQLite database")
    if code == sqlite3.SQLITE_CORRUPT:
        return damaged(path, _first_damaged_page(path) or f"{what}, {_size_of(path)}")
    if code == sqlite3.SQLITE_CANTOPEN and path.is_dir():
        what = "a folder has its name"
    return JournalError(
        f"the journal {path} can't be used ({what})",
        "check the disk and the permissions of the folder and of what is in it, then start again",
        code="journal_unwritable",
    )


def _size_of(path: Path) -> str:
    try:
        # A stat opens nothing, so it drops no locks of a journal in use.
        return f"it is {path.stat().st_size:,} bytes long"
    except OSError as error:
        return f"its size can't be told ({error.strerror})"


def _first_damaged_page(path: Path) -> str | None:
    """What SQLite's own check finds first; it reads the whole file, and makes none where it is gone."""
    there = f"{path.absolute().as_uri()}?mode=rw"
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(there, uri=True)) as database:
        (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            return " ".join(str(found).replace("***", "").split())
    return None
