"""Values at the ends of what a message may hold answer alike on both databases."""

from __future__ import annotations

import pytest

from app.store.entryrows import Position
from sdstore.sds.model import LAMPORT_MAX, LAMPORT_MIN
from tests.support.publications import content_frame
from tests.support.stores import BYTES_MAX, Stores, entry_of

pytestmark = pytest.mark.anyio

# In the order of their UTF-8 bytes, which is neither a dictionary's nor that of UTF-16.
BYTE_ORDER = [
    "A",
    "B",
    "Z",
    "a",
    "a/b",
    "a0",
    "aB",
    "aa",
    "b",
    "z",
    "Ä",
    "é",
    "\uffff",
    "\U0001f600",
]


async def test_message_ids_of_one_time_are_in_the_order_of_their_bytes(stores: Stores) -> None:
    async with stores.open() as store:
        for each in reversed(BYTE_ORDER):
            store.writer.write([entry_of(content_frame(1, message_id=each))])
        page = await store.channels.page("channel", limit=100, bytes_max=BYTES_MAX)
        read: list[str] = []
        after: Position | None = None
        while len(read) < len(BYTE_ORDER):
            one = await store.channels.page("channel", limit=1, bytes_max=BYTES_MAX, after=after)
            read += [entry.message_id for entry in one.entries]
            after = one.next
    assert [entry.message_id for entry in page.entries] == BYTE_ORDER
    assert read == BYTE_ORDER


async def test_lamport_timestamps_of_64_bits_keep_their_order_and_value(stores: Stores) -> None:
    lamports = [LAMPORT_MIN, -1, 0, 1, LAMPORT_MAX]
    async with stores.open() as store:
        store.writer.write(
            [
                entry_of(content_frame(number, lamport=lamport))
                for number, lamport in enumerate(lamports)
            ]
        )
        page = await store.channels.page("channel", limit=10, bytes_max=BYTES_MAX)
        first = await store.channels.page(
            "channel", limit=10, bytes_max=BYTES_MAX, lamport_from=LAMPORT_MIN, lamport_to=-1
        )
        last = await store.channels.page(
            "channel", limit=10, bytes_max=BYTES_MAX, lamport_from=LAMPORT_MAX, direction="desc"
        )
        channel = await store.channels.named("channel")
    assert [entry.lamport_timestamp for entry in page.entries] == lamports
    assert [entry.lamport_timestamp for entry in first.entries] == [LAMPORT_MIN, -1]
    assert [entry.lamport_timestamp for entry in last.entries] == [LAMPORT_MAX]
    assert channel is not None
    assert (channel.lamport_first, channel.lamport_last) == (LAMPORT_MIN, LAMPORT_MAX)


async def test_a_text_with_u_0000_names_nothing_and_is_no_fault(stores: Stores) -> None:
    async with stores.open() as store:
        store.writer.write([entry_of(content_frame(1, message_id="m"), b"h")])
        for text in ("\0", "m\0", "\0m"):
            assert await store.entries.find(text, None) is None
            assert await store.entries.find("m", text) is None
            assert await store.channels.named(text) is None
            assert (await store.gaps.page(text, None, 10)).gaps == []
            assert (await store.channels.page(text, limit=1, bytes_max=1)).entries == []
            assert (await store.claims.page(b"h", text, 10)).entries == []
            assert await store.channels.after(None, 10, text) == []
            result = await store.entries.lookup(
                [text, "m"], [], None, presence_only=True, bytes_max=BYTES_MAX
            )
            assert result.missing == [text]
            assert [key for key, _ in result.found] == ["m"]
