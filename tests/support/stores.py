"""Fresh stores for tests: quick to make, because the schema is made once and copied."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path

import psycopg
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

from app.entries import MetId, NewEntry
from app.errors import Problem
from app.ingest.prepare import Publication, Relayed, prepare
from app.server.limits import DEFAULT_LIMITS, Limits
from app.store.schema import metadata, migrate
from app.store.store import Store
from sdstore.sds.model import Kind

BYTES_MAX = 10**9
_FILLED_TABLES = [table for table in metadata.tables if table not in {"store_meta", "watermark"}]


class SqliteStores:
    """Databases in one folder."""

    kind = "sqlite"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = count()
        self._template = folder / "template.db"
        migrate(f"sqlite:///{self._template}")

    def new_url(self) -> str:
        """The URL of a new, empty database with a schema."""
        path = self._folder / f"{next(self._numbers)}.db"
        shutil.copyfile(self._template, path)
        return f"sqlite:///{path}"

    def refuse_rows(self, url: str, message_id: str) -> None:
        """Make the database itself fail every message with this ID."""
        engine = create_engine(url)
        with engine.begin() as connection:
            connection.exec_driver_sql(
                f"CREATE TRIGGER refuse BEFORE INSERT ON messages WHEN NEW.message_id = '{message_id}' "
                "BEGIN SELECT RAISE(ABORT, 'refused by the test'); END"
            )
        engine.dispose()

    @asynccontextmanager
    async def open(self, limits: Limits = DEFAULT_LIMITS) -> AsyncIterator[Store]:
        """A new store that this test alone writes to."""
        url = self.new_url()
        store = await Store.open(url, limits)
        store.begin_writing()
        try:
            yield store
        finally:
            await store.close()
            for path in Path(url.removeprefix("sqlite:///")).parent.glob(f"{Path(url).name}*"):
                path.unlink()


class PostgresStores:
    """Databases of one server."""

    kind = "postgres"

    def __init__(self, server_url: str) -> None:
        self._server_url = server_url
        self._numbers = count()
        self._run = secrets.token_hex(4)
        self._made: list[str] = []
        self._idle: list[str] = []
        self._template = self.empty_url()
        migrate(self._template)

    def new_url(self) -> str:
        """The URL of a new, empty database with a schema."""
        return self._create(self._name_of(self._template))

    def empty_url(self, encoding: str = "UTF8") -> str:
        """The URL of a database without any table."""
        return self._create("template0", f"ENCODING '{encoding}' LOCALE 'C'")

    def close(self) -> None:
        """Drop whatever was made."""
        for name in self._made:
            self._execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def refuse_rows(self, url: str, message_id: str) -> None:
        """Make the database itself fail every message with this ID."""
        with psycopg.connect(url) as connection:
            connection.execute(
                "CREATE FUNCTION refuse() RETURNS trigger AS "
                "$$BEGIN RAISE 'refused by the test'; END$$ LANGUAGE plpgsql"
            )
            connection.execute(
                "CREATE TRIGGER refuse BEFORE INSERT ON messages FOR EACH ROW "
                f"WHEN (NEW.message_id = '{message_id}') EXECUTE FUNCTION refuse()"
            )

    @asynccontextmanager
    async def open(self, limits: Limits = DEFAULT_LIMITS) -> AsyncIterator[Store]:
        """A new store that this test alone writes to."""
        url = self._idle.pop() if self._idle else self.new_url()
        store = await Store.open(url, limits)
        store.begin_writing()
        try:
            yield store
        finally:
            await store.close()
            _empty(url)
            self._idle.append(url)

    def _create(self, template: str, options: str = "") -> str:
        name = f"sdstore_{self._run}_{next(self._numbers)}"
        self._execute(f"CREATE DATABASE {name} TEMPLATE {template} {options} STRATEGY file_copy")
        self._made.append(name)
        return make_url(self._server_url).set(database=name).render_as_string(hide_password=False)

    @staticmethod
    def _name_of(url: str) -> str:
        return str(make_url(url).database)

    def _execute(self, statement: str) -> None:
        with psycopg.connect(self._server_url, autocommit=True) as connection:
            connection.execute(statement)  # type: ignore[call-overload]


Stores = SqliteStores | PostgresStores


def _empty(url: str) -> None:
    """Empty a database, which is twenty times as fast as making one."""
    with psycopg.connect(url) as connection:
        (entry_count,) = connection.execute("SELECT seq FROM watermark").fetchone() or (0,)
        # TRUNCATE gives every table and index a new file: it pays where rows are many.
        if entry_count > 1_000:
            connection.execute(f"TRUNCATE {', '.join(_FILLED_TABLES)}")
        else:
            connection.execute(";".join(f"DELETE FROM {table}" for table in _FILLED_TABLES))  # type: ignore[call-overload]
        connection.execute("UPDATE watermark SET seq = 0, claim_no = 0")


def prepared(
    publications: Sequence[Publication], limits: Limits = DEFAULT_LIMITS
) -> tuple[list[NewEntry], list[MetId]]:
    """The entries that ingest would write for these."""
    entries: list[NewEntry] = []
    met: list[MetId] = []
    for publication in publications:
        try:
            item = prepare(publication, limits)
        except Problem:
            continue
        if isinstance(item, NewEntry):
            entries.append(item)
        elif isinstance(item, Relayed) and item.message.kind is Kind.SYNC:
            met.append(MetId(item.message.channel_id, item.message.message_id))
    return entries, met


def entry_of(frame: bytes, *hints: bytes) -> NewEntry:
    """The entry of a good frame."""
    (entry,), _ = prepared([Publication(frame, hints)])
    return entry


@contextmanager
def taken_back(url: str) -> Iterator[None]:
    """Lose the commits of the block at its end, as a fail-over to a lagging standby does."""
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    tables = [*_FILLED_TABLES, "watermark"]
    with engine.begin() as connection:
        for table in tables:
            connection.execute(text(f"CREATE TABLE kept_{table} AS SELECT * FROM {table}"))
    yield
    with engine.begin() as connection:
        for table in tables:
            connection.execute(text(f"DELETE FROM {table}"))
            connection.execute(text(f"INSERT INTO {table} SELECT * FROM kept_{table}"))
            connection.execute(text(f"DROP TABLE kept_{table}"))
    engine.dispose()
