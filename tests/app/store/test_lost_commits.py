"""A database that loses its last commits under a running store: whatever is acknowledged later stays."""

from __future__ import annotations

import pytest

from app.entries import NewEntry
from app.store.store import Store
from sdstore.sds.model import HistoryEntry
from tests.app.store.test_frames import conversation, reopened
from tests.support.publications import content_frame
from tests.support.stores import BYTES_MAX, Stores, entry_of, taken_back

pytestmark = pytest.mark.anyio


def write(store: Store, *entries: NewEntry) -> None:
    """One group for each."""
    for entry in entries:
        store.writer.write([entry])


async def test_frames_are_compressed_against_what_is_still_there(stores: Stores) -> None:
    url = stores.new_url()
    small = [entry_of(content_frame(number)) for number in range(2)]
    one, other = conversation(7), conversation(4, seed=2, channel_id="other")
    async with reopened(url) as store:
        store.begin_writing()
        write(store, *small)
        with taken_back(url):
            write(store, *one[:4])
        write(store, *other, *one[4:])
    acknowledged = [*small, *other, *one[4:]]
    async with reopened(url) as store:
        found = await store.entries.by_digest([entry.digest for entry in acknowledged])
        assert [entry.frame for entry in found] == [entry.frame for entry in acknowledged]


async def test_messages_stay_in_their_channels(stores: Stores) -> None:
    url = stores.new_url()
    async with reopened(url) as store:
        store.begin_writing()
        with taken_back(url):
            write(store, entry_of(content_frame(1, channel_id="a")))
        write(store, entry_of(content_frame(2, channel_id="b")))
        write(store, entry_of(content_frame(3, channel_id="a")))
        assert {each.channel_id: each.count for each in await store.channels.after(None, 9)} == {
            "a": 1,
            "b": 1,
        }
        assert await store.entries.find("message-000003", "a") is not None


async def test_gaps_and_hints_that_were_lost_are_told_again(stores: Stores) -> None:
    url = stores.new_url()
    told = (HistoryEntry("absent", b"hint"),)
    async with reopened(url) as store:
        store.begin_writing()
        write(store, entry_of(content_frame(1)))
        with taken_back(url):
            write(store, entry_of(content_frame(2, history=told)))
        write(store, entry_of(content_frame(3, history=told)))
        page = await store.gaps.page("channel", None, 9)
        assert [(gap.message_id, gap.hints) for gap in page.gaps] == [("absent", (b"hint",))]
        write(store, entry_of(content_frame(4, message_id="absent")))
        found = await store.entries.lookup(
            [], [b"hint"], None, presence_only=True, bytes_max=BYTES_MAX
        )
        assert len(found.found) == 1


async def test_a_writer_remembers_what_it_knew_when_another_one_wrote_meanwhile(
    postgres_stores: Stores,
) -> None:
    url = postgres_stores.new_url()
    one = conversation(5)
    async with reopened(url) as store, reopened(url) as another:
        store.begin_writing()
        another.begin_writing()
        write(store, *one[:4])
        known = dict(store.writer._frames._channels)
        write(another, entry_of(content_frame(1, channel_id="other")))
        write(store, one[4])
        assert known.keys() == store.writer._frames._channels.keys()
        assert all(store.writer._frames._channels[each] is known[each] for each in known)
