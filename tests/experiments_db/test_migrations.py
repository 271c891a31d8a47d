"""What migrations make of rows that are there, on each kind of database."""

from __future__ import annotations

from typing import Any

from alembic import command
from alembic.config import Config

from experiments_db.derive import Event, store
from experiments_db.engine import HEAD, Database
from experiments_db.models import Row
from experiments_db.writes import create_single_run


def test_warnings_that_older_events_hold_as_words_become_rows(database: Database) -> None:
    """Steps 2 and 3 are done again, and the second run has warnings of its own."""
    config = Config()
    config.set_main_option("script_location", "experiments_db:migrations")
    words = {
        1: ["loss or gradient was not finite in 1 of the last 1 updates, the limit is 0; these steps were skipped"],
        2: [
            "policy 'a': entropy fell from 1 to 0.05 nats per token, 5% of the start, the limit is 10%",
            "policy 'b': sampler and trainer differ by 0.5 nats per token over the last 5 updates",
        ],
        3: [
            "the gradient's norm is 6 over the last 5 updates and was 0.5 before",
            "the mean reward went from 0 to 0 in 20 updates",
            "90% of the replies were cut at their limit of tokens over the last 5 updates",
            "90% of the groups got one reward for all episodes and taught nothing",
        ],
    }
    with database.write() as session:
        run, other = (create_single_run(session, "vibe", "q", "nim", {"size": size}) for size in (3, 4))
        steps = [1, 2, 3, 2]
        store(
            session,
            run,
            "s1",
            [
                Event(seq, float(seq), "step", {"step": step, "metrics": {"loss": 0.5}, "warnings": words[step]})
                for seq, step in enumerate(steps, 1)
            ],
        )
        store(session, other, "s2", [Event(1, 1.0, "step", {"step": 1, "metrics": {}, "warnings": ["unheard of"]})])
        store(session, other, "s2", [Event(2, 2.0, "step", {"step": "torn", "warnings": words[1]})])
    before = dump(database)
    for revision, move in (("0002_arms_and_wishes", command.downgrade), (HEAD, command.upgrade)):
        with database.engine.begin() as connection:
            config.attributes["connection"] = connection
            move(config, revision)
    after = dump(database)
    rows = after.pop("health_warning")
    assert before.pop("health_warning") == []
    assert after == before
    places = [(row.experiment_id, row.segment, row.step, row.policy, row.kind, row.message) for row in rows]
    assert sorted(places) == sorted(
        [
            (run, 0, 1, "", "not_finite", words[1][0]),
            (run, 0, 2, "a", "entropy_collapse", words[2][0]),
            (run, 0, 2, "b", "kl_spike", words[2][1]),
            (run, 0, 3, "", "gradient_explodes", words[3][0]),
            (run, 0, 3, "", "reward_flat", words[3][1]),
            (run, 0, 3, "", "truncation", words[3][2]),
            (run, 0, 3, "", "zero_variance", words[3][3]),
            (run, 1, 2, "a", "entropy_collapse", words[2][0]),
            (run, 1, 2, "b", "kl_spike", words[2][1]),
            (other, 0, 1, "", "other", "unheard of"),
        ]
    )
    assert {row.value for row in rows} == {None}


def dump(database: Database) -> dict[str, list[Any]]:
    """Every row of every table, in order."""
    with database.engine.connect() as connection:
        return {
            name: sorted(connection.execute(table.select()).all(), key=repr)
            for name, table in Row.metadata.tables.items()
        }
