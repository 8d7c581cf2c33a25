"""Snapshots that earlier versions wrote: `tests/fixtures/snapshots/` has one of each schema version."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from pipeline import manifest as manifests
from pipeline.export import export_snapshot
from pipeline.manifest import SCHEMA_VERSION, write_file
from pipeline.restore import restore_snapshot
from pipeline.tables import parquet_bytes, read_entries
from pipeline.verify import check_file, verify_snapshot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FIRST = Path(__file__).parents[1] / "fixtures" / "snapshots" / "1"
ROWS = 60


def test_a_snapshot_of_the_first_version_is_checked_and_restored(tmp_path: Path) -> None:
    manifest = manifests.load(FIRST)
    assert (manifest.schema_version, manifest.entries.count) == (1, ROWS)
    for each in (*manifest.entry_ranges, *manifest.claim_ranges):
        assert check_file(FIRST, manifest.schema_version, each).findings == ()
    assert restore_snapshot(FIRST, f"sqlite:///{tmp_path / 'new.db'}").written_count == ROWS


def test_a_file_of_this_version_without_its_content_is_no_file_of_this_version() -> None:
    [first, *_] = manifests.load(FIRST).entry_ranges
    assert check_file(FIRST, SCHEMA_VERSION, first).findings != ()


@pytest.mark.slow
def test_a_snapshot_of_the_first_version_is_verified_read_and_followed_by_one_of_this(
    spark: SparkSession, store_url: str, snapshot: Path, tmp_path: Path
) -> None:
    assert verify_snapshot(spark, FIRST).findings == ()
    rows = read_entries(spark, FIRST).select("frame", "content").collect()
    assert [row["content"] for row in rows] == [None] * ROWS
    assert all(row["frame"] for row in rows)
    # As the first version would have exported the store of the tests.
    shutil.copytree(snapshot, tmp_path / "old")
    now = manifests.load(snapshot)
    ranges = []
    for each in now.entry_ranges:
        table = pq.read_table(snapshot / each.file.path, partitioning=None)
        content = parquet_bytes(table.drop_columns(["content"]))
        ranges.append(replace(each, file=write_file(tmp_path / "old", each.file.path, content)))
    old = replace(now, schema_version=1, entry_ranges=tuple(ranges))
    write_file(tmp_path / "old", manifests.FILE_NAME, old.to_bytes())
    assert verify_snapshot(spark, tmp_path / "old").findings == ()
    made = export_snapshot(spark, store_url, tmp_path / "new", parent=tmp_path / "old")
    assert (made.schema_version, made.entries) == (SCHEMA_VERSION, now.entries)
    assert verify_snapshot(spark, tmp_path / "new").findings == ()
    assert read_entries(spark, tmp_path / "new").where("content IS NULL").count() == 0
