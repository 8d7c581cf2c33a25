"""Snapshots of stores that have lost content, and snapshots that give it back."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from app.server.limits import DEFAULT_LIMITS
from app.store.groupwriter import Retiring
from app.store.store import Store
from pipeline.export import export_snapshot
from pipeline.restore import restore_snapshot
from pipeline.verify import verify_snapshot
from tests.pipeline.test_versions import FIRST, ROWS
from tests.support.snapshots import conversation, fill_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROTTEN = (7, 23)


def rot(path: Path) -> None:
    """Damage frames behind the store's back."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(f"UPDATE frames SET data = x'00' WHERE seq IN {ROTTEN}")


def mark(path: Path) -> None:
    """Let the store find out."""

    async def recheck() -> None:
        store = await Store.open(f"sqlite:///{path}", DEFAULT_LIMITS)
        try:
            store.begin_writing()
            store.writer.recheck(ROTTEN)
            assert await store.frames.lost_count() == len(ROTTEN)
        finally:
            await store.close()

    asyncio.run(recheck())


def frames_served(path: Path) -> tuple[int, int]:
    """How many entries are served with their frames, and how many are marked as lost."""

    async def read() -> tuple[int, int]:
        store = await Store.open(f"sqlite:///{path}", DEFAULT_LIMITS)
        try:
            page = await store.channels.feed(0, 1_000, 10**9)
            return len(page.entries), await store.frames.lost_count()
        finally:
            await store.close()

    return asyncio.run(read())


@pytest.mark.parametrize("is_known", [True, False])
def test_a_restore_of_a_whole_snapshot_mends_what_the_store_has_lost(
    tmp_path: Path, is_known: bool
) -> None:
    path = tmp_path / "sdstore.db"
    restore_snapshot(FIRST, f"sqlite:///{path}")
    rot(path)
    if is_known:
        mark(path)
    assert frames_served(path)[0] == ROWS - len(ROTTEN)
    restored = restore_snapshot(FIRST, f"sqlite:///{path}")
    assert restored.written_count == len(ROTTEN)
    assert frames_served(path) == (ROWS, 0)
    assert restore_snapshot(FIRST, f"sqlite:///{path}").written_count == 0


@pytest.mark.slow
def test_lost_content_is_exported_as_elements_counted_and_exported_whole_once_it_is_mended(
    spark: SparkSession, tmp_path: Path
) -> None:
    path, url = tmp_path / "sdstore.db", f"sqlite:///{tmp_path / 'sdstore.db'}"
    fill_store(url, conversation(seed=8), 200)
    whole = export_snapshot(spark, url, tmp_path / "whole")
    rot(path)
    mark(path)
    # A file of the parent that still has the frames is shared with it: nothing is lost twice.
    shared = export_snapshot(spark, url, tmp_path / "shared", parent=tmp_path / "whole")
    assert (shared.entries, shared.lost_count, shared.bytes_written) == (whole.entries, 0, 0)

    lacking = export_snapshot(spark, url, tmp_path / "lacking")
    assert (lacking.entries, lacking.lost_count) == (whole.entries, len(ROTTEN))
    verified = verify_snapshot(spark, tmp_path / "lacking")
    assert (verified.findings, verified.lost_count) == ((), len(ROTTEN))
    table = pq.read_table(tmp_path / "lacking" / lacking.entry_ranges[0].file.path)
    rows = {row["seq"]: row for row in table.to_pylist()}
    assert {seq for seq, row in rows.items() if row["content"] is None} == set(ROTTEN)
    assert restore_snapshot(tmp_path / "lacking", url).refused == {"frame_lost": len(ROTTEN)}

    assert restore_snapshot(tmp_path / "whole", url).written_count == len(ROTTEN)
    mended = export_snapshot(spark, url, tmp_path / "mended", parent=tmp_path / "lacking")
    assert (mended.entries, mended.lost_count) == (whole.entries, 0)
    assert verify_snapshot(spark, tmp_path / "mended").findings == ()


def test_retired_entries_are_exported_as_elements_and_never_restored(
    tmp_path: Path, spark: SparkSession
) -> None:
    source, target = tmp_path / "source.db", tmp_path / "target.db"
    restore_snapshot(FIRST, f"sqlite:///{source}")
    first = tmp_path / "first"
    export_snapshot(spark, f"sqlite:///{source}", first)

    async def retire() -> None:
        store = await Store.open(f"sqlite:///{source}", DEFAULT_LIMITS)
        try:
            store.begin_writing()
            page = await store.channels.feed(0, 1_000, 10**9)
            digests = [each.digest for each in page.entries if each.seq in ROTTEN]
            assert store.writer.retire(Retiring(digests, "a test")).retired == len(ROTTEN)
        finally:
            await store.close()

    asyncio.run(retire())
    second = tmp_path / "second"
    export_snapshot(spark, f"sqlite:///{source}", second, parent=first)
    verified = verify_snapshot(spark, second)
    assert (verified.findings, verified.lost_count) == ((), 0)
    restored = restore_snapshot(second, f"sqlite:///{target}")
    assert (restored.written_count, restored.retired_count) == (ROWS - len(ROTTEN), len(ROTTEN))
    # A snapshot of before brings nothing back to the store that retired it.
    assert restore_snapshot(first, f"sqlite:///{source}").written_count == 0
    assert frames_served(source) == (ROWS - len(ROTTEN), 0)
