"""Frames come back byte for byte, small on disk; a damaged row costs its own message alone."""

from __future__ import annotations

import hashlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from importlib.resources import files
from typing import Any

import pytest
import zstandard
from sqlalchemy import Connection, create_engine, func, select, text
from sqlalchemy.engine import make_url

from app.cli.checking import Findings, check_store
from app.entries import NewEntry
from app.errors import Code, Problem
from app.server.limits import DEFAULT_LIMITS
from app.store.entryrows import Codec, FrameUnpacker, PackedFrame
from app.store.schema import filter_references, frames
from app.store.store import Store
from sdstore.sds.codec import decode, encode
from sdstore.sds.model import HistoryEntry, Message, frame_hash
from tests.support.stores import BYTES_MAX, Stores, entry_of

FILTER_BYTES = 18_752
CHANNEL = "channel"


def conversation(
    count: int, *, known: int = 2_000, seed: int = 1, channel_id: str = CHANNEL
) -> list[NewEntry]:
    """Frames with a full-size filter that gains ten bits a message."""
    drawn = random.Random(seed)
    bits = bytearray(FILTER_BYTES)

    def add_id() -> None:
        for _ in range(10):
            bit = drawn.randrange(8 * FILTER_BYTES)
            bits[bit >> 3] |= 1 << (bit & 7)

    for _ in range(known):
        add_id()
    ids: list[str] = []
    entries: list[NewEntry] = []
    for number in range(count):
        ids.append(drawn.randbytes(32).hex())
        message = Message(
            ids[-1],
            channel_id,
            lamport_timestamp=1_000 * number,
            causal_history=tuple(map(HistoryEntry, ids[-3:-1])),
            bloom_filter=bytes(bits),
            content=b"message %d" % number,
        )
        entries.append(entry_of(encode(message)))
        add_id()
    return entries


@asynccontextmanager
async def reopened(url: str) -> AsyncIterator[Store]:
    """The store as another process finds it: nothing is in memory yet."""
    store = await Store.open(url, DEFAULT_LIMITS)
    try:
        yield store
    finally:
        await store.close()


async def written(stores: Stores, groups: Sequence[Sequence[NewEntry]]) -> str:
    url = stores.new_url()
    async with reopened(url) as store:
        store.begin_writing()
        for group in groups:
            store.writer.write(group)
    return url


def in_database(url: str, act: Callable[[Connection], Any]) -> Any:
    parsed = make_url(url)
    if parsed.get_backend_name() == "postgresql":
        parsed = parsed.set(drivername="postgresql+psycopg")
    engine = create_engine(parsed)
    try:
        with engine.begin() as connection:
            return act(connection)
    finally:
        engine.dispose()


async def lost(store: Store, entries: Sequence[NewEntry]) -> list[int]:
    """Positions of the entries that cannot be read; the others are right."""
    gone, stripped = await read(store, entries)
    assert not stripped
    return gone


async def read(store: Store, entries: Sequence[NewEntry]) -> tuple[list[int], list[int]]:
    """Positions of the entries that cannot be read, and of those that come without their filters."""
    gone: list[int] = []
    stripped: list[int] = []
    for position, entry in enumerate(entries):
        try:
            found = await store.entries.entry(entry.digest)
        except Problem as problem:
            if problem.code is not Code.CONTENT_LOST:
                raise
            gone.append(position)
        else:
            assert found is not None
            assert found.frame_hash == frame_hash(found.frame)
            if found.filter_is_lost:
                stripped.append(position)
                assert decode(found.frame)[0] == replace(entry.message, bloom_filter=b"")
            else:
                assert found.frame == entry.frame
    return gone, stripped


def stored_bytes(connection: Connection) -> int:
    return sum(
        connection.execute(
            select(func.coalesce(func.sum(func.length(each.c.data)), 0))
        ).scalar_one()
        for each in (frames, filter_references)
    )


@pytest.mark.anyio
async def test_frames_in_any_order_from_a_writer_that_forgets_come_back_whole(
    stores: Stores,
) -> None:
    entries = conversation(200)
    random.Random(3).shuffle(entries)
    url = stores.new_url()
    for at in range(0, len(entries), 40):
        async with reopened(url) as store:
            store.begin_writing()
            store.writer.write(entries[at : at + 40])
    assert in_database(url, stored_bytes) / len(entries) < 3_000
    async with reopened(url) as store:
        assert await lost(store, entries) == []
        page = await store.channels.page(CHANNEL, limit=1_000, bytes_max=BYTES_MAX)
        assert {entry.frame for entry in page.entries} == {entry.frame for entry in entries}


Harm = Callable[[Connection, str, int], None]


KEYS = {"frames": "seq", "filter_references": "reference_no"}


def row_of(connection: Connection, table: str, seq: int) -> dict[str, Any]:
    query = text(f"SELECT * FROM {table} WHERE {KEYS[table]} = :seq")
    return dict(connection.execute(query, {"seq": seq}).one()._mapping)


def put_data(connection: Connection, table: str, seq: int, data: bytes) -> None:
    statement = text(f"UPDATE {table} SET data = :data WHERE {KEYS[table]} = :seq")
    connection.execute(statement, {"data": data, "seq": seq})


def flip(connection: Connection, table: str, seq: int) -> None:
    data = bytearray(row_of(connection, table, seq)["data"])
    data[len(data) // 2] ^= 0x40
    put_data(connection, table, seq, bytes(data))


def spoil(connection: Connection, table: str, seq: int) -> None:
    """Flip a bit near the end, which is in the rest of a frame with a filter."""
    data = bytearray(row_of(connection, table, seq)["data"])
    data[-20] ^= 1
    put_data(connection, table, seq, bytes(data))


def cut(connection: Connection, table: str, seq: int) -> None:
    put_data(connection, table, seq, b"(")


def delete(connection: Connection, table: str, seq: int) -> None:
    connection.execute(text(f"DELETE FROM {table} WHERE {KEYS[table]} = :seq"), {"seq": seq})


def apply(harm: Harm, table: str, seq: int, connection: Connection) -> None:
    harm(connection, table, seq)


async def audited(store: Store) -> Findings:
    findings = Findings()
    await check_store(store, findings, deep=True, tick=lambda _: None)
    return findings


def users_of(connection: Connection, reference_no: int) -> list[int]:
    """Sequence numbers of the entries whose frames are stored against a reference."""
    query = select(frames.c.seq).where(frames.c.reference_no == reference_no)
    return sorted(connection.scalars(query))


def references_of(url: str) -> list[int]:
    query = select(filter_references.c.reference_no)
    numbers: list[int] = in_database(url, lambda c: sorted(c.scalars(query)))
    return numbers


@pytest.mark.anyio
@pytest.mark.parametrize("harm", [flip, cut, delete])
async def test_a_damaged_reference_costs_filters_and_no_content(stores: Stores, harm: Harm) -> None:
    entries = conversation(60, known=500)
    for place in (0, -1):
        url = await written(stores, [entries])
        references = references_of(url)
        assert 2 <= len(references) < 20
        users = in_database(url, partial(users_of, reference_no=references[place]))
        in_database(url, partial(apply, harm, "filter_references", references[place]))
        async with reopened(url) as store:
            assert await read(store, entries) == ([], [seq - 1 for seq in users])
            page = await store.channels.page(CHANNEL, limit=1_000, bytes_max=BYTES_MAX)
            assert (len(page.entries), page.left_out) == (len(entries), ())
            damages = (await audited(store)).damages
            assert len(damages) == len(users)
            assert all("bloom filter" in damage for damage in damages)
            assert await store.frames.lost_count() == 0
            assert (await audited(store)).damages == []


@pytest.mark.anyio
@pytest.mark.parametrize("harm", [flip, cut, delete])
async def test_any_damaged_frame_costs_at_most_its_own_message(stores: Stores, harm: Harm) -> None:
    entries = conversation(60, known=500)
    for seq in (1, 7, 60):
        url = await written(stores, [entries])
        in_database(url, partial(apply, harm, "frames", seq))
        async with reopened(url) as store:
            gone, stripped = await read(store, entries)
            assert gone + stripped == [seq - 1]
            page = await store.channels.page(CHANNEL, limit=1_000, bytes_max=BYTES_MAX)
            assert [each.seq for each in page.left_out] == [position + 1 for position in gone]
            assert len(page.entries) == len(entries) - len(gone)
            findings = await audited(store)
            assert any(entries[seq - 1].digest.hex() in damage for damage in findings.damages)
            assert await store.frames.lost_count() == len(gone)


@pytest.mark.anyio
async def test_a_row_with_another_messages_frame_is_lost_content(stores: Stores) -> None:
    entries = conversation(10, known=500)
    url = await written(stores, [entries])
    other = in_database(url, partial(row_of, table="frames", seq=7))["data"]
    in_database(url, partial(put_data, table="frames", seq=8, data=other))
    async with reopened(url) as store:
        assert await read(store, entries) == ([7], [])


@pytest.mark.anyio
async def test_a_lost_filter_is_told_once_and_the_frame_is_sound_from_then_on(
    stores: Stores,
) -> None:
    entries = conversation(60, known=500)
    url = await written(stores, [entries])
    first, *others = references_of(url)
    users = in_database(url, partial(users_of, reference_no=first))
    in_database(url, partial(flip, table="filter_references", seq=first))
    async with reopened(url) as store:
        store.begin_writing()
        assert store.writer.recheck(range(1, 61)) == (frozenset(), frozenset(range(1, 61)))
    assert references_of(url) == others
    async with reopened(url) as store:
        assert (await audited(store)).damages == []
        assert await read(store, entries) == ([], [seq - 1 for seq in users])
        # Such a frame is a duplicate of the message with its filter: what it says is here.
        store.begin_writing()
        assert not any(r.is_new or r.is_mended for r in store.writer.write(entries))
        assert [r.is_new for r in store.writer.write(conversation(61, known=500)[60:])] == [True]


def test_data_that_claims_to_be_larger_than_its_frame_is_not_unpacked() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(100_000_000))
    packed = PackedFrame(1, 300, frame_hash(b""), bytes(32), Codec.BUILT_IN, None, bomb)
    assert FrameUnpacker().unpack_at_hand(packed) is None


def test_the_built_in_dictionary_never_changes() -> None:
    dictionary = files("app.store").joinpath("frames.zdict").read_bytes()
    assert hashlib.sha256(dictionary).hexdigest() == (
        "71106b6ea9bd08cab69a7b12823e3ebdeeee54bd7a381c6fec0f989e8859778e"
    )
