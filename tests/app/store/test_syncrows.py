"""Session records in the database, on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from app.server.limits import DEFAULT_LIMITS
from app.store.peerrows import SyncRow
from app.store.store import Store
from tests.support.stores import PostgresStores, SqliteStores, Stores

pytestmark = pytest.mark.anyio


FEW = replace(DEFAULT_LIMITS, syncs_remembered_max=3)


def row(number: int, finished_at_ms: int | None = 1, **document: Any) -> SyncRow:
    return SyncRow(f"s{number}", "peer", "process", finished_at_ms, document)


def write(store: Store, *rows: SyncRow) -> None:
    with store.transaction() as transaction:
        store.syncs.write(transaction, rows)


async def test_a_record_is_read_as_it_was_written_last(stores: Stores) -> None:
    async with stores.open() as store:
        write(store, row(1, None, percent=1), row(2, None))
        write(store, row(1, None, percent=2))
        assert await store.syncs.get("s1") == row(1, None, percent=2)
        assert await store.syncs.under_way() == [row(1, None, percent=2), row(2, None)]
        write(store, row(1, 5, percent=100))
        assert await store.syncs.under_way() == [row(2, None)]
        assert await store.syncs.recent() == [row(2, None), row(1, 5, percent=100)]
        assert await store.syncs.get("s3") is None


async def test_the_oldest_finished_records_go_and_running_ones_stay(stores: Stores) -> None:
    async with stores.open(FEW) as store:
        write(store, row(0, None))
        for number in range(1, 8):
            write(store, row(number))
        assert [each.sync_id for each in await store.syncs.recent()] == ["s7", "s6", "s0"]


async def test_a_start_on_sqlite_ends_the_records_of_the_process_before(
    sqlite_stores: SqliteStores,
) -> None:
    async with sqlite_stores.open() as store:
        write(store, row(1, None, outcome=None), row(2, 1, outcome="in_sync"))
        assert store.syncs.end_abandoned(9) == ["s1"]
        found = await store.syncs.get("s1")
        assert found is not None
        assert found.finished_at_ms == 9
        assert found.document["outcome"] == "partial"
        assert found.document["detail"] == "the process that ran the session has ended"
        assert (await store.syncs.get("s2")) == row(2, 1, outcome="in_sync")


async def test_a_record_that_nobody_touches_has_ended_by_the_databases_clock(
    postgres_stores: PostgresStores,
) -> None:
    async with postgres_stores.open() as store:
        write(store, row(1, None), replace(row(2, None), process=""))
        assert store.syncs.end_abandoned(9, 1.5) == []
        await asyncio.sleep(1.0)
        write(store, row(1, None))
        await asyncio.sleep(0.7)
        assert store.syncs.end_abandoned(9, 1.5) == ["s2"]
        found = await store.syncs.get("s2")
        assert found is not None
        assert found.document["detail"] == "no process took the session up"
        assert (await store.syncs.get("s1")) == row(1, None)
