"""Bounds on the cost of readers, and behaviour at the limits."""

from __future__ import annotations

import hashlib
import time

import pytest

from app.entries import MetId
from app.server.limits import DEFAULT_LIMITS, Limits
from app.store.entryrows import Keys, Position
from app.store.histories import Gap
from app.store.lookups import ROW_BYTES
from app.store.schema import _engine, published_claims
from app.store.store import Store
from sdstore.sds.model import HistoryEntry
from tests.support.publications import content_frame
from tests.support.stores import BYTES_MAX, Stores, entry_of

pytestmark = pytest.mark.anyio


async def test_a_reply_is_cut_at_its_bound_in_bytes_but_never_empty(stores: Stores) -> None:
    frames = [content_frame(number, content=bytes(1000)) for number in range(1, 6)]
    size = len(frames[0])
    async with stores.open() as store:
        store.writer.write([entry_of(frame) for frame in frames])
        for bytes_max, count in ((1, 1), (2 * size, 2), (2 * size + 1, 2), (5 * size, 5)):
            page = await store.channels.page("channel", limit=10, bytes_max=bytes_max)
            assert len(page.entries) == count
            assert (page.next is None) == (count == 5)
            assert len((await store.channels.feed(0, 10, bytes_max)).entries) == count


async def test_a_look_up_that_is_full_names_what_it_did_not_examine(stores: Stores) -> None:
    frames = [content_frame(number, content=bytes(1000)) for number in range(1000, 1600)]
    ids = [f"message-{number:06}" for number in range(1000, 1600)]
    row_bytes = ROW_BYTES + len(ids[0])
    async with stores.open() as store:
        store.writer.write([entry_of(frame) for frame in frames])
        for presence_only, size in ((False, row_bytes + len(frames[0])), (True, row_bytes)):
            result = await store.entries.lookup(
                ["missing", *ids], [], None, presence_only=presence_only, bytes_max=300 * size
            )
            assert [key for key, _ in result.found] == ids[:300]
            assert result.missing == ["missing"]
            assert result.not_examined == ids[300:]


@pytest.mark.parametrize("presence_only", [False, True])
async def test_all_that_keys_with_many_matches_lead_to_is_found_in_bounded_replies(
    stores: Stores, presence_only: bool
) -> None:
    hints = [b"hint %d" % number for number in range(8)]
    entries = [entry_of(content_frame(number), *hints) for number in range(5)]
    async with stores.open() as store:
        store.writer.write(entries)
        rest, matches = hints, []
        while rest:
            # Room for the matches of some keys, and a part of those of the next.
            result = await store.entries.lookup(
                [], rest, None, presence_only=presence_only, bytes_max=13 * (ROW_BYTES + 100)
            )
            assert 5 <= len(result.found) <= 15
            matches += [(key, getattr(match, "digest", match)) for key, match in result.found]
            rest = [key for key in result.not_examined if isinstance(key, bytes)]
    assert matches == [(hint, entry.digest) for hint in hints for entry in entries]


async def test_a_key_that_leads_to_more_than_a_reply_is_answered_in_part(stores: Stores) -> None:
    entries = [entry_of(content_frame(number), b"hint") for number in range(5)]
    async with stores.open() as store:
        store.writer.write(entries)
        for bytes_max, count in ((1, 1), (3 * (ROW_BYTES + 4), 3)):
            result = await store.entries.lookup(
                ["nobody"], [b"hint", b"other"], None, presence_only=True, bytes_max=bytes_max
            )
            assert result.found == [(b"hint", entry.digest) for entry in entries[:count]]
            assert result.missing == ["nobody", b"other"]


async def test_an_id_in_many_channels_is_found_in_each_and_listed_up_to_a_bound(
    stores: Stores,
) -> None:
    limits = Limits(variants_listed_max=10)
    async with stores.open(limits) as store:
        store.writer.write(
            [
                entry_of(content_frame(n, channel_id=f"channel {n}", message_id="ok"))
                for n in range(200)
            ]
        )
        for number in (0, 7, 199):
            found = await store.entries.find("ok", f"channel {number}")
            assert found is not None
            assert found.entry.lamport_timestamp == number
            assert found.variants_count == 1
        everywhere = await store.entries.find("ok", None)
    assert everywhere is not None
    assert everywhere.entry.channel_id == "channel 0"
    assert everywhere.variants_count == 10


async def test_a_verifying_variant_that_comes_late_is_served_first(stores: Stores) -> None:
    content = b"what the ID names"
    verifying = hashlib.sha256(content).hexdigest()
    async with stores.open() as store:
        store.writer.write([entry_of(content_frame(1, message_id=verifying, content=b"forged"))])
        forged = await store.entries.find(verifying, None)
        store.writer.write([entry_of(content_frame(2, message_id=verifying, content=content))])
        store.writer.write([entry_of(content_frame(3, message_id=verifying, content=content))])
        found = await store.entries.find(verifying, "channel")
    assert forged is not None
    assert found is not None
    assert forged.entry.lamport_timestamp == 1
    assert found.entry.lamport_timestamp == 2
    assert found.variants_count == 3


async def test_hint_spam_is_examined_in_bounded_steps_and_the_honest_claim_is_found(
    stores: Stores,
) -> None:
    limits = Limits(hint_candidates_max=20)
    hint = bytes(32)
    async with stores.open(limits) as store:
        spam = [content_frame(n, channel_id="spam") for n in range(100)]
        store.writer.write([entry_of(frame, hint) for frame in spam])
        store.writer.write([entry_of(content_frame(1000, channel_id="honest"), hint)])
        entries, pages, after = [], 0, None
        while True:
            page = await store.claims.page(hint, "honest", 10, after)
            entries += page.entries
            pages += 1
            if page.next is None:
                break
            after = page.next
    assert [entry.lamport_timestamp for entry in entries] == [1000]
    assert pages == 1


async def test_claims_of_one_channel_are_paged_in_bounded_steps(stores: Stores) -> None:
    hint, told = b"wanted", HistoryEntry("message-000500", b"wanted")
    async with stores.open(Limits(hint_candidates_max=10)) as store:
        for channel_id in ("spam", "honest"):
            own = [content_frame(n, channel_id=channel_id) for n in range(25)]
            store.writer.write([entry_of(frame, hint) for frame in own])
            other = [content_frame(600, channel_id=channel_id, history=(told,))]
            other.append(content_frame(500, channel_id=channel_id))
            store.writer.write([entry_of(frame) for frame in other])
        for channel_id in ("spam", "honest", None):
            found: list[int] = []
            after: Position | None = None
            for _ in range(20):
                page = await store.claims.page(hint, channel_id, 7, after)
                assert {entry.channel_id for entry in page.entries} <= {
                    channel_id or "spam",
                    "honest",
                }
                found += [entry.lamport_timestamp for entry in page.entries]
                after = page.next
                if after is None:
                    break
            assert found == [*range(25), 500] if channel_id else [*range(25), *range(25), 500, 500]
            assert after is None


async def test_a_gap_ends_when_its_message_comes_and_is_marked_when_a_sync_message_bears_its_id(
    stores: Stores,
) -> None:
    told = (HistoryEntry("message-000001"), HistoryEntry("sync"), HistoryEntry("never", b"h"))
    async with stores.open() as store:
        store.writer.write([entry_of(content_frame(9, history=told))])
        first = await store.gaps.page("channel", None, 2)
        second = await store.gaps.page("channel", first.next, 2)
        store.writer.write([entry_of(content_frame(1))], [MetId("channel", "sync")])
        after = await store.gaps.page("channel", None, 10)
    assert [gap.message_id for gap in (*first.gaps, *second.gaps)] == [
        "message-000001",
        "never",
        "sync",
    ]
    assert second.next is None
    assert after.gaps == [
        Gap("never", (b"h",), met_as_sync=False),
        Gap("sync", (), met_as_sync=True),
    ]


async def test_channels_are_listed_by_prefix_and_by_bytes(stores: Stores) -> None:
    names = ["a", "a/1", "a/2", "b", "Z", "é", "\U0001f600", "\uffff", ""]
    async with stores.open() as store:
        store.writer.write(
            [entry_of(content_frame(n, channel_id=name)) for n, name in enumerate(names)]
        )
        everything = [channel.channel_id for channel in await store.channels.after(None, 100)]
        below = [channel.channel_id for channel in await store.channels.after(None, 100, "a/")]
        second = [channel.channel_id for channel in await store.channels.after("a/1", 100, "a/")]
        rest = [channel.channel_id for channel in await store.channels.after("b", 2)]
    assert everything == sorted(names, key=str.encode)
    assert below == ["a/1", "a/2"]
    assert second == ["a/2"]
    assert rest == ["é", "\uffff"]


def test_keys_are_signed_64_bit_and_differ_between_databases() -> None:
    keys = [Keys(bytes([secret]) * 16).of_text("message") for secret in range(100)]
    assert len(set(keys)) == 100
    assert all(-(2**63) <= key < 2**63 for key in keys)
    assert min(keys) < 0 < max(keys)


@pytest.mark.slow
async def test_a_hint_with_a_million_claims_is_looked_up_like_one_with_a_thousand(
    stores: Stores,
) -> None:
    hint, other, claims_count, spam_count = bytes(32), b"other", 1_000_000, 1_000
    url = stores.new_url()
    store = await Store.open(url, DEFAULT_LIMITS)
    store.begin_writing()
    spam = [content_frame(n, channel_id="spam") for n in range(spam_count)]
    store.writer.write([entry_of(frame, hint) for frame in spam])
    honest = entry_of(content_frame(spam_count, channel_id="honest"), hint, other)
    store.writer.write([entry_of(frame, other) for frame in spam])
    store.writer.write([honest])
    engine = _engine(url)
    with engine.begin() as connection:  # as many claims as it takes, on the same entries
        names = [column.name for column in published_claims.columns if column.name != "claim_no"]
        numbers = (
            f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n"
            f" WHERE i < {claims_count // spam_count - 1})"
        )
        # A sort builds an index in a tenth of the time that a million rows in any order take.
        for index in published_claims.indexes:
            index.drop(connection)
        connection.exec_driver_sql(
            f"INSERT INTO published_claims (claim_no, {', '.join(names)}) {numbers}"
            f" SELECT {spam_count} * (i + 3) + claim_no, {', '.join(names)} FROM published_claims, n"
            f" WHERE claim_no <= {spam_count}"
        )
        for index in published_claims.indexes:
            index.create(connection)
    engine.dispose()
    for channel_id in ("honest", None):
        seconds: dict[bytes, list[float]] = {hint: [], other: []}
        cpu_seconds: list[float] = []
        for _ in range(50):  # in turns, and the quickest: others use the machine too
            for each, its in seconds.items():
                start_s, start_cpu_s = time.perf_counter(), time.thread_time()
                found = await store.entries.lookup(
                    [], [each], channel_id, presence_only=True, bytes_max=BYTES_MAX
                )
                its.append(time.perf_counter() - start_s)
                cpu_seconds.append(time.thread_time() - start_cpu_s)
                assert not found.missing
                digests = [digest for _, digest in found.found]
                assert channel_id is None or digests == [honest.digest]
        assert min(cpu_seconds) < 0.010
        assert min(seconds[hint]) < 10 * min(seconds[other])
    await store.close()


async def test_what_only_a_sync_message_names_is_a_gap_until_it_comes_or_a_history_names_it(
    stores: Stores,
) -> None:
    sync = MetId("channel", "sync", ("message-000001", "last", "told"))
    async with stores.open() as store:
        store.writer.write([entry_of(content_frame(1))])
        store.writer.write([], [sync, MetId("unknown channel", "sync", ("x",))])
        first = await store.gaps.page("channel", None, 10)
        assert [(each.message_id, each.is_named_by_sync) for each in first.gaps] == [
            ("last", True),
            ("told", True),
        ]
        told = (HistoryEntry("told"), HistoryEntry("other"))
        store.writer.write([entry_of(content_frame(2, history=told))], [sync])
        after = await store.gaps.page("channel", None, 10)
    assert [(each.message_id, each.is_named_by_sync) for each in after.gaps] == [
        ("last", True),
        ("other", False),
        ("told", False),
    ]


async def test_a_flood_of_sync_messages_displaces_what_they_named_in_their_channel_alone(
    stores: Stores,
) -> None:
    async with stores.open(Limits(named_by_sync_max=3)) as store:
        told = (HistoryEntry("by history"),)
        store.writer.write(
            [
                entry_of(content_frame(1, history=told)),
                entry_of(content_frame(1, channel_id="quiet")),
            ]
        )
        store.writer.write([], [MetId("quiet", "s", ("witness",))])
        for number in range(5):
            names = (f"ghost {number}a", f"ghost {number}b")
            store.writer.write([], [MetId("channel", f"s{number}", names)])
        loud = await store.gaps.page("channel", None, 10)
        quiet = await store.gaps.page("quiet", None, 10)
    assert [each.message_id for each in loud.gaps] == [
        "by history", "ghost 3b", "ghost 4a", "ghost 4b",
    ]  # fmt: skip
    assert [each.message_id for each in quiet.gaps] == ["witness"]
