"""Keep how many calls of an episode were refused, and what the last one was told."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004_refusals"
down_revision = "0003_health_warnings"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("episode", sa.Column("num_refused", sa.BigInteger(), nullable=True))
    op.add_column("episode", sa.Column("last_refusal", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("episode", "last_refusal")
    op.drop_column("episode", "num_refused")
