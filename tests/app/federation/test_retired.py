"""What one store of a pair has retired is named one by one while it is little, and left out of comparisons else."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import sdstore.sync.session as session_module
from app.server.node import Node
from sdstore.sds.model import Message, entry_digest
from sdstore.sync.comparison import Mode
from sdstore.sync.memory import Cuts, PeerMemory
from sdstore.sync.report import SyncOutcome, SyncReport
from sdstore.wire import recon_pb2
from sdstore.wire.recon_pb2 import ReconRequest, ReconResponse
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

NAMED_MAX = 20
HINT = b"hint"


@pytest.fixture(autouse=True)
def _few_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "RETIRED_NAMED_MAX", NAMED_MAX)


async def sync(
    one: Node, peer: InProcessPeer, memory: Remembered, mode: Mode = Mode.MOVE
) -> SyncReport:
    interest = one.federation.interests.current
    return await sync_with_peer(local_of(one), peer, interest, memory=memory, mode=mode)


async def retire(node: Node, messages: Sequence[Message]) -> None:
    digests = [entry_digest(each) for each in messages]
    assert (await node.ingest.retirement.retire(digests, "a test")).counts.ahead == 0


async def ids(node: Node) -> set[str]:
    return {message_id for _, message_id, _ in await holdings(node)}


def names(messages: Sequence[Message]) -> set[str]:
    return {each.message_id for each in messages}


async def is_whole(
    one: Node, two: Node, memory: Remembered, *, set_aside: int = 0
) -> InProcessPeer:
    """Sync; the pair is proved equal, is idle afterwards, and a look at everything finds nothing more."""
    peer = InProcessPeer(two)
    report = await sync(one, peer, memory)
    assert (report.outcome, report.proved, report.set_aside_count) == (
        SyncOutcome.IN_SYNC,
        True,
        set_aside,
    )
    assert memory.value == PeerMemory.of(memory.value.document())
    idle = InProcessPeer(two)
    report = await sync(one, idle, memory)
    assert (report.proved, report.requests) == (True, 1)
    assert not report.entries_received
    counted = await sync(one, InProcessPeer(two), memory, Mode.COUNT)
    assert (counted.missing_here, counted.missing_there) == (0, 0)
    return peer


MESSAGES = [message(n) for n in range(200)]
HINTS = {each.message_id: (HINT,) for each in MESSAGES[:100:10]}


def pushed(*peers: InProcessPeer) -> int:
    return sum(len(request.push) for peer in peers for request in peer.requests)


def test_a_new_store_is_whole_after_one_session_whatever_its_only_peer_retired(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with open_nodes(tmp_path, {}, {}) as (old, new):
            await publish(old, MESSAGES, HINTS)
            await retire(old, MESSAGES[:100])
            here, there = Remembered(), Remembered()
            first = await is_whole(new, old, here)
            assert await ids(new) == names(MESSAGES[100:])
            # So the other way round: nobody asks for what it retired.
            third = await is_whole(old, new, there)
            # It keeps what the other retires later, and never offers it.
            await retire(old, MESSAGES[100:150])
            second = await is_whole(new, old, here)
            assert await ids(new) == names(MESSAGES[100:])
            await is_whole(old, new, there)
            assert await ids(old) == names(MESSAGES[150:])
            assert pushed(first, second, third) == 0
            # Both go on.
            await publish(old, [message(300)])
            await publish(new, [message(301)])
            await is_whole(new, old, here)
            await is_whole(old, new, there)
            assert {"m300", "m301"} <= await ids(old) & await ids(new)

    run(scenario())


def test_a_store_that_was_away_lacks_only_what_came_and_was_retired_meanwhile(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with open_nodes(tmp_path, {}, {}) as (one, two):
            await publish(two, MESSAGES[:100])
            memory = Remembered()
            await is_whole(one, two, memory)
            for start in (100, 150):  # away twice
                await publish(two, MESSAGES[start : start + 50])
                await retire(two, MESSAGES[start - 50 : start + 40])
                await is_whole(one, two, memory)
                assert len(memory.value.asides[0].theirs.pairs) == (start - 50) // 50
            kept = [*MESSAGES[:100], *MESSAGES[140:150], *MESSAGES[190:]]
            assert await ids(one) == names(kept)
            assert await ids(two) == names([*MESSAGES[:50], *MESSAGES[190:]])

    run(scenario())


def test_what_was_left_out_and_comes_from_elsewhere_counts_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_nodes(tmp_path, {}, {}, {}) as (new, old, archive):
            await publish(old, MESSAGES, HINTS)
            await publish(archive, MESSAGES, HINTS)
            await retire(old, MESSAGES[:100])
            memory = Remembered()
            await is_whole(new, old, memory)
            assert memory.value.asides[0].theirs.pairs
            await is_whole(new, archive, Remembered())
            assert await ids(new) == names(MESSAGES)
            memory.value = replace(memory.value, baselines=())  # look at everything
            await is_whole(new, old, memory)
            assert not memory.value.asides[0].theirs.pairs
            assert await ids(old) == names(MESSAGES[100:])

    run(scenario())


def test_a_few_retired_elements_are_named_one_by_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with open_nodes(tmp_path, {}, {}) as (new, old):
            await publish(old, MESSAGES)
            await retire(old, MESSAGES[:NAMED_MAX])
            memory = Remembered()
            await is_whole(new, old, memory, set_aside=NAMED_MAX)
            assert not memory.value.asides[0].theirs.pairs

    run(scenario())


def test_a_peer_that_invents_retired_elements_costs_a_bounded_memory_and_nothing_is_adopted(
    tmp_path: Path,
) -> None:
    def invents(_: ReconRequest, response: ReconResponse) -> ReconResponse:
        for each in response.items:
            each.absent.reason = recon_pb2.RETIRED
        return response

    async def scenario() -> None:
        async with open_nodes(tmp_path, {}, {}) as (one, liar):
            await publish(one, MESSAGES[:10])
            await publish(liar, MESSAGES)
            memory = Remembered()
            for _ in range(3):
                await sync(one, InProcessPeer(liar, invents), memory)
            aside = memory.value.aside_over(one.federation.interests.current.encode())
            assert len(aside.elements) <= NAMED_MAX
            assert len(aside.theirs.pairs) == 1
            assert await ids(one) == names(MESSAGES[:10])
            assert await one.store.frames.retired_count() == 0

    run(scenario())


def test_stores_with_different_retention_stay_equal_beside_traffic(tmp_path: Path) -> None:
    """Each keeps the newest of what arrived; a third keeps all. Nobody gets back what it retired."""
    rng = random.Random(26)

    async def scenario() -> None:
        async with open_nodes(tmp_path, {}, {}, {}) as nodes:
            keeps = {0: 30, 1: 90, 2: 10**6}
            memories: dict[tuple[int, int], Remembered] = {}
            gone: dict[int, set[str]] = {each: set() for each in keeps}
            made: list[Message] = []
            for _ in range(60):
                new = [message(len(made) + n) for n in range(rng.randrange(1, 12))]
                made += new
                await publish(nodes[rng.randrange(3)], new)
                a, b = rng.sample(range(3), 2)
                memory = memories.setdefault((a, b), Remembered())
                report = await sync(nodes[a], InProcessPeer(nodes[b]), memory)
                assert (report.outcome, report.proved) == (SyncOutcome.IN_SYNC, True), report
                place = rng.randrange(2)
                page = await nodes[place].store.channels.feed(0, 100_000, 1 << 40)
                old = [each.digest for each in page.entries][: -keeps[place]]
                gone[place] |= {each.message_id for each in page.entries[: -keeps[place]]}
                if old:
                    await nodes[place].ingest.retirement.retire(old, "a test")
                for each, before in gone.items():
                    assert not before & await ids(nodes[each])
            for a, b in ((0, 1), (1, 2), (2, 0), (0, 1), (1, 2), (2, 0)):
                memory = memories.setdefault((a, b), Remembered())
                report = await sync(nodes[a], InProcessPeer(nodes[b]), memory)
            for (a, b), memory in memories.items():
                for _ in range(2):
                    report = await sync(nodes[a], InProcessPeer(nodes[b]), memory)
                assert (report.proved, report.requests) == (True, 1), (a, b, report)

    run(scenario())


def test_cuts_are_bounded() -> None:
    cuts = Cuts()
    for each in range(20):
        cuts = replace(cuts.cut(b"u%d" % each), place=b"p%d" % each)
    assert len(cuts.pairs) == 8
    assert cuts.pairs[-1] == (b"p6", b"u19")
    cuts = replace(cuts, place=b"p6").cut(b"u20")
    assert cuts.pairs == ((b"", b"u20"),)


@pytest.mark.parametrize("pairs", [[(b"x", b"y")], [(b"", bytes(16))] * 9])
def test_moments_of_another_form_and_more_than_a_few_are_refused(
    tmp_path: Path, pairs: list[tuple[bytes, bytes]]
) -> None:
    class Odd(InProcessPeer):
        async def recon(self, request: bytes) -> bytes:
            parsed = ReconRequest.FromString(request)
            parsed.without.extend([recon_pb2.Retired(after=a, until=u) for a, u in pairs])
            return await super().recon(parsed.SerializeToString())

    async def scenario() -> None:
        async with open_nodes(tmp_path, {}, {}) as (one, two):
            await publish(two, MESSAGES[:3])
            report = await sync(one, Odd(two), Remembered())
            assert report.detail == "malformed: at most 8 pairs of moments of 16 bytes"

    run(scenario())
