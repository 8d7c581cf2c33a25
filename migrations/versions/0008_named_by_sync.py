"""Missing messages that only sync messages name are listed too, in the order in which they were named."""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Column, Integer, text

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

Number = BigInteger().with_variant(Integer(), "sqlite")


def upgrade() -> None:
    """Add the column, 0 for those that a history names, and an index of the others."""
    op.add_column(
        "missing_references", Column("named_no", Number, nullable=False, server_default=text("0"))
    )
    is_named_by_sync = text("named_no > 0")
    op.create_index(
        "missing_references_by_sync",
        "missing_references",
        ["channel_no", "named_no"],
        sqlite_where=is_named_by_sync,
        postgresql_where=is_named_by_sync,
    )
