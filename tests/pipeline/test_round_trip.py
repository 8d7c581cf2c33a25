"""A real node, exported, verified, damaged, restored, and equal at the end."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from app.ingest.prepare import Publication
from pipeline import manifest as manifests
from pipeline.diff import diff
from pipeline.export import export_snapshot
from pipeline.ordering import log_positions
from pipeline.restore import restore_snapshot
from pipeline.tables import read_entries
from pipeline.verify import verify_snapshot
from sdstore.client.clients import StoreClient
from sdstore.client.records import PublishItem
from sdstore.sync.report import SyncOutcome
from tests.support.cli import cli
from tests.support.server import running_node
from tests.support.snapshots import conversation

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.support.stores import Stores

MESSAGES = 2_000
SYNC_MOVED = ("entries_received", "entries_sent", "claims_received", "claims_sent")


def test_a_node_is_exported_verified_restored_and_equal(
    spark: SparkSession, stores: Stores, tmp_path: Path
) -> None:
    messages = conversation(seed=7)
    first, second = tmp_path / "first", tmp_path / "second"
    url, copy_url = stores.new_url(), stores.new_url()
    original, copy = (
        partial(running_node, tmp_path / name, database_url=each)
        for name, each in (("a", url), ("b", copy_url))
    )

    with original() as node, StoreClient(node.url) as client:
        publications = list(islice(messages, MESSAGES))
        publish(client, publications)
        whole = export_snapshot(spark, url, first)
        assert whole.entries.count == MESSAGES
        assert verify_snapshot(spark, first, node.url).findings == ()

    with original() as node, StoreClient(node.url) as client:
        publish(client, islice(messages, MESSAGES // 100))
        change = export_snapshot(spark, url, second, parent=first)
        assert change.entries.count == MESSAGES + MESSAGES // 100
        assert change.bytes_written <= 0.05 * change.table_bytes
        # The older snapshot is a part of what the node has by now, and provably so.
        assert verify_snapshot(spark, first, node.url).findings == ()
        assert node_logs(client) == snapshot_logs(spark, second)
        roots = {
            each.channel_id: client.channel(each.channel_id).root for each in client.channels()
        }

    damaged = set(damage_every_file(second, tmp_path / "damaged"))
    assert {each.where for each in verify_snapshot(spark, tmp_path / "damaged").findings} == damaged

    restored = restore_snapshot(second, copy_url)
    assert restored.written_count == change.entries.count
    assert restored.claims_count == change.claims.count > 0
    assert diff(url, copy_url, 0).ranges == ()
    with original() as node, copy() as other, StoreClient(other.url) as client:
        assert roots == {
            each.channel_id: client.channel(each.channel_id).root for each in client.channels()
        }
        hinted = next(each for each in publications if each.hints)
        assert [each.frame for each in client.hint(hinted.hints[0]).messages] == [hinted.frame]
        synced = cli("sync", node.url, "--node", other.url, "--json").json["report"]
        assert synced["outcome"] == SyncOutcome.IN_SYNC
        assert [synced[each] for each in SYNC_MOVED] == [0] * len(SYNC_MOVED)


def publish(client: StoreClient, publications: Iterable[Publication]) -> None:
    items = (PublishItem(each.frame, each.hints) for each in publications)
    assert {each.outcome for each in client.publish_batch(items)} == {"stored"}


def node_logs(client: StoreClient) -> dict[str, list[bytes]]:
    return {
        each.channel_id: [message.digest for message in client.messages(each.channel_id)]
        for each in client.channels()
    }


def snapshot_logs(spark: SparkSession, snapshot: Path) -> dict[str, list[bytes]]:
    logs: dict[str, list[bytes]] = {}
    placed = log_positions(read_entries(spark, snapshot)).sort("channel_id", "position")
    for row in placed.select("channel_id", "position", "digest").collect():
        log = logs.setdefault(row["channel_id"], [])
        assert row["position"] == len(log)
        log.append(bytes(row["digest"]))
    return logs


def damage_every_file(snapshot: Path, copy: Path) -> list[str]:
    """Change one byte in the middle of each file but the manifest; the paths."""
    shutil.copytree(snapshot, copy)
    paths = [record.path for record in manifests.load(copy).files()]
    for path in paths:
        content = bytearray((copy / path).read_bytes())
        content[len(content) // 2] ^= 0x40
        (copy / path).write_bytes(content)
    return paths
