"""Entries can be retired: they lose their content and stay elements."""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Column, Integer, LargeBinary, Text

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

Number = BigInteger().with_variant(Integer(), "sqlite")
ByteText = Text().with_variant(Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Add the table of retired entries."""
    op.create_table(
        "retired_content",
        Column("digest", LargeBinary, primary_key=True),
        Column("seq", Number),
        Column("retired_at_ms", Number, nullable=False),
        Column("reason", ByteText, nullable=False),
        sqlite_with_rowid=False,
    )
