"""Fresh stores for tests: quick to make, because the schema is made once and copied."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

from sqlalchemy import create_engine

from app.entries import NewEntry
from app.errors import Problem
from app.ingest.prepare import prepare
from app.ingest.records import Publication, Relayed
from app.limits import DEFAULT_LIMITS, Limits
from app.store.migrate import migrate
from app.store.records import MetId
from app.store.store import Store
from sdstore.sds.model import Kind

BYTES_MAX = 10**9


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


Stores = SqliteStores


def make_stores(kind: str, folder: Path) -> Iterator[Stores]:
    """Where tests get their databases of one kind from."""
    yield SqliteStores(folder)


def prepared(
    publications: Sequence[Publication], limits: Limits = DEFAULT_LIMITS
) -> tuple[list[NewEntry], list[MetId]]:
    """What the door would write of these."""
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
