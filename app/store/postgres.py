"""PostgreSQL 15 or later: several node processes may share one database.

Writers take turns under an advisory lock that ends with their transaction, so that numbers become
visible in their own order and the highest committed one is the watermark (docs/decisions/0002). Reads
go through a pool; look-ups by ID that wait at the same time share one query.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from copy import copy
from functools import cache, partial
from itertools import chain
from operator import itemgetter
from struct import Struct
from typing import Any, NamedTuple, cast

import numpy as np
import psycopg
from psycopg import errors
from psycopg.adapt import AdaptersMap, Dumper
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import Format
from psycopg.types.numeric import Int8BinaryDumper
from psycopg.types.string import StrBinaryDumper
from psycopg_pool import AsyncConnectionPool
from sqlalchemy import (
    ARRAY,
    BigInteger,
    BindParameter,
    ColumnElement,
    Delete,
    Executable,
    FromClause,
    Integer,
    LargeBinary,
    Select,
    SmallInteger,
    Table,
    Text,
    Update,
    any_,
    bindparam,
    column,
    delete,
    func,
    literal_column,
    select,
    true,
    update,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.dialects.postgresql import psycopg as psycopg_dialect
from sqlalchemy.types import TypeEngine

from app.errors import Code, Problem
from app.server.limits import Limits
from app.store.database import (
    Arguments,
    Database,
    DatabaseUnreachableError,
    Erasure,
    Keyed,
    ManyQuery,
    Query,
    Row,
    SqlDialect,
    Transaction,
    UnsupportedDatabaseError,
)
from app.store.schema import is_current, migrate

WRITER_LOCK = 0x5D5_0001
"""The advisory lock of writers; PostgreSQL has one for each database."""

VERSION_MIN = 15

CUT_S = 1.0
"""After the time of a read, for the answer of a server that has ended the read itself."""

QUERIES_MAX = 2
"""Queries under way at a time: while one is answered, the next one gathers."""

_log = logging.getLogger(__name__)

_BEGIN = f"BEGIN; SELECT pg_advisory_xact_lock({WRITER_LOCK})"

# A URL can override these. A server that vanished is noticed within half a minute.
_DEFAULTS = {
    "application_name": "sdstore",
    "client_encoding": "UTF8",
    "connect_timeout": 5,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}

# Every statement is a bounded number of look-ups in indexes. The planner must not scan a table because
# it has no statistics, nor plan the same look-ups again for other arguments. An acknowledged commit is
# on disk, whatever the default of the server, the database or the role.
_SESSION = """
SET plan_cache_mode = force_generic_plan;
SET enable_seqscan = off;
SET enable_bitmapscan = off;
SET enable_hashjoin = off;
SET enable_mergejoin = off;
SET max_parallel_workers_per_gather = 0;
SET jit = off;
SET default_transaction_isolation = 'read committed';
SET statement_timeout = '{seconds}s';
SET idle_in_transaction_session_timeout = '{seconds}s';
SELECT set_config('synchronous_commit', 'on', false)
WHERE current_setting('synchronous_commit') = 'off'
"""

_PROBE = """
SELECT (SELECT 1 FROM messages LIMIT 1), (SELECT 1 FROM frames LIMIT 1), (SELECT 1 FROM channels LIMIT 1)
"""

_UNAVAILABLE = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    psycopg.InternalError,
    errors.ReadOnlySqlTransaction,
)


# ---- statements


class PostgresSql(SqlDialect):
    """Placeholders are `%s`; many keys and rows travel as one array for each column."""

    _dialect = psycopg_dialect.dialect(paramstyle="format")  # type: ignore[no-untyped-call]

    def among(
        self, key: ColumnElement[Any], make: Callable[[ColumnElement[bool]], Select[Any]]
    ) -> ManyQuery:
        keys: BindParameter[Any] = bindparam("keys", type_=ARRAY(key.type))
        return self._arrays(make(key == any_(keys)), {"keys": key.type})

    def each(self, arguments: Arguments, make: Callable[[Keyed], Select[Any]]) -> ManyQuery:
        rows = self._unnested(arguments, number="which")
        found = make({name: rows.c[name] for name in arguments}).lateral()
        # WITH ORDINALITY counts from 1.
        which = (rows.c.which - literal_column("1")).label("which")
        statement = select(which, *found.c).select_from(rows.join(found, true()))
        return self._arrays(statement, arguments)

    @cache  # noqa: B019 - lives as long as the process
    def insert(self, table: Table, *, or_ignore: bool = False) -> ManyQuery:
        statement = self._insert_unnested(table)
        if or_ignore:
            statement = statement.on_conflict_do_nothing()
        return self._arrays(statement, _types(table))

    @cache  # noqa: B019 - lives as long as the process
    def upsert(self, table: Table, key: str, merge: Callable[[Any], dict[str, Any]]) -> ManyQuery:
        statement = self._insert_unnested(table)
        statement = statement.on_conflict_do_update(
            index_elements=[key], set_=merge(statement.excluded)
        )
        return self._arrays(statement, _types(table))

    @cache  # noqa: B019 - lives as long as the process
    def delete_each(self, table: Table, *columns: str) -> ManyQuery:
        types = {name: table.c[name].type for name in columns}
        rows = self._unnested(types)
        statement: Delete = delete(table)
        for name in columns:
            statement = statement.where(table.c[name] == rows.c[name])
        return self._arrays(statement, types)

    @cache  # noqa: B019 - lives as long as the process
    def update_each(self, table: Table, key: str, *changed: str) -> ManyQuery:
        types = {name: table.c[name].type for name in (*changed, key)}
        rows = self._unnested(types)
        statement: Update = update(table).values({name: rows.c[name] for name in changed})
        return self._arrays(statement.where(table.c[key] == rows.c[key]), types)

    def _arrays(self, statement: Executable, types: Arguments) -> ManyQuery:
        return self._many(statement, list(types))._replace(types=tuple(types.values()))

    def _insert_unnested(self, table: Table) -> postgresql.Insert:
        rows = self._unnested(_types(table))
        return postgresql.insert(table).from_select(
            [c.name for c in table.columns], select(*[rows.c[c.name] for c in table.columns])
        )

    @staticmethod
    def _unnested(
        columns: Mapping[str, TypeEngine[Any]], *, number: str | None = None
    ) -> FromClause:
        arrays = [bindparam(name, type_=ARRAY(_plain(kind))) for name, kind in columns.items()]
        described = [column(name, kind) for name, kind in columns.items()]
        return (
            func.unnest(*arrays).table_valued(*described, with_ordinality=number).render_derived()
        )


def _types(table: Table) -> Arguments:
    return {each.name: each.type for each in table.columns}


def _plain(kind: TypeEngine[Any]) -> TypeEngine[Any]:
    # The type of an array's elements cannot name a collation.
    return Text() if isinstance(kind, Text) else kind


POSTGRES = PostgresSql()


# ---- the database


class PostgresDatabase(Database):
    """One PostgreSQL database."""

    is_shared = True

    def __init__(self, url: str, limits: Limits) -> None:
        self.sql = POSTGRES
        self._parameters = parameters_of(url)
        self._limits = limits
        self._pool = AsyncConnectionPool(
            kwargs=self._parameters,
            min_size=1,
            max_size=limits.database_connections_max,
            max_waiting=limits.lookups_waiting_max,
            timeout=limits.database_wait_s,
            # On failure the next reader makes the pool reconnect, instead of the pool's own back-off.
            reconnect_timeout=limits.database_wait_s,
            configure=self._configure,
            open=False,
        )
        self._writer: psycopg.Connection[Row] | None = None
        self._probe: psycopg.AsyncConnection[Any] | None = None
        self._shared: dict[str, SharedLookups] = {}
        # Of a snapshot: the connection that all reads are made on.
        self._pinned: psycopg.AsyncConnection[Any] | None = None

    @classmethod
    async def open(cls, url: str, limits: Limits) -> PostgresDatabase:
        """Connect, and bring the database to this code's schema."""
        database = cls(url, limits)
        if not is_current(await asyncio.to_thread(_revision, database._parameters)):
            await asyncio.to_thread(migrate, url)
        await database._pool.open()
        return database

    async def rows(self, query: Query, **values: Any) -> list[Row]:
        return await self._fetch(query.text, query.arguments(values))

    async def among(self, query: ManyQuery, keys: Sequence[Any]) -> list[Row]:
        return await self._fetch(query.text, _arrays(query, [keys])) if keys else []

    async def each(self, query: ManyQuery, arguments: Sequence[Row]) -> list[Row]:
        if not arguments:
            return []
        rows = await self._fetch(query.text, _columns(query, arguments))
        return sorted(rows, key=itemgetter(0))

    async def single(self, query: ManyQuery, arguments: Row) -> list[Row]:
        shared = self._shared.get(query.text)
        if shared is None:
            shared = SharedLookups(partial(self.each, query), self._limits)
            self._shared[query.text] = shared
        return await shared.look_up(arguments)

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[PostgresDatabase]:
        try:
            async with self._pool.connection() as connection:
                await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                frozen: PostgresDatabase = copy(self)
                frozen._pinned, frozen._shared = connection, {}
                yield frozen
        except psycopg.Error as error:
            problem = problem_of(error)
            if problem is not None:
                raise problem from error
            raise

    async def ping(self) -> None:
        # On its own connection: a busy pool must not look like an absent database. It reads what callers
        # read, so it waits as they do for a lock on these tables.
        try:
            if self._probe is None or self._probe.closed:
                self._probe = await psycopg.AsyncConnection.connect(**self._parameters)
            await self._probe.execute(_PROBE)
        except psycopg.Error as error:
            raise Problem(Code.STORE_UNAVAILABLE, str(unreachable(error))) from error

    def begin_writing(self) -> None:
        try:
            self._connected_writer()
        except psycopg.Error as error:
            raise unreachable(error) from error

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        try:
            writer = self._begin()
            # The server inserts one column of rows while the next one is made.
            with writer.pipeline():
                yield PostgresTransaction(writer)
                writer.execute("COMMIT")
        except BaseException as error:
            problem = problem_of(error)
            self._end_failed(is_intact=problem is None)
            if problem is not None:
                raise problem from error
            raise

    def erase(self) -> Erasure:
        return Erasure.REWRITE_NEEDED

    async def close(self) -> None:
        await self._pool.close()
        if self._probe is not None:
            await self._probe.close()
        if self._writer is not None:
            self._writer.close()

    # ---- the writer's connection

    def _begin(self) -> psycopg.Connection[Row]:
        writer = self._connected_writer()
        try:
            writer.execute(_BEGIN)
        except psycopg.OperationalError:
            # A restart of the server may have ended the connection; nothing is written yet.
            if not writer.closed:
                raise
            writer = self._connected_writer()
            writer.execute(_BEGIN)
        return writer

    def _connected_writer(self) -> psycopg.Connection[Row]:
        if self._writer is None or self._writer.closed:
            writer = psycopg.connect(**self._parameters)
            adapt(writer.adapters)
            writer.execute(session_settings(self._limits.database_statement_s))
            self._writer = writer
        return self._writer

    def _end_failed(self, *, is_intact: bool) -> None:
        """Roll back if the data were at fault; after any other fault, connect again next time."""
        writer = self._writer
        if writer is None:
            return
        try:
            if is_intact:
                writer.execute("ROLLBACK")
                return
        except psycopg.Error:
            # The caller gets the original error.
            _log.warning("a transaction could not be rolled back", exc_info=True)
        writer.close()

    # ---- the readers' connections

    async def _configure(self, connection: psycopg.AsyncConnection[Any]) -> None:
        adapt(connection.adapters)
        await connection.execute(session_settings(self._limits.database_read_s))

    async def _fetch(self, text: str, arguments: Sequence[Any]) -> list[Row]:
        try:
            try:
                return await self._fetch_once(text, arguments)
            except _ConnectionLostError:
                await self._pool.check()
                return await self._fetch_once(text, arguments)
        except Exception as error:
            problem = problem_of(error)
            if problem is not None:
                raise problem from error
            raise

    async def _fetch_once(self, text: str, arguments: Sequence[Any]) -> list[Row]:
        if self._pinned is not None:
            return await self._fetch_on(self._pinned, text, arguments)
        async with self._pool.connection() as connection:
            return await self._fetch_on(connection, text, arguments)

    async def _fetch_on(
        self, connection: psycopg.AsyncConnection[Any], text: str, arguments: Sequence[Any]
    ) -> list[Row]:
        cursor = connection.cursor(binary=True)
        # The server ends a statement that takes too long. A server that is stopped does not.
        loop = asyncio.get_running_loop()
        seconds = self._limits.database_read_s
        cutting = loop.call_later(seconds + CUT_S, _cut, connection)
        try:
            await cursor.execute(text, arguments, prepare=True)
        except psycopg.OperationalError as error:
            if isinstance(error, errors.QueryCanceled) or loop.time() >= cutting.when():
                detail = f"the database did not answer a read within {seconds} s"
                raise Problem(Code.STORE_UNAVAILABLE, detail) from error
            if connection.closed:
                raise _ConnectionLostError(str(error)) from error
            raise
        finally:
            cutting.cancel()
        return await cursor.fetchall()


class PostgresTransaction:
    """The writer's connection inside of a transaction."""

    def __init__(self, connection: psycopg.Connection[Row]) -> None:
        self._cursor = connection.cursor(binary=True)

    def rows(self, query: Query, **values: Any) -> list[Row]:
        return self._fetch(query.text, query.arguments(values))

    def among(self, query: ManyQuery, keys: Sequence[Any]) -> list[Row]:
        return self._fetch(query.text, _arrays(query, [keys])) if keys else []

    def each(self, query: ManyQuery, arguments: Sequence[Row]) -> list[Row]:
        if not arguments:
            return []
        return sorted(self._fetch(query.text, _columns(query, arguments)), key=itemgetter(0))

    def execute(self, query: Query, **values: Any) -> None:
        self._cursor.execute(query.text, query.arguments(values), prepare=True)

    def many(self, query: ManyQuery, rows: Sequence[Row]) -> None:
        if rows:
            self._cursor.execute(query.text, _columns(query, rows), prepare=True)

    def _fetch(self, text: str, arguments: Sequence[Any]) -> list[Row]:
        self._cursor.execute(text, arguments, prepare=True)
        return self._cursor.fetchall()


def _cut(connection: psycopg.AsyncConnection[Any]) -> None:
    """Let a read fail whose server is silent; the pool replaces the connection."""
    # Not by a cancellation, which waits for an answer of the server.
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
        duplicate.shutdown(socket.SHUT_RDWR)


class _ConnectionLostError(psycopg.OperationalError):
    """A pooled connection had ended before it was used; another one may work."""


def _columns(query: ManyQuery, rows: Sequence[Row]) -> list[Any]:
    return _arrays(query, zip(*rows, strict=True))


def _arrays(query: ManyQuery, columns: Any) -> list[Any]:
    arrays = [array_of(kind, column) for kind, column in zip(query.types, columns, strict=True)]
    return [*arrays, *query.constants]


def _revision(parameters: dict[str, Any]) -> str | None:
    try:
        with psycopg.connect(**parameters) as connection:
            check_server(connection.info)
            with suppress(errors.UndefinedTable):
                row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
                return None if row is None else str(row[0])
    except psycopg.Error as error:
        raise unreachable(error) from error
    return None


# ---- look-ups that share queries

RunEach = Callable[[Sequence[Row]], Awaitable[list[Row]]]
"""Runs many look-ups; each row of the answer begins with the number of its look-up."""

Waiting = tuple[Row, asyncio.Future[list[Row]]]


class SharedLookups:
    """Look-ups of one kind."""

    def __init__(self, run_each: RunEach, limits: Limits) -> None:
        self._run_each = run_each
        self._limits = limits
        self._waiting: list[Waiting] = []
        self._running: set[asyncio.Task[None]] = set()

    async def look_up(self, arguments: Row) -> list[Row]:
        """The rows of one look-up, without its number. Raises `overloaded` where too many wait."""
        if len(self._waiting) >= self._limits.lookups_waiting_max:
            raise Problem(
                Code.OVERLOADED,
                f"{self._limits.lookups_waiting_max:,} look-ups are waiting; retry after 1 s",
                headers={"Retry-After": "1"},
            )
        future: asyncio.Future[list[Row]] = asyncio.get_running_loop().create_future()
        self._waiting.append((arguments, future))
        if len(self._running) < QUERIES_MAX:
            task = asyncio.create_task(self._run())
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        return await future

    async def _run(self) -> None:
        most = self._limits.lookups_shared_max
        while self._waiting:
            batch = self._waiting[:most]
            del self._waiting[:most]
            try:
                rows = await self._run_each([arguments for arguments, _ in batch])
            except Exception as error:  # noqa: BLE001 - whatever it is, everybody who waits gets it
                _fail(batch, error)
            else:
                _answer(batch, rows)


def _answer(batch: Sequence[Waiting], rows: Sequence[Row]) -> None:
    answers: list[list[Row]] = [[] for _ in batch]
    for row in rows:
        answers[row[0]].append(row[1:])
    for (_, future), answer in zip(batch, answers, strict=True):
        if not future.done():
            future.set_result(answer)


def _fail(batch: Sequence[Waiting], error: Exception) -> None:
    for _, future in batch:
        if not future.done():
            future.set_exception(error)


# ---- arrays
#
# A driver adapts an array value by value, in Python, which costs more than the insertion itself. So whole
# columns are written at once in the binary format of `array_recv` (PostgreSQL,
# src/backend/utils/adt/arrayfuncs.c): number of dimensions, a flag for nulls, the elements' type, the
# dimension's length and lower bound; then each element as its length in bytes (-1: null) and its bytes,
# all numbers big-endian.

_HEADER = Struct(">iiIii")
_LENGTH = Struct(">i").pack
_NULL = _LENGTH(-1)

_INTEGERS: dict[type[TypeEngine[Any]], tuple[int, int]] = {
    SmallInteger: (21, 2),
    Integer: (23, 4),
    BigInteger: (20, 8),
}
"""Column type -> (type number on the wire, bytes)."""
_TEXT_OID, _BYTES_OID = 25, 17


class BinaryArray(NamedTuple):
    """An array as it goes over the wire; the statement's cast names its type."""

    data: bytes


class BinaryArrayDumper(Dumper):
    """Passes a `BinaryArray` on."""

    format = Format.BINARY

    def dump(self, obj: BinaryArray) -> bytes:
        """See `Dumper`."""
        return obj.data


def array_of(kind: TypeEngine[Any], values: Sequence[Any]) -> BinaryArray:
    """The array of a column's values."""
    if integer := _INTEGERS.get(type(kind)):
        oid, width = integer
        return _array(oid, len(values), _integers(values, width))
    if isinstance(kind, Text):
        return _array(_TEXT_OID, len(values), _sized(_texts(values)))
    if isinstance(kind, LargeBinary):
        return _array(_BYTES_OID, len(values), _sized(values))
    raise TypeError(f"no array of {kind!r}")


def wire_text(value: str) -> bytes | None:
    """UTF-8, or null for a text with U+0000: no stored text holds one, and null equals none."""
    return None if "\0" in value else value.encode()


def _array(oid: int, count: int, elements: bytes) -> BinaryArray:
    return BinaryArray(_HEADER.pack(1, 1, oid, count, 1) + elements)


def _integers(values: Sequence[int | None], width: int) -> bytes:
    if None in values:
        return _sized([v if v is None else v.to_bytes(width, "big", signed=True) for v in values])
    rows = np.empty(len(values), [("length", ">i4"), ("value", f">i{width}")])
    rows["length"] = width
    rows["value"] = values
    return rows.tobytes()


def _texts(values: Sequence[str]) -> Sequence[bytes | None]:
    return [wire_text(v) for v in values] if "\0" in "".join(values) else [*map(str.encode, values)]


def _sized(values: Sequence[bytes | None]) -> bytes:
    if None in values:
        return b"".join([_NULL if v is None else _LENGTH(len(v)) + v for v in values])
    present = cast("Sequence[bytes]", values)
    lengths = [*map(len, present)]
    if len(set(lengths)) == 1:
        return _of_one_length(present, lengths[0])
    return b"".join(chain.from_iterable(zip(map(_LENGTH, lengths), present, strict=True)))


def _of_one_length(values: Sequence[bytes], length: int) -> bytes:
    rows = np.empty(len(values), [("length", ">i4"), ("value", f"V{length}")])
    rows["length"] = length
    rows["value"] = np.frombuffer(b"".join(values), f"V{length}") if length else b""
    return rows.tobytes()


# ---- sessions: parameters, settings, faults


class _TextDumper(StrBinaryDumper):
    def dump(self, obj: str) -> bytes | None:
        return wire_text(obj)


def parameters_of(url: str) -> dict[str, Any]:
    """The arguments of `psycopg.connect`: the URL's own parameters over this node's defaults."""
    try:
        given = conninfo_to_dict(url)
    except psycopg.ProgrammingError as error:
        raise UnsupportedDatabaseError(f"this is not a URL of PostgreSQL: {error}") from error
    return {**_DEFAULTS, **given, "autocommit": True}


def session_settings(seconds: int) -> str:
    """Statements that every new connection runs; `seconds`: the longest of its later statements."""
    return _SESSION.format(seconds=seconds)


def adapt(adapters: AdaptersMap) -> None:
    """Send everything in binary; integers in one width, so that a statement is prepared once."""
    adapters.register_dumper(int, Int8BinaryDumper)
    adapters.register_dumper(str, _TextDumper)
    adapters.register_dumper(BinaryArray, BinaryArrayDumper)


def check_server(info: psycopg.ConnectionInfo) -> None:
    """Refuse servers that would answer differently."""
    if info.server_version < VERSION_MIN * 10_000:
        version = info.server_version // 10_000
        raise UnsupportedDatabaseError(
            f"PostgreSQL {VERSION_MIN} or later is needed; this server is {version}"
        )
    encoding = info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise UnsupportedDatabaseError(
            f"the database {info.dbname!r} is encoded in {encoding}: make one with ENCODING 'UTF8'"
        )


def unreachable(error: psycopg.Error) -> DatabaseUnreachableError:
    """The error if no connection can be made."""
    return DatabaseUnreachableError(f"the database cannot be reached: {str(error).strip()}")


def problem_of(error: BaseException) -> Problem | None:
    """The `Problem` for an error of the database; None if the data are at fault."""
    if isinstance(error, errors.DiskFull):
        return Problem(Code.DISK_FULL, f"the database could not be written: {error}")
    if isinstance(error, (errors.DataCorrupted, errors.IndexCorrupted)):
        return Problem(
            Code.STORE_UNAVAILABLE,
            f"the database is damaged ({error}); `sdstore check --deep` names the damage and what to do",
        )
    if isinstance(error, _UNAVAILABLE):
        return Problem(Code.STORE_UNAVAILABLE, f"the database cannot be used: {error}")
    return None
