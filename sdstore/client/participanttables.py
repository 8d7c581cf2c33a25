"""The tables of a `ParticipantFile`, and the statements that run often.

IDs are BLOBs: SQLite compares them byte by byte and stores every character, U+0000 included. The names
begin with `sds_` because an application can have tables of its own in the file.

A random key slows inserts, so there is one index of IDs, of 64-bit keyed hashes; rows found by it are
compared with the ID. Frames have their own table, which scans of the log do not touch.

Staged messages are rows of the log with the number `STAGED`. A participant that takes one changes its
row, so its frame and its ID are written once. Each index in log order has rows of one kind only.
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
    func,
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

STAGED = -1
"""The number of a row of the log that is staged."""

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
    Column("number", Integer, nullable=False),  # of the delivery; 0 for our own; `STAGED`
    Column("gap", String),  # JSON of after_gap, is_late (and true if it supersedes); NULL
)
FRAMES = Table(
    "sds_frames",
    METADATA,
    Column("log_no", Integer, primary_key=True),
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
_IS_LOGGED: ColumnElement[bool] = LOG.c.number >= text("0")  # as text: queries must repeat it so
_IS_STAGED: ColumnElement[bool] = LOG.c.number < text("0")
_IN_ORDER = (LOG.c.channel_no, LOG.c.lamport, LOG.c.message_id)
Index("sds_log_in_order", *_IN_ORDER, sqlite_where=_IS_LOGGED)
Index("sds_staged_in_order", *_IN_ORDER, sqlite_where=_IS_STAGED)
Index("sds_log_by_number", LOG.c.channel_no, LOG.c.number, sqlite_where=LOG.c.number > 0)
Index("sds_filters_by_channel", FILTERS.c.channel_no)

UPGRADES: tuple[Sequence[str], ...] = (
    (  # staged messages had a table of their own, without the sender
        """INSERT INTO sds_frames
        SELECT (SELECT coalesce(max(log_no), 0) FROM sds_log) + staged_no, hash, filter_no, data
        FROM sds_staged""",
        """INSERT INTO sds_log
        SELECT (SELECT coalesce(max(log_no), 0) FROM sds_log) + staged_no, channel_no, id_key, lamport,
            message_id, x'', digest, hint, -1, NULL
        FROM sds_staged""",
        "DROP TABLE sds_staged",
        "DROP INDEX sds_log_in_order",
        "CREATE INDEX sds_log_in_order ON sds_log (channel_no, lamport, message_id) WHERE number >= 0",
        "CREATE INDEX sds_staged_in_order ON sds_log (channel_no, lamport, message_id) WHERE number < 0",
    ),
)
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
_HAS_ID = (LOG.c.id_key == _KEY, LOG.c.channel_no == _CHANNEL, LOG.c.message_id == _ID)
FIND_LOGGED = sql(select(LOG.c.log_no, LOG.c.lamport, LOG.c.digest).where(*_HAS_ID, _IS_LOGGED))
FIND_FRAME = sql(_logged_with(*_FRAME).where(*_HAS_ID, _IS_LOGGED))
FIND_STAGED = sql(select(LOG.c.log_no, LOG.c.lamport, LOG.c.digest).where(*_HAS_ID, _IS_STAGED))
# Many IDs at once: their keys as JSON. The + keeps SQLite from using an index of channels.
OF_KEYS = sql(
    select(LOG.c.message_id, LOG.c.digest, LOG.c.log_no, LOG.c.number).where(
        text("sds_log.id_key IN (SELECT value FROM json_each(?))"),
        literal_column("+sds_log.channel_no") == _CHANNEL,
    )
)
LOGGED_OF_KEYS = sql(
    select(LOG.c.message_id).where(
        text("sds_log.id_key IN (SELECT value FROM json_each(?))"),
        literal_column("+sds_log.channel_no") == _CHANNEL,
        _IS_LOGGED,
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
    _logged_with(LOG.c.log_no, LOG.c.hint, *_FRAME).where(
        LOG.c.log_no.in_(select(DIGESTS.c.log_no).where(DIGESTS.c.start == bindparam("start"))),
        LOG.c.digest == bindparam("digest"),
        literal_column("+sds_log.channel_no") == _CHANNEL,  # + keeps SQLite from using its index
    )
)
NEWEST = sql(
    select(LOG.c.lamport, LOG.c.message_id, LOG.c.hint, LOG.c.sender_id)
    .where(LOG.c.channel_no == _CHANNEL, LOG.c.lamport <= bindparam("last"), _IS_LOGGED)
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
    _logged_with(LOG.c.log_no, LOG.c.lamport, LOG.c.message_id, LOG.c.digest, LOG.c.hint, *_FRAME)
    .where(
        LOG.c.channel_no == _CHANNEL,
        text("(sds_log.lamport, sds_log.message_id) >= (?, ?)"),
        _IS_STAGED,
    )
    .order_by(LOG.c.lamport, LOG.c.message_id)
)


def _elements(kind: ColumnElement[bool]) -> str:
    return sql(
        select(LOG.c.lamport, LOG.c.message_id, LOG.c.digest)
        .where(
            LOG.c.channel_no == _CHANNEL,
            text("(sds_log.lamport, sds_log.message_id) > (?, ?)"),
            kind,
        )
        .order_by(LOG.c.lamport, LOG.c.message_id)
    )


LOGGED_ELEMENTS = _elements(_IS_LOGGED)
STAGED_ELEMENTS = _elements(_IS_STAGED)
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
LOG_STAGED = sql(  # what the participant took
    update(LOG)
    .where(LOG.c.log_no == bindparam("no"))
    .values({name: bindparam(f"new_{name}") for name in ("sender_id", "hint", "number", "gap")})
)
DELETE_LOG = sql(delete(LOG).where(LOG.c.log_no == bindparam("no")))
DELETE_FRAME = sql(delete(FRAMES).where(FRAMES.c.log_no == bindparam("no")))
INSERT_NOTED = sql(insert(NOTED).prefix_with("OR IGNORE"))
PUT_STATE = sql(insert(STATE).prefix_with("OR REPLACE"))
DELETE_STATE = sql(
    delete(STATE).where(STATE.c.channel_no == _CHANNEL, STATE.c.key == bindparam("state_key"))
)
SET_COUNTS = sql(
    update(CHANNELS)
    .where(CHANNELS.c.channel_no == _CHANNEL)
    .values(logged_count=bindparam("logged"), noted_count=bindparam("noted"))
)

# What the log relies on, for `ParticipantFile.check`.
COUNTS = sql(
    select(
        CHANNELS.c.channel_id,
        CHANNELS.c.logged_count,
        CHANNELS.c.noted_count,
        select(func.count())
        .where(LOG.c.channel_no == CHANNELS.c.channel_no, _IS_LOGGED)
        .scalar_subquery(),
        select(func.count()).where(NOTED.c.channel_no == CHANNELS.c.channel_no).scalar_subquery(),
    )
)
ALONE_LOG = sql(
    select(func.count()).select_from(LOG).where(LOG.c.log_no.not_in(select(FRAMES.c.log_no)))
)
ALONE_FRAMES = sql(
    select(func.count()).select_from(FRAMES).where(FRAMES.c.log_no.not_in(select(LOG.c.log_no)))
)
