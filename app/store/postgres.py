"""PostgreSQL 15 or later: several node processes may share one database.

Writers take turns under an advisory lock that ends with their transaction, so that numbers become
visible in their own order and the highest committed one is the watermark (docs/decisions/0002). Reads
go through a pool; look-ups by ID that wait at the same time share one query.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from operator import itemgetter
from typing import Any

import psycopg
from psycopg import errors
from psycopg_pool import AsyncConnectionPool

from app.errors import Code, Problem
from app.limits import Limits
from app.store.arrays import array_of
from app.store.database import Database, Transaction
from app.store.migrate import is_current, migrate
from app.store.pgsession import (
    adapt,
    check_server,
    parameters_of,
    problem_of,
    session_settings,
    unreachable,
)
from app.store.sharedlookups import SharedLookups
from app.store.sql import ManyQuery, PostgresSql, Query, Row

WRITER_LOCK = 0x5D5_0001
"""The advisory lock of those who write; PostgreSQL keeps those of different databases apart."""

_log = logging.getLogger(__name__)

_BEGIN = f"BEGIN; SELECT pg_advisory_xact_lock({WRITER_LOCK})"


class PostgresDatabase(Database):
    """One PostgreSQL database."""

    def __init__(self, url: str, limits: Limits) -> None:
        self.sql = PostgresSql()
        self._parameters = parameters_of(url)
        self._limits = limits
        self._pool = AsyncConnectionPool(
            kwargs=self._parameters,
            min_size=1,
            max_size=limits.database_connections_max,
            max_waiting=limits.lookups_waiting_max,
            timeout=limits.database_wait_s,
            # Then the next reader makes the pool try again, instead of ever rarer attempts.
            reconnect_timeout=limits.database_wait_s,
            configure=self._configure,
            open=False,
        )
        self._writer: psycopg.Connection[Row] | None = None
        self._probe: psycopg.AsyncConnection[Any] | None = None
        self._shared: dict[str, SharedLookups] = {}

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

    async def ping(self) -> None:
        # On a connection of its own: a busy pool is not a database that is away.
        try:
            if self._probe is None or self._probe.closed:
                self._probe = await psycopg.AsyncConnection.connect(**self._parameters)
            await self._probe.execute("SELECT 1")
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
            # It may have ended long ago, with a restart of the server; nothing is written yet.
            if not writer.closed:
                raise
            writer = self._connected_writer()
            writer.execute(_BEGIN)
        return writer

    def _connected_writer(self) -> psycopg.Connection[Row]:
        if self._writer is None or self._writer.closed:
            writer = psycopg.connect(**self._parameters)
            adapt(writer.adapters)
            writer.execute(session_settings(self._limits))
            self._writer = writer
        return self._writer

    def _end_failed(self, *, is_intact: bool) -> None:
        """Roll back where the data were at fault; of any other fault the next connection is free."""
        writer = self._writer
        if writer is None:
            return
        try:
            if is_intact:
                writer.execute("ROLLBACK")
                return
        except psycopg.Error:
            # The fault itself is what the caller has to hear of.
            _log.warning("a transaction could not be rolled back", exc_info=True)
        writer.close()

    # ---- the readers' connections

    async def _configure(self, connection: psycopg.AsyncConnection[Any]) -> None:
        adapt(connection.adapters)
        await connection.execute(session_settings(self._limits))

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
        async with self._pool.connection() as connection:
            cursor = connection.cursor(binary=True)
            try:
                await cursor.execute(text, arguments, prepare=True)
            except psycopg.OperationalError as error:
                if connection.closed:
                    raise _ConnectionLostError(str(error)) from error
                raise
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


class _ConnectionLostError(psycopg.OperationalError):
    """A pooled connection had ended before it was used; there may be others, and there will be."""


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
