"""What the record of a peer says the peer lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from app.federation.peer import Peer, divergence_of
from app.server.node import Node
from recon.agreement import Interest
from sdstore.sync.report import SyncOutcome
from tests.support.federation import (
    InProcessPeer,
    Remembered,
    local_of,
    message,
    open_nodes,
    publish,
    run,
    sync_with_peer,
)


async def proved(one: Node, two: Node, interest: Interest) -> Remembered:
    """The memory of a session over the interest."""
    memory = Remembered()
    report = await sync_with_peer(local_of(one), InProcessPeer(two), interest, memory=memory)
    assert (report.outcome, report.proved) == (SyncOutcome.IN_SYNC, True)
    return memory


async def missing_there(node: Node, memory: Remembered) -> tuple[Any, Any]:
    """How many entries the peer lacks by its record, and whether that is exact."""
    peer = Peer("two", httpx.URL("http://two"))
    found = await divergence_of(peer, memory.value, node.store, node.index, now_ms=0)
    return found["missing_there"], found["missing_there_is_exact"]


def test_what_a_session_brought_is_not_missing_at_the_peer_that_sent_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_nodes(tmp_path, {}, {}) as (one, two):
            await publish(two, [message(n, "a") for n in range(3)])
            memory = await proved(one, two, Interest.make(everything=True))
            assert await missing_there(one, memory) == (0, True)
            await publish(one, [message(n, "a") for n in (3, 4)])
            assert await missing_there(one, memory) == (2, True)

    run(scenario())


def test_only_what_the_mutual_interest_has_is_missing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_nodes(tmp_path, {}, {}) as (one, two):
            channels = frozenset({"a", "c"})
            interest = Interest.make(channels=channels, lamport_from=3, lamport_to=8)
            memory = await proved(one, two, interest)
            await publish(one, [message(n, "abc"[n % 3]) for n in range(12)])
            assert await missing_there(one, memory) == (3, True)  # m3, m5 and m6

    run(scenario())


def test_no_more_than_a_bounded_number_is_counted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_nodes(tmp_path, {}, {}) as (one, two):
            memory = await proved(one, two, Interest.make(everything=True))
            await publish(one, [message(n, "a") for n in range(10_000)])
            assert await missing_there(one, memory) == (10_000, True)
            await publish(one, [message(n, "a") for n in range(10_000, 10_009)])
            assert await missing_there(one, memory) == (10_001, False)

    run(scenario())
