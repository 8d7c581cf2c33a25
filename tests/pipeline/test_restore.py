"""In which order a restore brings rows in, and what it says of rows without frames."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from app.entries import WriteResult
from app.errors import Code, Problem
from app.ingest.prepare import Publication
from app.server.limits import DEFAULT_LIMITS
from app.store.groupwriter import GroupWriter
from pipeline import manifest as manifests
from pipeline.database import DAY_MS, Scan, open_database
from pipeline.export import export_snapshot
from pipeline.restore import restore_snapshot
from pipeline.verify import Fault, verify_snapshot
from sdstore.sds.codec import encode
from sdstore.sds.model import Message
from tests.pipeline.test_versions import FIRST, ROWS
from tests.support.snapshots import conversation, fill_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def frames_in(url: str) -> list[bytes]:
    with open_database(url) as database:
        batches = list(database.entries(Scan()))
    return [frame for batch in batches for frame in batch.column("frame").to_pylist()]


@pytest.mark.slow
def test_of_the_variants_of_an_id_the_first_stays_the_first(
    spark: SparkSession, tmp_path: Path
) -> None:
    plain = Message("x", "channel", lamport_timestamp=1, content=b"mallory")
    filtered = replace(plain, content=b"alice", bloom_filter=bytes(18_000))
    frames = [encode(filtered), encode(plain)]
    url, copy_url = (f"sqlite:///{tmp_path}/{name}.db" for name in "ab")
    fill_store(url, iter([Publication(frame) for frame in frames]), len(frames))
    export_snapshot(spark, url, tmp_path / "snapshot")
    restore_snapshot(tmp_path / "snapshot", copy_url)
    assert frames_in(copy_url) == frames


@pytest.mark.slow
def test_order_and_hints_survive_a_clock_that_went_across_midnight_and_back(
    spark: SparkSession, tmp_path: Path
) -> None:
    url, copy_url = (f"sqlite:///{tmp_path}/{name}.db" for name in "ab")
    fill_store(url, conversation(seed=3), 300)
    change(tmp_path / "a.db", f"UPDATE messages SET received_at_ms = (seq % 2) * {DAY_MS}")
    made = export_snapshot(spark, url, tmp_path / "snapshot")
    assert [(each.first, each.last) for each in made.entry_ranges] == [(1, 299), (2, 300)]
    done = restore_snapshot(tmp_path / "snapshot", copy_url)
    assert done.claims_count == made.claims.count > 0
    assert frames_in(copy_url) == frames_in(url)


@pytest.mark.slow
def test_what_was_lost_is_refused_and_what_was_retired_is_not(
    spark: SparkSession, tmp_path: Path
) -> None:
    url, copy_url = (f"sqlite:///{tmp_path}/{name}.db" for name in "ab")
    fill_store(url, conversation(seed=3), 100)
    change(tmp_path / "a.db", "UPDATE messages SET frame_bytes = 0 WHERE seq < 4")
    change(tmp_path / "a.db", "DELETE FROM frames WHERE seq < 6")
    made = export_snapshot(spark, url, tmp_path / "snapshot")
    verified = verify_snapshot(spark, tmp_path / "snapshot")
    assert (verified.retired_count, verified.lost_count, verified.findings) == (3, 2, ())
    assert made.lost_count == 2
    done = restore_snapshot(tmp_path / "snapshot", copy_url)
    assert (done.retired_count, done.refused) == (3, {Fault.FRAME_LOST: 2})
    assert done.written_count == 95


def first_with(tmp_path: Path, change: Callable[[list[dict[str, Any]]], None]) -> Path:
    """A copy of the snapshot of the first version, with other rows in its first file."""
    copy = tmp_path / "copy"
    shutil.copytree(FIRST, copy)
    path = copy / manifests.load(copy).entry_ranges[0].file.path
    table = pq.read_table(path, partitioning=None)
    rows = table.to_pylist()
    change(rows)
    pq.write_table(pa.Table.from_pylist(rows, table.schema), path)
    return copy


def test_a_row_whose_frame_has_another_digest_or_is_no_message_is_refused(tmp_path: Path) -> None:
    def damage(rows: list[dict[str, Any]]) -> None:
        rows[0]["digest"], rows[1]["digest"] = rows[1]["digest"], rows[0]["digest"]
        rows[2]["frame"] = b"\xff"

    copy = first_with(tmp_path, damage)
    done = restore_snapshot(copy, f"sqlite:///{tmp_path / 'new.db'}")
    assert done.refused == {Fault.DIGEST_DIFFERS: 2, Code.MALFORMED_FRAME: 1}
    assert done.written_count == ROWS - 3 == len(frames_in(f"sqlite:///{tmp_path / 'new.db'}"))


def test_a_restore_that_the_disk_ended_is_completed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, url = replace(DEFAULT_LIMITS, group_items_max=10), f"sqlite:///{tmp_path / 'new.db'}"
    write, groups = GroupWriter.write, iter(range(3))

    def write_thrice(writer: GroupWriter, *of: Any) -> list[WriteResult]:
        if next(groups, None) is None:
            raise Problem(Code.DISK_FULL, "no space left")
        return write(writer, *of)

    with monkeypatch.context() as patched:
        patched.setattr(GroupWriter, "write", write_thrice)
        with pytest.raises(Problem, match="no space left"):
            restore_snapshot(FIRST, url, limits)
    held = frames_in(url)
    assert len(held) == 30
    done = restore_snapshot(FIRST, url, limits)
    assert (done.rows_count, done.written_count, done.refused) == (ROWS, ROWS - len(held), {})
    assert done.claims_count == manifests.load(FIRST).claims.count > 0
    assert frames_in(url)[: len(held)] == held


def change(path: Path, sql: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(sql)
