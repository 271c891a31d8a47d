"""What only PostgreSQL does its own way. The other tests run on it too: `make test-heavy`."""

from __future__ import annotations

import multiprocessing
from multiprocessing.synchronize import Barrier

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, make_url, text
from sqlmodel import select

from experiments_db.engine import open_database
from experiments_db.errors import NewerDatabaseError, UnavailableError
from experiments_db.models import Note, Row

pytestmark = pytest.mark.heavy


def test_the_migrations_make_the_tables_of_the_models(postgres_url: str) -> None:
    with open_database(postgres_url) as database, database.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Row.metadata) == []
        checks = "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint ORDER BY 1, 2"
        migrated = connection.execute(text(checks)).all()
        connection.rollback()
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
        Row.metadata.create_all(connection)
        made = connection.execute(text(checks)).all()
    assert [row for row in migrated if row[0] != "alembic_version"] == list(made)


def _open_and_write(url: str, name: str, all_are_here: Barrier) -> None:
    all_are_here.wait(timeout=60)
    with open_database(url) as database, database.write() as session:
        session.add(Note(scope=name, text="here"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_eight_processes_open_a_new_database_at_once(postgres_url: str) -> None:
    context = multiprocessing.get_context("fork")
    all_are_here = context.Barrier(8)
    processes = [context.Process(target=_open_and_write, args=(postgres_url, str(n), all_are_here)) for n in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)
    assert [process.exitcode for process in processes] == [0] * 8
    with open_database(postgres_url) as database, database.read() as session:
        assert sorted(session.exec(select(Note.scope)).all()) == [str(n) for n in range(8)]


def test_a_database_of_a_newer_version_is_refused(postgres_url: str) -> None:
    with open_database(postgres_url) as database, database.engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '0099_later'"))
    with pytest.raises(NewerDatabaseError, match="at migration '0099_later'"):
        open_database(postgres_url)


def test_tables_of_other_programs_are_left_alone(postgres_url: str) -> None:
    engine = create_engine(postgres_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE theirs (name TEXT)"))
    open_database(postgres_url).close()
    with engine.begin() as connection:
        connection.execute(text("SELECT name FROM theirs"))
        connection.execute(text("DROP TABLE alembic_version"))
    with pytest.raises(UnavailableError, match="tables of another program"):
        open_database(postgres_url)
    engine.dispose()


def test_the_plain_url_works_and_no_password_is_shown(postgres_url: str) -> None:
    plain = make_url(postgres_url).set(drivername="postgresql", password="secret").render_as_string(hide_password=False)
    with open_database(plain) as database:
        assert database.url == plain.replace("postgresql://", "postgresql+psycopg://")
        assert "secret" not in database.name
        assert "secret" not in repr(database)
