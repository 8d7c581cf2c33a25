"""Values at the ends of what a message may hold answer alike on both databases."""

from __future__ import annotations

import pytest

from app.entries import MetId
from app.store.entryrows import Position
from sdstore.sds.model import LAMPORT_MAX, LAMPORT_MIN, HistoryEntry
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
INT64_MAX = 2**63 - 1


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


async def test_ids_of_full_length_are_stored_listed_and_found(stores: Stores) -> None:
    ids = ["é" * 511 + end for end in ("a", "b", "ü")]
    channel_id = "c" * 256
    async with stores.open() as store:
        told = (HistoryEntry("m" * 1024, b"h" * 256),)
        store.writer.write(
            [
                entry_of(
                    content_frame(1, channel_id=channel_id, message_id=each, history=told),
                    b"p" * 256,
                )
                for each in ids
            ],
            [MetId(channel_id, "s" * 1024)],
        )
        page = await store.channels.page(channel_id, limit=2, bytes_max=BYTES_MAX)
        rest = await store.channels.page(channel_id, limit=2, bytes_max=BYTES_MAX, after=page.next)
        gaps = await store.gaps.page(channel_id, None, 10)
        for each in ids:
            assert await store.entries.find(each, channel_id) is not None
    assert [entry.message_id for entry in (*page.entries, *rest.entries)] == ids
    assert [gap.message_id for gap in gaps.gaps] == ["m" * 1024]


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


async def test_positions_of_64_bits_are_places_like_any_other(stores: Stores) -> None:
    async with stores.open() as store:
        store.writer.write([entry_of(content_frame(1), b"h")])
        for number in (-INT64_MAX - 1, -1, INT64_MAX):
            seen = 1 if number < 0 else 0
            assert len((await store.channels.feed(number, 10, BYTES_MAX)).entries) == seen
            hint = await store.claims.page(b"h", None, 10, (number, number, number))
            assert len(hint.entries) == seen
            arrival = await store.channels.page(
                "channel", order="arrival", limit=10, bytes_max=BYTES_MAX, after=(number,)
            )
            assert len(arrival.entries) == seen
