"""The tables, once for SQLite and PostgreSQL (docs/store.md explains the keys), and their migrations.

Every random-key index costs ingest speed and disk, so indexes hold 64-bit keys (`app.store.entryrows`) or
the first 8 bytes of a digest instead of long values, and queries compare the full value as well.
Text compares by its UTF-8 bytes on both databases.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    create_engine,
    event,
    inspect,
    text,
)

from app.store.database import SchemaTooNewError

SCHEMA_REVISION = "0010"
"""The Alembic revision this code reads and writes."""

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

# One row: the last numbers of entries and claims, whether or not their rows still exist.
watermark = Table(
    "watermark",
    metadata,
    Column("row_no", SmallInteger, primary_key=True, autoincrement=False),
    Column("seq", Number, nullable=False),
    Column("claim_no", Number, nullable=False),
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
    # The running sum of the arrival chain up to this row (`app.store.arrivals`).
    Column("arrival_sum", Number, nullable=False, server_default=text("0")),
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

# Filters that others are stored as differences from (docs/decisions/0003). The number is that of the
# entry whose filter it was first; `last_seq` is the last entry whose frame needs it.
filter_references = Table(
    "filter_references",
    metadata,
    Column("reference_no", Number, primary_key=True, autoincrement=False),
    Column("channel_no", Integer, nullable=False),
    Column("last_seq", Number, nullable=False),
    Column("data", LargeBinary, nullable=False),
)
index_ending_in_key("filter_references_by_channel", filter_references, "channel_no")

# Messages whose frames were read twice and were wrong each time (docs/decisions/0010). Empty on a
# healthy store.
lost_content = Table(
    "lost_content",
    metadata,
    Column("seq", Number, primary_key=True, autoincrement=False),
    Column("found_at_ms", Number, nullable=False),
)

# Entries whose content was dropped on purpose (docs/decisions/0035). `seq` is None before the entry has
# arrived: it is stored without its content then.
retired_content = Table(
    "retired_content",
    metadata,
    Column("digest", LargeBinary, primary_key=True),
    Column("seq", Number),
    Column("retired_at_ms", Number, nullable=False),
    Column("reason", ByteText, nullable=False),
    sqlite_with_rowid=False,
)

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
    Column("arrival_sum", Number, nullable=False, server_default=text("0")),
    # that of the entry
    Column("channel_no", Integer, nullable=False, server_default=text("0")),
)
Index(
    "published_claims_by_hint",
    published_claims.c.hint_key,
    published_claims.c.source,
    published_claims.c.seq,
)
# A channel's claims are found however many others make on the same hint.
Index(
    "published_claims_by_hint_and_channel",
    published_claims.c.hint_key,
    published_claims.c.channel_no,
    published_claims.c.source,
    published_claims.c.seq,
)
Index("published_claims_by_seq", published_claims.c.seq)
Index("published_claims_by_element", published_claims.c.element_prefix)
index_ending_in_key("published_claims_in_arrival_order", published_claims, "channel_no")

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
index_ending_in_key("history_claims_by_hint", history_claims, "hint_key", "channel_no")
index_ending_in_key("history_claims_by_id", history_claims, "id_key", "channel_no")

# IDs that histories name and the store lacks, for as long as it lacks them; also those that were met
# as IDs of sync messages.
missing_references = Table(
    "missing_references",
    metadata,
    Column("channel_no", Integer, primary_key=True, autoincrement=False),
    Column("message_id", ByteText, primary_key=True),
    # 0 if a history names it; else only sync messages do, and this is their order
    Column("named_no", Number, nullable=False, server_default=text("0")),
    sqlite_with_rowid=False,
)
Index(
    "missing_references_by_sync",
    missing_references.c.channel_no,
    missing_references.c.named_no,
    sqlite_where=missing_references.c.named_no > 0,
    postgresql_where=missing_references.c.named_no > 0,
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

# MVDS (`app.store.peerrows`): the peers, their places in arrival order, and what is on its way to them.
mvds_peers = Table(
    "mvds_peers",
    metadata,
    Column("peer_no", Number, primary_key=True, autoincrement=False),
    Column("epoch", Number, nullable=False),
    # Grows with every exchange of any peer: the lowest number belongs to the peer silent for longest.
    Column("exchange_no", Number, nullable=False),
    Column("caller", ByteText, nullable=False),
    Column("peer_id", ByteText, nullable=False),
    Index("mvds_peers_by_name", "caller", "peer_id", unique=True),
)

mvds_positions = Table(
    "mvds_positions",
    metadata,
    Column("peer_no", Number, primary_key=True, autoincrement=False),
    Column("channel_no", Integer, primary_key=True, autoincrement=False),
    Column("seq", Number, nullable=False),
    sqlite_with_rowid=False,
)

# `channel_no` and `seq` name the entry of an OFFER or a MESSAGE; both are 0 for a REQUEST.
mvds_records = Table(
    "mvds_records",
    metadata,
    Column("peer_no", Number, primary_key=True, autoincrement=False),
    Column("message_id", LargeBinary, primary_key=True),
    Column("type", SmallInteger, nullable=False),
    Column("send_count", Number, nullable=False),
    Column("send_epoch", Number, nullable=False),
    Column("channel_no", Integer, nullable=False),
    Column("seq", Number, nullable=False),
    sqlite_with_rowid=False,
)

# Peers of this node, and which process syncs with each (`app.store.peerrows`).
peers = Table(
    "peers",
    metadata,
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
    # The lease. PostgreSQL: it ends at `expires_ms` by the clock of the database.
    Column("holder", ByteText, nullable=False),
    Column("fence", Number, nullable=False),
    Column("expires_ms", Number, nullable=False),
    Index("peers_by_id", "peer_id", unique=True),
)

# Session records (`app.store.peerrows`). `process` is empty until a process takes a requested one up.
syncs = Table(
    "syncs",
    metadata,
    Column("sync_no", Number, primary_key=True, autoincrement=False),
    Column("sync_id", ByteText, nullable=False),
    Column("peer_id", ByteText, nullable=False),
    Column("process", ByteText, nullable=False),
    Column("finished_at_ms", Number),
    Column("seen_ms", Number, nullable=False),
    Column("document", LargeBinary, nullable=False),
    Index("syncs_by_id", "sync_id", unique=True),
)


# ---- migrations
#
# The revision is read before Alembic is imported, so opening an up-to-date store costs no import.

MIGRATION_LOCK = 0x5D5_0002
"""The advisory lock of nodes that migrate one PostgreSQL database."""


def migrate(url: str) -> None:
    """Upgrade; a migration that was killed leaves no trace, or goes on where it was.

    Raises `SchemaTooNewError` for a revision this code does not know.
    """
    engine = _engine(url)
    try:
        with engine.begin() as connection:
            if revision_of(connection) != SCHEMA_REVISION:
                _upgrade(connection)
    finally:
        engine.dispose()


def revision_of(connection: Connection) -> str | None:
    """The revision a database is at; None for an empty one."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    return None if found is None else str(found)


def is_current(revision: str | None) -> bool:
    """Whether a database needs no migration."""
    return revision == SCHEMA_REVISION


def migrations_folder() -> Path:
    """`migrations/` inside the installed package, or at the top of the checkout."""
    installed = Path(__file__).parent / "migrations"
    # Looks for the file: an older checkout can still have the folder, empty.
    return (
        installed if (installed / "env.py").is_file() else Path(__file__).parents[2] / "migrations"
    )


def _upgrade(connection: Connection) -> None:
    from alembic import command  # noqa: PLC0415 - see above
    from alembic.config import Config  # noqa: PLC0415
    from alembic.util import CommandError  # noqa: PLC0415

    config = Config()
    config.set_main_option("script_location", str(migrations_folder()))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise SchemaTooNewError(
            f"the database is at revision {revision_of(connection)}, which this version of sdstore "
            f"(revision {SCHEMA_REVISION}) does not know: use the newer sdstore that wrote it"
        ) from error


def _engine(url: str) -> Engine:
    if url.startswith("postgresql:"):
        import psycopg  # noqa: PLC0415 - an extra

        # The URL is libpq's: several hosts, sockets and all its parameters mean what they say there.
        engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(url))
        event.listen(engine, "begin", _alone_on_postgres)
        return engine
    engine = create_engine(url)
    # sqlite3 would commit before each CREATE TABLE; one explicit transaction holds them all.
    event.listen(engine, "connect", _leave_transactions_to_us)
    event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    return engine


def _alone_on_postgres(connection: Connection) -> None:
    # Nodes that share a database and start together migrate it one after the other. The lock lasts as long
    # as the connection, because a migration can take several transactions.
    connection.exec_driver_sql(f"SELECT pg_advisory_lock({MIGRATION_LOCK})")


def _leave_transactions_to_us(connection: Any, _record: Any) -> None:
    connection.isolation_level = None
    # Holds for a new file alone: its free pages can be given back later without a copy of the file.
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
