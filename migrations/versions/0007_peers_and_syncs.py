"""Peers with their state and memory, and session records; peers kept in `store_meta` move over."""

from __future__ import annotations

import json

from alembic import op
from blake3 import blake3
from sqlalchemy import BigInteger, Column, Connection, Integer, LargeBinary, Text, text

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

Number = BigInteger().with_variant(Integer(), "sqlite")
ByteText = Text().with_variant(Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Create the tables and move the peers."""
    op.create_table(
        "peers",
        Column("peer_no", Number, primary_key=True, autoincrement=False),
        Column("peer_id", ByteText, nullable=False),
        Column("url", ByteText, nullable=False),
        Column("origin", ByteText, nullable=False),
        Column("token", ByteText, nullable=False),
        Column("state", ByteText, nullable=False),
        Column("since_ms", Number, nullable=False),
        Column("code", ByteText, nullable=False),
        Column("reason", ByteText, nullable=False),
        Column("failures", Number, nullable=False),
        Column("next_sync_at_ms", Number),
        Column("in_sync_at_ms", Number),
        Column("proved_at_ms", Number),
        Column("missing_here", Number),
        Column("missing_there", Number),
        Column("apart_since_ms", Number),
        Column("last_sync_id", ByteText, nullable=False),
        Column("memory", LargeBinary),
        Column("holder", ByteText, nullable=False),
        Column("fence", Number, nullable=False),
        Column("expires_ms", Number, nullable=False),
    )
    op.create_index("peers_by_id", "peers", ["peer_id"], unique=True)
    op.create_table(
        "syncs",
        Column("sync_no", Number, primary_key=True, autoincrement=False),
        Column("sync_id", ByteText, nullable=False),
        Column("peer_id", ByteText, nullable=False),
        Column("process", ByteText, nullable=False),
        Column("finished_at_ms", Number),
        Column("seen_ms", Number, nullable=False),
        Column("document", LargeBinary, nullable=False),
    )
    op.create_index("syncs_by_id", "syncs", ["sync_id"], unique=True)
    _move_peers(op.get_bind())


def _move_peers(connection: Connection) -> None:
    row = connection.execute(text("SELECT value FROM store_meta WHERE name = 'peers'")).scalar()
    for number, (url, token) in enumerate(_listed(row), 1):
        connection.execute(
            text(
                "INSERT INTO peers (peer_no, peer_id, url, origin, token, state, since_ms, code,"
                " reason, failures, last_sync_id, holder, fence, expires_ms)"
                " VALUES (:number, :peer_id, :url, 'added', :token, 'new', 0, '', '', 0, '', '', 0, 0)"
            ),
            {
                "number": number,
                "peer_id": blake3(url.encode()).hexdigest(length=8),
                "url": url,
                "token": str(token or ""),
            },
        )
    connection.execute(text("DELETE FROM store_meta WHERE name = 'peers'"))


def _listed(value: bytes | None) -> list[tuple[str, str | None]]:
    """URLs alone, or with their tokens; a value that is not such a list has no peers."""
    try:
        kept = json.loads(bytes(value or b"[]"))
        pairs = [each if isinstance(each, list) else (each, None) for each in kept]
        return [*{url: (url, token) for url, token in pairs if url.startswith("http")}.values()]
    except (AttributeError, TypeError, ValueError):
        return []
