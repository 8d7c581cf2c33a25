"""`ParticipantFile`: the participants of a program, their logs and their state in one SQLite file.

    with ParticipantFile("chat.db") as file:
        participant = file.participant("general", "ada")
        effects = participant.receive(frame, now_ms)
        file.save("general", effects)  # before the other effects are carried out

Every channel has a log and a state. `save` writes the changes of both in one transaction that is on
the disk when it returns; a program that is killed finds all of a save or nothing of it. An application
can have tables of its own in the file and confirm deliveries in the same transaction (`transaction`),
so that each message takes effect exactly once.

Methods block, for some milliseconds when they write. A file belongs to one process, and to one thread
at a time. IDs are compared as UTF-8 bytes; U+0000 and all other characters are allowed in them.

A save that fails writes nothing, and what it should have written is kept for the next save: the
effects after the `Save` must wait until a save succeeds. If the kept rows reach `UNSAVED_BYTES_MAX`, or
the disk reports a fault other than being full, the file refuses every further use. Open it anew and
restore the participants then: they continue from the last save.
"""

from __future__ import annotations

import json
import os
import sqlite3
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

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

from sdstore.client.driver import DRIVER_KEYS
from sdstore.client.filterdelta import FILTER_BYTES_MIN, REFERENCES_MAX, FilterPacker, unpack
from sdstore.sds.codec import decode
from sdstore.sds.digest import entry_digest, frame_hash
from sdstore.sds.effects import Effect, Save
from sdstore.sds.log import ELEMENTS_PER_PIECE_MAX, LogEntry, Noted, Reference, Staged
from sdstore.sds.model import LAMPORT_MAX, HistoryEntry, Message, MessageError
from sdstore.sds.options import ParticipantOptions
from sdstore.sds.participant import Participant
from sdstore.sds.state import PROGRESS, seal, unseal
from sdstore.wire.participant_pb2 import Progress

UNSAVED_BYTES_MAX = 64 * 1024 * 1024
"""Frames and state appended since the last save: some hundred times what a backfill combines."""

RECENT_IDS_MAX = 16_384
"""Logged IDs of a channel kept in memory, 2 MB: causes are nearly always recent messages."""

TAIL_MAX = 128
"""The newest messages of a channel kept in memory: causal histories name at most ten."""

FILTERS_CACHED_MAX = 32
"""Reference filters kept for reading, 0.6 MB of js-waku's."""

STAGED_PER_READ = 256
"""Staged rows read at a time: a participant takes some hundred per turn."""

IDS_PER_READ = 1_024
"""IDs looked up at once, some 20 kB of keys: a backfill asks about that many at a time."""

BUSY_TIMEOUT_MS = 5_000
"""Other connections, such as a backup, can hold the file for a moment."""

CACHE_KIB = 32 * 1024
"""Holds the index of IDs of a million messages, which a new message touches at a random place."""

WAL_PAGES = 8_192
"""32 MiB of write-ahead log before a checkpoint, which writes each changed page once."""

_FULL = {sqlite3.SQLITE_FULL}
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_READ_ONLY = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM}


class ParticipantFileError(Exception):
    """The file cannot be used, or not in this way.

    `code` is stable and meant for programs, `detail` for people:

    - `in_use`: another process, or another `ParticipantFile`, has the file open
    - `too_new`: a later version of sdstore wrote the file
    - `damaged`: the file is damaged, or is not a SQLite database
    - `read_only`, `disk_full`, `busy`: nothing was written; the next save writes it
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


# --- schema ------------------------------------------------------------------------------------
# IDs are BLOBs: SQLite compares them byte by byte and stores every character, U+0000 included.
# The names begin with sds_ because an application can have its own tables in the file.

_metadata = MetaData()

_meta = Table(
    "sds_meta",
    _metadata,
    Column("name", String, primary_key=True),
    Column("value", LargeBinary, nullable=False),
)
_channels = Table(
    "sds_channels",
    _metadata,
    Column("channel_no", Integer, primary_key=True),
    Column("channel_id", LargeBinary, nullable=False, unique=True),
    Column("logged_count", Integer, nullable=False),
    Column("noted_count", Integer, nullable=False),
    Column("confirmed", Integer, nullable=False),  # by `ParticipantFile.confirm`
)
_state = Table(
    "sds_state",
    _metadata,
    Column("channel_no", Integer, primary_key=True),
    Column("key", LargeBinary, primary_key=True),
    Column("value", LargeBinary, nullable=False),
)
_log = Table(
    "sds_log",
    _metadata,
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
_frames = Table(
    "sds_frames",
    _metadata,
    Column("log_no", Integer, primary_key=True),
    Column("hash", LargeBinary, nullable=False),
    Column("filter_no", Integer),
    Column("data", LargeBinary, nullable=False),
)
_staged = Table(
    "sds_staged",
    _metadata,
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
_filters = Table(
    "sds_filters",
    _metadata,
    Column("filter_no", Integer, primary_key=True),
    Column("channel_no", Integer, nullable=False),
    Column("filter", LargeBinary, nullable=False),
)
_noted = Table(
    "sds_noted",
    _metadata,
    Column("channel_no", Integer, primary_key=True),
    Column("element_id", LargeBinary, primary_key=True),
    Column("lamport", BigInteger, primary_key=True),
    sqlite_with_rowid=False,
)

Index("sds_log_by_id", _log.c.id_key, _log.c.channel_no)
Index("sds_log_in_order", _log.c.channel_no, _log.c.lamport, _log.c.message_id)
Index("sds_log_by_number", _log.c.channel_no, _log.c.number, sqlite_where=_log.c.number > 0)
Index("sds_staged_by_id", _staged.c.id_key, _staged.c.channel_no)
Index("sds_staged_in_order", _staged.c.channel_no, _staged.c.lamport, _staged.c.message_id)
Index("sds_filters_by_channel", _filters.c.channel_no)

_UPGRADES: tuple[Sequence[str], ...] = ()
"""Statements that bring version 1 to 2, 2 to 3 and so on. A new file gets the latest schema."""

_HASH_BYTES = 8  # of a frame's hash: detects damage, identifies nothing


# --- statements --------------------------------------------------------------------------------
# SQLAlchemy writes them once; sqlite3 runs them, at a tenth of the cost of a `Connection.execute`.
# Values are positional, in the order of the WHERE clause. Rows are limited by `fetchmany`.

_DIALECT = sqlite.dialect(paramstyle="qmark")


def _sql(statement: ClauseElement) -> str:
    return str(statement.compile(dialect=_DIALECT))


def _logged_with(*columns: Any) -> Any:
    return select(*columns).join_from(_log, _frames, _frames.c.log_no == _log.c.log_no)


_CHANNEL: BindParameter[int] = bindparam("channel")
_KEY: BindParameter[int] = bindparam("key")
_ID: BindParameter[bytes] = bindparam("id")
_FRAME = (_frames.c.hash, _frames.c.filter_no, _frames.c.data)
_STAGED_FRAME = (_staged.c.hash, _staged.c.filter_no, _staged.c.data)
_IS_LOGGED_ID = (_log.c.id_key == _KEY, _log.c.channel_no == _CHANNEL, _log.c.message_id == _ID)
_IS_STAGED_ID = (
    _staged.c.id_key == _KEY,
    _staged.c.channel_no == _CHANNEL,
    _staged.c.message_id == _ID,
)
_FIND_LOGGED = _sql(select(_log.c.digest).where(*_IS_LOGGED_ID))
_FIND_FRAME = _sql(_logged_with(*_FRAME).where(*_IS_LOGGED_ID))
_FIND_STAGED = _sql(
    select(_staged.c.staged_no, _staged.c.lamport, _staged.c.digest).where(*_IS_STAGED_ID)
)
# Many IDs at once: their keys as JSON. The + keeps SQLite from using an index of channels.
_LOGGED_OF_KEYS = _sql(
    select(_log.c.message_id, _log.c.digest).where(
        text("sds_log.id_key IN (SELECT value FROM json_each(?))"),
        literal_column("+sds_log.channel_no") == _CHANNEL,
    )
)
_STAGED_OF_KEYS = _sql(
    select(_staged.c.message_id, _staged.c.digest, _staged.c.staged_no).where(
        text("sds_staged.id_key IN (SELECT value FROM json_each(?))"),
        literal_column("+sds_staged.channel_no") == _CHANNEL,
    )
)
_FIND_NOTED = _sql(
    select(_noted.c.lamport).where(
        _noted.c.channel_no == _CHANNEL,
        _noted.c.element_id == bindparam("element"),
        _noted.c.lamport == bindparam("at"),
    )
)
# An index of digests in the file would slow every append by a third, and only a backfill that offers
# messages to a store needs it: it is made then, outside of the file.
_digests = Table(
    "sds_digests",
    MetaData(),
    Column("start", LargeBinary, primary_key=True),  # of the digest
    Column("log_no", Integer, primary_key=True),
    prefixes=["TEMP"],
    sqlite_with_rowid=False,
)
_DIGEST_START: ColumnElement[bytes] = literal_column("substr(sds_log.digest, 1, 8)")
_ADD_DIGESTS = _sql(
    insert(_digests).from_select(
        ["start", "log_no"],
        select(_DIGEST_START, _log.c.log_no)
        .where(_log.c.log_no > bindparam("after"))
        .order_by(_DIGEST_START),
    )
)
_FRAME_OF_DIGEST = _sql(
    _logged_with(_log.c.hint, *_FRAME).where(
        _log.c.log_no.in_(select(_digests.c.log_no).where(_digests.c.start == bindparam("start"))),
        _log.c.digest == bindparam("digest"),
        literal_column("+sds_log.channel_no") == _CHANNEL,  # + keeps SQLite from using its index
    )
)
_FRAME_OF_STAGED_DIGEST = _sql(
    select(_staged.c.message_id, _staged.c.hint, *_STAGED_FRAME).where(
        _staged.c.channel_no == _CHANNEL, _staged.c.digest == bindparam("digest")
    )
)
_NEWEST = _sql(
    select(_log.c.lamport, _log.c.message_id, _log.c.hint, _log.c.sender_id)
    .where(_log.c.channel_no == _CHANNEL, _log.c.lamport <= bindparam("last"))
    .order_by(_log.c.lamport.desc(), _log.c.message_id.desc())
)
_DELIVERIES = _sql(
    _logged_with(_log.c.number, _log.c.hint, _log.c.gap, *_FRAME)
    .where(
        _log.c.channel_no == _CHANNEL,
        _log.c.number > text("0"),  # as in the index
        _log.c.number > bindparam("after"),
    )
    .order_by(_log.c.number)
)
_STAGED_IN_ORDER = _sql(
    select(
        _staged.c.staged_no,
        _staged.c.lamport,
        _staged.c.message_id,
        _staged.c.digest,
        _staged.c.hint,
        *_STAGED_FRAME,
    )
    .where(
        _staged.c.channel_no == _CHANNEL,
        text("(sds_staged.lamport, sds_staged.message_id) >= (?, ?)"),
    )
    .order_by(_staged.c.lamport, _staged.c.message_id)
)
_LOGGED_ELEMENTS = _sql(
    select(_log.c.lamport, _log.c.message_id, _log.c.digest)
    .where(
        _log.c.channel_no == _CHANNEL,
        text("(sds_log.lamport, sds_log.message_id) > (?, ?)"),
    )
    .order_by(_log.c.lamport, _log.c.message_id)
)
_STAGED_ELEMENTS = _sql(
    select(_staged.c.lamport, _staged.c.message_id, _staged.c.digest)
    .where(
        _staged.c.channel_no == _CHANNEL,
        text("(sds_staged.lamport, sds_staged.message_id) > (?, ?)"),
    )
    .order_by(_staged.c.lamport, _staged.c.message_id)
)
_NOTED_ELEMENTS = _sql(
    select(_noted.c.lamport, _noted.c.element_id)
    .where(
        _noted.c.channel_no == _CHANNEL,
        text("(sds_noted.element_id, sds_noted.lamport) > (?, ?)"),
    )
    .order_by(_noted.c.element_id, _noted.c.lamport)
)
_FILTER = _sql(select(_filters.c.filter).where(_filters.c.filter_no == bindparam("no")))
_FILTERS = _sql(
    select(_filters.c.filter_no, _filters.c.filter)
    .where(_filters.c.channel_no == _CHANNEL)
    .order_by(_filters.c.filter_no.desc())
)
_INSERT_LOG = _sql(insert(_log))
_INSERT_FRAME = _sql(insert(_frames))
_INSERT_FILTER = _sql(insert(_filters).values(channel_no=_CHANNEL, filter=bindparam("filter")))
_INSERT_STAGED = _sql(
    insert(_staged).values({c.name: bindparam(c.name) for c in list(_staged.c)[1:]})
)
_INSERT_NOTED = _sql(insert(_noted).prefix_with("OR IGNORE"))
_PUT_STATE = _sql(insert(_state).prefix_with("OR REPLACE"))
_DELETE_STATE = _sql(
    delete(_state).where(_state.c.channel_no == _CHANNEL, _state.c.key == bindparam("state_key"))
)
_DELETE_STAGED = _sql(delete(_staged).where(_staged.c.staged_no == bindparam("no")))
_SET_COUNTS = _sql(
    update(_channels)
    .where(_channels.c.channel_no == _CHANNEL)
    .values(logged_count=bindparam("logged"), noted_count=bindparam("noted"))
)


# --- the file ----------------------------------------------------------------------------------


class ParticipantFile:
    """See the module. `path` is made if it does not exist; its directory must exist.

    Use it in a `with` statement, or `close` it. Every method raises `ParticipantFileError`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._fault: ParticipantFileError | None = None
        self._logs: dict[str, FileLog] = {}
        self._filters: OrderedDict[int, bytes] = OrderedDict()
        self._confirming: Connection | None = None
        self._is_writing = False
        self._digests_through = 0  # log numbers of the index of digests
        self._lock = _lock(self.path)
        try:
            with self._faults():
                self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        # SQLAlchemy's connection is this one too, in a thread that need not be this one.
        self._raw = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        self._raw.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        self._raw.execute("PRAGMA journal_mode = WAL")
        self._raw.execute("PRAGMA synchronous = FULL")
        self._raw.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        self._raw.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
        self._engine = create_engine("sqlite://", creator=lambda: self._raw, poolclass=StaticPool)
        self._inode = _inode(self.path)
        with self.transaction() as connection:
            self._prepare(connection)
            secret = connection.scalar(select(_meta.c.value).where(_meta.c.name == "secret"))
            self.next_log_no = (connection.scalar(select(func.max(_log.c.log_no))) or 0) + 1
        self.hasher = blake2b(digest_size=8, key=secret or b"")

    def _prepare(self, connection: Connection) -> None:
        """Bring the schema to this version."""
        found = connection.scalars(text("SELECT name FROM sqlite_schema WHERE type = 'table'"))
        names = set(found)
        latest = 1 + len(_UPGRADES)
        version = 0
        if _meta.name in names:
            value = connection.scalar(select(_meta.c.value).where(_meta.c.name == "version"))
            version = int.from_bytes(value or b"", "big")
            if version > latest:
                raise ParticipantFileError(
                    "too_new",
                    f"{self.path} has schema version {version}, this version of sdstore reads up to "
                    f"{latest}; install a later one",
                )
            if not version or (version == latest and not names >= _metadata.tables.keys()):
                raise ParticipantFileError("damaged", f"{self.path} lacks some of its tables")
        if not version:
            _metadata.create_all(connection)
            connection.execute(insert(_meta).values(name="version", value=bytes([latest])))
            connection.execute(insert(_meta).values(name="secret", value=os.urandom(16)))
        elif version < latest:
            for statements in _UPGRADES[version - 1 :]:
                for statement in statements:
                    connection.exec_driver_sql(statement)
            connection.execute(
                update(_meta).where(_meta.c.name == "version").values(value=bytes([latest]))
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. What was appended after the last save is dropped."""
        self._fault = self._fault or ParticipantFileError("closed", f"{self.path} is closed")
        if hasattr(self, "_engine"):
            self._engine.dispose()
        if hasattr(self, "_raw"):
            self._raw.close()
        self._lock.close()

    # --- participants ----------------------------------------------------------------------------

    def channels(self) -> list[str]:
        """The IDs of the channels in the file, ordered by their bytes."""
        with self._faults():
            rows = self._raw.execute(_sql(select(_channels.c.channel_id))).fetchall()
        return sorted((_text(each) for (each,) in rows), key=_bytes)

    def log(self, channel_id: str) -> FileLog:
        """The log of a channel, the same object at every call."""
        log = self._logs.get(channel_id)
        if log is None:
            log = self._logs[channel_id] = self._make_log(channel_id)
        return log

    def _make_log(self, channel_id: str) -> FileLog:
        of_channel = select(
            _channels.c.channel_no, _channels.c.logged_count, _channels.c.noted_count
        ).where(_channels.c.channel_id == _bytes(channel_id))
        with self.transaction() as connection:
            row = connection.execute(of_channel).first()
            if row is None:
                connection.execute(
                    insert(_channels).values(
                        channel_id=_bytes(channel_id), logged_count=0, noted_count=0, confirmed=0
                    )
                )
                row = connection.execute(of_channel).one()
        return FileLog(self, *row)

    def participant(
        self, channel_id: str, sender_id: str, options: ParticipantOptions | None = None
    ) -> Participant:
        """The participant of a channel from where its last save left it, or a new one.

        Raises `LocalProtocolError` as `Participant.restore`: `state_of_another` if the channel's
        participant has another sender ID.
        """
        state = self.state(channel_id)
        own = {key: value for key, value in state.items() if not key.startswith(DRIVER_KEYS)}
        return Participant.restore(
            channel_id, sender_id, own, self.log(channel_id), options=options
        )

    def state(self, channel_id: str) -> dict[str, bytes]:
        """The state of a channel as the saved `Save` effects and `confirm` left it."""
        channel_no = self.log(channel_id).channel_no
        wanted = select(_state.c.key, _state.c.value).where(_state.c.channel_no == bindparam("no"))
        state = {_text(key): value for key, value in self.rows(_sql(wanted), (channel_no,))}
        confirmed = self.confirmed(channel_id)
        if confirmed and PROGRESS in state:
            progress = unseal(PROGRESS, state[PROGRESS], Progress)
            if progress.confirmed < confirmed:
                progress.confirmed = confirmed
                state[PROGRESS] = seal(PROGRESS, progress)
        return state

    def save(self, channel_id: str, *effects: Iterable[Effect]) -> None:
        """Carry out the `Save` effects of one or several lists, in one transaction with the log.

        Pass the effects of all calls of the participant since the last save. Without any, it writes
        what a failed save left.
        """
        self.save_all({channel_id: [each for part in effects for each in part]})

    def save_all(self, effects: Mapping[str, Iterable[Effect]]) -> None:
        """`save` for several channels at once: the effects by channel ID, in one transaction."""
        logs = [self.log(channel_id) for channel_id in effects]
        for log, each in zip(logs, effects.values(), strict=True):
            log.take_changes(each)
        unsaved = [log for log in logs if log.has_unsaved]
        if not unsaved:
            return
        try:
            with self.writing() as raw:
                for log in unsaved:
                    log.write(raw)
        except BaseException:
            for log in unsaved:
                log.forget_references()
            raise
        for log in unsaved:
            log.written()

    # --- the application's transaction -----------------------------------------------------------

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A transaction for the application's own tables, on the disk at the end of the block.

        An exception in the block rolls it back. Nothing can be saved or staged inside of the block.
        """
        with self._faults(), self._engine.connect() as connection, self.writing() as raw:
            self._confirming = connection
            try:
                yield connection
            finally:
                self._confirming = None
            if not raw.in_transaction:
                raise ParticipantFileError(
                    "misuse", "the transaction was ended inside of its block"
                )

    def confirm(self, connection: Connection, channel_id: str, number: int) -> None:
        """Confirm a channel's deliveries up to `number`, in the transaction of `connection`.

        After a restart they are not delivered again. Call `Participant.confirm(number)` after the
        transaction, so that the running participant knows as well.
        """
        if connection is not self._confirming:
            raise ParticipantFileError("misuse", "confirm takes the connection of `transaction`")
        higher = func.max(_channels.c.confirmed, number)
        of_channel = _channels.c.channel_id == _bytes(channel_id)
        if not connection.execute(
            update(_channels).where(of_channel).values(confirmed=higher)
        ).rowcount:
            raise ParticipantFileError("misuse", f"the file has no channel {channel_id!r}")

    def confirmed(self, channel_id: str) -> int:
        """The highest number given to `confirm`, 0 before the first."""
        wanted = select(_channels.c.confirmed).where(_channels.c.channel_id == bindparam("id"))
        row = self.row(_sql(wanted), (_bytes(channel_id),))
        return 0 if row is None else int(row[0])

    # --- for the logs ----------------------------------------------------------------------------

    def row(self, statement: str, values: Sequence[Any]) -> Any:
        """The first row, or None."""
        try:
            return self._raw.execute(statement, values).fetchone()
        except sqlite3.Error as error:
            self._refuse(error)
            raise

    def rows(self, statement: str, values: Sequence[Any], count: int = -1) -> list[Any]:
        """The first `count` rows, or all."""
        try:
            cursor = self._raw.execute(statement, values)
            return cursor.fetchall() if count < 0 else cursor.fetchmany(count)
        except sqlite3.Error as error:
            self._refuse(error)
            raise

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction, on the disk at the end of the block."""
        self.check()
        raw = self._raw
        if self._is_writing:
            raise ParticipantFileError("misuse", "another transaction of this file is running")
        if _inode(self.path) != self._inode:
            # SQLite goes on writing to a file that was deleted, and its content ends with the process.
            self._fault = ParticipantFileError(
                "file_gone", f"{self.path} was deleted or replaced while it was open"
            )
            raise self._fault
        self._is_writing = True
        try:
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

    def check(self) -> None:
        """Raises the error for which the file refuses further use."""
        if self._fault is not None:
            raise self._fault

    def give_up(self, code: str, detail: str) -> ParticipantFileError:
        """Refuse further use; the error to raise."""
        self._fault = self._fault or ParticipantFileError(
            code, f"{detail}; open the file anew and restore its participants"
        )
        return self._fault

    def filter(self, filter_no: int) -> bytes:
        """A stored reference filter."""
        found = self._filters.get(filter_no)
        if found is None:
            row = self.row(_FILTER, (filter_no,))
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
                    raw.execute(str(CreateTable(_digests).compile(dialect=_DIALECT)))
                raw.execute(_ADD_DIGESTS, (self._digests_through,))
            self._digests_through = self.next_log_no - 1

    def frame(self, frame_hash_start: bytes, filter_no: int | None, data: bytes) -> bytes:
        """The frame of a row, checked."""
        try:
            frame = data if filter_no is None else unpack(data, self.filter(filter_no))
        except ValueError:
            frame = b""
        if frame_hash(frame)[:_HASH_BYTES] != frame_hash_start:
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
    def _faults(self) -> Iterator[None]:
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
        if code in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
            raise ParticipantFileError(
                "busy", f"another connection kept {self.path} for {BUSY_TIMEOUT_MS} ms; save again"
            ) from error
        if code in {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PROTOCOL}:
            raise self.give_up("unavailable", f"{self.path} could not be used ({cause})") from error


class _Offered(NamedTuple):
    """A row that `FileLog.staged` returned: the participant will append and unstage it."""

    staged_no: int
    noted: Noted
    frame: bytes
    packed: tuple[bytes, int | None, bytes]


class _Unsaved:
    """An appended entry until the next save; `packed` if its frame was staged."""

    __slots__ = ("digest", "entry", "packed", "raw_id")

    def __init__(self, entry: LogEntry, offered: _Offered | None) -> None:
        self.entry = entry
        self.raw_id = entry.message.message_id.encode()
        self.packed: tuple[bytes, int | None, bytes] | None = None
        if offered is not None and offered.frame is entry.frame:
            self.digest, self.packed = offered.noted.element_id, offered.packed
        else:
            self.digest = entry_digest(entry.message)


_Place = tuple[int, bytes, Reference]
_FIRST_PLACE = (-(2**63), b"")


class FileLog:
    """A channel's log in a `ParticipantFile`: a `ParticipantLog` and a `BackfillLog`.

    What was appended and unstaged since the last save is in memory alone. The first methods are those
    of the two protocols; the last ones belong to the file.
    """

    def __init__(
        self, file: ParticipantFile, channel_no: int, logged_count: int, noted_count: int
    ) -> None:
        self.channel_no = channel_no
        self._file = file
        self._hasher = file.hasher.copy()
        self._hasher.update(channel_no.to_bytes(8, "big"))
        self._saved_count = logged_count
        self._saved_noted_count = noted_count
        self._unsaved: dict[str, _Unsaved] = {}
        self._unsaved_order: list[_Place] = []
        self._unsaved_numbers: list[LogEntry] = []
        self._unsaved_bytes = 0
        self._changes: dict[bytes, bytes | None] = {}
        self._unstaged: dict[str, int] = {}  # row numbers
        self._offered: dict[str, _Offered] = {}  # by the last call of `staged`
        self._not_logged: set[str] = set()  # of those
        self._new_noted: set[Noted] = set()
        self._staged_from = _FIRST_PLACE  # all staged rows before it are unstaged
        # Two generations of IDs: when the newer one is full it becomes the older one.
        self._recent: set[str] = set()
        self._less_recent: set[str] = set()
        self._packer: FilterPacker | None = None
        self._tail = self._newest_saved(TAIL_MAX // 2, LAMPORT_MAX)

    # --- ParticipantLog --------------------------------------------------------------------------

    def __len__(self) -> int:
        return self._saved_count + len(self._unsaved)

    def contains(self, message_id: str) -> bool:
        """See `ParticipantLog`."""
        if (
            message_id in self._unsaved
            or message_id in self._recent
            or message_id in self._less_recent
        ):
            return True
        if message_id in self._not_logged:
            return False
        if self._file.row(_FIND_LOGGED, self._of_id(message_id)) is None:
            return False
        self._remember(message_id)
        return True

    def newest(self, count: int, before_lamport: int) -> list[Reference]:
        """See `ParticipantLog`."""
        places = self._tail
        end = bisect_left(places, (before_lamport,))
        if end < count and len(places) < len(self):
            end = bisect_left(self._unsaved_order, (before_lamport,))
            places = self._unsaved_order[max(end - count, 0) : end]
            places += self._newest_saved(count, min(before_lamport - 1, LAMPORT_MAX))
            places.sort()
            end = len(places)
        return [reference for _, _, reference in places[max(end - count, 0) : end]]

    def frame(self, message_id: str) -> bytes | None:
        """See `ParticipantLog`."""
        if unsaved := self._unsaved.get(message_id):
            return unsaved.entry.frame
        row = self._file.row(_FIND_FRAME, self._of_id(message_id))
        return None if row is None else self._file.frame(*row)

    def append(self, entry: LogEntry) -> None:
        """See `ParticipantLog`. It raises if too much was appended since the last save."""
        self._file.check()
        message = entry.message
        offered = self._offered.get(message.message_id)
        unsaved = self._unsaved[message.message_id] = _Unsaved(entry, offered)
        self._not_logged.discard(message.message_id)
        lamport = message.lamport_timestamp or 0
        reference = Reference(
            lamport, HistoryEntry(message.message_id, entry.retrieval_hint, message.sender_id)
        )
        place = (lamport, unsaved.raw_id, reference)
        _insert(self._unsaved_order, place)
        tail = self._tail
        # The tail has the newest messages without a hole: an older one belongs there only if all do.
        if len(tail) == len(self) - 1 or place > tail[0]:
            _insert(tail, place)
            if len(tail) > TAIL_MAX:
                del tail[: TAIL_MAX // 2]
        if entry.number:
            self._unsaved_numbers.append(entry)
        self._count_unsaved(len(entry.frame))

    def deliveries(self, after_number: int, count: int) -> list[LogEntry]:
        """See `ParticipantLog`."""
        rows = self._file.rows(_DELIVERIES, (self.channel_no, after_number), count)
        found = [self._entry(*row) for row in rows]
        unsaved = (each for each in self._unsaved_numbers if each.number > after_number)
        found += unsaved
        return found[:count]

    def staged(self, count: int) -> list[Staged]:
        """See `ParticipantLog`."""
        found: list[Staged] = []
        self._offered = {}
        for staged_no, place, digest, hint, packed in self._staged_rows():
            if len(found) == count:
                break
            message_id = _text(place[1])
            if message_id in self._unstaged:
                if not found:
                    self._staged_from = (place[0], place[1] + b"\0")  # the next possible place
                continue
            frame = self._file.frame(*packed)
            found.append(Staged(self._file.message(frame), frame, digest, hint))
            self._offered[message_id] = _Offered(staged_no, Noted(place[0], digest), frame, packed)
        logged = self._of_ids(_LOGGED_OF_KEYS, self._offered)
        self._not_logged = self._offered.keys() - {_text(raw_id) for raw_id, *_ in logged}
        self._not_logged -= self._unsaved.keys()
        return found

    def unstage(self, message_ids: Sequence[str]) -> None:
        """See `ParticipantLog`."""
        for message_id in message_ids:
            if message_id in self._unstaged:
                continue
            if offered := self._offered.get(message_id):
                staged_no, noted = offered.staged_no, offered.noted
            elif row := self._file.row(_FIND_STAGED, self._of_id(message_id)):
                staged_no, noted = row[0], Noted(*row[1:])
            else:
                continue
            self._unstaged[message_id] = staged_no
            if not self.contains(message_id) and not self._is_noted(noted):
                self._new_noted.add(noted)

    # --- BackfillLog -----------------------------------------------------------------------------

    def elements(self) -> Iterator[tuple[list[int], bytes]]:
        """See `BackfillLog`. Messages that are appended or staged meanwhile can be missing."""
        # In the order in which a save moves elements, so that none is missed by moving.
        unsaved = [
            (each.entry.message.lamport_timestamp or 0, each.digest)
            for each in self._unsaved.values()
        ]
        unsaved += [(each.lamport_timestamp, each.element_id) for each in self._new_noted]
        for start in range(0, len(unsaved), ELEMENTS_PER_PIECE_MAX):
            piece = unsaved[start : start + ELEMENTS_PER_PIECE_MAX]
            yield [each[0] for each in piece], b"".join([each[1] for each in piece])
        read, channel_no, count = self._file.rows, self.channel_no, ELEMENTS_PER_PIECE_MAX
        for statement in (_STAGED_ELEMENTS, _LOGGED_ELEMENTS):
            place = _FIRST_PLACE
            while rows := read(statement, (channel_no, *place), count):
                place = rows[-1][:2]
                if statement == _STAGED_ELEMENTS:  # the unstaged ones are logged, or noted by now
                    rows = [row for row in rows if _text(row[1]) not in self._unstaged]
                yield [row[0] for row in rows], b"".join([row[2] for row in rows])
        name = (b"", 0)
        while rows := read(_NOTED_ELEMENTS, (channel_no, *name), count):
            name = (rows[-1][1], rows[-1][0])
            yield [row[0] for row in rows], b"".join([row[1] for row in rows])

    @property
    def noted_count(self) -> int:
        """See `BackfillLog`."""
        return self._saved_noted_count + len(self._new_noted)

    def digests(self, message_ids: Sequence[str]) -> dict[str, bytes]:
        """See `BackfillLog`."""
        wanted = set(message_ids)
        staged = {
            _text(raw_id): digest for raw_id, digest, _ in self._of_ids(_STAGED_OF_KEYS, wanted)
        }
        found = {each: digest for each, digest in staged.items() if each not in self._unstaged}
        logged = self._of_ids(_LOGGED_OF_KEYS, wanted)
        found |= {_text(raw_id): digest for raw_id, digest in logged}
        return found | {each: self._unsaved[each].digest for each in wanted & self._unsaved.keys()}

    def frames(self, digests: Sequence[bytes]) -> dict[bytes, tuple[bytes, bytes]]:
        """See `BackfillLog`. The first call reads all digests: 1 s for a million messages."""
        file, channel_no = self._file, self.channel_no
        file.index_digests()
        unsaved = {each.digest: each.entry for each in self._unsaved.values()}
        found = {}
        for digest in digests:
            if entry := unsaved.get(digest):
                found[digest] = (entry.frame, entry.retrieval_hint)
            elif row := file.row(_FRAME_OF_DIGEST, (digest[:8], digest, channel_no)):
                found[digest] = (file.frame(*row[1:]), row[0])
            elif row := file.row(_FRAME_OF_STAGED_DIGEST, (channel_no, digest)):
                raw_id, hint, *packed = row
                if _text(raw_id) not in self._unstaged:
                    found[digest] = (file.frame(*packed), hint)
        return found

    def stage(self, messages: Sequence[Staged], noted: Sequence[Noted]) -> None:
        """See `BackfillLog`."""
        by_id = {each.message.message_id: each for each in messages}
        stale = [(staged_no,) for _, _, staged_no in self._of_ids(_STAGED_OF_KEYS, by_id)]
        new_noted = {each for each in noted if not self._is_on_disk(each)}
        try:
            with self._file.writing() as raw:
                raw.executemany(_DELETE_STAGED, stale)
                rows = [
                    self._staged_row(raw, self._of_id(message_id), each)
                    for message_id, each in by_id.items()
                ]
                raw.executemany(_INSERT_STAGED, rows)
                self._write_noted(raw, new_noted, self._saved_count)
        except BaseException:
            self.forget_references()
            raise
        self._saved_noted_count += len(new_noted)
        self._new_noted -= new_noted
        for message_id, each in by_id.items():
            self._unstaged.pop(message_id, None)
            place = (each.message.lamport_timestamp or 0, message_id.encode())
            self._staged_from = min(self._staged_from, place)

    # --- for the file ----------------------------------------------------------------------------

    def take_changes(self, effects: Iterable[Effect]) -> None:
        """Keep the changes of `Save` effects for the next save."""
        for effect in effects:
            if isinstance(effect, Save):
                for key, value in effect.changes:
                    before = self._changes.get(_bytes(key)) or b""
                    self._changes[_bytes(key)] = value
                    self._count_unsaved(len(value or b"") - len(before))

    @property
    def has_unsaved(self) -> bool:
        """Whether a save has anything to write."""
        return bool(self._changes or self._unsaved or self._unstaged or self._new_noted)

    def write(self, raw: sqlite3.Connection) -> None:
        """Write what is unsaved, in a transaction."""
        channel_no = self.channel_no
        puts = [
            (channel_no, key, value) for key, value in self._changes.items() if value is not None
        ]
        raw.executemany(_PUT_STATE, puts)
        deletions = [(channel_no, key) for key, value in self._changes.items() if value is None]
        raw.executemany(_DELETE_STATE, deletions)
        log_no = self._file.next_log_no
        rows, frames = [], []
        for message_id, unsaved in self._unsaved.items():
            entry = unsaved.entry
            message = entry.message
            key, _, raw_id = self._of_id(message_id)
            rows.append(
                (
                    log_no,
                    channel_no,
                    key,
                    message.lamport_timestamp or 0,
                    raw_id,
                    message.sender_id.encode(),
                    unsaved.digest,
                    entry.retrieval_hint,
                    entry.number,
                    _gap(entry),
                )
            )
            packed = unsaved.packed or self._packed(raw, message, entry.frame)
            frames.append((log_no, *packed))
            log_no += 1
        raw.executemany(_INSERT_LOG, rows)
        raw.executemany(_INSERT_FRAME, frames)
        raw.executemany(_DELETE_STAGED, [(staged_no,) for staged_no in self._unstaged.values()])
        self._write_noted(raw, self._new_noted, len(self))
        self._file.next_log_no = log_no

    def written(self) -> None:
        """The transaction is on the disk."""
        self._saved_count = len(self)
        for message_id in self._unsaved:
            self._remember(message_id)
        self._saved_noted_count = self.noted_count
        self._unsaved.clear()
        self._unsaved_order.clear()
        self._unsaved_numbers.clear()
        self._unsaved_bytes = 0
        self._changes.clear()
        self._unstaged.clear()
        self._new_noted.clear()

    def forget_references(self) -> None:
        """The transaction failed: references that it added are not in the file."""
        self._packer = None

    # --- rows ------------------------------------------------------------------------------------

    def _of_id(self, message_id: str) -> tuple[int, int, bytes]:
        """The values that find a message by its ID: key, channel, ID."""
        raw_id = _bytes(message_id)
        hasher = self._hasher.copy()
        hasher.update(raw_id)
        return int.from_bytes(hasher.digest(), "big", signed=True), self.channel_no, raw_id

    def _of_ids(self, statement: str, message_ids: Collection[str]) -> list[Any]:
        """The rows of a statement over the keys of many IDs; the first column is the ID."""
        found = []
        wanted = {self._of_id(each)[0]: _bytes(each) for each in message_ids}
        keys = list(wanted)
        for start in range(0, len(keys), IDS_PER_READ):
            some = json.dumps(keys[start : start + IDS_PER_READ])
            found += self._file.rows(statement, (some, self.channel_no))
        ids = set(wanted.values())
        return [row for row in found if row[0] in ids]

    def _remember(self, message_id: str) -> None:
        self._recent.add(message_id)
        if len(self._recent) >= RECENT_IDS_MAX // 2:
            self._less_recent, self._recent = self._recent, set()

    def _count_unsaved(self, size_bytes: int) -> None:
        self._unsaved_bytes += size_bytes
        if self._unsaved_bytes > UNSAVED_BYTES_MAX:
            raise self._file.give_up(
                "unsaved_full",
                f"more than {UNSAVED_BYTES_MAX:,} bytes were appended without a save",
            )

    def _newest_saved(self, count: int, last_lamport: int) -> list[_Place]:
        rows = self._file.rows(_NEWEST, (self.channel_no, max(last_lamport, -(2**63))), count)
        return [
            (lamport, raw_id, Reference(lamport, HistoryEntry(_text(raw_id), hint, _text(sender))))
            for lamport, raw_id, hint, sender in reversed(rows)
        ]

    def _entry(self, number: int, hint: bytes, gap: str | None, *packed: Any) -> LogEntry:
        frame = self._file.frame(*packed)
        after_gap, is_late = json.loads(gap) if gap else ((), False)
        message = self._file.message(frame)
        return LogEntry(message, frame, number, hint, tuple(after_gap), is_late)

    def _staged_rows(self) -> Iterator[tuple[int, tuple[int, bytes], bytes, bytes, Any]]:
        """Number, place, digest, hint and packed frame of staged rows in log order.

        They begin at `_staged_from`.
        """
        place, after = self._staged_from, b""
        while rows := self._file.rows(
            _STAGED_IN_ORDER, (self.channel_no, place[0], place[1] + after), STAGED_PER_READ
        ):
            for staged_no, lamport, raw_id, digest, hint, *packed in rows:
                place, after = (lamport, raw_id), b"\0"
                yield staged_no, place, digest, hint, tuple(packed)

    def _staged_row(
        self, raw: sqlite3.Connection, of_id: tuple[int, int, bytes], staged: Staged
    ) -> tuple[Any, ...]:
        key, channel_no, raw_id = of_id
        return (
            channel_no,
            key,
            staged.message.lamport_timestamp or 0,
            raw_id,
            staged.digest,
            staged.retrieval_hint,
            *self._packed(raw, staged.message, staged.frame),
        )

    def _is_noted(self, noted: Noted) -> bool:
        return noted in self._new_noted or self._is_on_disk(noted)

    def _is_on_disk(self, noted: Noted) -> bool:
        return (
            self._file.row(
                _FIND_NOTED, (self.channel_no, noted.element_id, noted.lamport_timestamp)
            )
            is not None
        )

    def _write_noted(self, raw: sqlite3.Connection, noted: set[Noted], logged_count: int) -> None:
        """Write noted names that are not on the disk, and the counts of the channel."""
        rows = [(self.channel_no, each.element_id, each.lamport_timestamp) for each in noted]
        raw.executemany(_INSERT_NOTED, rows)
        counts = (logged_count, self._saved_noted_count + len(noted), self.channel_no)
        raw.execute(_SET_COUNTS, counts)

    def _packed(
        self, raw: sqlite3.Connection, message: Message, frame: bytes
    ) -> tuple[bytes, int | None, bytes]:
        """The columns of a frame; a filter that becomes a reference is written first."""
        packer = self._packer
        if packer is None:
            packer = self._packer = FilterPacker()
            rows = raw.execute(_FILTERS, (self.channel_no,)).fetchmany(REFERENCES_MAX)
            for filter_no, bloom_filter in reversed(rows):
                packer.add_reference(filter_no, bloom_filter, is_used=True)
        bloom_filter = message.bloom_filter
        if not bloom_filter and len(frame) - len(message.content) > FILTER_BYTES_MIN:
            bloom_filter = decode(frame)[0].bloom_filter  # participants log messages without it
        while (packed := packer.pack(frame, bloom_filter)) is None:
            added = raw.execute(_INSERT_FILTER, (self.channel_no, bloom_filter))
            packer.add_reference(added.lastrowid or 0, bloom_filter, is_used=False)
        return frame_hash(frame)[:_HASH_BYTES], packed.reference_no, packed.data


def _insert(places: list[_Place], place: _Place) -> None:
    if places and place < places[-1]:
        insort(places, place)
    else:
        places.append(place)


def _gap(entry: LogEntry) -> str | None:
    has_gap = entry.after_gap or entry.is_late
    return json.dumps([entry.after_gap, entry.is_late]) if has_gap else None


def _bytes(value: str) -> bytes:
    # Strings of a program can hold lone surrogates, which UTF-8 has no bytes for.
    return value.encode("utf-8", "surrogatepass")


def _text(value: bytes) -> str:
    return value.decode("utf-8", "surrogatepass")


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
        raise ParticipantFileError(
            "unavailable", f"{path}-lock cannot be locked ({error})"
        ) from error
    return lock
