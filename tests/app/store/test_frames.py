"""Frames come back byte for byte, small on disk; a damaged row costs its own message alone."""

from __future__ import annotations

import hashlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
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
from app.limits import DEFAULT_LIMITS
from app.store.frames import Codec, FramePacker, FrameUnpacker, PackedFrame
from app.store.schema import frame_references, frames
from app.store.store import Store
from sdstore.sds.codec import encode
from sdstore.sds.digest import frame_hash
from sdstore.sds.model import HistoryEntry, Message
from tests.support.publications import content_frame
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
    gone: list[int] = []
    for position, entry in enumerate(entries):
        try:
            found = await store.entries.entry(entry.digest)
        except Problem as problem:
            if problem.code is not Code.CONTENT_LOST:
                raise
            gone.append(position)
        else:
            assert found is not None
            assert found.frame == entry.frame
    return gone


def stored_bytes(connection: Connection) -> int:
    return sum(
        connection.execute(
            select(func.coalesce(func.sum(func.length(each.c.data)), 0))
        ).scalar_one()
        for each in (frames, frame_references)
    )


@pytest.mark.anyio
@pytest.mark.parametrize("group_items", [1, 50])
async def test_a_filter_costs_little_more_than_what_is_new_in_it(
    stores: Stores, group_items: int
) -> None:
    entries = conversation(300)
    groups = [entries[at : at + group_items] for at in range(0, len(entries), group_items)]
    url = await written(stores, groups)
    assert in_database(url, stored_bytes) / len(entries) < 1_200
    async with reopened(url) as store:
        assert await lost(store, entries) == []


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


def row_of(connection: Connection, table: str, seq: int) -> dict[str, Any]:
    found = connection.execute(text(f"SELECT * FROM {table} WHERE seq = :seq"), {"seq": seq})
    return dict(found.one()._mapping)


def put_data(connection: Connection, table: str, seq: int, data: bytes) -> None:
    statement = text(f"UPDATE {table} SET data = :data WHERE seq = :seq")
    connection.execute(statement, {"data": data, "seq": seq})


def flip(connection: Connection, table: str, seq: int) -> None:
    data = bytearray(row_of(connection, table, seq)["data"])
    data[len(data) // 2] ^= 0x40
    put_data(connection, table, seq, bytes(data))


def cut(connection: Connection, table: str, seq: int) -> None:
    put_data(connection, table, seq, b"(")


def delete(connection: Connection, table: str, seq: int) -> None:
    connection.execute(text(f"DELETE FROM {table} WHERE seq = :seq"), {"seq": seq})


def apply(harm: Harm, table: str, seq: int, connection: Connection) -> None:
    harm(connection, table, seq)


def restore(connection: Connection, table: str, row: dict[str, Any]) -> None:
    delete(connection, table, row["seq"])
    marks = ", ".join(f":{name}" for name in row)
    connection.execute(text(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})"), row)


async def audited(store: Store) -> Findings:
    findings = Findings()
    await check_store(store, findings, deep=True, tick=lambda _: None)
    return findings


async def check_damaged(
    store: Store, entries: Sequence[NewEntry], seq: int, *, is_only_copy: bool
) -> None:
    gone = [seq - 1] if is_only_copy else []
    assert await lost(store, entries) == gone
    page = await store.channels.page(CHANNEL, limit=1_000, bytes_max=BYTES_MAX)
    assert len(page.entries) == len(entries) - len(gone)
    assert [left_out.digest for left_out in page.left_out] == [
        entries[position].digest for position in gone
    ]
    findings = await audited(store)
    named = entries[seq - 1].digest.hex() if is_only_copy else f"frame {seq}:"
    assert any(named in damage for damage in findings.damages)


@pytest.mark.anyio
@pytest.mark.parametrize("harm", [flip, cut, delete])
async def test_any_one_damaged_row_costs_at_most_its_own_message(
    stores: Stores, harm: Harm
) -> None:
    entries = conversation(60, known=500)
    url = await written(stores, [entries])
    references = in_database(url, lambda c: list(c.scalars(select(frame_references.c.seq))))
    assert 2 <= len(references) < 20
    tables = [("frame_references", seq) for seq in references]
    tables += [("frames", seq) for seq in [*references, 7, 60]]
    for table, seq in tables:
        before = in_database(url, partial(row_of, table=table, seq=seq))
        in_database(url, partial(apply, harm, table, seq))
        is_only_copy = table == "frames" and seq not in references
        async with reopened(url) as store:
            await check_damaged(store, entries, seq, is_only_copy=is_only_copy)
        in_database(url, partial(restore, table=table, row=before))
    async with reopened(url) as store:
        assert (await audited(store)).damages == []
        assert await store.frames.lost_count() == 0


@pytest.mark.anyio
async def test_a_damaged_frame_is_logged_once_however_often_it_is_read(
    stores: Stores, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.store.frames.DAMAGES_TOLD_MAX", 3)
    entries = conversation(10)
    url = await written(stores, [entries])
    for table in ("frames", "frame_references"):
        in_database(url, lambda c, table=table: c.execute(text(f"DELETE FROM {table}")))
    async with reopened(url) as store:
        for _ in range(4):
            assert await store.entries.by_digest([entries[0].digest]) == []
        assert len(caplog.records) == 1
        assert (await store.channels.feed(0, 100, BYTES_MAX)).entries == []
    assert len(caplog.records) == 3


@pytest.mark.anyio
async def test_what_was_rolled_back_is_no_reference(stores: Stores) -> None:
    entries = conversation(40)
    url = stores.new_url()
    stores.refuse_rows(url, entries[19].message.message_id)
    async with reopened(url) as store:
        store.begin_writing()
        with pytest.raises(Exception, match="refused by the test"):
            store.writer.write(entries[:20])
        kept = [*entries[:19], *entries[20:]]
        for entry in kept:
            store.writer.write([entry])
    async with reopened(url) as store:
        assert await lost(store, kept) == []
        assert await store.frames.references_in_doubt(10) == []


@pytest.mark.anyio
async def test_nothing_new_hangs_on_references_that_are_gone(stores: Stores) -> None:
    entries = conversation(40)
    url = stores.new_url()
    async with reopened(url) as store:
        store.begin_writing()
        store.writer.write(entries[:20])
        in_database(url, lambda c: c.execute(frame_references.delete()))
        store.writer.write(entries[20:])
    used = in_database(
        url,
        lambda c: c.execute(
            select(func.min(frames.c.reference_no)).where(frames.c.seq > 20)
        ).scalar_one(),
    )
    assert used > 20
    async with reopened(url) as store:
        assert await lost(store, entries) == []


@pytest.mark.anyio
async def test_frames_that_do_not_compress_lie_as_they_are(stores: Stores) -> None:
    drawn = random.Random(1)
    sizes = [1, 200, 5_000, 20_000, 200_000]
    entries = [
        entry_of(content_frame(number, content=drawn.randbytes(sizes[number % len(sizes)])))
        for number in range(30)
    ]
    url = await written(stores, [entries])
    size = sum(len(entry.frame) for entry in entries)
    assert in_database(url, stored_bytes) <= 1.1 * size
    async with reopened(url) as store:
        assert await lost(store, entries) == []


def test_data_that_claims_to_be_larger_than_its_frame_is_not_unpacked() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(100_000_000))
    packed = PackedFrame(1, 300, frame_hash(b""), Codec.BUILT_IN, None, bomb)
    assert FrameUnpacker().unpack_at_hand(packed) is None


def test_the_built_in_dictionary_never_changes() -> None:
    dictionary = files("app.store").joinpath("frames.zdict").read_bytes()
    assert hashlib.sha256(dictionary).hexdigest() == (
        "71106b6ea9bd08cab69a7b12823e3ebdeeee54bd7a381c6fec0f989e8859778e"
    )


def test_a_small_frame_shrinks_by_the_built_in_dictionary() -> None:
    drawn = random.Random(5)
    history = tuple(HistoryEntry(drawn.randbytes(32).hex()) for _ in range(2))
    frame = content_frame(1, message_id=drawn.randbytes(32).hex(), history=history)
    codec, reference_no, data = FramePacker().pack(frame)
    assert (codec, reference_no) == (Codec.BUILT_IN, None)
    assert len(data) < 0.75 * len(frame)
    packed = PackedFrame(1, len(frame), frame_hash(frame), codec, None, data)
    assert FrameUnpacker().unpack_at_hand(packed) == frame
