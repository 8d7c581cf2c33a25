"""Fast ways to fill stores with many messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path

import psycopg
import uvloop
from sqlalchemy.engine import make_url

from app.ingest.committer import GroupCommitter
from app.ingest.door import Door
from app.ingest.prepare import Publication
from app.limits import DEFAULT_LIMITS as LIMITS
from app.store.store import Store
from pipeline.bulkload import load_empty_store

BATCH = 2_000
CALLERS = 6

Item = tuple[bytes, tuple[bytes, ...]]
"""A frame and the hints it is published with."""


def new_database(server_url: str, name: str) -> str:
    """The URL of a new, empty database of a server."""
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(
            f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C'".encode()
        )
    return make_url(server_url).set(database=name).render_as_string(hide_password=False)


@asynccontextmanager
async def open_door(url: str) -> AsyncIterator[Door]:
    """The door of a store, as a node wires it."""
    store = await Store.open(url, LIMITS)
    committer = GroupCommitter(store, LIMITS)
    await committer.start()
    try:
        yield Door(store, committer, LIMITS)
    finally:
        await committer.close()
        await store.close()


def load_file(path: Path, items: Iterable[Item]) -> None:
    """Load all items into an empty SQLite store in bulk."""
    numbered = ((seq, *item) for seq, item in enumerate(items, 1))
    assert not load_empty_store(path, lambda _: numbered, LIMITS).refused


def load(url: str, items: Iterable[Item]) -> None:
    """Load all items into an empty store: in bulk on SQLite, else by many callers of ingest."""
    if url.startswith("sqlite:"):
        load_file(Path(url.removeprefix("sqlite:///")), items)
    else:
        uvloop.run(_publish(url, iter(items)))


async def _publish(url: str, items: Iterator[Item]) -> None:
    async def call(door: Door) -> None:
        while batch := [Publication(*item) for item in islice(items, BATCH)]:
            await door.publish_many(batch)

    async with open_door(url) as door:
        await asyncio.gather(*(call(door) for _ in range(CALLERS)))
