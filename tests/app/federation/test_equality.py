"""Equal stores are proved so under a session's key."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from app.access.operator import token_for
from app.server.limits import DEFAULT_LIMITS
from app.server.node import Node
from recon.codec import pack_counts, unpack_counts
from recon.limits import SHORT_ID_BYTES
from sdstore.client import StoreClient
from sdstore.sync.comparison import Mode
from sdstore.sync.report import SyncOutcome, SyncReport
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


def with_two_equal_nodes(scenario: Callable[..., Any], folder: Path, **limits: int) -> None:
    async def around() -> None:
        bounds = replace(DEFAULT_LIMITS, **limits)
        async with open_nodes(folder, {}, {}, limits=bounds) as (one, two):
            await publish(one, MESSAGES[:200])
            await publish(two, MESSAGES[100:])
            peer, memory = InProcessPeer(two), Remembered()
            report = await sync(one, peer, memory)
            assert (report.outcome, report.proved) == (SyncOutcome.IN_SYNC, True)
            peer.requests.clear()
            await scenario(one, two, peer, memory)

    run(around())


def test_a_dry_run_always_compares_under_a_key(tmp_path: Path) -> None:
    async def scenario(one: Node, _: Node, peer: InProcessPeer, memory: Remembered) -> None:
        assert (await sync(one, peer, memory, mode=Mode.COUNT)).proved
        assert [each.HasField("ranges") for each in peer.requests] == [True]

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
