"""The first schema. A frozen copy: later changes of `app.store.schema` come as later revisions."""

from __future__ import annotations

import secrets

from alembic import op
from sqlalchemy import (
    BigInteger,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    insert,
)

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# SQLite stores every integer in as few bytes as it needs, and only an INTEGER key is the rowid.
Number = BigInteger().with_variant(Integer(), "sqlite")
ByteText = Text().with_variant(Text(collation="C"), "postgresql")

metadata = MetaData()


def index_ending_in_key(name: str, table: Table, *columns: str) -> None:
    """An index with equal keys in order of the table's own number, which SQLite's always end in."""
    leading = [table.c[column] for column in columns]
    Index(name, *leading).ddl_if(dialect="sqlite")
    Index(name, *leading, table.c[table.primary_key.columns.keys()[0]]).ddl_if(dialect="postgresql")


store_meta = Table(
    "store_meta",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", LargeBinary, nullable=False),
)

channels = Table(
    "channels",
    metadata,
    Column("channel_no", Number, primary_key=True, autoincrement=False),
    Column("channel_id", ByteText, nullable=False),
    Column("count", Number, nullable=False),
    Column("lamport_first", Number, nullable=False),
    Column("lamport_last", Number, nullable=False),
    Index("channels_by_id", "channel_id", unique=True),
)

# Columns in the order that packs them best on PostgreSQL.
messages = Table(
    "messages",
    metadata,
    Column("seq", Number, primary_key=True, autoincrement=False),
    Column("id_key", Number, nullable=False),
    Column("lamport", Number, nullable=False),
    Column("received_at_ms", Number, nullable=False),
    Column("channel_no", Integer, nullable=False),
    Column("frame_bytes", Integer, nullable=False),
    Column("dialect", SmallInteger, nullable=False),
    # 0 where the message ID matches the content under a known scheme: those are served first
    Column("unverified", SmallInteger, nullable=False),
    Column("message_id", ByteText, nullable=False),
    # the first 8 bytes of the digest: they sort as it does, and no more of it is indexed
    Column("digest_prefix", LargeBinary, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("frame_hash", LargeBinary, nullable=False),
)
Index("messages_by_digest", messages.c.digest_prefix)
index_ending_in_key("messages_by_id", messages, "id_key", "unverified")
index_ending_in_key("messages_by_channel_and_id", messages, "id_key", "channel_no", "unverified")
Index(
    "messages_in_log_order",
    messages.c.channel_no,
    messages.c.lamport,
    messages.c.message_id,
    messages.c.digest_prefix,
)
index_ending_in_key("messages_in_arrival_order", messages, "channel_no")

frames = Table(
    "frames",
    metadata,
    Column("seq", Number, primary_key=True, autoincrement=False),
    Column("codec", SmallInteger, nullable=False),
    Column("reference_no", Number),
    Column("data", LargeBinary, nullable=False),
)

# The second copy of every frame that others are compressed against (docs/decisions/0003).
frame_references = Table(
    "frame_references",
    metadata,
    Column("seq", Number, primary_key=True, autoincrement=False),
    Column("channel_no", Integer, nullable=False),
    Column("codec", SmallInteger, nullable=False),
    Column("reference_no", Number),
    Column("data", LargeBinary, nullable=False),
)
index_ending_in_key("frame_references_by_channel", frame_references, "channel_no")

published_claims = Table(
    "published_claims",
    metadata,
    Column("claim_no", Number, primary_key=True, autoincrement=False),
    Column("hint_key", Number, nullable=False),
    Column("seq", Number, nullable=False),
    Column("source", SmallInteger, nullable=False),
    Column("hint", LargeBinary, nullable=False),
    Column("element_prefix", LargeBinary, nullable=False),
    Column("element_id", LargeBinary, nullable=False),
)
Index(
    "published_claims_by_hint",
    published_claims.c.hint_key,
    published_claims.c.source,
    published_claims.c.seq,
)
Index("published_claims_by_seq", published_claims.c.seq)
Index("published_claims_by_element", published_claims.c.element_prefix)

history_claims = Table(
    "history_claims",
    metadata,
    Column("claim_no", Number, primary_key=True, autoincrement=False),
    Column("hint_key", Number, nullable=False),
    Column("id_key", Number, nullable=False),
    Column("channel_no", Integer, nullable=False),
    Column("message_id", ByteText, nullable=False),
    Column("hint", LargeBinary, nullable=False),
)
index_ending_in_key("history_claims_by_hint", history_claims, "hint_key")
index_ending_in_key("history_claims_by_id", history_claims, "id_key", "channel_no")

# IDs that histories name and the store lacks, for as long as it lacks them.
missing_references = Table(
    "missing_references",
    metadata,
    Column("channel_no", Integer, primary_key=True, autoincrement=False),
    Column("message_id", ByteText, primary_key=True),
    sqlite_with_rowid=False,
)

met_ids = Table(
    "met_ids",
    metadata,
    Column("met_no", Number, primary_key=True, autoincrement=False),
    Column("id_key", Number, nullable=False),
    Column("channel_id", ByteText, nullable=False),
    Column("message_id", ByteText, nullable=False),
    Index("met_ids_by_id", "id_key"),
)

refused_digests = Table(
    "refused_digests",
    metadata,
    Column("refused_no", Number, primary_key=True, autoincrement=False),
    Column("digest", LargeBinary, nullable=False),
    Index("refused_digests_by_digest", "digest", unique=True),
)


def upgrade() -> None:
    """Make every table, and the database's ID and secret of its keys."""
    metadata.create_all(op.get_bind(), checkfirst=False)
    op.get_bind().execute(
        insert(store_meta),
        [
            {"name": "database_id", "value": secrets.token_hex(8).encode()},
            {"name": "key_secret", "value": secrets.token_bytes(16)},
        ],
    )
