"""Equal stores: proved under a session's key, then, with a peer that gives no marks, by root for a while.

The tests of roots run sessions without marks. `test_news.py` has those with marks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.limits import DEFAULT_LIMITS
from app.node import Node
from app.operator import token_for
from recon.codec import pack_counts, unpack_counts
from recon.limits import SHORT_ID_BYTES
from recon.session import Interest
from sdstore.client import StoreClient
from sdstore.sync.report import Progress, SegmentState, SyncOutcome, SyncReport
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
from tests.support.server import running_node

MESSAGES = [message(n, f"c{n % 3}") for n in range(300)]


async def sync(one: Node, peer: InProcessPeer, memory: Remembered, **options: Any) -> SyncReport:
    """A session without marks."""
    options = {"arrivals": None, **options}
    return await sync_with_peer(
        local_of(one), peer, one.interests.current, memory=memory, **options
    )


def kinds(peer: InProcessPeer) -> list[str]:
    """Return and clear the requests of a session, call by call."""
    asked = ["root" if each.idle_root else "session" for each in peer.requests]
    peer.requests.clear()
    return asked


def with_two_equal_nodes(scenario: Callable[..., Any], folder: Path, **limits: int) -> None:
    async def around() -> None:
        bounds = replace(DEFAULT_LIMITS, **limits)
        async with open_nodes(folder, {}, {}, limits=bounds) as (one, two):
            await publish(one, MESSAGES[:200])
            await publish(two, MESSAGES[100:])
            peer, memory = InProcessPeer(two), Remembered()
            report = await sync(one, peer, memory)
            assert (report.outcome, report.proved) == (SyncOutcome.IN_SYNC, True)
            kinds(peer)
            await scenario(one, two, peer, memory)

    run(around())


def test_idle_peers_compare_roots_in_one_small_round_trip(tmp_path: Path) -> None:
    async def scenario(one: Node, _: Node, peer: InProcessPeer, memory: Remembered) -> None:
        seen: list[Progress] = []
        before = (peer.bytes_up, peer.bytes_down)
        report = await sync(one, peer, memory, changed=seen.append)
        assert kinds(peer) == ["root"]
        assert (report.outcome, report.proved, report.rounds) == (SyncOutcome.IN_SYNC, False, 1)
        assert report.elements == len(MESSAGES)
        assert seen[-1].segments == ((SegmentState.IN_SYNC, 1.0),)
        assert peer.bytes_up - before[0] < 64
        assert peer.bytes_down - before[1] < 8

    with_two_equal_nodes(scenario, tmp_path)


@pytest.mark.parametrize("side", ["here", "there"])
def test_a_new_message_on_either_side_is_followed_by_a_session(tmp_path: Path, side: str) -> None:
    async def scenario(one: Node, two: Node, peer: InProcessPeer, memory: Remembered) -> None:
        await publish(one if side == "here" else two, [message(1_000)])
        report = await sync(one, peer, memory)
        asked = kinds(peer)
        assert asked.count("root") == (side == "there")  # a root that changed here is not sent
        assert "session" in asked
        assert report.proved
        assert await holdings(one) == await holdings(two)
        assert (await sync(one, peer, memory)).rounds == 1
        assert kinds(peer) == ["root"]

    with_two_equal_nodes(scenario, tmp_path)


def test_a_proof_is_renewed_after_its_lifetime_and_for_another_interest(tmp_path: Path) -> None:
    async def scenario(one: Node, _: Node, peer: InProcessPeer, memory: Remembered) -> None:
        some = Interest.make(channels=frozenset(["c1"]))
        ours = local_of(one)
        assert (await sync_with_peer(ours, peer, some, memory=memory, arrivals=None)).proved
        assert "root" not in kinds(peer)
        assert memory.value.proof is not None
        aged = replace(memory.value.proof, at_s=time.time() - 10)
        memory.value = replace(memory.value, proof=aged)
        assert (await sync_with_peer(ours, peer, some, memory=memory, arrivals=None)).proved
        assert kinds(peer)[0] == "session"

    with_two_equal_nodes(scenario, tmp_path, recon_proof_lifetime_s=9)


def test_a_dry_run_always_compares_under_a_key(tmp_path: Path) -> None:
    async def scenario(one: Node, _: Node, peer: InProcessPeer, memory: Remembered) -> None:
        assert (await sync(one, peer, memory, dry_run=True)).proved
        assert set(kinds(peer)) == {"session"}

    with_two_equal_nodes(scenario, tmp_path)


def test_a_peer_that_cannot_tell_its_root_gets_a_session(tmp_path: Path) -> None:
    async def scenario(one: Node, two: Node, _: InProcessPeer, memory: Remembered) -> None:
        def forgetful(request: ReconRequest, response: ReconResponse) -> ReconResponse:
            return ReconResponse(status=3) if request.idle_root else response

        report = await sync(one, InProcessPeer(two, forgetful), memory)
        assert (report.outcome, report.proved) == (SyncOutcome.IN_SYNC, True)

    with_two_equal_nodes(scenario, tmp_path)


def test_a_peer_that_hides_an_element_of_a_range_we_lack_proves_nothing(tmp_path: Path) -> None:
    def hiding(_: ReconRequest, response: ReconResponse) -> ReconResponse:
        if response.answers.kinds == b"\x03":  # a bare count
            counts, _ = unpack_counts(np.frombuffer(response.answers.counts, np.uint8), 1)
            response.answers.counts = pack_counts(counts - 1)
        del response.items[-1:]
        return response

    async def scenario() -> None:
        async with open_nodes(tmp_path, {}, {}) as (one, two):
            await publish(two, MESSAGES)
            memory = Remembered()
            report = await sync(one, InProcessPeer(two, hiding), memory)
            assert (report.outcome, report.proved) == (SyncOutcome.PEER_FAULT, False)
            assert report.entries_received == len(MESSAGES) - 1
            peer = InProcessPeer(two)
            assert (await sync(one, peer, memory)).proved
            assert "root" not in kinds(peer)
            assert await holdings(one) == await holdings(two)

    run(scenario())


def test_a_peer_that_lists_one_element_twice_instead_of_another_proves_nothing(
    tmp_path: Path,
) -> None:
    def repeating(_: ReconRequest, response: ReconResponse) -> ReconResponse:
        first = response.answers.short_ids[:SHORT_ID_BYTES]
        response.answers.short_ids = first * (len(response.answers.short_ids) // SHORT_ID_BYTES)
        return response

    async def scenario() -> None:
        async with open_nodes(tmp_path, {}, {}) as (one, two):
            await publish(one, MESSAGES[:1])
            await publish(two, MESSAGES[:2])
            report = await sync(one, InProcessPeer(two, repeating), Remembered())
            assert (report.outcome, report.proved) == (SyncOutcome.PEER_FAULT, False)
            assert (report.missing_here, report.missing_there) == (0, 0)

    run(scenario())


def test_idle_nodes_compare_empty_news_over_http(tmp_path: Path) -> None:
    with (
        running_node(tmp_path / "one") as one,
        running_node(tmp_path / "two") as two,
        StoreClient(one.url, token=token_for(one.url)) as client,
    ):
        for each in MESSAGES[:20]:
            two.publish(each)
        reports = []
        for _ in range(2):
            sync_id = client.start_sync(two.url).id
            while client.sync(sync_id).state != "finished":
                time.sleep(0.02)
            reports.append(client.sync(sync_id).document["report"])
        assert [r["proved"] for r in reports] == [True, True]
        assert [r["outcome"] for r in reports] == ["in_sync"] * 2
        assert [r["elements"] for r in reports] == [20, 20]
        assert reports[1]["requests"] == 1
        assert reports[1]["bytes_up"] + reports[1]["bytes_down"] <= 300
