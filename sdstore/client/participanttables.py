"""The tables of a `ParticipantFile`, and the statements that run often.

IDs are BLOBs: SQLite compares them byte by byte and stores every character, U+0000 included. The names
begin with `sds_` because an application can have tables of its own in the file.

A random key slows inserts, so there is one index of IDs, of 64-bit keyed hashes; rows found by it are
compared with the ID. Frames have their own table, which scans of the log do not touch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    BindParameter,
    Column,
    ColumnElement,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    bindparam,
    delete,
    insert,
    literal_column,
    select,
    text,
    update,
)
from sqlalchemy.dialects import sqlite
from sqlalchemy.schema import CreateTable
from sqlalchemy.sql import ClauseElement

METADATA = MetaData()

META = Table(
    "sds_meta",
    METADATA,
    Column("name", String, primary_key=True),
    Column("value", LargeBinary, nullable=False),
)
CHANNELS = Table(
    "sds_channels",
    METADATA,
    Column("channel_no", Integer, primary_key=True),
    Column("channel_id", LargeBinary, nullable=False, unique=True),
    Column("logged_count", Integer, nullable=False),
    Column("noted_count", Integer, nullable=False),
    Column("confirmed", Integer, nullable=False),  # by `ParticipantFile.confirm`
)
STATE = Table(
    "sds_state",
    METADATA,
    Column("channel_no", Integer, primary_key=True),
    Column("key", LargeBinary, primary_key=True),
    Column("value", LargeBinary, nullable=False),
)
LOG = Table(
    "sds_log",
    METADATA,
    Column("log_no", Integer, primary_key=True),
    Column("channel_no", Integer, nullable=False),
    Column("id_key", BigInteger, nullable=False),  # keyed hash of channel and message ID
    Column("lamport", BigInteger, nullable=False),
    Column("message_id", LargeBinary, nullable=False),
    Column("sender_id", LargeBinary, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("hint", LargeBinary, nullable=False),
    Column("number", Integer, nullable=False),
    Column("gap", String),  # JSON of after_gap and is_late; NULL without them
)
FRAMES = Table(
    "sds_frames",
    METADATA,
    Column("log_no", Integer, primary_key=True),
    Column("hash", LargeBinary, nullable=False),
    Column("filter_no", Integer),
    Column("data", LargeBinary, nullable=False),
)
STAGED = Table(
    "sds_staged",
    METADATA,
    Column("staged_no", Integer, primary_key=True),
    Column("channel_no", Integer, nullable=False),
    Column("id_key", BigInteger, nullable=False),
    Column("lamport", BigInteger, nullable=False),
    Column("message_id", LargeBinary, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("hint", LargeBinary, nullable=False),
    Column("hash", LargeBinary, nullable=False),
    Column("filter_no", Integer),
    Column("data", LargeBinary, nullable=False),
)
FILTERS = Table(
    "sds_filters",
    METADATA,
    Column("filter_no", Integer, primary_key=True),
    Column("channel_no", Integer, nullable=False),
    Column("filter", LargeBinary, nullable=False),
)
NOTED = Table(
    "sds_noted",
    METADATA,
    Column("channel_no", Integer, primary_key=True),
    Column("element_id", LargeBinary, primary_key=True),
    Column("lamport", BigInteger, primary_key=True),
    sqlite_with_rowid=False,
)

Index("sds_log_by_id", LOG.c.id_key, LOG.c.channel_no)
Index("sds_log_in_order", LOG.c.channel_no, LOG.c.lamport, LOG.c.message_id)
Index("sds_log_by_number", LOG.c.channel_no, LOG.c.number, sqlite_where=LOG.c.number > 0)
Index("sds_staged_by_id", STAGED.c.id_key, STAGED.c.channel_no)
Index("sds_staged_in_order", STAGED.c.channel_no, STAGED.c.lamport, STAGED.c.message_id)
Index("sds_filters_by_channel", FILTERS.c.channel_no)

UPGRADES: tuple[Sequence[str], ...] = ()
"""Statements that bring version 1 to 2, 2 to 3 and so on. A new file gets the latest schema."""

HASH_BYTES = 8  # of a frame's hash: detects damage, identifies nothing


def id_bytes(value: str) -> bytes:
    """A string as its column holds it."""
    # Strings of a program can hold lone surrogates, which UTF-8 has no bytes for.
    return value.encode("utf-8", "surrogatepass")


def id_text(value: bytes) -> str:
    """The string of a column."""
    return value.decode("utf-8", "surrogatepass")


# --- statements --------------------------------------------------------------------------------
# SQLAlchemy writes them once; sqlite3 runs them, at a tenth of the cost of a `Connection.execute`.
# Values are positional, in the order of the WHERE clause. Rows are limited by `fetchmany`.

DIALECT = sqlite.dialect(paramstyle="qmark")


def sql(statement: ClauseElement) -> str:
    """The text of a statement for `sqlite3`."""
    return str(statement.compile(dialect=DIALECT))


def _logged_with(*columns: Any) -> Any:
    return select(*columns).join_from(LOG, FRAMES, FRAMES.c.log_no == LOG.c.log_no)


_CHANNEL: BindParameter[int] = bindparam("channel")
_KEY: BindParameter[int] = bindparam("key")
_ID: BindParameter[bytes] = bindparam("id")
_FRAME = (FRAMES.c.hash, FRAMES.c.filter_no, FRAMES.c.data)
_STAGED_FRAME = (STAGED.c.hash, STAGED.c.filter_no, STAGED.c.data)
_IS_LOGGED_ID = (LOG.c.id_key == _KEY, LOG.c.channel_no == _CHANNEL, LOG.c.message_id == _ID)
_IS_STAGED_ID = (
    STAGED.c.id_key == _KEY,
    STAGED.c.channel_no == _CHANNEL,
    STAGED.c.message_id == _ID,
)
FIND_LOGGED = sql(select(LOG.c.digest).where(*_IS_LOGGED_ID))
FIND_FRAME = sql(_logged_with(*_FRAME).where(*_IS_LOGGED_ID))
FIND_STAGED = sql(
    select(STAGED.c.staged_no, STAGED.c.lamport, STAGED.c.digest).where(*_IS_STAGED_ID)
)
# Many IDs at once: their keys as JSON. The + keeps SQLite from using an index of channels.
LOGGED_OF_KEYS = sql(
    select(LOG.c.message_id, LOG.c.digest).where(
        text("sds_log.id_key IN (SELECT value FROM json_each(?))"),
        literal_column("+sds_log.channel_no") == _CHANNEL,
    )
)
STAGED_OF_KEYS = sql(
    select(STAGED.c.message_id, STAGED.c.digest, STAGED.c.staged_no).where(
        text("sds_staged.id_key IN (SELECT value FROM json_each(?))"),
        literal_column("+sds_staged.channel_no") == _CHANNEL,
    )
)
FIND_NOTED = sql(
    select(NOTED.c.lamport).where(
        NOTED.c.channel_no == _CHANNEL,
        NOTED.c.element_id == bindparam("element"),
        NOTED.c.lamport == bindparam("at"),
    )
)
# An index of digests in the file would slow every append by a third, and only a backfill that offers
# messages to a store needs it: it is made then, outside of the file.
DIGESTS = Table(
    "sds_digests",
    MetaData(),
    Column("start", LargeBinary, primary_key=True),  # of the digest
    Column("log_no", Integer, primary_key=True),
    prefixes=["TEMP"],
    sqlite_with_rowid=False,
)
_DIGEST_START: ColumnElement[bytes] = literal_column("substr(sds_log.digest, 1, 8)")
MAKE_DIGESTS = str(CreateTable(DIGESTS).compile(dialect=DIALECT))
ADD_DIGESTS = sql(
    insert(DIGESTS).from_select(
        ["start", "log_no"],
        select(_DIGEST_START, LOG.c.log_no)
        .where(LOG.c.log_no > bindparam("after"))
        .order_by(_DIGEST_START),
    )
)
FRAME_OF_DIGEST = sql(
    _logged_with(LOG.c.hint, *_FRAME).where(
        LOG.c.log_no.in_(select(DIGESTS.c.log_no).where(DIGESTS.c.start == bindparam("start"))),
        LOG.c.digest == bindparam("digest"),
        literal_column("+sds_log.channel_no") == _CHANNEL,  # + keeps SQLite from using its index
    )
)
FRAME_OF_STAGED_DIGEST = sql(
    select(STAGED.c.message_id, STAGED.c.hint, *_STAGED_FRAME).where(
        STAGED.c.channel_no == _CHANNEL, STAGED.c.digest == bindparam("digest")
    )
)
NEWEST = sql(
    select(LOG.c.lamport, LOG.c.message_id, LOG.c.hint, LOG.c.sender_id)
    .where(LOG.c.channel_no == _CHANNEL, LOG.c.lamport <= bindparam("last"))
    .order_by(LOG.c.lamport.desc(), LOG.c.message_id.desc())
)
DELIVERIES = sql(
    _logged_with(LOG.c.number, LOG.c.hint, LOG.c.gap, *_FRAME)
    .where(
        LOG.c.channel_no == _CHANNEL,
        LOG.c.number > text("0"),  # as in the index
        LOG.c.number > bindparam("after"),
    )
    .order_by(LOG.c.number)
)
STAGED_IN_ORDER = sql(
    select(
        STAGED.c.staged_no,
        STAGED.c.lamport,
        STAGED.c.message_id,
        STAGED.c.digest,
        STAGED.c.hint,
        *_STAGED_FRAME,
    )
    .where(
        STAGED.c.channel_no == _CHANNEL,
        text("(sds_staged.lamport, sds_staged.message_id) >= (?, ?)"),
    )
    .order_by(STAGED.c.lamport, STAGED.c.message_id)
)
LOGGED_ELEMENTS = sql(
    select(LOG.c.lamport, LOG.c.message_id, LOG.c.digest)
    .where(
        LOG.c.channel_no == _CHANNEL,
        text("(sds_log.lamport, sds_log.message_id) > (?, ?)"),
    )
    .order_by(LOG.c.lamport, LOG.c.message_id)
)
STAGED_ELEMENTS = sql(
    select(STAGED.c.lamport, STAGED.c.message_id, STAGED.c.digest)
    .where(
        STAGED.c.channel_no == _CHANNEL,
        text("(sds_staged.lamport, sds_staged.message_id) > (?, ?)"),
    )
    .order_by(STAGED.c.lamport, STAGED.c.message_id)
)
NOTED_ELEMENTS = sql(
    select(NOTED.c.lamport, NOTED.c.element_id)
    .where(
        NOTED.c.channel_no == _CHANNEL,
        text("(sds_noted.element_id, sds_noted.lamport) > (?, ?)"),
    )
    .order_by(NOTED.c.element_id, NOTED.c.lamport)
)
FILTER_OF_NUMBER = sql(select(FILTERS.c.filter).where(FILTERS.c.filter_no == bindparam("no")))
NEWEST_FILTERS = sql(
    select(FILTERS.c.filter_no, FILTERS.c.filter)
    .where(FILTERS.c.channel_no == _CHANNEL)
    .order_by(FILTERS.c.filter_no.desc())
)
INSERT_LOG = sql(insert(LOG))
INSERT_FRAME = sql(insert(FRAMES))
INSERT_FILTER = sql(insert(FILTERS).values(channel_no=_CHANNEL, filter=bindparam("filter")))
INSERT_STAGED = sql(insert(STAGED).values({c.name: bindparam(c.name) for c in list(STAGED.c)[1:]}))
INSERT_NOTED = sql(insert(NOTED).prefix_with("OR IGNORE"))
PUT_STATE = sql(insert(STATE).prefix_with("OR REPLACE"))
DELETE_STATE = sql(
    delete(STATE).where(STATE.c.channel_no == _CHANNEL, STATE.c.key == bindparam("state_key"))
)
DELETE_STAGED = sql(delete(STAGED).where(STAGED.c.staged_no == bindparam("no")))
SET_COUNTS = sql(
    update(CHANNELS)
    .where(CHANNELS.c.channel_no == _CHANNEL)
    .values(logged_count=bindparam("logged"), noted_count=bindparam("noted"))
)
