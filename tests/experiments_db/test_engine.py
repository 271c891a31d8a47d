from __future__ import annotations

import contextlib
import multiprocessing
import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, create_engine, inspect, text
from sqlalchemy.exc import OperationalError
from sqlmodel import Session, col, select

from experiments_db import engine as engine_module
from experiments_db.engine import HEAD, Database, default_url, file_system_of, open_database
from experiments_db.errors import (
    DamagedError,
    ExperimentsDbError,
    FullError,
    NetworkDiskError,
    NewerDatabaseError,
    ReadOnlyError,
    UnavailableError,
)
from experiments_db.home import home_folder
from experiments_db.models import Decision, Note, Row, StageKind, Study, StudyKind
from experiments_db.writes import add_decision, add_prereg, add_stage, create_study


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """Of SQLite alone; test_postgres.py looks at the other."""
    with open_database(home=tmp_path / "home") as opened:
        yield opened


def add_note(session: Session, scope: str, text: str) -> None:
    """The smallest row there is."""
    session.add(Note(scope=scope, text=text))
    session.flush()


def schema_of(engine: Engine) -> dict[str, object]:
    """Everything that the inspector tells about our tables, triggers aside."""
    inspector = inspect(engine)
    return {
        table: {
            "columns": [(c["name"], str(c["type"]), c["nullable"]) for c in inspector.get_columns(table)],
            "primary key": inspector.get_pk_constraint(table),
            "foreign keys": sorted(inspector.get_foreign_keys(table), key=str),
            "unique": sorted(inspector.get_unique_constraints(table), key=str),
            "checks": sorted(inspector.get_check_constraints(table), key=str),
            "indexes": sorted(inspector.get_indexes(table), key=str),
        }
        for table in sorted(Row.metadata.tables)
    }


def test_the_migrations_make_the_tables_of_the_models(database: Database, tmp_path: Path) -> None:
    made = create_engine(f"sqlite:///{tmp_path / 'made.db'}")
    Row.metadata.create_all(made)
    assert schema_of(database.engine) == schema_of(made)
    made.dispose()


def test_autogenerate_finds_nothing_to_migrate(database: Database) -> None:
    with database.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Row.metadata) == []


def test_head_is_the_last_migration() -> None:
    config = Config()
    config.set_main_option("script_location", "experiments_db:migrations")
    assert ScriptDirectory.from_config(config).get_current_head() == HEAD


def test_alembic_finds_the_migrations_by_itself() -> None:
    top = Path(__file__).parents[2]
    shown = subprocess.run(
        [sys.executable, "-m", "alembic", "history"], cwd=top, capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stderr
    assert f"-> {HEAD} (head)" in shown.stdout


def test_the_spine_can_be_taken_back(database: Database) -> None:
    from alembic import command

    config = Config()
    config.set_main_option("script_location", "experiments_db:migrations")
    with database.engine.begin() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, "base")
    assert inspect(database.engine).get_table_names() == ["alembic_version"]


def test_the_arm_of_an_older_decision_is_taken_from_its_comment(database: Database) -> None:
    from alembic import command

    config = Config()
    config.set_main_option("script_location", "experiments_db:migrations")
    with database.write() as session:
        study = create_study(session, StudyKind.RESEARCH, "q")
        stage = add_stage(session, add_prereg(session, study, {}), 1, StageKind.COMPARE)
        for n, comment in enumerate(["size=8 against size=4; runs took 3 s", None]):
            add_decision(session, stage, n=n, node_id="n1", branch="superior", predicate_trace=[], comment=comment)
    for revision, move in (("0001_spine", command.downgrade), (HEAD, command.upgrade)):
        with database.engine.begin() as connection:
            config.attributes["connection"] = connection
            move(config, revision)
    with database.read() as session:
        assert session.exec(select(Decision.arm_key).order_by(col(Decision.n))).all() == ["size=8", None]
        assert session.get_one(Study, study).wishes == {}


def test_a_new_database_is_private_durable_and_strict(tmp_path: Path) -> None:
    home = tmp_path / "deep" / "home"
    with open_database(home=home) as database:
        assert database.url == f"sqlite:///{home}/experiments.db"
        assert database.name == f"{home}/experiments.db"
        with database.read() as session:
            settings = {
                name: session.execute(text(f"PRAGMA {name}")).scalar()
                for name in ("journal_mode", "foreign_keys", "busy_timeout", "synchronous")
            }
    assert settings == {"journal_mode": "wal", "foreign_keys": 1, "busy_timeout": 60000, "synchronous": 2}
    if os.name == "posix":
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        assert stat.S_IMODE((home / "experiments.db").stat().st_mode) == 0o600


def test_the_home_is_given_or_set_or_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("A3R_HOME", raising=False)
    assert home_folder() == tmp_path / ".a3r"
    monkeypatch.setenv("A3R_HOME", str(tmp_path / "set"))
    assert default_url() == f"sqlite:///{tmp_path}/set/experiments.db"
    assert home_folder(tmp_path / "given") == tmp_path / "given"
    monkeypatch.setenv("A3R_HOME", str(tmp_path / "50%41 hömë#"))
    with open_database() as database:
        assert database.name == f"{tmp_path}/50%41 hömë#/experiments.db", "a name of signs that mean something in URLs"
    with open_database(default_url()) as database:
        assert database.name == f"{tmp_path}/50%41 hömë#/experiments.db"
    monkeypatch.setenv("A3R_HOME", "~no-such-user/x")
    with pytest.raises(UnavailableError, match="A3R_HOME"):
        home_folder()


def test_what_was_written_is_there_when_it_is_opened_again(tmp_path: Path) -> None:
    with open_database(home=tmp_path) as database, database.write() as session:
        study = create_study(session, StudyKind.RESEARCH, "Is it there?")
    with open_database(home=tmp_path) as database, database.read() as session:
        assert session.get_one(Study, study).question == "Is it there?"


def test_an_exception_undoes_the_transaction(database: Database) -> None:
    def write_and_fail() -> None:
        with database.write() as session:
            add_note(session, "global", "gone")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_and_fail()
    with database.read() as session:
        assert session.exec(select(Note)).all() == []


def test_readers_do_not_wait_for_a_writer(database: Database) -> None:
    with database.write() as writer:
        add_note(writer, "global", "not yet")
        with database.read() as reader:
            assert reader.exec(select(Note)).all() == []


def _open_and_write(url: str, name: str, all_are_here: Barrier) -> None:
    all_are_here.wait(timeout=60)
    with open_database(url) as database:
        for number in range(5):
            with database.write() as session:
                add_note(session, name, f"note {number}")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_eight_processes_open_a_new_database_at_once(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'home' / 'experiments.db'}"
    context = multiprocessing.get_context("fork")
    all_are_here = context.Barrier(8)
    processes = [
        context.Process(target=_open_and_write, args=(url, f"process {number}", all_are_here)) for number in range(8)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0] * 8
    with open_database(url) as database, database.read() as session:
        notes = session.exec(select(Note)).all()
    assert sorted((note.scope, note.text) for note in notes) == [
        (f"process {process}", f"note {number}") for process in range(8) for number in range(5)
    ]


def test_a_new_database_waits_for_whoever_is_making_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "BUSY_TIMEOUT_S", 0)
    with contextlib.closing(sqlite3.connect(tmp_path / "experiments.db.lock", isolation_level=None)) as lock:
        lock.execute("BEGIN EXCLUSIVE")
        with pytest.raises(UnavailableError, match="locked by another process"):
            open_database(home=tmp_path)
    open_database(home=tmp_path).close()


def test_a_process_killed_while_it_migrates_leaves_nothing_behind(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from alembic import command\n"
        "real = command.upgrade\n"
        "def upgrade(*words):\n"
        "    real(*words)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "command.upgrade = upgrade\n"
        "from experiments_db.engine import open_database\n"
        "open_database(home=sys.argv[1])\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert killed.returncode == -9
    with sqlite3.connect(tmp_path / "experiments.db") as raw:
        assert raw.execute("SELECT name FROM sqlite_master").fetchall() == []
    raw.close()
    with open_database(home=tmp_path) as database:
        assert inspect(database.engine).has_table("study")


def test_a_database_of_a_newer_version_is_refused(database: Database) -> None:
    with database.engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '0099_later'"))
    with pytest.raises(NewerDatabaseError, match=rf"at migration '0099_later'.*knows them up to '{HEAD}'.*install"):
        open_database(database.url)


def test_the_database_of_another_program_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with sqlite3.connect(path) as raw:
        raw.execute("CREATE TABLE job (name TEXT)")
    raw.close()
    with pytest.raises(UnavailableError, match=r"tables of another program \(job\)"):
        open_database(f"sqlite:///{path}")


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "experiments.db").write_text("my shopping list, which is longer than a header of SQLite" * 9)
    with pytest.raises(DamagedError, match="is no SQLite database, or its first page is damaged; restore a copy"):
        open_database(home=tmp_path)
    assert (tmp_path / "experiments.db").read_text().startswith("my shopping list")


def in_sql(statement: str) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        with contextlib.closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(statement)

    return damage


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda path: os.truncate(path, 5 * 4096), r"experiments\.db is damaged \(.*(page|malformed)"),
        (
            lambda path: path.with_name("experiments.db-wal").write_bytes(b"garbage" * 999),
            r"-wal is damaged, its header",
        ),
        (in_sql("DROP TABLE note"), "its table note is missing; restore a copy"),
        (in_sql("UPDATE study SET budget = '{' WHERE question = 'b'"), "column budget of row .* in table study holds"),
    ],
)
def test_what_is_damaged_is_named_with_its_place(tmp_path: Path, damage: Callable[[Path], object], told: str) -> None:
    with open_database(home=tmp_path) as database, database.write() as session:
        create_study(session, StudyKind.VIBE, "a")
        create_study(session, StudyKind.VIBE, "b")
        add_note(session, "global", "here")
    damage(tmp_path / "experiments.db")

    def read() -> None:
        with open_database(home=tmp_path) as database, database.read() as session:
            session.exec(select(Study)).all()
            session.exec(select(Note)).all()

    with pytest.raises(DamagedError, match=told):
        read()


def test_another_process_that_looks_and_leaves_deletes_no_log_in_use(database: Database) -> None:
    look = (
        "import sqlite3, sys; d = sqlite3.connect(sys.argv[1]); d.execute('SELECT * FROM note').fetchall(); d.close()"
    )
    with database.write() as session:
        add_note(session, "global", "one")
    with open_database(database.url):  # opened and closed again beside the first
        pass
    subprocess.run([sys.executable, "-I", "-S", "-c", look, database.name], check=True)
    with database.write() as session:
        add_note(session, "global", "two")
    with contextlib.closing(sqlite3.connect(database.name)) as other:
        assert other.execute("SELECT count(*) FROM note").fetchone() == (2,)
    assert Path(f"{database.name}-wal").exists()


def test_a_folder_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ReadOnlyError, match=r"file/home can't be made.*A3R_HOME"):
        open_database(home=tmp_path / "file" / "home")


def test_a_folder_in_place_of_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "experiments.db").mkdir()
    with pytest.raises(UnavailableError, match="can't be opened"):
        open_database(home=tmp_path)


def test_a_full_disk_says_so_and_keeps_what_was_committed(database: Database) -> None:
    with database.write() as session:
        add_note(session, "global", "before")
        pages = session.execute(text("PRAGMA page_count")).scalar_one()

    def write_too_much() -> None:
        with database.write() as session:
            session.execute(text(f"PRAGMA max_page_count={pages}"))
            add_note(session, "global", "x" * 100_000)

    with pytest.raises(FullError, match=r"no room left for .*experiments\.db; free some"):
        write_too_much()
    with open_database(database.url) as again, again.read() as session:
        assert [note.text for note in session.exec(select(Note)).all()] == ["before"]


def test_a_database_that_may_only_be_read_says_so(database: Database) -> None:
    def write() -> None:
        with database.write() as session:
            session.execute(text("PRAGMA query_only=ON"))
            add_note(session, "global", "no")

    with pytest.raises(ReadOnlyError, match=r"can't be written .*check who owns it"):
        write()


def test_a_lock_held_too_long_says_so(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "BUSY_TIMEOUT_S", 0)
    with open_database(database.url) as other, database.write() as session:
        add_note(session, "global", "busy")
        with pytest.raises(UnavailableError, match="locked by another process"), other.write():
            pass


def test_our_own_mistakes_are_not_blamed_on_the_disk(database: Database) -> None:
    def ask() -> None:
        with database.read() as session:
            session.execute(text("SELECT name FROM nowhere"))

    with pytest.raises(OperationalError, match="no such table: nowhere"):
        ask()


def test_a_home_that_a_url_can_not_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="holds a question mark"):
        open_database(home=tmp_path / "really?")
    with pytest.raises(UnavailableError, match="holds a question mark"):
        home_folder(tmp_path / "really?" / "here")


@pytest.mark.parametrize("name", ["with blank", "100%", "a#b", "é漢", "a&b=c"])
def test_a_home_may_have_any_other_name(tmp_path: Path, name: str) -> None:
    with open_database(home=tmp_path / name) as database, open_database(database.url) as again:
        assert again.name == str(tmp_path / name / "experiments.db")
    assert (tmp_path / name / "experiments.db").exists()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("experiments", "is no database URL"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("mysql://user@host/name", "mysql is not supported"),
    ],
)
def test_a_url_that_can_not_be_used_is_answered(url: str, says: str) -> None:
    with pytest.raises(UnavailableError, match=says):
        open_database(url)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:hunter2@host:port/name",
        "postgresql//me:hunter2@host/name",
        "mysql://me:hunter2@host/name",
        "sqlite://me:hunter2@host",
        "postgresql://me:hunter2@127.0.0.1:1/name?sslpassword=hunter2&connect_timeout=2",
    ],
)
def test_an_error_about_a_url_does_not_show_its_password(url: str) -> None:
    with pytest.raises(UnavailableError) as caught:
        open_database(url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["me:hunter2@host/name?sslmode=require", "me@host/name?sslmode=require&password=hunter2"]
)
def test_another_process_gets_the_password_by_its_environment(url: str) -> None:
    engine = create_engine("sqlite://")
    found = Database(f"postgresql+psycopg://{url}", "name", engine).for_child()
    assert found == ("postgresql+psycopg://me@host/name?sslmode=require", {"PGPASSWORD": "hunter2"})
    assert Database("sqlite:////a b/c.db", "name", engine).for_child() == ("sqlite:////a b/c.db", {})
    engine.dispose()


def test_an_unreachable_server_is_named_without_its_password() -> None:
    with pytest.raises(UnavailableError, match="can't be reached") as caught:
        open_database("postgresql://me:secret@127.0.0.1:1/none")
    assert "secret" not in str(caught.value)


def test_a_missing_driver_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(UnavailableError, match=r"pip install 'a3r\[postgres\]'"):
        open_database("postgresql://me@127.0.0.1:1/none")


MOUNTS = (
    "/dev/root / ext4 rw 0 0\n"
    "server:/home /home nfs4 rw 0 0\n"
    "/dev/sdb /home/me/local\\040disk xfs rw 0 0\n"
    "tmpfs /home tmpfs rw 0 0\n"
)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib", "ext4"),
        ("/homework", "ext4"),
        ("/home/me", "tmpfs"),  # mounted over the one before
        ("/home/me/local disk/a3r", "xfs"),
    ],
)
def test_the_file_system_is_that_of_the_innermost_mount(path: str, kind: str) -> None:
    assert file_system_of(Path(path), MOUNTS) == kind


def test_a_network_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "file_system_of", lambda _: "nfs4")
    with pytest.raises(NetworkDiskError, match=r"is on nfs4, .*A3R_HOME"):
        open_database(home=tmp_path)


def test_every_error_is_of_the_one_tree() -> None:
    assert all(
        issubclass(kind, ExperimentsDbError)
        for kind in (FullError, NewerDatabaseError, NetworkDiskError, ReadOnlyError)
    )


def test_opening_an_up_to_date_database_does_not_load_alembic(database: Database) -> None:
    code = (
        "import sys; from experiments_db.engine import open_database\n"
        "open_database(sys.argv[1]).close(); print('alembic' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, database.url], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
