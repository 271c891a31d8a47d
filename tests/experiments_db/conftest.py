"""A fresh database for each test, and a study with runs to hang rows under."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments_db.engine import Database, open_database
from experiments_db.writes import create_single_run


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with open_database(home=tmp_path / "home") as opened:
        yield opened


@pytest.fixture
def experiment_id(database: Database) -> str:
    with database.write() as session:
        return create_single_run(session, "vibe", "Play tic-tac-toe", "tictactoe", {"trainer.group_size": 8})
