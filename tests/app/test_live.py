"""The hub of live readers, and what must not stop it: damaged frames, a store that cannot be read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from app.entries import START, Entry
from app.errors import Problem
from app.live.hub import LiveEvent, LiveHub, LiveMessage, Skip
from app.server.limits import DEFAULT_LIMITS
from app.store.entryrows import LeftOut
from app.store.store import Store
from tests.support.publications import content_frame
from tests.support.stores import Stores, entry_of, taken_back

pytestmark = pytest.mark.anyio


def write(store: Store, numbers: range) -> None:
    store.writer.write([entry_of(content_frame(number)) for number in numbers])


def lose_frames(url: str, first: int, last: int) -> None:
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        statement = text("DELETE FROM frames WHERE seq BETWEEN :first AND :last")
        connection.execute(statement, {"first": first, "last": last})
    engine.dispose()


def seqs(events: Sequence[LiveEvent]) -> list[int]:
    return [each.item.seq for each in events if isinstance(each, LiveMessage)]  # type: ignore[union-attr]


def left_out_and_seqs(events: list[LiveEvent]) -> tuple[int, list[int]]:
    items = [each.item for each in events if isinstance(each, LiveMessage)]
    entries = [item.seq for item in items if isinstance(item, Entry)]
    return sum(isinstance(item, LeftOut) for item in items), entries


async def next_messages(
    events: AsyncGenerator[Sequence[LiveEvent], None], count: int
) -> list[LiveEvent]:
    """The events up to the message that is the last of so many."""
    found: list[LiveEvent] = []
    while sum(isinstance(each, LiveMessage) for each in found) < count:
        found += await anext(events)
    return found


async def test_readers_are_told_of_messages_whose_content_is_lost(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.live.hub.FEED_PAGE", 5)
    url = stores.new_url()
    store = await Store.open(url, DEFAULT_LIMITS)
    store.begin_writing()
    hub = LiveHub(store, DEFAULT_LIMITS)
    write(store, range(1, 14))
    lose_frames(url, 1, 12)
    async with asyncio.timeout(60):
        stored = hub.events(lambda _: True, after=START)
        await anext(stored)
        assert left_out_and_seqs(await next_messages(stored, 13)) == (12, [13])
        # Both wait for what comes now; of it twelve are lost before anybody reads them.
        fresh = hub.events(lambda _: True, after=None)
        await anext(fresh)
        write(store, range(14, 27))
        lose_frames(url, 14, 25)
        hub.committed.set()
        for events in (stored, fresh):
            assert left_out_and_seqs(await next_messages(events, 13)) == (12, [26])
    await hub.close()
    for events in (stored, fresh):
        await events.aclose()
    await store.close()


async def test_readers_outlive_whatever_a_read_fails_with_and_the_log_says_so_once(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("app.live.hub.POLL_S", 0.01)
    async with stores.open() as store:
        hub = LiveHub(store, DEFAULT_LIMITS)
        events = hub.events(lambda _: True, after=None)
        await anext(events)
        read, failures = store.channels.feed, iter([OSError("the disk is gone")] * 5)

        async def failing(*arguments: Any) -> Any:
            for failure in failures:
                raise failure
            return await read(*arguments)

        monkeypatch.setattr(store.channels, "feed", failing)
        write(store, range(1, 2))
        with caplog.at_level(logging.WARNING, "app.live.hub"):
            async with asyncio.timeout(60):
                assert seqs(await next_messages(events, 1)) == [1]
        assert len(caplog.records) == 1
        await hub.close()
        await events.aclose()


@pytest.mark.parametrize("is_behind", [False, True])
async def test_readers_are_told_when_the_database_lost_what_they_were_shown(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, is_behind: bool
) -> None:
    monkeypatch.setattr("app.live.hub.REPLAY_PAGE", 4)
    url = stores.new_url()
    store = await Store.open(url, DEFAULT_LIMITS)
    store.begin_writing()
    hub = LiveHub(store, replace(DEFAULT_LIMITS, live_heartbeat_s=1))
    write(store, range(1, 4))
    present = (await store.arrivals.arrived()).entries
    async with asyncio.timeout(60):
        events = hub.events(lambda _: True, after=present if is_behind else None)
        await anext(events)
        with taken_back(url):
            write(store, range(4, 9))
            hub.committed.set()
            shown = await next_messages(events, 4)
            assert seqs(shown)[:4] == [4, 5, 6, 7]
        write(store, range(20, 23))
        hub.committed.set()
        told = list(await anext(events))
        while seqs(told) == [8]:
            told = list(await anext(events))
        assert told
        assert isinstance(told[0], Skip)
        while hub._last != (await store.arrivals.arrived()).entries:  # noqa: ASYNC110 - another task's state
            await asyncio.sleep(0.01)
        write(store, range(30, 32))
        hub.committed.set()
        while seqs(told)[-2:] != [7, 8]:
            told += await anext(events)
    await hub.close()
    await events.aclose()
    await store.close()


async def test_a_reader_that_leaves_frees_its_place_even_before_its_first_event(
    stores: Stores,
) -> None:
    store = await Store.open(stores.new_url(), DEFAULT_LIMITS)
    hub = LiveHub(store, replace(DEFAULT_LIMITS, live_readers_max=1))
    unread = hub.events(lambda _: True, None, "", await hub.admit())
    with pytest.raises(Problem):
        await hub.admit()
    del unread
    read = hub.events(lambda _: True, None, "", await hub.admit())
    await anext(read)
    with pytest.raises(Problem):
        await hub.admit()
    await read.aclose()
    await hub.admit()
    await hub.close()
    await store.close()
