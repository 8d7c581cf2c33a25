"""Content that cannot be read is marked, mended by any publication, and never stored twice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sqlalchemy import Connection, select, text

from app.entries import NewEntry
from app.store.entryrows import ContentState
from app.store.schema import frame_references, frames, lost_content
from recon.elements import order_of_lamport
from sdstore.sds.codec import encode
from sdstore.sds.digest import frame_hash
from tests.app.store.test_frames import (
    Harm,
    conversation,
    cut,
    delete,
    flip,
    in_database,
    lost,
    reopened,
    written,
)
from tests.support.stores import Stores, entry_of

pytestmark = pytest.mark.anyio

BOTH = ("frames", "frame_references")


def refiltered(entry: NewEntry) -> NewEntry:
    """The same message with another filter: the same digest, another frame."""
    message = replace(entry.message, bloom_filter=bytes(6_000))
    other = entry_of(encode(message, entry.dialect))
    assert other.digest == entry.digest
    assert other.frame_hash != entry.frame_hash
    return other


def references_of(url: str) -> list[int]:
    seqs: list[int] = in_database(url, lambda c: list(c.scalars(select(frame_references.c.seq))))
    return seqs


def marked(url: str) -> list[int]:
    seqs: list[int] = in_database(url, lambda c: sorted(c.scalars(select(lost_content.c.seq))))
    return seqs


def rows_of(url: str, table: str) -> int:
    return int(in_database(url, lambda c: c.scalar(text(f"SELECT count(*) FROM {table}"))))


def ruin(url: str, seq: int, *, harm: Harm = cut) -> None:
    def act(connection: Connection) -> None:
        for table in BOTH:
            if connection.scalar(text(f"SELECT 1 FROM {table} WHERE seq = {seq}")):
                harm(connection, table, seq)

    in_database(url, act)


@pytest.mark.parametrize("harm", [flip, cut, delete])
async def test_a_frame_that_reads_wrong_twice_is_marked_and_a_publication_mends_it(
    stores: Stores, harm: Harm
) -> None:
    entries = conversation(30)
    url = await written(stores, [entries])
    last = 30
    ruin(url, last, harm=harm)
    assert last not in references_of(url)
    async with reopened(url) as store:
        store.begin_writing()
        assert await lost(store, entries) == [last - 1]
        assert store.writer.recheck([last, 1]).lost == {last}
        digest = entries[last - 1].digest
        assert await store.frames.content_states([digest, bytes(32), entries[0].digest]) == {
            digest: ContentState.LOST
        }
        order = order_of_lamport(entries[last - 1].message.lamport_timestamp or 0)
        assert [each[:2] for each in await store.frames.lost_elements(10)] == [(order, digest)]
        assert await store.frames.lost_elements(10, last) == []
        assert await store.frames.lost_count() == 1
        first, second = store.writer.write([entries[last - 1]] * 2)
        assert (first.seq, first.is_new, first.is_mended) == (last, False, True)
        assert (second.is_new, second.is_mended) == (False, False)
        assert await store.frames.lost_count() == 0
        assert await lost(store, entries) == []
    assert rows_of(url, "messages") == rows_of(url, "frames") == len(entries)


async def test_a_publication_mends_what_nobody_found_yet(stores: Stores) -> None:
    entries = conversation(30)
    url = await written(stores, [entries])
    ruin(url, 30)
    async with reopened(url) as store:
        store.begin_writing()
        results = store.writer.write(entries)
        assert [r.seq for r in results if r.is_mended] == [30]
        assert await lost(store, entries) == []


async def test_the_same_frame_restores_both_copies_of_a_reference_and_its_dependents(
    stores: Stores,
) -> None:
    entries = conversation(60, known=500)
    url = await written(stores, [entries])
    reference = references_of(url)[0]
    ruin(url, reference)
    async with reopened(url) as store:
        store.begin_writing()
        store.writer.recheck(range(1, 61))
        gone = marked(url)
        assert reference in gone
        assert len(gone) > 10
        assert store.writer.write([entries[reference - 1]])[0].is_mended
        assert marked(url) == []
        assert await store.frames.references_in_doubt(10) == []
        assert await lost(store, entries) == []
    assert rows_of(url, "messages") == rows_of(url, "frames") == len(entries)


async def test_another_frame_of_a_lost_reference_is_served_and_never_decoded_against(
    stores: Stores,
) -> None:
    entries = conversation(60, known=500)
    url = await written(stores, [entries])
    reference = references_of(url)[0]
    ruin(url, reference, harm=flip)
    async with reopened(url) as store:
        store.begin_writing()
        store.writer.recheck(range(1, 61))
        gone = marked(url)
        assert reference in gone
        other = refiltered(entries[reference - 1])
        assert store.writer.write([other])[0].is_mended
        # Frames that were readable through the damaged copy are still readable; nothing else changed.
        assert marked(url) == [seq for seq in gone if seq != reference]
        found = await store.entries.entry(other.digest)
        assert found is not None
        assert (found.frame, found.frame_hash) == (other.frame, frame_hash(other.frame))
        assert await store.frames.references_in_doubt(10) == []
        store.writer.recheck(range(1, 61))
        assert marked(url) == [seq for seq in gone if seq != reference]
        # Nothing new is compressed against it, and each dependent is mended by itself.
        more = conversation(90, known=500)
        assert sum(r.is_mended for r in store.writer.write(more)) == len(gone) - 1
        everything = [*more]
        everything[reference - 1] = other
        assert await lost(store, everything) == []
    users = in_database(
        url,
        lambda c: list(c.scalars(select(frames.c.seq).where(frames.c.reference_no == reference))),
    )
    assert max(users, default=0) <= 60
    async with reopened(url) as store:
        assert await lost(store, everything) == []
    assert rows_of(url, "messages") == rows_of(url, "frames") == len(more)


async def test_what_can_be_read_through_a_damaged_reference_can_be_read_still(
    stores: Stores,
) -> None:
    entries = conversation(60, known=500)
    url = await written(stores, [entries])
    reference = references_of(url)[0]
    frame = entries[reference - 1].frame
    # The number in the content, which no other frame has in common with it.
    damaged = frame.replace(b"message %d" % (reference - 1), b"message %c" % 0)
    assert damaged != frame

    def spoil(connection: Connection) -> None:
        for table in BOTH:
            statement = f"UPDATE {table} SET codec = 0, data = :data WHERE seq = {reference}"
            connection.execute(text(statement), {"data": damaged})

    in_database(url, spoil)
    async with reopened(url) as store:
        store.begin_writing()
        assert await lost(store, entries) == [reference - 1]
        other = refiltered(entries[reference - 1])
        assert store.writer.write([other])[0].is_mended
        entries[reference - 1] = other
        assert await lost(store, entries) == []
    async with reopened(url) as store:
        assert await lost(store, entries) == []


async def test_a_fault_of_the_database_ends_a_recheck_and_marks_nothing(stores: Stores) -> None:
    entries = conversation(30)
    url = await written(stores, [entries])
    ruin(url, 30)
    async with reopened(url) as store:
        store.begin_writing()
        in_database(url, lambda c: c.execute(text("ALTER TABLE frames RENAME TO elsewhere")))
        with pytest.raises(Exception, match="frames"):
            store.writer.recheck(range(1, 31))
        in_database(url, lambda c: c.execute(text("ALTER TABLE elsewhere RENAME TO frames")))
        assert marked(url) == []
        assert store.writer.recheck(range(1, 31)).lost == {30}


async def test_a_repaired_row_unmarks_its_message(stores: Stores) -> None:
    entries = conversation(30)
    url = await written(stores, [entries])
    ruin(url, 30, harm=flip)
    async with reopened(url) as store:
        store.begin_writing()
        assert store.writer.recheck([30]).lost == {30}
        ruin(url, 30, harm=flip)
        assert store.writer.recheck([30]) == (frozenset(), {30})
    assert marked(url) == []


async def test_a_reference_in_the_writers_memory_mends_its_rows(stores: Stores) -> None:
    entries = conversation(60, known=500)
    url = stores.new_url()
    async with reopened(url) as store:
        store.begin_writing()
        store.writer.write(entries[:50])
        reference = references_of(url)[0]
        ruin(url, reference)
        store.writer.write(entries[50:])
        assert store.writer.recheck(range(1, 61)).lost == frozenset()
    async with reopened(url) as store:
        assert await lost(store, entries) == []
    assert marked(url) == []


async def test_a_mend_goes_on_behind_a_reference_that_was_mended_before(stores: Stores) -> None:
    """Of two references that one publication mends, the first was already mended with another frame."""
    entries = conversation(120, known=500)
    url = await written(stores, [entries])
    first, second = references_of(url)[:2]
    ruin(url, first, harm=flip)
    async with reopened(url) as store:
        store.begin_writing()
        store.writer.recheck(range(1, 121))
        entries[first - 1] = refiltered(entries[first - 1])
        assert store.writer.write([entries[first - 1]])[0].is_mended
        in_database(url, lambda c: cut(c, "frames", first))
        ruin(url, second)
        store.writer.recheck(range(1, 121))
        assert {first, second} <= set(marked(url))
        results = store.writer.write([entries[first - 1], entries[second - 1]])
        assert [result.is_mended for result in results] == [True, True]
        assert {first, second}.isdisjoint(marked(url))
        assert not {first - 1, second - 1} & set(await lost(store, entries))
    assert rows_of(url, "messages") == rows_of(url, "frames") == len(entries)
