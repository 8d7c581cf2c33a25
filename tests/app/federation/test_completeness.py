"""When a session ends, both sides hold all that either had when it began, while both go on growing."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from app.access.operator import token_for
from app.server.node import Node
from app.server.settings import Settings
from sdstore.client import StoreClient
from sdstore.client.records import PublishItem
from sdstore.sds.codec import encode
from sdstore.sync.report import SyncOutcome
from tests.app.federation.test_over_http import channels, finished
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
from tests.support.stores import Stores

EACH = 300  # at the start, a third of them on both sides
COUNTS = [1_000, pytest.param(10_000, marks=pytest.mark.slow)]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("has_marks", [True, False])
def test_a_session_is_complete_while_both_sides_grow(
    tmp_path: Path, has_marks: bool, count: int
) -> None:
    """`count` entries arrive on each side while it runs, 100 after each answer."""

    class Busy(InProcessPeer):
        number = 0

        async def recon(self, request: bytes) -> bytes:
            answer = await super().recon(request)
            for node in (one, two):
                stop = min(self.number + 100, count)
                new = [message(10_000 + n, node.instance_id) for n in range(self.number, stop)]
                await publish(node, new)
            self.number += 100
            return answer

    one: Node
    two: Node

    async def scenario() -> None:
        nonlocal one, two
        async with open_nodes(tmp_path, {}, {}) as (one, two):
            await publish(one, [message(n) for n in range(EACH)])
            await publish(two, [message(n) for n in range(EACH - 100, 2 * EACH - 100)])
            memory = Remembered()
            options: dict[str, Any] = {} if has_marks else {"arrivals": None}
            had = set(await holdings(one)) | set(await holdings(two))
            report = await sync_with_peer(
                local_of(one), Busy(two), one.federation.interests.current, memory=memory, **options
            )
            assert report.outcome is SyncOutcome.IN_SYNC, report
            for node in (one, two):
                assert had <= set(await holdings(node))
            while Busy.number < count:  # what the session was too short for
                await publish(one, [message(Busy.number, "late")])
                Busy.number += 100
            report = await sync_with_peer(
                local_of(one),
                InProcessPeer(two),
                one.federation.interests.current,
                memory=memory,
                **options,
            )
            assert (report.outcome, report.proved) == (SyncOutcome.IN_SYNC, True)
            assert await holdings(one) == await holdings(two)

    run(scenario())


@pytest.mark.parametrize("count", COUNTS)
def test_a_session_over_http_is_complete_while_both_sides_grow(tmp_path: Path, count: int) -> None:
    """Publishers on each side send batches of 250 while sessions run."""
    with (
        running_node(tmp_path / "one") as one,
        running_node(tmp_path / "two") as two,
        StoreClient(one.url, token=token_for(one.url)) as first,
        StoreClient(two.url, token=token_for(two.url)) as second,
        ThreadPoolExecutor(2) as executor,
    ):

        def keep_publishing(url: str, channel_id: str) -> None:
            with StoreClient(url, token=token_for(url)) as client:
                for start in range(0, count, 250):
                    new = [encode(message(n, channel_id)) for n in range(start, start + 250)]
                    outcomes = list(client.publish_batch(map(PublishItem, new)))
                    assert all(each.error is None for each in outcomes)

        for client, start in ((first, 0), (second, EACH - 100)):
            old = [encode(message(n)) for n in range(start, start + EACH)]
            assert all(each.error is None for each in client.publish_batch(map(PublishItem, old)))
        publishing = [
            executor.submit(keep_publishing, node.url, f"news of {name}")
            for name, node in (("one", one), ("two", two))
        ]
        is_growing = True
        while is_growing:
            is_growing = not all(each.done() for each in publishing)
            had = counts(first), counts(second)
            report = finished(first, first.start_sync(two.url).id)
            assert report["outcome"] == "in_sync", report
            for client in (first, second):
                have = counts(client)
                assert have["c"] == 2 * EACH - 100
                for before in had:
                    assert all(have.get(name, 0) >= number for name, number in before.items())
        for each in publishing:
            each.result()
        assert finished(first, first.start_sync(two.url).id)["proved"]
        assert channels(first) == channels(second)
        assert counts(first) == {"c": 500, "news of one": count, "news of two": count}


def counts(client: StoreClient) -> dict[str, int]:
    """Messages by channel."""
    return {each.channel_id: each.count for each in client.channels()}


def test_whole_sessions_and_news_on_both_databases(tmp_path: Path, stores: Stores) -> None:
    """Two nodes over databases of one kind: entries, claims, a late claim, then news in two trips."""

    async def scenario() -> None:
        memory = Remembered()
        settings = [
            Settings(data_dir=tmp_path / name, database_url=stores.new_url())
            for name in ("one", "two")
        ]
        async with Node.open(settings[0]) as one, Node.open(settings[1]) as two:
            hints = {f"m{n}": (b"hint %d" % n, os.urandom(8)) for n in range(0, 3_000, 7)}
            await publish(one, [message(n, f"c{n % 3}") for n in range(600)], hints)
            await publish(two, [message(n, f"c{n % 3}") for n in range(400, 1_000)])
            report = await sync_with_peer(
                local_of(one), InProcessPeer(two), one.federation.interests.current, memory=memory
            )
            assert (report.outcome, report.proved) == (SyncOutcome.IN_SYNC, True), report
            assert (report.entries_sent, report.entries_received) == (400, 400)
            assert await holdings(one) == await holdings(two)
            # The next session compares what this one moved, the one after it only what is new.
            await sync_with_peer(
                local_of(one), InProcessPeer(two), one.federation.interests.current, memory=memory
            )
            await publish(one, [message(n) for n in range(3_000, 3_010)])
            await publish(two, [message(n) for n in range(3_010, 3_020)], {"m3010": (b"hint",)})
            await publish(two, [message(0, "c0")], {"m0": (b"a late hint",)})
            report = await sync_with_peer(
                local_of(one), InProcessPeer(two), one.federation.interests.current, memory=memory
            )
            # Compare, push, and have the peer state a total that contains what was pushed.
            assert (report.proved, report.requests) == (True, 3), report
            assert await holdings(one) == await holdings(two)

    run(scenario())
