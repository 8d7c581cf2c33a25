"""A side table for content that cannot be read."""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Column, Integer

revision = "0003"
down_revision = "0001"
branch_labels = None
depends_on = None

Number = BigInteger().with_variant(Integer(), "sqlite")


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "lost_content",
        Column("seq", Number, primary_key=True, autoincrement=False),
        Column("found_at_ms", Number, nullable=False),
    )
