"""Opening the experiment log: where it is, its settings, its migrations, and what to do when it can't be opened.

    database = open_database()                  # A3R_HOME/experiments.db, made and migrated where needed
    with database.write() as session: ...       # one transaction, committed at the end
    with database.read() as session: ...        # one consistent view; writers go on meanwhile

SQLite runs in WAL mode with full sync: a commit that returned survives a power cut, and readers never wait for writers.
Any number of processes may open the same database at once. PostgreSQL is used by URL and runs the same statements.
"""

from __future__ import annotations

import contextlib
import errno
import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError, OperationalError
from sqlmodel import Session

from experiments_db.columns import CanonicalJson, NotJsonError
from experiments_db.errors import (
    ConflictError,
    DamagedError,
    ExperimentsDbError,
    FullError,
    NetworkDiskError,
    NewerDatabaseError,
    ReadOnlyError,
    UnavailableError,
    first_line,
)
from experiments_db.home import FILE_NAME, HOME_VARIABLE, home_folder
from experiments_db.models import Row

HEAD = "0004_refusals"
"""The migration that this version's tables need."""
BUSY_TIMEOUT_S = 60
"""How long a process waits for another one's transaction. Ours are short, but other programs may look in too; longer
means that something hangs."""
NETWORK_FILE_SYSTEMS = frozenset(
    {
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "fuse.sshfs",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "nfs",
        "nfs4",
        "smb3",
        "smbfs",
    }
)
"""Types under which SQLite's shared memory file is not shared, or its locks are not kept."""
WAL_MAGIC = (b"\x37\x7f\x06\x82", b"\x37\x7f\x06\x83")
"""A write-ahead log of SQLite begins with one of these."""
DISK_FULL = "53100"
"""PostgreSQL's code for it."""
RESTORE = "restore a copy of it, or move it away and a new one is made; run folders and their journals are not touched"
ADVISORY_LOCK = 0x613372
"""Names our migrations among the advisory locks of a PostgreSQL database."""


@dataclass(frozen=True, slots=True)
class Database:
    """An open experiment log. Share it among threads; let each process open its own."""

    url: str = field(repr=False)
    """Opens the same database from another process. It may hold a password, so `name` is what to print."""
    name: str
    """For people: the file, or the URL without its password and options."""
    engine: Engine

    def for_child(self) -> tuple[str, dict[str, str]]:
        """URL and environment variables by which a process that is started opens it; no command line has a password."""
        url = make_url(self.url)
        password = url.password or url.query.get("password")
        if url.get_backend_name() != "postgresql" or not isinstance(password, str):
            return self.url, {}
        plain = URL.create(url.drivername, url.username, None, url.host, url.port, url.database, url.query)
        return plain.difference_update_query(["password"]).render_as_string(), {"PGPASSWORD": password}

    @contextlib.contextmanager
    def write(self) -> Iterator[Session]:
        """A session whose work is one transaction: committed at the end, undone by an exception.

        On SQLite it holds the write lock from its start, so keep it short and talk to nothing else meanwhile.

        Raises:
            UnavailableError: the disk is full, read-only or gone, or others held the lock for longer than
                BUSY_TIMEOUT_S.
            ConflictError: a rule of the schema refuses a row.
        """
        with (
            explained(self.name),
            self.engine.connect().execution_options(immediate=True) as connection,
            connection.begin(),
            Session(connection, expire_on_commit=False) as session,
        ):
            yield session
            session.flush()

    @contextlib.contextmanager
    def read(self) -> Iterator[Session]:
        """A session that sees the database as it is when it first looks.

        Raises:
            UnavailableError: the database can't be read.
        """
        with explained(self.name), Session(self.engine, expire_on_commit=False) as session:
            yield session

    def close(self) -> None:
        """Close every connection."""
        self.engine.dispose()

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def default_url(home: Path | str | None = None) -> str:
    """URL of the database in the home folder."""
    return URL.create("sqlite", database=str(home_folder(home) / FILE_NAME)).render_as_string()


def open_database(url: str | None = None, home: Path | str | None = None) -> Database:
    """Open the experiment log; make it and bring it up to date where needed, one process at a time.

    Args:
        url: `sqlite:///FILE` or `postgresql://…`; None is `experiments.db` in the home folder.
        home: see `home.home_folder`; only looked at where there is no URL.
    Raises:
        UnavailableError: it can't be opened; the message says what to do.
        NewerDatabaseError: a later version of A3R has migrated it.
    """
    parsed = _parse(url or default_url(home))
    # Options of PostgreSQL may be passwords too.
    name = parsed.database or "" if parsed.get_backend_name() == "sqlite" else parsed.set(query={}).render_as_string()
    database = Database(parsed.render_as_string(hide_password=False), name, _engine(parsed, name))
    try:
        with explained(name):
            _bring_up_to_date(database)
    except BaseException:
        database.close()
        raise
    return database


def _parse(url: str) -> URL:
    """The URL with the driver we use, its file absolute."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # the second for a port that is no number
        raise UnavailableError(
            f"{_without_secrets(url)!r} is no database URL; use sqlite:///FILE or postgresql://USER@HOST/NAME"
        ) from None
    match parsed.get_backend_name():
        case "sqlite" if parsed.database and parsed.database != ":memory:":
            return parsed.set(drivername="sqlite", database=str(Path(parsed.database).expanduser().absolute()))
        case "sqlite":
            shown = _without_secrets(url)
            raise UnavailableError(f"{shown!r} names no file, and the log must outlive the process; use sqlite:///FILE")
        case "postgresql":
            return parsed.set(drivername="postgresql+psycopg")
        case other:
            raise UnavailableError(f"{other} is not supported; use sqlite:///FILE or postgresql://USER@HOST/NAME")


def _without_secrets(url: str) -> str:
    """A text that was to be a URL, without what may be a password."""
    head, at, address = url.rpartition("@")
    return f"{head.partition(':')[0]}{':***@' * bool(at)}{address.partition('?')[0]}"


def _engine(url: URL, name: str) -> Engine:
    if url.get_backend_name() == "postgresql":
        try:
            return create_engine(url, pool_pre_ping=True)
        except ModuleNotFoundError as error:
            raise UnavailableError(
                "PostgreSQL needs a driver that is not installed: pip install 'a3r[postgres]'"
            ) from error
    _prepare_folder(Path(name).parent)
    _check_log(Path(name))
    engine = create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S})
    event.listen(engine, "connect", _set_up_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _prepare_folder(folder: Path) -> None:
    """Make the folder of the file, for its owner alone, and see that its file system keeps SQLite's promises."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _os_error(folder, error) from error
    kind = file_system_of(folder)
    if kind in NETWORK_FILE_SYSTEMS:
        raise NetworkDiskError(
            f"{folder} is on {kind}, a network file system, where SQLite loses data; set {HOME_VARIABLE} to a folder "
            "on a local disk, or use PostgreSQL with --db postgresql://USER@HOST/NAME"
        )


def _check_log(file: Path) -> None:
    """See that SQLite will read the database's write-ahead log: one that it can't read is to it an empty one.

    Only the log may be opened and closed here. That of the database itself would drop the locks that this process has.
    """
    log = file.with_name(file.name + "-wal")
    try:
        with log.open("rb") as opened:
            header = opened.read(32)
    except OSError:
        return
    # All zeros is what a power cut may leave of a log that nothing was committed to yet.
    if header.strip(b"\0") and header[:4] not in WAL_MAGIC:
        raise DamagedError(
            f"{log} is damaged, its header is no write-ahead log's; restore a copy of it and of {file.name}, or move "
            "it away: without it the database is as it was some time before, and the rows written last are missing"
        )


def file_system_of(path: Path, mounts: str | None = None) -> str | None:
    """Type of the file system that holds `path`; None where the system does not tell (all but Linux).

    Args:
        mounts: text in the form of /proc/self/mounts; None reads that file.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="surrogateescape")
        except OSError:
            return None
    best, kind = -1, None
    resolved = path.resolve()
    for line in mounts.splitlines():
        _, point, its_kind, *_ = line.split(" ")
        # Blanks in the name of a mount point are written as octal.
        folder = Path(point.replace("\\040", " ").replace("\\011", "\t"))
        if resolved.is_relative_to(folder) and len(folder.parts) >= best:
            best, kind = len(folder.parts), its_kind
    return kind


def _set_up_sqlite(connection: Any, _record: Any) -> None:
    """Settings that SQLite keeps per connection. WAL is kept in the file."""
    connection.execute("PRAGMA foreign_keys=ON")
    connection.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_S * 1000}")
    connection.execute("PRAGMA synchronous=FULL")


def _begin_sqlite(connection: Connection) -> None:
    # Left to itself the driver begins late, and not at all before DDL: a migration would not be one transaction.
    # A writer that began as a reader can't wait for another writer: SQLite answers "locked" at once.
    immediate = connection.get_execution_options().get("immediate", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


# Migrations


def _bring_up_to_date(database: Database) -> None:
    if database.engine.dialect.name == "postgresql":
        with database.engine.begin() as connection:
            # Held to the end of the transaction; readers and writers of an up-to-date database never wait for it.
            if _version(connection) != HEAD:
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ADVISORY_LOCK})
                _migrate(connection, database.name)
        return
    if Path(database.name).exists() and _is_current(database):
        return
    with _one_at_a_time(Path(database.name)), database.engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        (mode,) = driver.execute("PRAGMA journal_mode=WAL").fetchone()
        if mode != "wal":
            raise NetworkDiskError(
                f"{database.name} can't use a write-ahead log (SQLite says {mode!r}), its file system lacks shared "
                f"memory; set {HOME_VARIABLE} to a folder on a local disk"
            )
        # Rebuilding a table drops the old one, which must not count as deleting the rows that others refer to.
        driver.execute("PRAGMA foreign_keys=OFF")
        with connection.execution_options(immediate=True).begin():
            _migrate(connection, database.name)
            broken = connection.exec_driver_sql("PRAGMA foreign_key_check").fetchall()
            assert not broken, f"a migration left references to nothing: {broken[:3]}"
        driver.execute("PRAGMA foreign_keys=ON")
    with contextlib.suppress(OSError):
        Path(database.name).chmod(0o600)


def _is_current(database: Database) -> bool:
    with database.engine.connect() as connection:
        return _version(connection) == HEAD


def _version(connection: Connection) -> str | None:
    """The last migration that ran; None before the first."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


@contextlib.contextmanager
def _one_at_a_time(file: Path) -> Iterator[None]:
    """Held by one process at a time, and given back when it dies.

    The lock is SQLite's own, on an empty database beside ours, so it works on every system. Switching a new database to
    WAL can't wait for others: of 1200 openings, eight at a time, four failed without this with "database is locked".
    """
    path = file.with_name(file.name + ".lock")
    with contextlib.closing(sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)) as lock:
        lock.execute("BEGIN EXCLUSIVE")
        yield


def _migrate(connection: Connection, name: str) -> None:
    """Run the migrations that are missing, inside the connection's transaction."""
    # Alembic takes a third of a second to import, and a database is migrated once.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    version = _version(connection)
    if version == HEAD:
        return
    config = Config()
    config.set_main_option("script_location", "experiments_db:migrations")
    config.attributes["connection"] = connection
    known = {revision.revision for revision in ScriptDirectory.from_config(config).walk_revisions()}
    if version is not None and version not in known:
        raise NewerDatabaseError(
            f"{name} is at migration {version!r}, this version of A3R knows them up to {HEAD!r}; install the version "
            f"that wrote it, or use another database with --db or {HOME_VARIABLE}"
        )
    if version is None and (taken := set(inspect(connection).get_table_names()) & set(Row.metadata.tables)):
        raise UnavailableError(
            f"{name} already holds tables of another program ({', '.join(sorted(taken)[:3])}); use another database"
        )
    command.upgrade(config, "head")


# Errors in words


@contextlib.contextmanager
def explained(name: str) -> Iterator[None]:
    """Turn what the driver raises inside into errors that say what to do."""
    try:
        yield
    except NotJsonError as error:
        where = _place_of_broken_json(name) or "a JSON column"
        raise DamagedError(f"{name} is damaged: {where} holds no JSON ({error}); {RESTORE}") from error
    except IntegrityError as error:
        raise ConflictError(f"the database refuses a row: {first_line(error.orig)}") from error
    except sqlite3.Error as error:
        if (known := _sqlite_trouble(name, error)) is None:
            raise
        raise known from error
    except DBAPIError as error:
        is_sqlite = isinstance(error.orig, sqlite3.Error)
        known = _sqlite_trouble(name, error.orig) if is_sqlite else _server_trouble(name, error)
        if known is None:
            raise
        raise known from error


def _sqlite_trouble(name: str, error: BaseException | None) -> ExperimentsDbError | None:
    """What a user can do about an error of SQLite; None where it is ours."""
    what = str(error)
    if "full" in what:
        return FullError(f"no room left for {name}; free some on its disk, what was written before is kept")
    if "readonly" in what or "read-only" in what:
        return ReadOnlyError(
            f"{name} can't be written ({what}); check who owns it and its folder, or set {HOME_VARIABLE} to a folder "
            "of your own"
        )
    if "is locked" in what:
        return UnavailableError(
            f"{name} was locked by another process for {BUSY_TIMEOUT_S} s; end the one that hangs and try again"
        )
    if "not a database" in what:
        return DamagedError(f"{name} is no SQLite database, or its first page is damaged; {RESTORE}")
    if "malformed" in what:
        return DamagedError(f"{name} is damaged ({_first_damaged_page(name) or what}); {RESTORE}")
    table = re.search(r"no such table: (?:main\.)?(\w+)", what)
    if table and table[1] in Row.metadata.tables:
        return DamagedError(f"{name} is damaged: its table {table[1]} is missing; {RESTORE}")
    if "unable to open" in what:
        return UnavailableError(f"{name} can't be opened ({what}); is it a file that you may read and write?")
    if "I/O" in what or "locking protocol" in what:
        return UnavailableError(f"{name}: {what}; check its disk, and set {HOME_VARIABLE} to a folder on a local one")
    return None


def _first_damaged_page(name: str) -> str | None:
    """What SQLite's own check finds first; it reads the whole file."""
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(name)) as database:
        (found,) = database.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            return " ".join(str(found).replace("***", "").split())
    return None


def _place_of_broken_json(name: str) -> str | None:
    """The first row with a JSON column that holds something else; None where SQLite can't look."""
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(name)) as database:
        for table in Row.metadata.sorted_tables:
            for column in table.columns:
                if isinstance(column.type, CanonicalJson):
                    sql = f'SELECT id FROM "{table.name}" WHERE NOT json_valid("{column.name}") LIMIT 1'
                    for (row,) in database.execute(sql):
                        return f"column {column.name} of row {row} in table {table.name}"
    return None


def _server_trouble(name: str, error: DBAPIError) -> ExperimentsDbError | None:
    """What a user can do about an error of a database server; None where it is ours."""
    if not isinstance(error, OperationalError):
        return None
    what = first_line(error.orig)
    if getattr(error.orig, "sqlstate", None) == DISK_FULL:
        return FullError(f"the server of {name} has no room left; free some, what was written before is kept")
    return UnavailableError(f"{name} can't be reached ({what}); does the server run, and may this user connect?")


def _os_error(folder: Path, error: OSError) -> ExperimentsDbError:
    kind = FullError if error.errno == errno.ENOSPC else ReadOnlyError
    return kind(
        f"{folder} can't be made ({error.strerror}); set {HOME_VARIABLE} to a folder where you may "
        "write and there is room"
    )
