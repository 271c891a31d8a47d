"""Keep what the engine warned of after each step, also what it said before there was a table for it."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import Any

import sqlalchemy as sa
from alembic import op

from experiments_db.ulid import new_ulid

revision = "0003_health_warnings"
down_revision = "0002_arms_and_wishes"
branch_labels = None
depends_on = None

ID = sa.String(26)
KINDS = {
    "not_finite": "loss or gradient was not finite",
    "entropy_collapse": "entropy fell from",
    "kl_spike": "sampler and trainer differ by",
    "gradient_explodes": "the gradient's norm is",
    "reward_flat": "the mean reward went from",
    "truncation": "of the replies were cut",
    "zero_variance": "of the groups got one reward",
}
"""What the texts of each kind hold: an older `step` event has nothing else of its warnings."""
OF_A_POLICY = re.compile(r"policy '([^']*)': ")


def upgrade() -> None:
    op.create_table(
        "health_warning",
        sa.Column("id", ID, nullable=False),
        sa.Column("experiment_id", ID, nullable=False),
        sa.Column("segment", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("policy", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_health_warning")),
        sa.ForeignKeyConstraint(["experiment_id"], ["experiment.id"], name=op.f("fk_health_warning_experiment_id")),
        sa.UniqueConstraint(
            "experiment_id",
            "segment",
            "step",
            "policy",
            "kind",
            name=op.f("uq_health_warning_experiment_id_segment_step_policy_kind"),
        ),
    )
    _fill()


def _fill() -> None:
    """Rows from the events that are there. Steps that begin again make a segment, as in `metric_point`."""
    event = sa.table("engine_event", *map(sa.column, ("experiment_id", "at", "server_id", "seq", "kind", "payload")))
    warning = sa.table(
        "health_warning",
        *map(sa.column, ("id", "experiment_id", "segment", "step", "policy", "kind", "value", "message")),
    )
    connection = op.get_bind()
    segments: defaultdict[str, int] = defaultdict(int)
    last_steps: defaultdict[str, int] = defaultdict(int)
    rows: list[dict[str, Any]] = []
    steps = (
        sa.select(event.c.experiment_id, event.c.payload)
        .where(event.c.kind == "step")
        .order_by(event.c.experiment_id, event.c.at, event.c.server_id, event.c.seq)
    )
    for experiment_id, text in connection.execute(steps):
        payload = json.loads(text)
        step = payload.get("step")
        if not isinstance(step, int):
            continue  # kept as it came, and no metric follows from it either
        segments[experiment_id] += step <= last_steps[experiment_id]
        last_steps[experiment_id] = step
        found = {_read(message): message for message in payload.get("warnings", ()) if isinstance(message, str)}
        rows += [
            {
                "id": new_ulid(),
                "experiment_id": experiment_id,
                "segment": segments[experiment_id],
                "step": step,
                "policy": policy,
                "kind": kind,
                "value": None,
                "message": message,
            }
            for (policy, kind), message in found.items()
        ]
    if rows:
        connection.execute(sa.insert(warning), rows)


def _read(message: str) -> tuple[str, str]:
    """Policy and kind of an older warning."""
    named = OF_A_POLICY.match(message)
    kind = next((kind for kind, part in KINDS.items() if part in message), "other")
    return named[1] if named else "", kind


def downgrade() -> None:
    op.drop_table("health_warning")
