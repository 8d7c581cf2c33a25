"""The audit finds planted damage of every kind within one pass, and nothing in a healthy store."""

from __future__ import annotations

import asyncio
import logging
import random
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Connection, text

from app.audit import Audit, Kind
from app.limits import DEFAULT_LIMITS
from app.recon.index import NodeIndex
from app.recon.indexaudit import IndexAudit
from app.store.store import Store
from recon.index import RangeIndex
from tests.app.store.test_frames import flip, in_database
from tests.support.damaged_stores import CHANNELS, conversation, overwrite
from tests.support.stores import PostgresStores, SqliteStores, Stores, prepared, taken_back

pytestmark = pytest.mark.anyio

QUICK = replace(DEFAULT_LIMITS, audit_percent_max=100, audit_delay_s=0, audit_interval_s=0)
MESSAGES = 90
STEPS_MAX = 2_000
BAD = 7


@asynccontextmanager
async def audited(url: str, folder: Path, *, checks_store: bool = True) -> AsyncIterator[Audit]:
    """An audit of a store that nobody writes to, with an index that has followed it."""
    store = await Store.open(url, QUICK)
    try:
        index = NodeIndex(store, QUICK)
        await index.catch_up()
        audit = Audit(store, index, QUICK, folder / "audit.json")
        audit.prepare(checks_store=checks_store)
        yield audit
        await audit.close()
    finally:
        await store.close()


async def filled(stores: Stores, seed: int = 1) -> str:
    """The URL of a store with rows in all tables that the audit walks."""
    url = stores.new_url()
    store = await Store.open(url, QUICK)
    store.begin_writing()
    entries, met = prepared(conversation(random.Random(seed), MESSAGES))
    store.writer.write(entries, met, [])
    await store.close()
    return url


async def one_pass(audit: Audit) -> set[Kind]:
    """Step until the pass ends; the kinds of what is found now."""
    passes = audit.passes_count
    for _ in range(STEPS_MAX):
        if audit.passes_count > passes:
            return {each.kind for each in audit.findings.open()}
        await audit.step()
        await asyncio.sleep(0)  # ends SQLite's read transaction
    raise AssertionError(f"the pass did not end; it is at {audit.current}")


def sql(statement: str) -> Callable[[str], None]:
    """Damage by one statement."""
    return lambda url: in_database(url, lambda connection: connection.execute(text(statement)))


def rotten(url: str) -> None:
    """Damage to every copy of a frame."""

    def act(connection: Connection) -> None:
        for table in ("frames", "frame_references"):
            if connection.scalar(text(f"SELECT 1 FROM {table} WHERE seq = {BAD}")):
                flip(connection, table, BAD)

    in_database(url, act)


DAMAGES: list[tuple[str, Callable[[str], None], Kind]] = [
    ("a frame has other bytes", rotten, Kind.CONTENT),
    ("a frame is gone", sql(f"DELETE FROM frames WHERE seq = {BAD}"), Kind.CONTENT),
    (
        "a row has another timestamp than its frame",
        sql(f"UPDATE messages SET lamport = lamport + 1 WHERE seq = {BAD}"),
        Kind.FRAME,
    ),
    (
        "a row is in another channel than its frame",
        sql(f"UPDATE messages SET channel_no = 3 - channel_no % 2 WHERE seq = {BAD}"),
        Kind.FRAME,
    ),
    (
        "a key is not that of the ID",
        sql(f"UPDATE messages SET id_key = id_key + 1 WHERE seq = {BAD}"),
        Kind.ROW,
    ),
    (
        "the chain is broken",
        sql(f"UPDATE messages SET arrival_sum = arrival_sum + 1 WHERE seq = {BAD}"),
        Kind.ROW,
    ),
    (
        "a claim names another channel",
        sql("UPDATE published_claims SET channel_no = channel_no + 1 WHERE claim_no = 2"),
        Kind.ROW,
    ),
    (
        "a hint of a history has another key",
        sql("UPDATE history_claims SET hint_key = hint_key + 1 WHERE claim_no = 1"),
        Kind.ROW,
    ),
    (
        "a stored message is listed as missing",
        sql(
            "INSERT INTO missing_references (channel_no, message_id) SELECT channel_no, message_id FROM messages"
            f" WHERE seq = {BAD}"
        ),
        Kind.REFERENCE,
    ),
    ("a counter is too low", sql("UPDATE watermark SET claim_no = 1"), Kind.COUNTER),
    (
        "a channel counts a message too many",
        sql("UPDATE channels SET count = count + 1 WHERE channel_no = 1"),
        Kind.CHANNEL,
    ),
    (
        "the last timestamp of a channel is wrong",
        sql("UPDATE channels SET lamport_last = lamport_last + 1 WHERE channel_no = 2"),
        Kind.CHANNEL,
    ),
]
ON_POSTGRES = [
    "a frame has other bytes",
    "the chain is broken",
    "a counter is too low",
    "a channel counts a message too many",
]


@pytest.mark.parametrize(
    ("harm", "kind"), [each[1:] for each in DAMAGES], ids=[name for name, *_ in DAMAGES]
)
async def test_damage_is_found_in_one_pass_and_logged_once(
    sqlite_stores: SqliteStores,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[str], None],
    kind: Kind,
) -> None:
    await find(await filled(sqlite_stores), tmp_path, caplog, harm, kind)


@pytest.mark.parametrize(
    ("harm", "kind"),
    [each[1:] for each in DAMAGES if each[0] in ON_POSTGRES],
    ids=ON_POSTGRES,
)
async def test_damage_on_postgresql_is_found_in_one_pass_and_logged_once(
    postgres_stores: PostgresStores,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[str], None],
    kind: Kind,
) -> None:
    await find(await filled(postgres_stores), tmp_path, caplog, harm, kind)


async def find(
    url: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[str], None],
    kind: Kind,
) -> None:
    async with audited(url, tmp_path) as audit:
        assert await one_pass(audit) == set()
        with caplog.at_level(logging.ERROR, "app.audit"):
            harm(url)
            assert kind in await one_pass(audit)
            first = [each.message for each in caplog.records if f"({kind})" in each.message]
            assert kind in await one_pass(audit)
            again = [each.message for each in caplog.records if f"({kind})" in each.message]
        # A wrong sum contradicts two rows, its own and the next one.
        assert 1 <= len(first) == len(again) <= 2
        assert "remedy: " in first[0]
        assert "Traceback" not in caplog.text
        assert audit.document()["found_total"][kind] >= 2


def without_one(index: RangeIndex) -> RangeIndex:
    return _rebuilt(index, slice(1, None), 0)


def with_one_more(index: RangeIndex) -> RangeIndex:
    found = _rebuilt(index, slice(0, None), 0)
    # As a hint claim: the counts of channels, which are of messages, do not show it.
    found.insert(np.ones(1, np.uint64), np.ones((1, 32), np.uint8), np.array([3], np.uint32))
    return found


def with_another_group(index: RangeIndex) -> RangeIndex:
    return _rebuilt(index, slice(0, None), 2)


def _rebuilt(index: RangeIndex, rows: slice, shift: int) -> RangeIndex:
    columns = index.state.snapshot.slice(0, len(index)).take(rows)
    groups = columns.groups.copy()
    groups[:1] += shift
    found = RangeIndex()
    found.insert(columns.orders, columns.ids, groups)
    return found


@pytest.mark.parametrize(
    ("harm", "checks_store"),
    [(without_one, True), (without_one, False), (with_one_more, False), (with_another_group, True)],
)
async def test_an_index_that_differs_from_the_database_is_read_again(
    stores: Stores, tmp_path: Path, harm: Callable[[RangeIndex], RangeIndex], checks_store: bool
) -> None:
    url = await filled(stores)
    async with audited(url, tmp_path, checks_store=checks_store) as audit:
        index: Any = audit._index
        index.elements = harm(index.elements)
        index._views, index._sums = index._caches()
        assert await one_pass(audit) == {Kind.INDEX}
        assert audit.read_again_count == 1
        assert await one_pass(audit) == set()
        # An index that is wrong again at once is reported, and not read again all the time.
        index.elements = harm(index.elements)
        index._views, index._sums = index._caches()
        assert await one_pass(audit) == {Kind.INDEX}
        assert await one_pass(audit) == {Kind.INDEX}
        assert audit.read_again_count == 1


def sqlite_path(url: str) -> Path:
    return Path(url.removeprefix("sqlite:///"))


def root_page(url: str, name: str) -> int:
    with closing(sqlite3.connect(sqlite_path(url))) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        query = "SELECT rootpage FROM sqlite_schema WHERE name = ?"
        [[page]] = connection.execute(query, [name]).fetchall()
    return int(page)


def leave_out(url: str, index: str) -> None:
    """Take the entry of one row out of an index, as a lost write does."""
    with closing(sqlite3.connect(sqlite_path(url), isolation_level=None)) as connection:
        [[whole]] = connection.execute("SELECT sql FROM sqlite_schema WHERE name = ?", [index])
        connection.execute("PRAGMA writable_schema = ON")
        for statement in (f"{whole} WHERE seq <> {BAD}", whole):
            change = "UPDATE sqlite_schema SET sql = ? WHERE name = ?"
            connection.execute(change, [statement, index])
            connection.execute("PRAGMA writable_schema = RESET")
            connection.execute("PRAGMA writable_schema = ON")
            if statement is not whole:
                connection.execute(f"REINDEX {index}")


INDEXES = [
    "messages_by_digest",
    "messages_by_id",
    "messages_by_channel_and_id",
    "messages_in_log_order",
    "messages_in_arrival_order",
]


@pytest.mark.parametrize("index", INDEXES)
async def test_a_row_that_an_sql_index_does_not_lead_to_is_named(
    sqlite_stores: SqliteStores, tmp_path: Path, index: str
) -> None:
    url = await filled(sqlite_stores)
    leave_out(url, index)
    async with audited(url, tmp_path) as audit:
        assert Kind.SQL_INDEX in await one_pass(audit)
        (found,) = [each for each in audit.findings.open() if each.kind is Kind.SQL_INDEX]
        assert found.what == f"index {index} does not lead to row {BAD}"


@pytest.mark.parametrize(
    ("name", "kind"),
    [(each, Kind.SQL_INDEX) for each in INDEXES]
    + [("published_claims_by_element", Kind.SQL_INDEX), ("messages", Kind.UNREADABLE)],
)
async def test_an_unreadable_page_is_a_finding_and_the_pass_goes_on_to_its_end(
    sqlite_stores: SqliteStores, tmp_path: Path, name: str, kind: Kind
) -> None:
    url = await filled(sqlite_stores)
    page = root_page(url, name)
    async with audited(url, tmp_path) as audit:
        overwrite(
            sqlite_path(url),
            page,
            lambda content: content.__setitem__(slice(None), bytes(len(content))),
        )
    # The first process may have had the page in memory.
    async with opened_damaged(url, tmp_path) as audit:
        found = await one_pass(audit)
        assert kind in found
        assert any(name in each.what or kind is Kind.UNREADABLE for each in audit.findings.open())
        assert "index channels" in audit.document()["stages"]


@asynccontextmanager
async def opened_damaged(url: str, folder: Path) -> AsyncIterator[Audit]:
    """As `audited`, but that the index cannot follow."""
    store = await Store.open(url, QUICK)
    audit = Audit(store, NodeIndex(store, QUICK), QUICK, folder / "audit.json")
    audit.prepare(checks_store=True)
    try:
        yield audit
    finally:
        await store.close()


async def test_nothing_is_found_while_others_write_and_the_database_goes_back_in_time(
    stores: Stores, tmp_path: Path
) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    world = random.Random(seed)
    url = stores.new_url()
    writer = await Store.open(url, QUICK)
    writer.begin_writing()
    entries, met = prepared(conversation(world, 400))
    end_s = time.monotonic() + 60
    has_gone_back = False
    try:
        async with audited(url, tmp_path) as audit:
            while entries or audit.passes_count < 2:
                assert time.monotonic() < end_s, "the passes did not end"
                if entries and world.random() < 0.3:
                    count = world.randrange(1, 30)
                    await asyncio.to_thread(writer.writer.write, entries[:count], met[:1], [])
                    entries, met = entries[count:], met[1:]
                if audit.passes_count == 1 and len(entries) > 60 and not has_gone_back:
                    has_gone_back = True
                    with taken_back(url):
                        await asyncio.to_thread(writer.writer.write, entries[:30], [], [])
                        await audit._index.catch_up()
                await audit.step()
                await asyncio.sleep(0)
            assert audit.findings.open() == []
            await one_pass(audit)
            assert await one_pass(audit) == set()
            assert audit.last is not None
            assert audit.last.checked["frames"] == audit.last.checked["rows of messages"] > 200
            assert audit.last.checked["index elements"] > audit.last.checked["frames"]
    finally:
        await writer.close()


async def test_entries_that_arrive_between_the_counts_of_sql_and_index_are_no_fault(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = await filled(stores)
    store = await Store.open(url, QUICK)
    try:
        store.begin_writing()
        index = NodeIndex(store, QUICK)
        await index.catch_up()
        entries, _ = prepared(conversation(random.Random(2), 40))
        follow = index.catch_up

        async def write_and_follow() -> None:
            store.writer.write(entries, [], [])
            await follow()

        monkeypatch.setattr(index, "catch_up", write_and_follow)
        done = await IndexAudit(store, index).channels_step(100)
        assert done.checked_count == len(CHANNELS)
        assert (done.faults, done.channel_faults) == ([], [])
    finally:
        await store.close()


async def test_the_rest_after_a_step_holds_the_audit_to_its_share_of_a_core(
    stores: Stores, tmp_path: Path
) -> None:
    url = await filled(stores)
    async with audited(url, tmp_path) as audit:
        audit._limits = replace(QUICK, audit_percent_max=2)
        rest_s = spent_s = 0.0
        for _ in range(30):
            began_s = time.thread_time()
            rest_s += await audit.step()
            spent_s += time.thread_time() - began_s
        # One part in fifty; a little of a step is outside of its own measurement.
        assert rest_s >= 49 * 0.8 * spent_s
        assert 0 < audit.cpu_s < 3


async def test_another_process_goes_on_where_the_audit_stopped_and_knows_its_findings(
    stores: Stores, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = await filled(stores)
    rotten(url)
    async with audited(url, tmp_path) as audit:
        while audit.current.stage != "rows of history_claims":
            await audit.step()
        place = audit.current
        assert [each.kind for each in audit.findings.open()] == [Kind.CONTENT]
    caplog.clear()
    with caplog.at_level(logging.ERROR, "app.audit"):
        async with audited(url, tmp_path) as audit:
            assert audit.current == place
            assert await one_pass(audit) == {Kind.CONTENT}
            assert audit.last is not None
            assert audit.last.checked["frames"] == place.checked["frames"]
            assert audit.frames_document()["last_pass_ended_at_ms"]
    assert "the audit found" not in caplog.text
    # Of another database the place means nothing.
    other = text("UPDATE store_meta SET value = :value WHERE name = 'database_id'")
    in_database(url, lambda connection: connection.execute(other, {"value": b"other"}))
    async with audited(url, tmp_path) as audit:
        assert audit.current.stage == ""
        assert audit.findings.open() == []
