"""The store: everything that the node keeps, by subject, over one database.

Reading methods are coroutines for the event loop. `Store.writer` blocks and belongs to one thread, the
group committer's (`app.ingest.door`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from functools import cache
from typing import Any

from sqlalchemy import select

from app.server.limits import Limits
from app.store.arrivals import Arrivals
from app.store.channelpages import Channels
from app.store.claims import HintClaims
from app.store.database import (
    Database,
    Erasure,
    Query,
    SqlDialect,
    Transaction,
    UnsupportedDatabaseError,
    missing_driver,
)
from app.store.entryrows import FrameReader, Keys
from app.store.groupwriter import GroupWriter, wall_clock_ms
from app.store.histories import Ancestors, Gaps
from app.store.integrity import RowCheck
from app.store.lookups import Lookups
from app.store.peerrows import MvdsPeers, PeerRows, SyncRows
from app.store.retained import RetainedEntries
from app.store.schema import store_meta
from app.store.sqlite import SqliteDatabase

INTEREST_NAME = "interest"
"""The row of `store_meta` with the interest that an operator set (`app.federation.interests`)."""


def _new_value(new: Any) -> dict[str, Any]:
    return {"value": new.value}


@cache  # it is read twice a second
def _kept_interest(sql: SqlDialect) -> Query:
    return sql.query(select(store_meta.c.value).where(store_meta.c.name == INTEREST_NAME))


async def open_database(url: str, limits: Limits) -> Database:
    """The database of a URL, at the schema of this code; a file is made if there is none."""
    if url.startswith("postgresql:"):
        try:
            from app.store.postgres import PostgresDatabase  # noqa: PLC0415 - an extra
        except ImportError as error:
            raise missing_driver(error) from error
        return await PostgresDatabase.open(url, limits)
    if url.startswith("sqlite:"):
        return SqliteDatabase.open(url, limits.sqlite_read_s)
    raise UnsupportedDatabaseError(
        f"unsupported kind of database: {url.split(':', maxsplit=1)[0]!r}"
    )


class Store:
    """One open store. `database_id` was drawn when the database was made; cursors name it.

    Each attribute is a subject: `entries` looks entries up, `frames` reads their frames and knows which
    are lost, `channels` lists channels and pages of their entries, `claims` finds what hints mean, `gaps`
    and `ancestors` follow causal histories, `arrivals` gives elements in the order they came,
    `retained` those that have content, for retention, `mvds` keeps the peers of MVDS, `peers` those of the federation and `syncs` their sessions, `writer` writes,
    `row_check` compares rows with themselves.
    """

    def __init__(
        self,
        database: Database,
        limits: Limits,
        database_id: str,
        keys: Keys,
        now_ms: Callable[[], int] = wall_clock_ms,
    ) -> None:
        self.database_id = database_id
        self.mark_secret = keys.secret
        """Authenticates marks (`recon.marks`): all processes over this database read each other's."""
        self._database = database
        self._limits = limits
        self._keys = keys
        self.frames = FrameReader(database)
        self.channels = Channels(database, self.frames)
        self.claims = HintClaims(database, self.frames, keys, self.channels, limits)
        self.entries = Lookups(database, self.frames, keys, self.claims, limits)
        self.gaps = Gaps(database, keys, self.channels, limits)
        self.ancestors = Ancestors(database, self.frames, keys, self.channels, self.gaps, limits)
        self.arrivals = Arrivals(database)
        self.retained = RetainedEntries(database)
        self.mvds = MvdsPeers(database, self.frames, limits)
        self.peers = PeerRows(database)
        self.syncs = SyncRows(database, limits.syncs_remembered_max)
        self.writer = GroupWriter(database, keys, limits, now_ms)
        self.row_check = RowCheck(database, keys)

    @classmethod
    async def open(
        cls,
        database_url: str,
        limits: Limits,
        now_ms: Callable[[], int] = wall_clock_ms,
    ) -> Store:
        """Open a database, or make a file if there is none; upgrade its schema if that is older.

        Takes no lock that another reader or the writer would notice. Raises the `StoreError`s of
        `app.store.database`.
        """
        database = await open_database(database_url, limits)
        meta: dict[str, bytes] = dict(await database.rows(database.sql.query(store_meta.select())))
        keys = Keys(meta["key_secret"])
        return cls(database, limits, meta["database_id"].decode(), keys, now_ms)

    async def close(self) -> None:
        """Close the database."""
        await self._database.close()

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[Store]:
        """This store as of the first read inside the block, without later commits.

        For reading only, and for seconds: it keeps the database from cleaning up.
        """
        async with self._database.snapshot() as database:
            yield Store(database, self._limits, self.database_id, self._keys)

    async def ping(self) -> None:
        """Return once the database has answered. Raises `Problem` STORE_UNAVAILABLE."""
        await self._database.ping()

    def begin_writing(self) -> None:
        """Become the writer; `StoreBusyError` if another process is it already."""
        self._database.begin_writing()

    def transaction(self) -> AbstractContextManager[Transaction]:
        """One transaction for several subjects, on the writer's thread; raises as `writer.write`."""
        return self._database.transaction()

    def erase(self) -> Erasure:
        """See `Database`."""
        return self._database.erase()

    async def kept_interest(self) -> bytes | None:
        """What `keep_interest` kept last. Raises `Problem` STORE_UNAVAILABLE."""
        rows = await self._database.few(_kept_interest(self._database.sql))
        return next((bytes(value) for (value,) in rows), None) or None

    def keep_interest(self, interest: bytes | None) -> None:
        """Keep the interest that an operator set; None: none is set. Raises `Problem` as `writer.write`."""
        insert_or_replace = self._database.sql.upsert(store_meta, "name", _new_value)
        with self._database.transaction() as transaction:
            # Empty, not deleted: a database of several processes then has one kind of write.
            transaction.many(insert_or_replace, [(INTEREST_NAME, interest or b"")])
