"""Peers and their leases in the database, on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import json
import random
import zlib
from collections.abc import Mapping
from dataclasses import replace

import pytest

from app.store.database import Query
from app.store.peerrows import (
    FORGET_S,
    MEMORY_BYTES_MAX,
    PeerRow,
    decode_memory,
    encode_memory,
)
from app.store.store import Store
from sdstore.sync.memory import (
    SET_ASIDE_MAX,
    Aside,
    AsideElement,
    Asked,
    Baseline,
    LackedBy,
    PeerMemory,
)
from tests.support.stores import PostgresStores, SqliteStores, Stores

pytestmark = pytest.mark.anyio

SEED = 15


def row(number: int, origin: str = "added") -> PeerRow:
    return PeerRow(peer_id=f"{number:016x}", url=f"http://peer-{number}", origin=origin)


A, B = row(1), row(2)


def memory(elements_count: int = 3) -> PeerMemory:
    world = random.Random(SEED)
    interest = b"interest"
    elements = tuple(
        AsideElement(LackedBy.THERE, n, world.randbytes(32), "refused", b"", 2, 5.5)
        for n in range(elements_count)
    )
    return PeerMemory(
        b"nonce",
        interest,
        7,
        12,
        4,
        (Asked(bytes(32), 2, 3.5),),
        (Aside(interest, elements, elements[:1]),),
        (Baseline(interest, b"own", b"peer", b"\1" * 40, b"\2" * 40, b"aside", 9, 4.5),),
    )


def write(
    store: Store,
    process: str,
    fences: Mapping[str, int],
    changed: PeerRow,
    raw: bytes | None = None,
) -> bool:
    """Write a peer as the process with these fences; whether its lease still holds."""
    with store.transaction() as transaction:
        is_standing = changed.peer_id in store.peers.standing(transaction, process, fences)
        if is_standing:
            store.peers.write(transaction, [(changed, raw)])
    return is_standing


# ---- rows


async def test_a_peer_is_read_as_it_was_written(stores: Stores) -> None:
    async with stores.open() as store:
        store.peers.add([A, replace(B, token="secret")])
        store.peers.add([replace(A, url="http://other")])  # there already
        fences = await store.peers.hold("p", ())
        changed = PeerRow(
            peer_id=A.peer_id,
            url=A.url,
            origin=A.origin,
            state="failing",
            since_ms=1,
            code="code",
            reason="no \0 and no \ud800",
            failures=2,
            next_sync_at_ms=3,
            in_sync_at_ms=4,
            proved_at_ms=5,
            missing_here=6,
            missing_there=7,
            apart_since_ms=8,
            last_sync_id="sync",
        )
        assert write(store, "p", fences, changed, encode_memory(memory()))
        assert [each for each, _ in await store.peers.read()] == [
            replace(changed, reason="no \ufffd and no ?"),
            replace(B, token="secret"),
        ]
        assert await store.peers.memory(A.peer_id) == memory()
        assert write(store, "p", fences, A)
        assert await store.peers.memory(A.peer_id) == memory()  # kept by a write without one
        store.peers.set_token(A.peer_id, "new", "added")
        store.peers.remove(B.peer_id)
        assert [each for each, _ in await store.peers.read()] == [replace(A, token="new")]
        assert await store.peers.memory(B.peer_id) == PeerMemory()


async def test_peers_of_former_settings_go_and_others_stay(stores: Stores) -> None:
    async with stores.open() as store:
        store.peers.add([row(1, "settings"), row(2, "settings"), row(3)])
        if store.peers.is_shared:  # another host may have these settings, and be paused
            store.peers.forget_settings([row(1).peer_id])
            assert len(await store.peers.read()) == 3
            ago = f"UPDATE peers SET expires_ms = expires_ms - {int(FORGET_S * 1_000)}"
            with store.transaction() as transaction:
                transaction.execute(Query(ago, (), {}))
        store.peers.forget_settings([row(1).peer_id])
        assert [each.peer_id for each, _ in await store.peers.read()] == [
            row(1).peer_id,
            row(3).peer_id,
        ]


async def test_an_operator_can_add_a_peer_of_settings_and_it_keeps_its_token(
    stores: Stores,
) -> None:
    async with stores.open() as store:
        store.peers.add([replace(A, origin="settings", token="first")])
        store.peers.add([replace(A, origin="settings", token="second")])
        assert [each for each, _ in await store.peers.read()] == [
            replace(A, origin="settings", token="first")
        ]
        store.peers.add([replace(A, origin="added")])
        assert [each for each, _ in await store.peers.read()] == [replace(A, token="first")]
        store.peers.add([replace(A, origin="added", token="third")])
        assert [each for each, _ in await store.peers.read()] == [replace(A, token="third")]


# ---- memories


def test_damaged_bytes_are_an_empty_memory_and_never_another_one() -> None:
    raw = encode_memory(memory())
    assert decode_memory(raw) == memory()
    world = random.Random(SEED)
    for place in range(len(raw)):
        damaged = raw[:place] + bytes([raw[place] ^ 1 << world.randrange(8)]) + raw[place + 1 :]
        # Some bits mean nothing, such as those after the end of a block.
        assert decode_memory(damaged) in (PeerMemory(), memory())
    for length in (0, 1, 5, len(raw) - 5, len(raw) - 1):
        assert decode_memory(raw[:length]) == PeerMemory()
    assert decode_memory(None) == PeerMemory()


def test_the_bytes_of_a_memory_with_other_fields_are_an_empty_memory() -> None:
    document = memory().document()
    for other in ({**document, "unknown": 1}, {"arrived_count": 5}, [], 7):
        assert decode_memory(zlib.compress(json.dumps(other).encode())) == PeerMemory()


@pytest.mark.slow
def test_a_memory_that_is_too_large_keeps_its_newest_interest_or_nothing() -> None:
    one = memory(SET_ASIDE_MAX)
    two = replace(
        one, asides=(replace(one.asides[0], interest=b"older"), *one.asides), lost_asked=()
    )
    raw = encode_memory(two)
    assert 0 < len(raw) <= MEMORY_BYTES_MAX
    kept = decode_memory(raw)
    assert kept.asides[-1] == one.asides[-1]
    huge = replace(memory(), interest=random.Random(SEED).randbytes(MEMORY_BYTES_MAX + 1))
    assert decode_memory(encode_memory(huge)) == PeerMemory()


# ---- leases


async def test_sqlite_has_one_holder_of_all_peers(sqlite_stores: SqliteStores) -> None:
    async with sqlite_stores.open() as store:
        store.peers.add([A, row(2, "settings")])
        assert await store.peers.hold("any", ()) == {A.peer_id: 0, B.peer_id: 0}
        assert write(store, "any", {A.peer_id: 0}, A)


async def test_one_process_holds_a_peer_until_its_lease_expires(
    postgres_stores: PostgresStores,
) -> None:
    async with postgres_stores.open() as store:
        store.peers.add([A])
        first = await store.peers.hold("p", (), lease_s=1.0)
        assert first == {A.peer_id: 1}
        assert await store.peers.hold("p", (), lease_s=1.0) == first  # renewed
        assert await store.peers.hold("q", ()) == {}
        [(_, lease)] = await store.peers.read()
        assert lease == ("p", 1, True)
        await asyncio.sleep(1.05)
        assert [lease for _, lease in await store.peers.read()] == [("p", 1, False)]
        # Nobody has taken the peer yet, and still the lease is over.
        assert not write(store, "p", first, replace(A, failures=9))
        second = await store.peers.hold("q", ())
        assert second == {A.peer_id: 2}
        assert await store.peers.hold("p", ()) == {}
        assert not write(store, "p", first, replace(A, failures=9))
        assert write(store, "q", second, replace(A, failures=1))
        assert [each.failures for each, _ in await store.peers.read()] == [1]


async def test_a_released_peer_is_taken_at_once(postgres_stores: PostgresStores) -> None:
    async with postgres_stores.open() as store:
        store.peers.add([A, B])
        await store.peers.hold("p", ())
        await store.peers.release("p")
        assert (await store.peers.hold("q", ())).keys() == {A.peer_id, B.peer_id}


async def test_peers_of_settings_are_held_only_by_processes_with_these_settings(
    postgres_stores: PostgresStores,
) -> None:
    async with postgres_stores.open() as store:
        store.peers.add([A, row(2, "settings")])
        assert (await store.peers.hold("p", ())).keys() == {A.peer_id}
        assert (await store.peers.hold("q", [B.peer_id])).keys() == {B.peer_id}


async def test_nobody_takes_a_peer_while_its_holder_writes(
    postgres_stores: PostgresStores,
) -> None:
    async with postgres_stores.open() as store:
        store.peers.add([A])
        fences = await store.peers.hold("p", (), lease_s=1.0)
        with store.transaction() as transaction:
            assert store.peers.standing(transaction, "p", fences) == {A.peer_id}
            await asyncio.sleep(1.1)
            assert await store.peers.hold("q", ()) == {}
            store.peers.write(transaction, [(replace(A, failures=1), None)])
        assert await store.peers.hold("q", ()) == {A.peer_id: 2}
