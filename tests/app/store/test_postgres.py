"""Faults of a database server: several writers, lost connections, restarts, servers that
this node cannot use."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from types import SimpleNamespace

import psycopg
import pytest

from app.entries import OutcomeKind
from app.errors import Code, Problem
from app.ingest.prepare import Publication
from app.recon.index import NodeIndex
from app.server.limits import DEFAULT_LIMITS
from app.store.database import DatabaseUnreachableError, StoreError, UnsupportedDatabaseError
from app.store.entryrows import arrived_after
from app.store.postgres import VERSION_MIN, check_server
from app.store.schema import migrate
from app.store.store import Store
from sdstore.sds.model import HistoryEntry
from tests.support.ingest import Ingest, open_ingest
from tests.support.publications import content_frame
from tests.support.stores import BYTES_MAX, PostgresStores, entry_of

pytestmark = pytest.mark.anyio

GROUPS = 40


def execute(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement)  # type: ignore[call-overload]


def frame_of(writer: int, group: int, number: int) -> bytes:
    """Every tenth message is written by both writers."""
    name = "both" if number == 9 else str(writer)
    told = (HistoryEntry(f"{name}/{group - 1}/{number}"), HistoryEntry(f"nobody/{group}"))
    return content_frame(
        number,
        channel_id=f"channel {group % 7}",
        message_id=f"{name}/{group}/{number}",
        history=told,
    )


def write_groups(store: Store, writer: int, begin: threading.Barrier) -> None:
    begin.wait()
    for group in range(GROUPS):
        entries = [entry_of(frame_of(writer, group, n), b"%d" % writer) for n in range(10)]
        store.writer.write(entries)


async def follow_feed(store: Store, is_over: Callable[[], bool]) -> list[bytes]:
    """The messages that a reader of the feed sees while others write."""
    seen: list[bytes] = []
    seq = 0
    while True:
        was_over = is_over()
        page = await store.channels.feed(seq, 7, BYTES_MAX)
        seen += [entry.digest for entry in page.entries]
        if page.entries:
            assert page.entries[0].seq > seq
            seq = page.entries[-1].seq
        elif was_over:
            return seen
        await asyncio.sleep(0)


async def follow_index(store: Store, is_over: Callable[[], bool]) -> NodeIndex:
    index = NodeIndex(store, DEFAULT_LIMITS)
    while True:
        was_over = is_over()
        await index.catch_up()
        if was_over:
            return index
        await asyncio.sleep(0)


async def test_all_databases_of_a_process_share_their_compiled_statements(
    postgres_stores: PostgresStores,
) -> None:
    async with postgres_stores.open() as one:
        await one.channels.feed(0, 1, BYTES_MAX)
        compiled = arrived_after.cache_info().misses
        async with postgres_stores.open() as another:
            await another.channels.feed(0, 1, BYTES_MAX)
            assert arrived_after.cache_info().misses == compiled


async def test_followers_of_two_writing_processes_miss_nothing_and_see_nothing_twice(
    postgres_stores: PostgresStores,
) -> None:
    url = postgres_stores.new_url()
    writers = [await Store.open(url, DEFAULT_LIMITS) for _ in range(2)]
    reader = await Store.open(url, DEFAULT_LIMITS)
    for store in writers:
        store.begin_writing()
    begin = threading.Barrier(2)
    writing = [
        asyncio.create_task(asyncio.to_thread(write_groups, store, number, begin))
        for number, store in enumerate(writers)
    ]

    def is_over() -> bool:
        return all(task.done() for task in writing)

    seen, index, _ = await asyncio.gather(
        follow_feed(reader, is_over), follow_index(reader, is_over), asyncio.gather(*writing)
    )
    expected = {
        entry_of(frame_of(writer, group, number)).digest
        for writer in range(2)
        for group in range(GROUPS)
        for number in range(10)
    }
    assert len(seen) == len(set(seen)) == len(expected) == 19 * GROUPS
    assert set(seen) == expected
    claims = 2 * 10 * GROUPS
    assert len(index.elements) == len(expected) + claims
    channels = await reader.channels.after(None, 100)
    assert sum(channel.count for channel in channels) == len(expected)
    for channel in channels:
        # A message that one writer stored before the other's history named it is not a gap.
        gaps = await reader.gaps.page(channel.channel_id, None, 1000)
        assert {gap.message_id.split("/")[0] for gap in gaps.gaps} <= {"nobody", "0", "1", "both"}
        for gap in gaps.gaps:
            assert await reader.entries.find(gap.message_id, channel.channel_id) is None
    for store in (*writers, reader):
        await store.close()


async def test_two_processes_that_are_sent_the_same_store_it_once(
    postgres_stores: PostgresStores,
) -> None:
    url = postgres_stores.new_url()
    async with open_ingest(url) as one, open_ingest(url) as two:
        outcomes = await asyncio.gather(
            *(
                ingest.door.publish(Publication(content_frame(number, channel_id=str(number % 3))))
                for number in range(60)
                for ingest in (one, two)
            )
        )
        kinds = [outcome.kind for outcome in outcomes]
        assert kinds.count(OutcomeKind.STORED) == 60
        assert kinds.count(OutcomeKind.DUPLICATE) == 60
        for ingest in (one, two):
            feed = await ingest.store.channels.feed(0, 1000, BYTES_MAX)
            assert [entry.seq for entry in feed.entries] == list(range(1, 61))


async def publish_and_note(
    ingest: Ingest, numbers: range, acknowledged: set[bytes], refused: list[Code]
) -> None:
    for number in numbers:
        try:
            outcome = await ingest.door.publish(Publication(content_frame(number)))
        except Problem as problem:
            refused.append(problem.code)
        else:
            assert outcome.digest is not None
            acknowledged.add(outcome.digest)


async def test_connections_that_are_cut_cost_no_acknowledged_message_and_heal(
    postgres_stores: PostgresStores,
) -> None:
    url = postgres_stores.new_url()
    acknowledged: set[bytes] = set()
    refused: list[Code] = []
    async with open_ingest(url) as ingest:
        cuts = published = 0
        publishing = asyncio.gather()
        # On a slow machine a round sees few cuts.
        while cuts < 4 or not publishing.done():
            if publishing.done():
                await publishing
                publishing = asyncio.gather(
                    *(
                        publish_and_note(ingest, range(first, first + 100), acknowledged, refused)
                        for first in range(published, published + 800, 100)
                    )
                )
                published += 800
            await asyncio.to_thread(
                execute,
                url,
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid != pg_backend_pid()",
            )
            cuts += 1
            # A reader that is handed a dead connection asks again with another.
            with contextlib.suppress(Problem):
                await ingest.store.arrivals.watermark()
            await asyncio.sleep(0.02)
        await publishing
        await publish_and_note(ingest, range(published, published + 10), acknowledged, [])
        assert len(acknowledged) + len(refused) == published + 10
        found = await ingest.store.entries.by_digest(list(acknowledged))
        assert {entry.digest for entry in found} == acknowledged
    assert set(refused) <= {Code.STORE_UNAVAILABLE}


async def test_a_commit_is_on_disk_whatever_the_database_has_as_its_default(
    postgres_stores: PostgresStores,
) -> None:
    url = postgres_stores.new_url()
    name = psycopg.conninfo.conninfo_to_dict(url)["dbname"]
    execute(url, f'ALTER DATABASE "{name}" SET synchronous_commit = off')
    async with open_ingest(url) as ingest:
        writer = ingest.store._database._connected_writer()  # type: ignore[attr-defined]
        assert writer.execute("SHOW synchronous_commit").fetchone() == ("on",)


async def test_a_full_disk_of_the_server_refuses_writers_and_serves_readers(
    postgres_stores: PostgresStores,
) -> None:
    url = postgres_stores.new_url()
    execute(
        url,
        "CREATE FUNCTION full_disk() RETURNS trigger AS "
        "$$BEGIN RAISE 'No space left on device' USING ERRCODE = 'disk_full'; END$$ "
        "LANGUAGE plpgsql",
    )
    async with open_ingest(url) as ingest:
        await ingest.door.publish(Publication(content_frame(1)))
        execute(
            url, "CREATE TRIGGER full_disk BEFORE INSERT ON frames EXECUTE FUNCTION full_disk()"
        )
        with pytest.raises(Problem) as refused:
            await ingest.door.publish(Publication(content_frame(2)))
        assert refused.value.code is Code.DISK_FULL
        assert await ingest.store.entries.find("message-000001", "channel") is not None
        assert await ingest.store.entries.find("message-000002", "channel") is None
        execute(url, "DROP TRIGGER full_disk ON frames")
        outcome = await ingest.door.publish(Publication(content_frame(2)))
        assert outcome.kind is OutcomeKind.STORED


async def test_processes_that_open_a_new_database_at_once_make_its_tables_once(
    postgres_stores: PostgresStores,
) -> None:
    url = postgres_stores.empty_url()
    await asyncio.gather(*(asyncio.to_thread(migrate, url) for _ in range(4)))
    stores = await asyncio.gather(*(Store.open(url, DEFAULT_LIMITS) for _ in range(4)))
    assert len({store.database_id for store in stores}) == 1
    for store in stores:
        await store.close()


def test_every_text_is_compared_by_its_bytes(postgres_stores: PostgresStores) -> None:
    with psycopg.connect(postgres_stores.new_url()) as connection:
        found = connection.execute(
            "SELECT table_name, column_name, collation_name FROM information_schema.columns "
            "WHERE table_schema = 'public' AND data_type = 'text' AND table_name != 'store_meta'"
        ).fetchall()
    assert len(found) >= 5
    assert {collation for *_, collation in found} == {"C"}


async def test_a_database_in_another_encoding_is_refused(postgres_stores: PostgresStores) -> None:
    with pytest.raises(UnsupportedDatabaseError, match="UTF8"):
        await Store.open(postgres_stores.empty_url("LATIN1"), DEFAULT_LIMITS)


def test_a_server_that_is_too_old_is_refused() -> None:
    old = SimpleNamespace(server_version=14_00_12)
    with pytest.raises(UnsupportedDatabaseError, match=f"PostgreSQL {VERSION_MIN} or later"):
        check_server(old)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("postgresql://user:secret@127.0.0.1:1/nowhere", DatabaseUnreachableError),
        ("postgresql://user:secret@localhost/x?nonsense=1", UnsupportedDatabaseError),
        ("postgresql://user:secret@localhost:port/x", StoreError),
    ],
)
async def test_a_database_that_cannot_be_had_is_named_without_its_password(
    url: str, fault: type[StoreError]
) -> None:
    with pytest.raises(fault) as refused:
        await Store.open(url, DEFAULT_LIMITS)
    assert "secret" not in str(refused.value)
