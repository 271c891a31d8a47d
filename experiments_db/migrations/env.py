"""Runs migrations on the connection that `experiments_db.engine` hands over, inside its transaction.

Developers run `alembic` with the settings in pyproject.toml; it then works on the database of A3R_HOME.
"""

from __future__ import annotations

from alembic import context

from experiments_db.models import Row


def run() -> None:
    connection = context.config.attributes.get("connection")
    if connection is not None:
        _run_on(connection)
        return
    from sqlalchemy import create_engine

    from experiments_db.engine import default_url

    with create_engine(default_url()).begin() as connection:
        _run_on(connection)


def _run_on(connection: object) -> None:
    # Batch mode: SQLite changes a table by building a new one.
    context.configure(connection=connection, target_metadata=Row.metadata, render_as_batch=True)  # type: ignore[arg-type]
    with context.begin_transaction():
        context.run_migrations()


run()
