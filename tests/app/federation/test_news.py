"""Sessions over the news between real nodes: entries with claims, SQL, restarts, sockets."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path
from random import Random

import pytest

from app.server.node import Node
from recon.agreement import Interest
from sdstore.sync.report import SyncOutcome, SyncReport
from tests.support.federation import (
    InProcessPeer,
    Remembered,
    holdings,
    local_of,
    message,
    open_nodes,
    publish,
    run,
    sync_with_peer,
)

SEED = 20_261_122


async def sync(
    one: Node, peer: InProcessPeer, memory: Remembered, interest: Interest | None = None
) -> SyncReport:
    """One session; the requests of earlier ones are forgotten."""
    peer.requests.clear()
    return await sync_with_peer(
        local_of(one), peer, interest or one.federation.interests.current, memory=memory
    )


def was_over_news(peer: InProcessPeer) -> bool:
    """Whether the last session compared news, and nothing else."""
    compared = [each for each in peer.requests if each.total or each.HasField("ranges")]
    return bool(compared) and all(each.since for each in compared)


@pytest.mark.parametrize("channels", [(), ("c1", "c2")])
def test_news_with_their_claims_travel_in_two_trips_and_are_confirmed_in_a_third(
    tmp_path: Path, channels: tuple[str, ...]
) -> None:
    async def scenario() -> None:
        async with open_nodes(tmp_path, {"channels": channels}, {}) as (one, two):
            old = [message(n, f"c{n % 4}") for n in range(200)]
            hints = {f"m{n}": (b"hint %d" % n,) for n in range(0, 400, 3)}
            await publish(one, old, hints)
            await publish(two, old, hints)
            peer, memory = InProcessPeer(two), Remembered()
            await sync(one, peer, memory)
            await publish(one, [message(n, "c1") for n in range(200, 210)], hints)
            await publish(two, [message(n, "c2") for n in range(210, 220)], hints)
            await publish(two, [message(n, "c3") for n in range(220, 230)], hints)
            await publish(two, [old[1]], {"m1": (b"a late hint on an old message",)})
            report = await sync(one, peer, memory)
            assert (report.outcome, report.proved) == (SyncOutcome.IN_SYNC, True)
            assert (report.requests, was_over_news(peer)) == (3, True)
            assert report.entries_sent == 10
            assert report.entries_received == (10 if channels else 20)
            mine, theirs = await holdings(one), await holdings(two)
            shared = {key for key in theirs if not channels or key[0] in channels}
            assert {key: theirs[key] for key in shared} == {key: mine[key] for key in shared}
            report = await sync(one, peer, memory)
            assert (report.requests, was_over_news(peer)) == (1, True)
            assert report.missing_here == report.missing_there == 0

    run(scenario())


def test_marks_survive_a_restart_of_either_node(tmp_path: Path) -> None:
    async def scenario() -> None:
        peer_memory = Remembered()
        for number in range(3):
            async with open_nodes(tmp_path, {}, {}) as (one, two):
                peer = InProcessPeer(two)
                await publish(one, [message(10 * number)])
                await publish(two, [message(10 * number + 1)])
                report = await sync(one, peer, peer_memory)
                assert (report.outcome, report.proved) == (SyncOutcome.IN_SYNC, True)
                assert was_over_news(peer) is (number > 0)
                assert await holdings(one) == await holdings(two)

    run(scenario())


@pytest.mark.parametrize("side", [0, 1])
def test_a_database_put_back_leads_to_a_whole_session(tmp_path: Path, side: int) -> None:
    async def scenario() -> None:
        memory = Remembered()
        database, backup = tmp_path / str(side) / "sdstore.db", tmp_path / "backup.db"
        async with open_nodes(tmp_path, {}, {}) as (one, two):
            await publish(one, [message(n) for n in range(20)])
        shutil.copyfile(database, backup)
        async with open_nodes(tmp_path, {}, {}) as (one, two):
            await publish(two, [message(n) for n in range(10, 30)])
            assert (await sync(one, InProcessPeer(two), memory)).proved
        for each in database.parent.glob("sdstore.db-*"):
            each.unlink()
        shutil.copyfile(backup, database)
        async with open_nodes(tmp_path, {}, {}) as (one, two):
            await publish((one, two)[side], [message(n) for n in range(100, 160)])
            peer = InProcessPeer(two)
            report = await sync(one, peer, memory)
            assert (report.outcome, report.proved) == (SyncOutcome.IN_SYNC, True)
            assert not was_over_news(peer)
            assert await holdings(one) == await holdings(two)
            assert len(await holdings(one)) == 90

    run(scenario())


def test_no_random_world_of_two_nodes_loses_anything(tmp_path: Path) -> None:
    """Third parties bring entries, variants and claims to both sides, between and during sessions."""

    async def scenario() -> None:
        for seed in range(SEED, SEED + 4):
            async with open_nodes(tmp_path / str(seed), {}, {}) as (one, two):
                await random_world(seed, one, two)

    run(scenario())


async def random_world(seed: int, one: Node, two: Node, sessions: int = 8) -> None:
    """Sessions from one node to the other; after each, both hold what either held at its start."""
    random = Random(seed)

    async def arrive(count: int) -> None:
        for node in random.choice([[one], [two], [one, two], [two, one]]):
            numbers = [random.randrange(60) for _ in range(random.randint(0, count))]
            messages = [message(n, f"c{n % 3}") for n in numbers]
            hints = {
                f"m{n}": tuple(
                    b"hint %d" % random.randrange(90) for _ in range(random.randrange(6))
                )
                for n in numbers
            }
            await publish(node, messages, hints)

    class Growing(InProcessPeer):
        async def recon(self, request: bytes) -> bytes:
            await arrive(4)
            answer = await super().recon(request)
            await arrive(2)
            return answer

    memory, peer, news_count = Remembered(), Growing(two), 0
    for _ in range(sessions):
        await arrive(12)
        before = [await holdings(node) for node in (one, two)]
        report = await sync(one, peer, memory)
        assert report.outcome is SyncOutcome.IN_SYNC, (seed, report)
        news_count += report.proved and was_over_news(peer)
        for node in (one, two):
            after = await holdings(node)
            for held in before:
                for key, claims in held.items():
                    missing = claims - after.get(key, frozenset())
                    assert key in after, (seed, key)
                    assert not missing, (seed, key, missing)
    still = InProcessPeer(two)
    for _ in range(2):
        report = await sync(one, still, memory)
        assert report.proved, (seed, report)
    assert await holdings(one) == await holdings(two), seed
    assert news_count >= sessions // 2, (seed, news_count)


def test_a_row_that_the_database_lost_is_found_by_the_next_session_after_a_restart(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        memory = Remembered()
        async with open_nodes(tmp_path, {}, {}) as (one, two):
            await publish(one, [message(n) for n in range(20)])
            for _ in range(2):  # the second mark covers what the first session moved
                await sync(one, InProcessPeer(two), memory)
            held = await holdings(one)
        connection = sqlite3.connect(tmp_path / "1" / "sdstore.db")
        connection.execute("DELETE FROM messages WHERE seq = 7")
        connection.commit()
        connection.close()
        for each in (tmp_path / "1").glob("*index*"):
            each.unlink()  # the saved index still has the element
        async with open_nodes(tmp_path, {}, {}) as (one, two):
            assert len(await holdings(two)) == 19
            peer = InProcessPeer(two)
            report = await sync(one, peer, memory)
            assert (report.outcome, report.proved) == (SyncOutcome.IN_SYNC, True)
            assert not was_over_news(peer)
            assert await holdings(two) == held

    run(scenario())
