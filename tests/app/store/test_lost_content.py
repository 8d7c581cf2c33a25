"""Content that cannot be read is marked, mended by any publication, and never stored twice."""

from __future__ import annotations

import pytest
from sqlalchemy import select, text

from app.store.entryrows import ContentState
from app.store.schema import lost_content
from recon.elements import order_of_lamport
from tests.app.store.test_frames import (
    Harm,
    conversation,
    cut,
    delete,
    in_database,
    lost,
    reopened,
    spoil,
    written,
)
from tests.support.stores import Stores

pytestmark = pytest.mark.anyio


def marked(url: str) -> list[int]:
    seqs: list[int] = in_database(url, lambda c: sorted(c.scalars(select(lost_content.c.seq))))
    return seqs


def rows_of(url: str, table: str) -> int:
    return int(in_database(url, lambda c: c.scalar(text(f"SELECT count(*) FROM {table}"))))


def ruin(url: str, seq: int, *, harm: Harm = cut) -> None:
    in_database(url, lambda c: harm(c, "frames", seq))


@pytest.mark.parametrize("harm", [spoil, cut, delete])
async def test_a_frame_that_reads_wrong_twice_is_marked_and_a_publication_mends_it(
    stores: Stores, harm: Harm
) -> None:
    entries = conversation(30)
    url = await written(stores, [entries])
    last = 30
    ruin(url, last, harm=harm)
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
    ruin(url, 30, harm=spoil)
    async with reopened(url) as store:
        store.begin_writing()
        assert store.writer.recheck([30]).lost == {30}
        ruin(url, 30, harm=spoil)
        assert store.writer.recheck([30]) == (frozenset(), {30})
    assert marked(url) == []
