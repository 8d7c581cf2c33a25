"""The arrival chain: numbers are given once, and a token holds where the history is the same."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine, text

from app.entries import START, Token, Watermark
from app.server.limits import DEFAULT_LIMITS
from app.store.arrivals import ArrivalChain
from app.store.store import Store
from sdstore.sds.codec import encode
from sdstore.sds.model import Message
from tests.app.store.test_schema_fixtures import restored
from tests.support.publications import content_frame
from tests.support.stores import Stores, entry_of

pytestmark = pytest.mark.anyio


def plain_sums(secret: bytes, rows: Sequence[tuple[int, bytes]]) -> list[int]:
    """The sums of rows (number, element), one by one, as docs/store.md defines them."""
    key = blake3(secret, derive_key_context="sdstore arrival chain v1").digest(length=16)
    total, sums = 0, []
    for number, element in rows:
        # CBC-MAC of 48 bytes: the last block of CBC with a zero IV.
        encryptor = Cipher(algorithms.AES(key), modes.CBC(bytes(16))).encryptor()
        mac = encryptor.update(number.to_bytes(16, "little") + element)[-16:]
        total = (total + int.from_bytes(mac[:8], "little")) % 2**64
        sums.append(total - 2**64 if total >= 2**63 else total)
    return sums


def stored(url: str) -> tuple[bytes, list[Any], list[Any]]:
    """(secret, rows of entries, rows of claims) of a database; rows are (number, element, sum)."""
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect() as connection:

        def rows(statement: str) -> list[tuple[Any, ...]]:
            return [tuple(row) for row in connection.execute(text(statement))]

        [[secret]] = rows("SELECT value FROM store_meta WHERE name = 'key_secret'")
        entries = rows("SELECT seq, digest, arrival_sum FROM messages ORDER BY seq")
        claims = rows(
            "SELECT claim_no, element_id, arrival_sum FROM published_claims ORDER BY claim_no"
        )
    engine.dispose()
    return bytes(secret), entries, claims


def require_whole(url: str) -> None:
    """Every sum is the one that the rows up to it make."""
    secret, *chains = stored(url)
    for rows in chains:
        expected = plain_sums(secret, [(number, bytes(element)) for number, element, _ in rows])
        assert [row[2] for row in rows] == expected


@given(
    st.binary(min_size=16, max_size=16),
    st.integers(-(2**63), 2**63 - 1),
    st.lists(st.binary(min_size=32, max_size=32), max_size=12),
)
def test_columns_and_single_rows_have_the_sums_of_the_definition(
    secret: bytes, before: int, elements: list[bytes]
) -> None:
    chain = ArrivalChain(secret)
    numbers = [3 * n + 1 for n in range(len(elements))]
    at_once = chain.sums(before, numbers, elements)
    one_by_one, last = [], before
    for number, element in zip(numbers, elements, strict=True):
        [last] = chain.sums(last, [number], [element])
        one_by_one.append(last)
    assert at_once == one_by_one
    if before == 0:
        assert at_once == plain_sums(secret, list(zip(numbers, elements, strict=True)))


async def test_a_migration_fills_the_chains_of_what_was_there(
    stores: Stores, tmp_path: Path
) -> None:
    url = restored(stores, "0001", tmp_path)
    store = await Store.open(url, DEFAULT_LIMITS)
    require_whole(url)
    before = await store.arrivals.arrived()
    assert before.entries.number > 10
    assert before.claims.number > 10
    store.begin_writing()
    store.writer.write([entry_of(content_frame(1), b"hint")])
    require_whole(url)
    assert await store.arrivals.holds(*before)
    await store.close()


async def test_a_number_is_given_once_also_after_the_newest_row_is_gone(stores: Stores) -> None:
    url = stores.new_url()
    store = await Store.open(url, DEFAULT_LIMITS)
    store.begin_writing()
    first = store.writer.write([entry_of(content_frame(n), b"hint") for n in range(3)])
    before = await store.arrivals.arrived()
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM published_claims WHERE claim_no = 3"))
        connection.execute(text("DELETE FROM frames WHERE seq = 3"))
        connection.execute(text("DELETE FROM messages WHERE seq = 3"))
    engine.dispose()
    await asyncio.sleep(0)  # reads of one turn of the loop share a transaction
    gone = await store.arrivals.arrived()
    [result] = store.writer.write([entry_of(content_frame(7), b"hint")])
    assert result.seq == first[-1].seq + 1
    assert result.new_claims[0].claim_no == first[-1].new_claims[0].claim_no + 1
    # A token made while the last number had no row means the last row below it, for ever.
    assert gone.entries.number == before.entries.number
    assert await store.arrivals.holds(*gone)
    await store.close()


async def test_a_token_above_the_watermark_or_with_another_sum_does_not_hold(
    stores: Stores,
) -> None:
    async with stores.open() as store:
        assert await store.arrivals.holds(START)
        assert not await store.arrivals.holds(Token(1, 0))
        store.writer.write([entry_of(content_frame(n), b"hint") for n in range(3)])
        entries, claims = await store.arrivals.arrived()
        assert await store.arrivals.holds(entries, claims)
        for wrong in (entries._replace(sum=entries.sum ^ 1), Token(4, entries.sum), Token(0, 1)):
            assert not await store.arrivals.holds(wrong, claims)
        for wrong in (claims._replace(sum=claims.sum ^ 1), Token(4, claims.sum), Token(-1, 1)):
            assert not await store.arrivals.holds(entries, wrong)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(0, 3), st.integers(0, 5), st.booleans()),
        st.tuples(st.just("copy"), st.integers(0, 3), st.integers(0, 3), st.just(True)),
    ),
    min_size=4,
    max_size=24,
)


@given(steps)
@settings(max_examples=25, deadline=None)
def test_a_token_holds_on_exactly_the_copies_that_share_the_history_up_to_it(
    script: list[tuple[str, int, int, bool]],
) -> None:
    """Four copies of a database take messages and each other's places, in any order."""

    async def scenario(folder: Path) -> None:
        histories: list[tuple[list[str], list[str]]] = [([], []) for _ in range(4)]
        seed = await Store.open(f"sqlite:///{folder}/0.db", DEFAULT_LIMITS)
        await seed.close()
        for n in range(1, 4):
            shutil.copy(folder / "0.db", folder / f"{n}.db")
        tokens: dict[Watermark, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        for kind, one, other, has_hint in script:
            if kind == "copy":
                if one != other:
                    shutil.copy(folder / f"{one}.db", folder / f"{other}.db")
                    histories[other] = tuple(map(list, histories[one]))  # type: ignore[assignment]
                continue
            store = await Store.open(f"sqlite:///{folder}/{one}.db", DEFAULT_LIMITS)
            store.begin_writing()
            entry = entry_of(content_frame(other), *([b"h"] if has_hint else []))
            [result] = store.writer.write([entry])
            entries, claims = histories[one]
            if result.is_new:
                entries.append(f"m{other}")
            if result.new_claims:
                claims.append(f"m{other}")
            tokens[await store.arrivals.arrived()] = (tuple(entries), tuple(claims))
            await store.close()
            # Nothing may be left in the log that a copy would miss.
            with closing(sqlite3.connect(folder / f"{one}.db")) as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        for n, (entries, claims) in enumerate(histories):
            store = await Store.open(f"sqlite:///{folder}/{n}.db", DEFAULT_LIMITS)
            for token, (its_entries, its_claims) in tokens.items():
                shared = (
                    tuple(entries[: len(its_entries)]) == its_entries
                    and tuple(claims[: len(its_claims)]) == its_claims
                )
                assert await store.arrivals.holds(*token) is shared
            await store.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(scenario(Path(folder)))


async def test_what_arrived_in_between_is_found_in_some_channels_and_in_all(stores: Stores) -> None:
    """By the index of each channel, and by reading everything: both give the same."""
    store = await Store.open(stores.new_url(), DEFAULT_LIMITS)
    store.begin_writing()
    for number in range(120):
        message = Message(f"m{number}", f"c{number % 3}", lamport_timestamp=number, content=b"x")
        store.writer.write([entry_of(encode(message), b"hint %d" % number)])
    names = {each.channel_id: each.channel_no for each in await store.channels.numbered_after(0, 9)}
    some = sorted([names["c0"], names["c2"]])
    arrivals = store.arrivals
    for read in (arrivals.entries_between, arrivals.claims_between):
        everything = await read(0, 1_000, None, 1_000)
        assert [row[0] for row in everything] == list(range(1, 121))
        for after, up_to in ((0, 120), (7, 9), (60, 120), (119, 120), (50, 50)):
            expected = [row for row in everything if after < row[0] <= up_to]
            assert sorted(await read(after, up_to, None, 1_000)) == expected
            in_some = [row for row in expected if row[1] in some]
            assert sorted(await read(after, up_to, some, 1_000)) == in_some
            assert await read(after, up_to, [], 1_000) == []
    assert len(await arrivals.entries_between(0, 120, None, 5)) == 5
    assert len(await arrivals.entries_between(0, 120, some, 5)) <= 10
    place = await arrivals.places((60, 30))
    assert place is not None
    assert await arrivals.holds(*place)
    assert await arrivals.places((121, 0)) is None
    assert await arrivals.places((0, 121)) is None
    await store.close()


async def test_when_entries_arrived_is_read_by_their_numbers(stores: Stores) -> None:
    store = await Store.open(stores.new_url(), DEFAULT_LIMITS)
    store.begin_writing()
    for number in range(5):
        message = Message(f"m{number}", "c", lamport_timestamp=number, content=b"x")
        store.writer.write([entry_of(encode(message))])
    found = {seq: at_ms for at_ms, seq in await store.arrivals.received_at([5, 2, 9])}
    assert found == {seq: await store.arrivals.received_at_ms(seq) for seq in (2, 5)}
    await store.close()
