"""In which order a restore brings rows in, and what it says of rows without frames."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from app.ingest.prepare import Publication
from pipeline.database import open_database
from pipeline.export import export_snapshot
from pipeline.findings import Fault
from pipeline.restore import restore_snapshot
from pipeline.scan import DAY_MS, Scan
from pipeline.verify import verify_snapshot
from sdstore.sds.codec import encode
from sdstore.sds.model import Message
from tests.support.snapshots import conversation, fill_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow


def frames_in(url: str) -> list[bytes]:
    with open_database(url) as database:
        batches = list(database.entries(Scan()))
    return [frame for batch in batches for frame in batch.column("frame").to_pylist()]


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


def change(path: Path, sql: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(sql)
