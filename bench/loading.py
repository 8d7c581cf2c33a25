"""Fast ways to fill stores with many messages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import psycopg
import uvloop
from sqlalchemy.engine import make_url

from app.entries import Outcome
from app.errors import Problem
from app.ingest.door import open_door
from app.ingest.prepare import Publication
from app.server.limits import DEFAULT_LIMITS as LIMITS

BATCH = LIMITS.group_items_max

Item = tuple[bytes, tuple[bytes, ...]]
"""A frame and the hints it is published with."""


def new_database(server_url: str, name: str) -> str:
    """The URL of a new, empty database of a server."""
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(
            f"CREATE DATABASE {name} TEMPLATE template0 ENCODING 'UTF8' LOCALE 'C'".encode()
        )
    return make_url(server_url).set(database=name).render_as_string(hide_password=False)


def load_file(path: Path, items: Iterable[Item]) -> None:
    """Load all items into a SQLite store."""
    load(f"sqlite:///{path}", items)


def load(url: str, items: Iterable[Item]) -> None:
    """Load all items into a store, through its door."""
    uvloop.run(_publish(url, iter(items)))


async def _publish(url: str, items: Iterator[Item]) -> None:
    """Prepares a batch while the writer's thread commits the one before."""
    async with open_door(url, LIMITS) as door:
        writing: asyncio.Task[list[Outcome | Problem]] | None = None
        while batch := [Publication(*item) for item in islice(items, BATCH)]:
            prepared = await door.prepare_many(batch)
            if writing is not None:
                _require_stored(await writing)
            writing = asyncio.create_task(door.publish_prepared(prepared))
        if writing is not None:
            _require_stored(await writing)


def _require_stored(outcomes: Iterable[Outcome | Problem]) -> None:
    for outcome in outcomes:
        if isinstance(outcome, Problem):
            raise outcome
