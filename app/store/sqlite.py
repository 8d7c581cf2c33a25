"""SQLite: one file, of one process: read on its event loop and in threads, written by one thread.

A look-up of few rows takes some microseconds, less than a handover to a thread (22 to 73 us), so it runs on the
event loop. Reads of many rows take milliseconds, or as long as the disk takes where the database is larger than
memory: they run in threads. If the median of the look-ups shows that they wait for a slow disk too, they move
to the threads until it falls again. With write-ahead logging no reader waits for the writer.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from functools import cache
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from statistics import median
from time import monotonic, perf_counter
from typing import Any

from sqlalchemy import BindParameter, ColumnElement, Select, Table, bindparam, delete, update
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

from app.errors import Code, Problem
from app.server.disk import sync_path
from app.server.limits import DEFAULT_LIMITS
from app.store.database import (
    Arguments,
    Database,
    Erasure,
    Keyed,
    ManyQuery,
    Query,
    Row,
    SqlDialect,
    StoreBusyError,
    Transaction,
    UnsupportedDatabaseError,
    UnusableFileError,
    chunks,
)
from app.store.schema import is_current, migrate

WRITER_CACHE_KIB = 64 * 1024
"""Holds the indexes of some 500,000 messages: random keys make every insert touch them all."""

READER_CACHE_KIB = 16 * 1024
"""Of each reading connection. No file is mapped: that would save 1 of the 15 microseconds of a look-up by ID,
count the whole file as memory of this process, and end it with SIGBUS where a disk cannot be read."""

WAL_PAGES = 65_536
"""256 MiB of write-ahead log before a checkpoint, which then writes each changed page only once:
at 10^6 messages ingest is 1.6 times as fast as with 64 MiB."""

BUSY_TIMEOUT_MS = 5_000
"""Readers in other processes can delay a checkpoint for a moment, never a commit."""

ERASURE_WAIT_MS = 100
"""How long an erasure waits for readers."""

FREE_PAGES_PER_ERASURE = 2_000
"""Free pages, 8 MiB, that one erasure gives back to the file system: some 20 ms of the writer."""

WRITER_LOCK_WAIT_S = 5.0
"""The wait for the writer's lock: a node that is stopping gives it back within this time."""

READER_THREADS = 2
"""More would wait for the interpreter: half of a page is Python's work."""

POINT_KEYS_MAX = 32
"""Keys of a read on the event loop: the matches of an ID, the messages of a small session. 0.3 ms."""

LOOKUPS_PER_TURN = 256
"""Look-ups of one read before another read gets the thread: about a millisecond."""

LOOKUPS_PER_LOOK = 16
"""Look-ups of a thread between two looks at the clock."""

OPERATIONS_PER_LOOK = 1_000_000
"""Of SQLite's virtual machine, some 20 ms, between two looks at the clock in a long statement."""

POINT_READ_S_MAX = 0.001
"""The median of look-ups above which they move to the threads: a hundred times that from memory."""

TIMED_READS = 31
"""Look-ups on the event loop of which the median is taken."""

READS_PER_TRY = 32
"""While look-ups are in the threads, one in so many runs on the event loop and is timed."""

SQLITE_KEYS_PER_QUERY = (1, 16, 128)
"""Placeholders of the forms of an `among` query on SQLite: preparing many for one key costs ten
times the look-up, and beyond 128 longer lists gain nothing."""


SQLITE_ROWS_PER_INSERT = 32
"""Rows of one statement: the driver lets other threads run during a statement and then waits for its
turn, which between single rows would cost more than the insertion."""

_FULL = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}
_UNREADABLE = {sqlite3.SQLITE_IOERR_READ, sqlite3.SQLITE_IOERR_SHORT_READ}
_UNAVAILABLE = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PROTOCOL,  # a reader lost the race for the log's header many times
}
_INTERRUPTED = sqlite3.SQLITE_INTERRUPT
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


class SqliteSql(SqlDialect):
    """Placeholders are question marks; many rows go through executemany."""

    _dialect = sqlite.dialect(paramstyle="qmark")

    def among(
        self, key: ColumnElement[Any], make: Callable[[ColumnElement[bool]], Select[Any]]
    ) -> ManyQuery:
        forms = []
        for most in SQLITE_KEYS_PER_QUERY:
            keys: list[BindParameter[Any]] = [bindparam(f"key_{n}") for n in range(most)]
            forms.append((most, self._many(make(key.in_(keys)), [each.key for each in keys])))
        *shorter, (_, longest) = forms
        return longest._replace(shorter=tuple((most, form.text) for most, form in shorter))

    def each(self, arguments: Arguments, make: Callable[[Keyed], Select[Any]]) -> ManyQuery:
        binds = {name: bindparam(name, type_=kind) for name, kind in arguments.items()}
        return self._many(make(binds), list(arguments))

    @cache  # noqa: B019 - lives as long as the process
    def insert(self, table: Table, *, or_ignore: bool = False) -> ManyQuery:
        names = table.columns.keys()
        if or_ignore:
            statement = sqlite.insert(table).values(_binds(table))
            return self._many(statement.on_conflict_do_nothing(), names)
        rows: list[dict[str, BindParameter[Any]]] = [
            {name: bindparam(f"{name}_{row}") for name in names}
            for row in range(SQLITE_ROWS_PER_INSERT)
        ]
        # Without ROLLBACK a statement of several rows copies each page first, to undo itself alone.
        many_rows = sqlite.insert(table).prefix_with("OR ROLLBACK").values(rows)
        several = self.query(many_rows).text
        statement = sqlite.insert(table).values(_binds(table))
        return self._many(statement, names)._replace(several=several)

    @cache  # noqa: B019 - lives as long as the process
    def upsert(self, table: Table, key: str, merge: Callable[[Any], dict[str, Any]]) -> ManyQuery:
        statement = sqlite.insert(table).values(_binds(table))
        statement = statement.on_conflict_do_update(
            index_elements=[key], set_=merge(statement.excluded)
        )
        return self._many(statement, table.columns.keys())

    @cache  # noqa: B019 - lives as long as the process
    def delete_each(self, table: Table, *columns: str) -> ManyQuery:
        wanted = [table.c[name] == bindparam(f"is_{name}") for name in columns]
        return self._many(delete(table).where(*wanted), [f"is_{name}" for name in columns])

    @cache  # noqa: B019 - lives as long as the process
    def update_each(self, table: Table, key: str, *changed: str) -> ManyQuery:
        # SQLAlchemy sets columns in the order of the table.
        statement = update(table).ordered_values(
            *[(name, bindparam(f"to_{name}")) for name in changed]
        )
        names = [*(f"to_{name}" for name in changed), "at"]
        return self._many(statement.where(table.c[key] == bindparam("at")), names)


def _binds(table: Table) -> dict[str, BindParameter[Any]]:
    return {each.name: bindparam(each.name) for each in table.columns}


SQLITE = SqliteSql()


class PointReads:
    """Decides where look-ups run: on the event loop, unless their running median is above `POINT_READ_S_MAX`."""

    def __init__(self) -> None:
        self.are_slow = False
        self._seconds: deque[float] = deque(maxlen=TIMED_READS)
        self._passed_count = 0

    def begins_on_loop(self) -> bool:
        """Whether the next look-up runs on the event loop; then `add` its time."""
        if not self.are_slow:
            return True
        self._passed_count += 1
        return self._passed_count % READS_PER_TRY == 0

    def add(self, seconds: float) -> None:
        """A look-up on the event loop took so long."""
        self._seconds.append(seconds)
        # Taking the median takes longer than a look-up: often enough where it can change the answer.
        if (seconds > POINT_READ_S_MAX) is not self.are_slow and len(self._seconds) == TIMED_READS:
            self.are_slow = median(self._seconds) > POINT_READ_S_MAX


class _Reader:
    """A connection of a reading thread. A read that lasts longer than `life_s_max` ends with a `Problem`.

    `is_frozen`: all reads are of one transaction, which ends with the connection and lives no longer either.
    `is_ending` ends reads at once.
    """

    def __init__(self, path: Path, life_s_max: float, *, is_frozen: bool) -> None:
        self.connection = _reading_connection(path)
        self._life_s_max = life_s_max
        self._ends_s = monotonic() + life_s_max
        self._is_frozen = is_frozen
        self.is_ending = False
        self.connection.set_progress_handler(self._is_late, OPERATIONS_PER_LOOK)
        if is_frozen:
            self.connection.execute("BEGIN")

    def _is_late(self) -> bool:
        return self.is_ending or monotonic() > self._ends_s

    def look(self) -> None:
        """Raise a `Problem` if the transaction is too old."""
        if self._is_late():
            raise Problem(
                Code.STORE_UNAVAILABLE,
                f"the database was read for longer than {self._life_s_max:g} s",
            )

    def read(self, read: Callable[..., list[Row]], *arguments: Any) -> list[Row]:
        """The rows of `read(self, *arguments)`, in this thread."""
        try:
            if self._is_frozen:
                self.look()
            else:
                self._ends_s = monotonic() + self._life_s_max
                # One statement is a transaction of its own. On a busy machine each further one waits twice for
                # the interpreter.
                if read is not _rows:
                    self.connection.execute("BEGIN")
            return read(self, *arguments)
        except sqlite3.Error as error:
            _refuse(error)
            raise
        finally:
            # Some faults end the transaction by themselves, and a damaged file cannot COMMIT.
            if not self._is_frozen and self.connection.in_transaction:
                self.connection.execute("ROLLBACK")


class _ReaderThreads:
    """Threads that read, each with a connection of its own."""

    def __init__(self, readers: Sequence[_Reader]) -> None:
        self._readers = readers
        self._free: SimpleQueue[_Reader] = SimpleQueue()
        for each in readers:
            self._free.put(each)
        # A thread begins with the first read that finds none free.
        self._threads = ThreadPoolExecutor(len(readers), thread_name_prefix="sqlite reader")

    async def read(self, read: Callable[..., list[Row]], *arguments: Any) -> list[Row]:
        """See `_Reader.read`."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._read, read, *arguments)

    def _read(self, read: Callable[..., list[Row]], *arguments: Any) -> list[Row]:
        reader = self._free.get()
        try:
            return reader.read(read, *arguments)
        finally:
            self._free.put(reader)

    def close(self) -> None:
        """Cut the reads that have begun short, wait for their ends, and close the connections."""
        readers, self._readers = self._readers, ()
        for each in readers:
            each.is_ending = True
        self._threads.shutdown(cancel_futures=True)
        for each in readers:
            each.connection.close()


class SqliteDatabase(Database):
    """One SQLite file. `life_s_max`: the longest life of a reading transaction."""

    def __init__(
        self, url: str, life_s_max: float = DEFAULT_LIMITS.sqlite_read_s, *, is_frozen: bool = False
    ) -> None:
        self.sql = SQLITE
        self.path = _path_of(url)
        self._file = _identity(self.path)
        self._life_s_max = life_s_max
        count = 1 if is_frozen else READER_THREADS
        readers = [_Reader(self.path, life_s_max, is_frozen=is_frozen) for _ in range(count)]
        self._threads = _ReaderThreads(readers)
        self._reader = None if is_frozen else _reading_connection(self.path)
        self._point_reads = PointReads()
        self._commits = 0
        self._reads_as_of: int | None = None
        self._writer: sqlite3.Connection | None = None
        self._lock: sqlite3.Connection | None = None

    @classmethod
    def open(cls, url: str, life_s_max: float = DEFAULT_LIMITS.sqlite_read_s) -> SqliteDatabase:
        """Open a file and bring it to this code's schema; make it if there is none."""
        prepare_file(_path_of(url))
        return cls(url, life_s_max)

    async def rows(self, query: Query, **values: Any) -> list[Row]:
        return await self._threads.read(_rows, query.text, query.arguments(values))

    async def few(self, query: Query, **values: Any) -> list[Row]:
        if reader := self._reader_on_loop():
            return self._timed(_fetch, reader, query.text, query.arguments(values))
        return await self.rows(query, **values)

    async def among(self, query: ManyQuery, keys: Sequence[Any]) -> list[Row]:
        if not keys:
            return []
        if len(keys) <= POINT_KEYS_MAX and (reader := self._reader_on_loop()):
            return self._timed(_among, reader, query, keys)
        found: list[Row] = []
        for part in chunks(keys, LOOKUPS_PER_TURN):
            found += await self._threads.read(_among_many, query, part)
        return found

    async def each(self, query: ManyQuery, arguments: Sequence[Row]) -> list[Row]:
        if not arguments:
            return []
        if len(arguments) <= POINT_KEYS_MAX and (reader := self._reader_on_loop()):
            return self._timed(_each, reader, query, arguments, 0)
        found: list[Row] = []
        for number, part in enumerate(chunks(arguments, LOOKUPS_PER_TURN)):
            found += await self._threads.read(_each_looking, query, part, number * LOOKUPS_PER_TURN)
        return found

    async def single(self, query: ManyQuery, arguments: Row) -> list[Row]:
        values = arguments + query.constants
        if reader := self._reader_on_loop():
            return self._timed(_fetch, reader, query.text, values)
        return await self._threads.read(_rows, query.text, values)

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[SqliteDatabase]:
        frozen = SqliteDatabase(f"sqlite:///{self.path}", self._life_s_max, is_frozen=True)
        try:
            yield frozen
        finally:
            await frozen.close()

    async def ping(self) -> None:
        self._check_place()
        await self._threads.read(_rows, "SELECT 1 FROM store_meta LIMIT 1", ())

    def begin_writing(self) -> None:
        if self._writer is None:
            self._lock = _writer_lock(self.path)
            self._writer = _connect(self.path)
            self._writer.execute("PRAGMA synchronous = FULL")
            self._writer.execute(f"PRAGMA cache_size = -{WRITER_CACHE_KIB}")
            self._writer.execute(f"PRAGMA wal_autocheckpoint = {WAL_PAGES}")
            # Deleted content is overwritten with zeros (docs/decisions/0035).
            self._writer.execute("PRAGMA secure_delete = ON")

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        if self._writer is None:
            raise Problem(Code.STORE_UNAVAILABLE, "this process is not the writer of this store")
        writer = self._writer
        try:
            writer.execute("BEGIN IMMEDIATE")
            yield SqliteTransaction(writer)
            self._check_place()
            writer.execute("COMMIT")
            self._commits += 1
        except BaseException as error:
            # Some faults roll back by themselves, and a failed roll-back must not hide the fault.
            if writer.in_transaction:
                with suppress(sqlite3.Error):
                    writer.execute("ROLLBACK")
            _refuse(error)
            raise

    def _check_place(self) -> None:
        """Raise STORE_UNAVAILABLE unless the open file is the one at `path`.

        SQLite goes on writing to a file that was deleted, and its content ends with the process.
        """
        if _identity(self.path) != self._file:
            raise Problem(
                Code.STORE_UNAVAILABLE,
                f"{self.path} was deleted or replaced while the node runs; stop the node, put the "
                "file back, then start the node",
            )

    def erase(self) -> Erasure:
        if self._writer is None:
            raise Problem(Code.STORE_UNAVAILABLE, "this process is not the writer of this store")
        try:
            self._writer.execute(f"PRAGMA incremental_vacuum({FREE_PAGES_PER_ERASURE})").fetchall()
            # The log holds pages as they were before. It is emptied only while nobody reads from it, and
            # publishers wait meanwhile.
            self._writer.execute(f"PRAGMA busy_timeout = {ERASURE_WAIT_MS}")
            (is_busy, *_), *_ = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error as error:
            _refuse(error)
            raise
        finally:
            self._writer.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        return Erasure.PENDING if is_busy else Erasure.DONE

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.close)
        self.close_now()

    def close_now(self) -> None:
        """`close` for those who have no event loop."""
        self._threads.close()
        self._end_reading()
        for connection in (self._reader, self._writer, self._lock):
            if connection is not None:
                connection.close()

    def _reader_on_loop(self) -> sqlite3.Connection | None:
        """The connection of the event loop, if the next look-up runs on it.

        It is inside of a transaction that ends with this turn of the loop: beginning one costs system calls, a
        third of a look-up, so all look-ups of a turn share one. A commit of this process ends it, because
        readers see the commit at once.
        """
        reader = self._reader
        if reader is None or not self._point_reads.begins_on_loop():
            return None
        if self._reads_as_of != self._commits:
            self._end_reading()
        if self._reads_as_of is None:
            self._reads_as_of = self._commits
            try:
                reader.execute("BEGIN")
            except sqlite3.Error as error:
                _refuse(error)
                raise
            asyncio.get_running_loop().call_soon(self._end_reading)
        return reader

    def _timed(self, read: Callable[..., list[Row]], *arguments: Any) -> list[Row]:
        began_s = perf_counter()
        try:
            return read(*arguments)
        except sqlite3.Error as error:
            _refuse(error)
            raise
        finally:
            self._point_reads.add(perf_counter() - began_s)

    def _end_reading(self) -> None:
        if self._reads_as_of is not None and self._reader is not None:
            self._reads_as_of = None
            # Some faults end the transaction by themselves, and a damaged file cannot COMMIT.
            if self._reader.in_transaction:
                self._reader.execute("ROLLBACK")


class SqliteTransaction:
    """The writer's connection inside of a transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def rows(self, query: Query, **values: Any) -> list[Row]:
        return _fetch(self._connection, query.text, query.arguments(values))

    def among(self, query: ManyQuery, keys: Sequence[Any]) -> list[Row]:
        return _among_parts(self._connection, query, keys)

    def each(self, query: ManyQuery, arguments: Sequence[Row]) -> list[Row]:
        return _each(self._connection, query, arguments, 0)

    def execute(self, query: Query, **values: Any) -> None:
        self._connection.execute(query.text, query.arguments(values))

    def many(self, query: ManyQuery, rows: Sequence[Row]) -> None:
        insert_many(self._connection, query, rows)


def problem_of(error: BaseException) -> Problem | None:
    """The `Problem` for an error of the database; None if the data are at fault."""
    if not isinstance(error, sqlite3.Error):
        return None
    code = getattr(error, "sqlite_errorcode", 0)
    if code & 0xFF in _DAMAGED:
        return Problem(
            Code.STORE_UNAVAILABLE,
            f"the database file is damaged ({error}); `sdstore check --deep` names the damage and "
            "what to do",
        )
    if code & 0xFF == _INTERRUPTED:
        return Problem(Code.STORE_UNAVAILABLE, "the database was read for too long")
    if code in _UNREADABLE or code & 0xFF in _UNAVAILABLE:
        return Problem(Code.STORE_UNAVAILABLE, f"the database refuses: {error}")
    if code & 0xFF in _FULL:
        return Problem(Code.DISK_FULL, f"the database could not be written: {error}")
    return None


def _refuse(error: BaseException) -> None:
    problem = problem_of(error)
    if problem is not None:
        raise problem from error


def insert_many(connection: sqlite3.Connection, query: ManyQuery, rows: Sequence[Row]) -> None:
    """Run a writing statement for every row."""
    whole = len(rows) - len(rows) % SQLITE_ROWS_PER_INSERT if query.several else 0
    if query.several and whole:
        parts = chunks(rows[:whole], SQLITE_ROWS_PER_INSERT)
        connection.executemany(query.several, [tuple(chain.from_iterable(each)) for each in parts])
    if whole < len(rows):
        connection.executemany(query.text, rows[whole:])


def _fetch(connection: sqlite3.Connection, text: str, arguments: Sequence[Any]) -> list[Row]:
    return connection.execute(text, arguments).fetchall()


def _among(connection: sqlite3.Connection, query: ManyQuery, keys: Sequence[Any]) -> list[Row]:
    text, most = query.text, SQLITE_KEYS_PER_QUERY[-1]
    for fewer, shorter in query.shorter:
        if len(keys) <= fewer:
            text, most = shorter, fewer
            break
    padded = (*keys, *([keys[-1]] * (most - len(keys))), *query.constants)
    return connection.execute(text, padded).fetchall()


def _among_parts(
    connection: sqlite3.Connection, query: ManyQuery, keys: Sequence[Any]
) -> list[Row]:
    parts = chunks(keys, SQLITE_KEYS_PER_QUERY[-1])
    return [row for part in parts for row in _among(connection, query, part)]


def _each(
    connection: sqlite3.Connection, query: ManyQuery, arguments: Sequence[Row], first: int
) -> list[Row]:
    text, constants = query.text, query.constants
    execute = connection.cursor().execute
    return [
        (number, *row)
        for number, values in enumerate(arguments, first)
        for row in execute(text, values + constants)
    ]


# --- reads of threads


def _rows(reader: _Reader, text: str, arguments: Sequence[Any]) -> list[Row]:
    return _fetch(reader.connection, text, arguments)


def _among_many(reader: _Reader, query: ManyQuery, keys: Sequence[Any]) -> list[Row]:
    return _among_parts(reader.connection, query, keys)


def _each_looking(
    reader: _Reader, query: ManyQuery, arguments: Sequence[Row], first: int
) -> list[Row]:
    found: list[Row] = []
    for number, part in enumerate(chunks(arguments, LOOKUPS_PER_LOOK)):
        reader.look()
        found += _each(reader.connection, query, part, first + number * LOOKUPS_PER_LOOK)
    return found


def _path_of(url: str) -> Path:
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite" or not parsed.database:
        raise UnsupportedDatabaseError(f"{url!r} does not name an SQLite file")
    return Path(parsed.database)


def prepare_file(path: Path) -> None:
    """Make the file if there is none, and bring it to this code's schema."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _usable(path):
        if is_current(_revision(path)):
            return
    with writing_alone(path), _usable(path):
        migrate(f"sqlite:///{path}")


def require_current(path: Path) -> None:
    """Return if the file has this code's schema, as far as can be read; else raise UnusableFileError."""
    with suppress(sqlite3.Error):
        if not is_current(found := _revision(path)):
            what = "is not a store" if found is None else f"has an older schema ({found})"
            raise UnusableFileError(f"{path} {what}: `sdstore migrate` upgrades older stores")


def _revision(path: Path) -> str | None:
    if not path.exists():
        return None
    with closing(_attached(path)) as connection:
        has_table = "SELECT 1 FROM sqlite_schema WHERE name = 'alembic_version'"
        if connection.execute(has_table).fetchone() is None:
            return None
        found = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        return None if found is None else str(found[0])


def _connect(path: Path) -> sqlite3.Connection:
    with _usable(path):
        connection = _attached(path)
        connection.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
        connection.execute("PRAGMA journal_mode = WAL")
        return connection


def _reading_connection(path: Path) -> sqlite3.Connection:
    connection = _connect(path)
    connection.execute(f"PRAGMA cache_size = -{READER_CACHE_KIB}")
    return connection


def _attached(path: Path) -> sqlite3.Connection:
    """A connection that has read from the file.

    Connections share the index of the write-ahead log, a file of its own. On a full disk there is no
    room for it: then it is in the memory of this process, and no other process can open the database.
    """
    try:
        return _attached_as(str(path))
    except sqlite3.Error as error:
        if error.sqlite_errorcode != sqlite3.SQLITE_IOERR_SHMSIZE:
            raise
    return _attached_as(f"{path.absolute().as_uri()}?vfs=unix-excl")


def _attached_as(name: str) -> sqlite3.Connection:
    # Connections are handed between threads, never shared by two at a time.
    connection = sqlite3.connect(name, isolation_level=None, check_same_thread=False, uri=True)
    try:
        connection.execute("SELECT 1 FROM sqlite_schema").fetchone()
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of a file; None without one."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    """Raises `UnusableFileError` for every error of SQLite."""
    try:
        yield
    except (sqlite3.Error, DBAPIError) as error:
        fault = error.orig if isinstance(error, DBAPIError) else error
        raise UnusableFileError(f"{path} cannot be used: {fault}") from error


def _writer_lock(path: Path, wait_s: float = WRITER_LOCK_WAIT_S) -> sqlite3.Connection:
    """Lock a second SQLite file for the life of this process: works wherever SQLite does."""
    with _usable(path):
        lock = sqlite3.connect(
            f"{path}-writer",
            timeout=wait_s,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            lock.execute("PRAGMA locking_mode = EXCLUSIVE")
            lock.execute("PRAGMA journal_mode = MEMORY")  # a full disk has no room for a journal
            lock.execute("BEGIN EXCLUSIVE")
        except sqlite3.Error as error:
            lock.close()
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                raise
            raise StoreBusyError(f"another process writes to {path}: stop it first") from error
    return lock


def replace_file(path: Path, draft: Path, kept: Path | None = None) -> None:
    """Replace the database at `path` by `draft`, one file without a log.

    The caller holds the writer's lock. The old file stays under the name `kept`, if that is given. Raises
    `Problem` STORE_UNAVAILABLE while another process reads the old file.
    """
    with closing(sqlite3.connect(path)) as connection:
        # SQLite would take a log that a reader keeps for the new file's log.
        if connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
            raise Problem(Code.STORE_UNAVAILABLE, "the store is being read: try again")
    sync_path(draft)
    if kept is not None:
        kept.unlink(missing_ok=True)
        kept.hardlink_to(path)
    draft.replace(path)
    sync_path(path.parent)


def require_writable(path: Path) -> None:
    """Return if this process could write the file now, or make it; raises as `Database.begin_writing`."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UnusableFileError(f"{path} cannot be used: {error.strerror}") from error
    _writer_lock(path, wait_s=0).close()
    if path.exists():
        with _usable(path), closing(_attached(path)) as connection:
            connection.execute("BEGIN IMMEDIATE")


@contextmanager
def writing_alone(path: Path) -> Iterator[None]:
    """Hold the writer's lock of a file; `StoreBusyError` if another process has it."""
    lock = _writer_lock(path)
    try:
        yield
    finally:
        lock.close()
