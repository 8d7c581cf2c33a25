"""PostgreSQL 15 or later: several node processes may share one database.

Writers take turns under an advisory lock that ends with their transaction, so that sequence numbers
become visible in their own order and the highest committed number is the watermark
(docs/decisions/sequence.md). Reads go through a pool; look-ups by ID that wait at the same time share
one query, which is what makes them fast.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg import errors
from psycopg.conninfo import conninfo_to_dict
from psycopg_pool import AsyncConnectionPool, PoolTimeout

from app.errors import Code, Problem
from app.store.database import Database, Transaction
from app.store.faults import StoreError, UnsupportedDatabaseError
from app.store.migrate import is_current, migrate
from app.store.sql import POSTGRES, ManyQuery, Query, Row

CONNECTIONS_MAX = 8
"""Connections that read: more of them than the server has cores gain nothing."""

WAIT_FOR_CONNECTION_S = 5.0
"""A reader that gets no connection for so long is told that the database is unavailable."""

LOOKUPS_SHARED_MAX = 512
"""Look-ups in one shared query: a millisecond of the server."""

SHARED_QUERIES_MAX = 2
"""Shared queries under way at a time: while one is answered, the next one gathers."""

WRITER_LOCK = 0x5D5_0001
"""The advisory lock of those who write, one for each database."""

VERSION_MIN = 150_000

_FULL = (errors.DiskFull, errors.IoError)
_UNAVAILABLE = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    errors.ReadOnlySqlTransaction,
    PoolTimeout,
)


class PostgresDatabase(Database):
    """One PostgreSQL database."""

    def __init__(self, url: str) -> None:
        self.sql = POSTGRES
        self._url = url
        self._pool = AsyncConnectionPool(
            url,
            min_size=1,
            max_size=CONNECTIONS_MAX,
            timeout=WAIT_FOR_CONNECTION_S,
            kwargs={"autocommit": True},
            open=False,
        )
        self._writer: psycopg.Connection[Row] | None = None
        self._shared: dict[str, SharedLookups] = {}

    @classmethod
    async def open(cls, url: str) -> PostgresDatabase:
        """Connect, and bring the database to this code's schema."""
        revision = await asyncio.to_thread(_revision, url)
        if not is_current(revision):
            await asyncio.to_thread(migrate, url)
        database = cls(url)
        await database._pool.open()
        return database

    async def rows(self, query: Query, **values: Any) -> list[Row]:
        return await self._fetch(query.text, query.arguments(values))

    async def among(self, query: ManyQuery, keys: Sequence[Any]) -> list[Row]:
        return await self._fetch(query.text, (list(keys), *query.constants)) if keys else []

    async def each(self, query: ManyQuery, arguments: Sequence[Row]) -> list[Row]:
        if not arguments:
            return []
        return _numbered_from_0(await self._fetch(query.text, _columns(query, arguments)))

    async def single(self, query: ManyQuery, arguments: Row) -> list[Row]:
        shared = self._shared.get(query.text)
        if shared is None:
            shared = self._shared[query.text] = SharedLookups(self, query)
        return await shared.look_up(arguments)

    def begin_writing(self) -> None:
        self._connected_writer()

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        try:
            writer = self._connected_writer()
            with writer.transaction():
                writer.execute("SELECT pg_advisory_xact_lock(%s)", (WRITER_LOCK,))
                yield PostgresTransaction(writer)
        except Exception as error:
            problem = problem_of(error)
            if problem is None:
                raise
            raise problem from error

    async def close(self) -> None:
        await self._pool.close()
        if self._writer is not None:
            self._writer.close()

    def _connected_writer(self) -> psycopg.Connection[Row]:
        if self._writer is None or self._writer.closed:
            self._writer = psycopg.connect(self._url, autocommit=True)
        return self._writer

    async def _fetch(self, text: str, arguments: Sequence[Any]) -> list[Row]:
        try:
            async with self._pool.connection() as connection:
                cursor = connection.cursor(binary=True)
                await cursor.execute(text, arguments, prepare=True)
                return await cursor.fetchall()
        except Exception as error:
            problem = problem_of(error)
            if problem is None:
                raise
            raise problem from error


class PostgresTransaction:
    """The writer's connection inside of a transaction."""

    def __init__(self, connection: psycopg.Connection[Row]) -> None:
        self._cursor = connection.cursor(binary=True)

    def rows(self, query: Query, **values: Any) -> list[Row]:
        return self._fetch(query.text, query.arguments(values))

    def among(self, query: ManyQuery, keys: Sequence[Any]) -> list[Row]:
        return self._fetch(query.text, (list(keys), *query.constants)) if keys else []

    def each(self, query: ManyQuery, arguments: Sequence[Row]) -> list[Row]:
        if not arguments:
            return []
        return _numbered_from_0(self._fetch(query.text, _columns(query, arguments)))

    def execute(self, query: Query, **values: Any) -> None:
        self._execute(query.text, query.arguments(values))

    def many(self, query: ManyQuery, rows: Sequence[Row]) -> None:
        if rows:
            self._execute(query.text, _columns(query, rows))

    def _fetch(self, text: str, arguments: Sequence[Any]) -> list[Row]:
        self._execute(text, arguments)
        return self._cursor.fetchall()

    def _execute(self, text: str, arguments: Sequence[Any]) -> None:
        self._cursor.execute(text, arguments, prepare=True)


class SharedLookups:
    """Look-ups of one kind that wait at the same time become one query.

    As with group commit nothing waits for company: a look-up that finds no query under way starts
    one at once.
    """

    def __init__(self, database: PostgresDatabase, query: ManyQuery) -> None:
        self._database = database
        self._query = query
        self._waiting: list[tuple[Row, asyncio.Future[list[Row]]]] = []
        self._running: set[asyncio.Task[None]] = set()

    async def look_up(self, arguments: Row) -> list[Row]:
        """The rows of one look-up, without its number."""
        future: asyncio.Future[list[Row]] = asyncio.get_running_loop().create_future()
        self._waiting.append((arguments, future))
        if len(self._running) < SHARED_QUERIES_MAX:
            task = asyncio.create_task(self._run())
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        return await future

    async def _run(self) -> None:
        while self._waiting:
            batch = self._waiting[:LOOKUPS_SHARED_MAX]
            del self._waiting[:LOOKUPS_SHARED_MAX]
            answers: list[list[Row]] = [[] for _ in batch]
            try:
                found = await self._database.each(self._query, [each for each, _ in batch])
            except Exception as error:  # noqa: BLE001 - each of the waiting gets it
                _fail(batch, error)
                continue
            for number, *row in found:
                answers[number].append(tuple(row))
            for (_, future), answer in zip(batch, answers, strict=True):
                if not future.done():
                    future.set_result(answer)


def _fail(batch: Sequence[tuple[Row, asyncio.Future[list[Row]]]], error: Exception) -> None:
    for _, future in batch:
        if not future.done():
            future.set_exception(error)


def problem_of(error: BaseException) -> Problem | None:
    """The refusal that a fault of the database is; None where the data are at fault."""
    if isinstance(error, _FULL):
        return Problem(Code.DISK_FULL, f"the database could not be written: {error}")
    if isinstance(error, _UNAVAILABLE):
        return Problem(Code.STORE_UNAVAILABLE, f"the database cannot be used: {error}")
    return None


def _columns(query: ManyQuery, rows: Sequence[Row]) -> list[Any]:
    return [*map(list, zip(*rows, strict=True)), *query.constants]


def _numbered_from_0(rows: list[Row]) -> list[Row]:
    # WITH ORDINALITY counts from 1; the join keeps the order of each look-up, not of all of them.
    return sorted([(row[0] - 1, *row[1:]) for row in rows], key=lambda row: int(row[0]))


def _revision(url: str) -> str | None:
    try:
        with suppress(errors.UndefinedTable), psycopg.connect(url) as connection:
            if connection.info.server_version < VERSION_MIN:
                raise UnsupportedDatabaseError("PostgreSQL 15 or later is needed")
            row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
            return None if row is None else str(row[0])
    except psycopg.Error as error:
        name = conninfo_to_dict(url).get("dbname")
        raise StoreError(f"the database {name!r} cannot be reached: {error}") from error
    return None
