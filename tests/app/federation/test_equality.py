"""Equal stores are proved so under a session's key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from app.server.node import Node
from recon.codec import pack_counts, unpack_counts
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

MESSAGES = [message(n, f"c{n % 3}") for n in range(300)]


async def sync(one: Node, peer: InProcessPeer, memory: Remembered, **options: Any) -> SyncReport:
    """A session without marks."""
    options = {"arrivals": None, **options}
    return await sync_with_peer(
        local_of(one), peer, one.federation.interests.current, memory=memory, **options
    )


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
