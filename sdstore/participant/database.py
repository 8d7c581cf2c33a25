"""The SQLite file under a `ParticipantFile`: its tables and statements; opening, locking, transactions, faults.

IDs are BLOBs: SQLite compares them byte by byte and stores every character, U+0000 included. The names
begin with `sds_` because an application can have tables of its own in the file.

A random key slows inserts, so there is one index of IDs, of 64-bit keyed hashes; rows found by it are
compared with the ID. Frames have their own table, which scans of the log do not touch.

Staged messages are rows of the log with the number `STAGED`. A participant that takes one changes its
row, so its frame and its ID are written once. Each index in log order has rows of one kind only.
"""

from __future__ import annotations

import os
import sqlite3
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

from sqlalchemy import (
    BigInteger,
    BindParameter,
    Column,
    ColumnElement,
    Connection,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    bindparam,
    create_engine,
    delete,
    func,
    insert,
    literal_column,
    select,
    text,
    update,
)
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import StaticPool
from sqlalchemy.schema import CreateTable
from sqlalchemy.sql import ClauseElement

from sdstore.errors import SdstoreError
from sdstore.participant.filterdelta import unpack
from sdstore.sds.codec import decode
from sdstore.sds.digest import frame_hash
from sdstore.sds.model import Message, MessageError

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


# --- the file ------------------------------------------------------------------------------------

FILTERS_CACHED_MAX = 32
"""Reference filters kept for reading, 0.6 MB of js-waku's."""

BUSY_TIMEOUT_MS = 5_000
"""Other connections, such as a backup, can hold the file for a moment."""

CACHE_KIB = 32 * 1024
"""Holds the index of IDs of a million messages, which a new message touches at a random place."""

WAL_PAGES = 8_192
"""32 MiB of write-ahead log before a checkpoint, which writes each changed page once."""

_FULL = {sqlite3.SQLITE_FULL}
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_READ_ONLY = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM}
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_BROKEN = {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PROTOCOL}


class ParticipantFileError(SdstoreError):
    """The file cannot be used, or not in this way.

    `code` is stable and meant for programs, `detail` for people:

    - `in_use`: another process, or another `ParticipantFile`, has the file open
    - `too_new`: a later version of sdstore wrote the file
    - `damaged`: the file is damaged, or is not a SQLite database
    - `read_only`, `disk_full`, `busy`: nothing was written; the next save writes it. `busy`: another
      connection holds the file, or a transaction of this one is open
    - `unavailable`: the file cannot be opened, read or written
    - `file_gone`: the file was deleted or replaced while it was open
    - `unsaved_full`: too much was appended without a save
    - `closed`: the file was closed
    - `misuse`: the call is not allowed now
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class ParticipantDatabase:
    """One open file. `hasher` is the keyed hash of IDs, `next_log_no` the next row of the log.

    After a fault that leaves the file's content unknown, every use raises that fault again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.next_log_no = 1
        self._fault: ParticipantFileError | None = None
        self._filters: OrderedDict[int, bytes] = OrderedDict()
        self._is_writing = False
        self._is_open = False
        self._digests_through = 0  # log numbers of the index of digests
        self._lock = _lock(path)
        try:
            with self.faults():
                self._open()
            self._is_open = True
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        # An absolute path is a file even if it ends with ":memory:".
        # SQLAlchemy's connection is this one too, in a thread that need not be this one.
        self.raw = sqlite3.connect(
            self.path.absolute(), isolation_level=None, check_same_thread=False
        )
        self.raw.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        self.raw.execute("PRAGMA journal_mode = WAL")
        self.raw.execute("PRAGMA synchronous = FULL")
        self.raw.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        self.raw.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
        self._engine = create_engine("sqlite://", creator=lambda: self.raw, poolclass=StaticPool)
        self._inode = _inode(self.path)
        with self.transaction() as connection:
            self._prepare(connection)
            secret = connection.scalar(select(META.c.value).where(META.c.name == "secret"))
            self.next_log_no = (connection.scalar(select(func.max(LOG.c.log_no))) or 0) + 1
        self.hasher = blake2b(digest_size=8, key=secret or b"")

    def _prepare(self, connection: Connection) -> None:
        """Bring the schema to this version."""
        found = connection.scalars(text("SELECT name FROM sqlite_schema WHERE type = 'table'"))
        names = set(found)
        latest = 1 + len(UPGRADES)
        version = 0
        if META.name in names:
            value = connection.scalar(select(META.c.value).where(META.c.name == "version"))
            version = int.from_bytes(value or b"", "big")
            if version > latest:
                raise ParticipantFileError(
                    "too_new",
                    f"{self.path} has schema version {version}, this version of sdstore reads up to "
                    f"{latest}; install a later one",
                )
            if not version or (version == latest and not names >= METADATA.tables.keys()):
                raise ParticipantFileError("damaged", f"{self.path} lacks some of its tables")
        if not version:
            METADATA.create_all(connection)
            connection.execute(insert(META).values(name="version", value=bytes([latest])))
            connection.execute(insert(META).values(name="secret", value=os.urandom(16)))
        elif version < latest:
            for statements in UPGRADES[version - 1 :]:
                for statement in statements:
                    connection.exec_driver_sql(statement)
            connection.execute(
                update(META).where(META.c.name == "version").values(value=bytes([latest]))
            )

    def close(self) -> None:
        """Close the file."""
        self._fault = self._fault or ParticipantFileError("closed", f"{self.path} is closed")
        if hasattr(self, "_engine"):
            self._engine.dispose()
        if hasattr(self, "raw"):
            self.raw.close()
        self._lock.close()

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A transaction through SQLAlchemy."""
        with self.faults(), self._engine.connect() as connection, self.writing() as raw:
            yield connection
            if not raw.in_transaction:
                raise ParticipantFileError(
                    "misuse", "the transaction was ended inside of its block"
                )

    def row(self, statement: str, values: Sequence[Any]) -> Any:
        """The first row, or None."""
        try:
            return self.raw.execute(statement, values).fetchone()
        except sqlite3.Error as error:
            self._refuse(error)
            raise

    def rows(self, statement: str, values: Sequence[Any], count: int = -1) -> list[Any]:
        """The first `count` rows, or all."""
        try:
            cursor = self.raw.execute(statement, values)
            return cursor.fetchall() if count < 0 else cursor.fetchmany(count)
        except sqlite3.Error as error:
            self._refuse(error)
            raise

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction, on the disk at the end of the block."""
        self.check()
        raw = self.raw
        if self._is_writing:
            raise ParticipantFileError("busy", "a transaction of this file is open; end it first")
        if _inode(self.path) != self._inode:
            # SQLite goes on writing to a file that was deleted, and its content ends with the process.
            self._fault = ParticipantFileError(
                "file_gone", f"{self.path} was deleted or replaced while it was open"
            )
            raise self._fault
        self._is_writing = True
        try:
            if raw.in_transaction:
                raw.execute("COMMIT")  # of `begin_reading`
            raw.execute("BEGIN IMMEDIATE")
            yield raw
            raw.execute("COMMIT")
        except BaseException as error:
            if raw.in_transaction:
                with suppress(sqlite3.Error):
                    raw.execute("ROLLBACK")
            self._refuse(error)
            raise
        finally:
            self._is_writing = False

    def begin_reading(self) -> None:
        """Keep one transaction for all reads until the next write: the locks of each are half its cost.

        Meanwhile SQLite cannot shorten the write-ahead log, so a write must follow soon.
        """
        self.check()
        if not self.raw.in_transaction:
            with self.faults():
                self.raw.execute("BEGIN")

    def check(self) -> None:
        """Raises the error for which the file refuses further use."""
        if self._fault is not None:
            raise self._fault

    def give_up(self, code: str, detail: str) -> ParticipantFileError:
        """Refuse further use; the error to raise."""
        advice = "; open the file anew and restore its participants" if self._is_open else ""
        self._fault = self._fault or ParticipantFileError(code, detail + advice)
        return self._fault

    def filter(self, filter_no: int) -> bytes:
        """A stored reference filter."""
        found = self._filters.get(filter_no)
        if found is None:
            row = self.row(FILTER_OF_NUMBER, (filter_no,))
            if row is None:
                raise ParticipantFileError("damaged", f"{self.path} lacks filter {filter_no}")
            found = self._filters[filter_no] = row[0]
            if len(self._filters) > FILTERS_CACHED_MAX:
                self._filters.popitem(last=False)
        return found

    def index_digests(self) -> None:
        """Bring the index of digests up to date, which lasts as long as the file is open."""
        if self._digests_through + 1 < self.next_log_no:
            with self.writing() as raw:
                if not self._digests_through:
                    raw.execute(MAKE_DIGESTS)
                raw.execute(ADD_DIGESTS, (self._digests_through,))
            self._digests_through = self.next_log_no - 1

    def frame(self, frame_hash_start: bytes, filter_no: int | None, data: bytes) -> bytes:
        """The frame of a row, checked."""
        try:
            frame = data if filter_no is None else unpack(data, self.filter(filter_no))
        except ValueError:
            frame = b""
        if frame_hash(frame)[:HASH_BYTES] != frame_hash_start:
            raise ParticipantFileError(
                "damaged", f"{self.path} has a frame that does not match its hash"
            )
        return frame

    def message(self, frame: bytes) -> Message:
        """The message of a checked frame."""
        try:
            return decode(frame)[0]
        except MessageError as error:
            raise ParticipantFileError(
                "damaged", f"{self.path} has a frame that is not a message: {error}"
            ) from error

    @contextmanager
    def faults(self) -> Iterator[None]:
        """Raise the `ParticipantFileError` for SQLite's errors in the block."""
        try:
            yield
        except (sqlite3.Error, DBAPIError) as error:
            self._refuse(error)
            raise

    def _refuse(self, error: BaseException) -> None:
        """Raise the `ParticipantFileError` for an error of SQLite; return for others."""
        cause = error.orig if isinstance(error, DBAPIError) else error
        if not isinstance(cause, sqlite3.Error):
            return
        self.check()
        code = getattr(cause, "sqlite_errorcode", 0) & 0xFF
        if code in _DAMAGED:
            raise self.give_up(
                "damaged", f"{self.path} is damaged, or is not a SQLite database ({cause})"
            ) from error
        if code in _FULL:
            raise ParticipantFileError(
                "disk_full", f"{self.path} could not be written ({cause}); make room and save again"
            ) from error
        if code in _READ_ONLY:
            raise ParticipantFileError(
                "read_only", f"{self.path} cannot be written ({cause})"
            ) from error
        if code in _BUSY:
            raise ParticipantFileError(
                "busy", f"another connection kept {self.path} for {BUSY_TIMEOUT_MS} ms; save again"
            ) from error
        if code in _BROKEN:
            raise self.give_up("unavailable", f"{self.path} could not be used ({cause})") from error


def _inode(path: Path) -> tuple[int, int] | None:
    """Device and inode of a file; None without one."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _lock(path: Path) -> sqlite3.Connection:
    """Lock a second SQLite file until the connection is closed: works wherever SQLite does."""
    lock = None
    try:
        lock = sqlite3.connect(
            f"{path}-lock", timeout=0, isolation_level=None, check_same_thread=False
        )
        lock.execute("PRAGMA locking_mode = EXCLUSIVE")
        lock.execute("BEGIN EXCLUSIVE")
    except sqlite3.Error as error:
        if lock is not None:
            lock.close()
        if error.sqlite_errorcode == sqlite3.SQLITE_BUSY:
            raise ParticipantFileError(
                "in_use", f"another process has {path} open; stop it first"
            ) from error
        if error.sqlite_errorcode & 0xFF in _FULL:
            raise ParticipantFileError(
                "disk_full", f"{path}-lock could not be written ({error}); make room"
            ) from error
        raise ParticipantFileError(
            "unavailable",
            f"{path}-lock cannot be locked ({error}): does its folder exist, and can you write there?",
        ) from error
    return lock
