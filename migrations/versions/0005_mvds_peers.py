"""Peers of MVDS, their places in the channels, and the records of messages on their way."""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Column, Integer, LargeBinary, SmallInteger, Text

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

Number = BigInteger().with_variant(Integer(), "sqlite")
ByteText = Text().with_variant(Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "mvds_peers",
        Column("peer_no", Number, primary_key=True, autoincrement=False),
        Column("epoch", Number, nullable=False),
        Column("exchange_no", Number, nullable=False),
        Column("caller", ByteText, nullable=False),
        Column("peer_id", ByteText, nullable=False),
    )
    op.create_index("mvds_peers_by_name", "mvds_peers", ["caller", "peer_id"], unique=True)
    op.create_table(
        "mvds_positions",
        Column("peer_no", Number, primary_key=True, autoincrement=False),
        Column("channel_no", Integer, primary_key=True, autoincrement=False),
        Column("seq", Number, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "mvds_records",
        Column("peer_no", Number, primary_key=True, autoincrement=False),
        Column("message_id", LargeBinary, primary_key=True),
        Column("type", SmallInteger, nullable=False),
        Column("send_count", Number, nullable=False),
        Column("send_epoch", Number, nullable=False),
        Column("channel_no", Integer, nullable=False),
        Column("seq", Number, nullable=False),
        sqlite_with_rowid=False,
    )
