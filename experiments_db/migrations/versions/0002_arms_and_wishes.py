"""Say which arm a decision is about, and with which wishes a study was asked for."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002_arms_and_wishes"
down_revision = "0001_spine"
branch_labels = None
depends_on = None

SEPARATOR = " against "
"""Between the two arms in the comment of a decision, where the arm stood before it had a column."""


def upgrade() -> None:
    op.add_column("decision", sa.Column("arm_key", sa.String(), nullable=True))
    op.add_column("study", sa.Column("wishes", sa.Text(), nullable=False, server_default="{}"))
    decision = sa.table("decision", sa.column("id"), sa.column("arm_key"), sa.column("comment"))
    connection = op.get_bind()
    for row in connection.execute(sa.select(decision.c.id, decision.c.comment)).all():
        arm, separator, _ = (row.comment or "").partition(SEPARATOR)
        if separator:
            connection.execute(sa.update(decision).where(decision.c.id == row.id).values(arm_key=arm))


def downgrade() -> None:
    op.drop_column("study", "wishes")
    op.drop_column("decision", "arm_key")
