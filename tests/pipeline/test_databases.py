"""Snapshots of nodes on both databases, also while messages arrive."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import pytest

from pipeline.diff import diff
from pipeline.export import export_snapshot
from pipeline.restore import restore_snapshot
from pipeline.verify import verify_snapshot
from sdstore.client.clients import StoreClient
from sdstore.client.records import PublishItem
from tests.support.server import running_node
from tests.support.snapshots import conversation

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.support.stores import Stores

pytestmark = pytest.mark.slow

PAUSE_S = 0.1  # between batches: the store shall grow while it is read, not without end


def test_snapshots_taken_while_messages_arrive_are_consistent(
    spark: SparkSession, stores: Stores, tmp_path: Path
) -> None:
    """Each is a prefix of the arrival order, verified, and grows from the one before."""
    url, messages = stores.new_url(), conversation(seed=21)
    stop = Event()

    def publish_on(client: StoreClient) -> int:
        count = 0
        while not stop.wait(PAUSE_S):
            items = [PublishItem(each.frame, each.hints) for each in islice(messages, 100)]
            count += sum(each.outcome == "stored" for each in client.publish_batch(items))
        return count

    with (
        running_node(tmp_path / "node", database_url=url) as node,
        StoreClient(node.url) as client,
        ThreadPoolExecutor(1) as executor,
    ):
        publishing = executor.submit(publish_on, client)
        try:
            parent: Path | None = None
            counts = []
            for name in ("a", "b", "c"):
                made = export_snapshot(spark, url, tmp_path / name, parent=parent)
                parent = tmp_path / name
                assert made.entries.count == made.watermark.seq
                assert verify_snapshot(spark, parent).findings == ()
                counts.append(made.entries.count)
        finally:
            stop.set()
        assert counts == sorted(set(counts))
        assert publishing.result() >= counts[-1]
        last = export_snapshot(spark, url, tmp_path / "last", parent=parent)
        assert last.entries.count == publishing.result()
        assert verify_snapshot(spark, tmp_path / "last", node.url).findings == ()

    copy_url = stores.new_url()
    restored = restore_snapshot(tmp_path / "last", copy_url)
    assert restored.written_count == last.entries.count
    assert restored.claims_count == last.claims.count > 0
    assert diff(url, copy_url, 0).ranges == ()
