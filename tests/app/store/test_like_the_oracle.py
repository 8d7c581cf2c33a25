"""After any writes in any groups, the store gives the same answers as an oracle of dictionaries."""

from __future__ import annotations

import asyncio
import hashlib
from unittest.mock import patch

from hypothesis import given, settings

from app.ingest.prepare import Publication
from app.server.limits import DEFAULT_LIMITS, Limits
from app.store.channelpages import Page
from app.store.entryrows import Keys, Position
from app.store.store import Store
from recon.elements import order_of_lamport
from sdstore.sds.model import claim_id
from tests.support.oracle_store import Kept, OracleStore
from tests.support.publications import CHANNELS, HINTS, MESSAGE_IDS, groups
from tests.support.stores import BYTES_MAX, Stores, prepared

FEW_CLAIMS = Limits(hint_claims_per_entry_max=2)
Groups = list[list[Publication]]


def colliding_key(_keys: Keys, value: bytes) -> int:
    """Three keys for everything."""
    return hashlib.sha256(value).digest()[0] % 3 - 1


async def written(store: Store, sent: Groups, limits: Limits = DEFAULT_LIMITS) -> OracleStore:
    oracle = OracleStore(limits)
    for group in sent:
        entries, met = prepared(group, limits)
        results = store.writer.write(entries, met)
        assert [result.is_new for result in results] == oracle.write(entries, met)
        assert [result.seq for result in results] == [oracle.kept[e.digest].seq for e in entries]
    return oracle


async def check_everything(store: Store, oracle: OracleStore) -> None:
    await check_entries(store, oracle)
    await check_ids(store, oracle)
    await check_hints(store, oracle)
    await check_channels(store, oracle)
    await check_elements(store, oracle)


async def check_entries(store: Store, oracle: OracleStore) -> None:
    digests = [*oracle.kept, bytes(32)]
    for entry, kept in zip(
        await store.entries.by_digest(digests), oracle.kept.values(), strict=True
    ):
        assert (entry.seq, entry.digest, entry.frame) == (kept.seq, kept.digest, kept.entry.frame)
        assert (entry.channel_id, entry.message_id) == (kept.channel_id, kept.message_id)
        assert entry.lamport_timestamp == kept.lamport
        assert entry.frame_hash == kept.entry.frame_hash
        assert entry.dialect is kept.entry.dialect
    hints = {
        digest: {claim.hint: int(claim.source) for claim in claims}
        for digest, claims in (await store.claims.of(digests)).items()
    }
    entries = await store.entries.by_digest(digests)
    assert await store.claims.of_entries(entries) == await store.claims.of(digests)
    assert hints == {kept.digest: kept.hints for kept in oracle.kept.values() if kept.hints}
    for digest in digests:
        # Of one entry they are read in another way.
        claims = (await store.claims.of([digest])).get(digest, [])
        assert {claim.hint: int(claim.source) for claim in claims} == hints.get(digest, {})


async def check_ids(store: Store, oracle: OracleStore) -> None:
    for channel_id in (None, *CHANNELS, "no such channel"):
        for message_id in MESSAGE_IDS:
            expected = [kept.digest for kept in oracle.bearing(message_id, channel_id)]
            found = await store.entries.find(message_id, channel_id)
            assert ([] if found is None else list(found.variants)) == expected
            assert found is None or found.entry.digest == expected[0]
        asked = [*MESSAGE_IDS, "never"]
        result = await store.entries.lookup(
            asked, HINTS, channel_id, presence_only=True, bytes_max=BYTES_MAX
        )
        by_key = {
            **{key: [k.digest for k in oracle.bearing(key, channel_id)] for key in asked},
            **{hint: [k.digest for k in oracle.hint(hint, channel_id)] for hint in HINTS},
        }
        assert result.found == [(key, digest) for key, found in by_key.items() for digest in found]
        assert result.missing == [key for key, found in by_key.items() if not found]


async def check_hints(store: Store, oracle: OracleStore) -> None:
    for channel_id in (None, *CHANNELS):
        for hint in HINTS:
            expected = [kept.digest for kept in oracle.hint(hint, channel_id)]
            assert await hint_pages(store, hint, channel_id, 1) == expected
            assert await hint_pages(store, hint, channel_id, 100) == expected


async def hint_pages(store: Store, hint: bytes, channel_id: str | None, limit: int) -> list[bytes]:
    digests: list[bytes] = []
    after: Position | None = None
    while True:
        page = await store.claims.page(hint, channel_id, limit, after)
        digests += [entry.digest for entry in page.entries]
        if page.next is None:
            return digests
        after = page.next


async def check_channels(store: Store, oracle: OracleStore) -> None:
    listed = await store.channels.after(None, 100)
    assert [channel.channel_id for channel in listed] == oracle.channel_ids()
    for channel in listed:
        entries = oracle.channel(channel.channel_id)
        lamports = [kept.lamport for kept in entries]
        assert channel.count == len(entries)
        assert (channel.lamport_first, channel.lamport_last) == (min(lamports), max(lamports))
        assert await store.channels.named(channel.channel_id) == channel
        gaps = await store.gaps.page(channel.channel_id, None, 100)
        assert {gap.message_id: list(gap.hints) for gap in gaps.gaps} == oracle.gaps(
            channel.channel_id
        )
        marked = {gap.message_id for gap in gaps.gaps if gap.met_as_sync}
        met = {message_id for name, message_id in oracle.met if name == channel.channel_id}
        assert marked == met & {gap.message_id for gap in gaps.gaps}
        await check_pages(store, channel.channel_id, entries)
    feed = await store.channels.feed(0, 1000, BYTES_MAX)
    assert [entry.digest for entry in feed.entries] == list(oracle.kept)


async def check_pages(store: Store, channel_id: str, entries: list[Kept]) -> None:
    in_log_order = sorted(entries, key=lambda kept: kept.log_key)
    for order, expected in (("log", in_log_order), ("arrival", entries)):
        for direction in ("asc", "desc"):
            digests = [kept.digest for kept in expected]
            if direction == "desc":
                digests.reverse()
            found = await pages(store, channel_id, 2, order=order, direction=direction)
            assert found == digests


async def pages(store: Store, channel_id: str, limit: int, **how: object) -> list[bytes]:
    digests: list[bytes] = []
    after: Position | None = None
    while True:
        page: Page = await store.channels.page(
            channel_id,
            after=after,
            limit=limit,
            bytes_max=BYTES_MAX,
            **how,  # type: ignore[arg-type]
        )
        digests += [entry.digest for entry in page.entries]
        if page.next is None:
            return digests
        after = page.next


async def check_elements(store: Store, oracle: OracleStore) -> None:
    channels = {c.channel_no: c.channel_id for c in await store.channels.numbered_after(0, 100)}
    found: list[tuple[int, bytes, str, int]] = []
    position = (0, 0)
    while len((columns := await store.arrivals.elements_after(*position, 3)).orders):
        rows = zip(columns.orders, columns.ids, columns.groups, strict=True)
        found += [
            (int(order), bytes(element), channels[int(group) // 2], int(group) % 2)
            for order, element, group in rows
        ]
        position = columns.next
    assert position == await store.arrivals.watermark()
    entries = [
        (order_of_lamport(kept.lamport), kept.digest, kept.channel_id, 0)
        for kept in oracle.kept.values()
    ]
    claims = {
        (order_of_lamport(kept.lamport), claim_id(kept.digest, hint), kept.channel_id, 1): hint
        for kept in oracle.kept.values()
        for hint in kept.hints
    }
    assert found[: len(entries)] == entries
    assert sorted(found[len(entries) :]) == sorted(claims)
    named = await store.claims.by_element([element for _, element, *_ in claims])
    assert [named[element][1] for _, element, *_ in claims] == list(claims.values())


@given(groups)
@settings(max_examples=25, deadline=None)
def test_any_mix_of_frames_in_any_grouping_answers_like_the_oracle(
    stores: Stores, sent: Groups
) -> None:
    async def scenario() -> None:
        async with stores.open() as store:
            await check_everything(store, await written(store, sent))

    asyncio.run(scenario())


@given(groups)
@settings(max_examples=12, deadline=None)
def test_colliding_keys_cost_no_right_answer(stores: Stores, sent: Groups) -> None:
    async def scenario() -> None:
        async with stores.open() as store:
            await check_everything(store, await written(store, sent))

    with patch.object(Keys, "of_bytes", colliding_key):
        asyncio.run(scenario())


@given(groups)
@settings(max_examples=12, deadline=None)
def test_claims_beyond_the_bound_of_an_entry_are_left_out(stores: Stores, sent: Groups) -> None:
    async def scenario() -> None:
        async with stores.open(FEW_CLAIMS) as store:
            await check_everything(store, await written(store, sent, FEW_CLAIMS))

    asyncio.run(scenario())


@given(groups)
@settings(max_examples=12, deadline=None)
def test_the_grouping_of_writes_changes_nothing(stores: Stores, sent: Groups) -> None:
    async def scenario() -> None:
        async with stores.open() as store:
            oracle = await written(store, [[item] for group in sent for item in group])
            await check_everything(store, oracle)

    asyncio.run(scenario())


def position(kept: Kept, order: str) -> Position:
    if order == "log":
        return kept.lamport, kept.message_id, kept.digest.hex()
    return (kept.seq,)
