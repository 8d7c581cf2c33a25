"""Checks of snapshots find every fault; restores of damaged snapshots."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from pipeline import export, tables
from pipeline import manifest as manifests
from pipeline.export import Exported, Route, export_snapshot, export_tables
from pipeline.manifest import Manifest, PipelineError, write_file
from pipeline.restore import restore_snapshot
from pipeline.tables import entry_facts, parquet_bytes
from pipeline.verify import Fault, verify_snapshot
from tests.support.snapshots import conversation, fill_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow


def forged(snapshot: Path, copy: Path, change: Callable[[pa.Table], pa.Table]) -> str:
    """A copy whose first file is changed and whose manifest lies accordingly; the file's path."""
    shutil.copytree(snapshot, copy)
    manifest = manifests.load(copy)
    victim = manifest.entry_ranges[0]
    table = change(pq.read_table(copy / victim.file.path, partitioning=None))
    facts = entry_facts(table) | {"first": victim.first, "last": victim.last}
    file = write_file(copy, victim.file.path, parquet_bytes(table))
    lie = replace(victim, **facts, file=file)
    count = manifest.entries.count + lie.count - victim.count
    total = replace(manifest.entries, count=count)
    seal(copy, replace(manifest, entries=total, entry_ranges=(lie, *manifest.entry_ranges[1:])))
    return victim.file.path


def seal(snapshot: Path, manifest: Manifest) -> None:
    write_file(snapshot, manifests.FILE_NAME, manifest.to_bytes())


def with_column(
    name: str, values: Callable[[list[object]], list[object]]
) -> Callable[..., pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        number = table.column_names.index(name)
        column = pa.array(values(table[name].to_pylist()), table.schema.field(name).type)
        return table.set_column(number, table.schema.field(name), column)

    return change


def first_changed(new: object) -> Callable[[list[object]], list[object]]:
    return lambda values: [new, *values[1:]]


@pytest.mark.parametrize(
    ("column", "value", "fault"),
    [
        ("frame", b"\xff", Fault.FRAME_REFUSED),
        ("frame_hash", bytes(32), Fault.FRAME_HASH_DIFFERS),
        ("digest", bytes(32), Fault.DIGEST_DIFFERS),
        ("sender_id", "mallory", Fault.COLUMN_DIFFERS),
        ("lamport_timestamp", 0, Fault.COLUMN_DIFFERS),
        ("causal_history", [], Fault.COLUMN_DIFFERS),
        ("seq", 10**9, Fault.OUTSIDE_OF_RANGE),
    ],
)
def test_a_poisoned_row_is_named_even_if_the_manifest_was_forged_with_it(
    spark: SparkSession, snapshot: Path, tmp_path: Path, column: str, value: object, fault: Fault
) -> None:
    path = forged(snapshot, tmp_path / "forged", with_column(column, first_or_last(column, value)))
    findings = verify_snapshot(spark, tmp_path / "forged").findings
    assert (fault, path) in {(each.fault, each.where) for each in findings}
    rows = {each.row for each in findings if each.row is not None}
    assert len(rows) == (0 if fault is Fault.OUTSIDE_OF_RANGE else 1)


def first_or_last(column: str, value: object) -> Callable[[list[object]], list[object]]:
    """The last message of a file has a history, which the first one may not have."""
    if column == "causal_history":
        return lambda values: [*values[:-1], value]
    return first_changed(value)


def test_a_row_that_was_left_out_shows_in_the_totals(
    spark: SparkSession, snapshot: Path, tmp_path: Path
) -> None:
    forged(snapshot, tmp_path / "forged", lambda table: table.slice(1))
    findings = verify_snapshot(spark, tmp_path / "forged").findings
    assert {"entries", "channels.parquet"} <= {each.where for each in findings}
    assert {each.fault for each in findings} <= {Fault.ROOT_DIFFERS, Fault.CLAIM_WITHOUT_ENTRY}


def test_a_proof_names_the_entries_that_claims_miss(
    spark: SparkSession, snapshot: Path, tmp_path: Path
) -> None:
    """Also those of buckets that hold no entry at all."""
    manifest = manifests.load(snapshot)
    proved = tables.prove(spark, snapshot, (), manifest.claim_ranges, list)
    claims = pa.concat_tables(
        [pq.read_table(snapshot / each.file.path) for each in manifest.claim_ranges]
    )
    assert proved.orphans == tuple(sorted(set(claims["digest"].to_pylist())))
    assert (proved.entries.count, proved.made) == (0, [])


def test_missing_and_unknown_files_are_named(
    spark: SparkSession, snapshot: Path, tmp_path: Path
) -> None:
    shutil.copytree(snapshot, tmp_path / "copy")
    gone = manifests.load(snapshot).entry_ranges[0].file.path
    (tmp_path / "copy" / gone).unlink()
    (tmp_path / "copy" / "README.md").unlink()
    (tmp_path / "copy" / "entries" / "extra.parquet").touch()
    (tmp_path / "copy" / ".lock").touch()  # of a maker that was killed right after it was done
    found = {
        (each.fault, each.where) for each in verify_snapshot(spark, tmp_path / "copy").findings
    }
    assert found == {
        (Fault.MISSING_FILE, gone),
        (Fault.MISSING_FILE, "README.md"),
        (Fault.UNLISTED_FILE, "entries/extra.parquet"),
    }


def test_a_damaged_snapshot_restores_what_is_whole_of_it(
    spark: SparkSession, snapshot: Path, tmp_path: Path
) -> None:
    shutil.copytree(snapshot, tmp_path / "copy")
    lost = manifests.load(snapshot).entry_ranges[0]
    (tmp_path / "copy" / lost.file.path).write_bytes(b"PAR1")
    restored = restore_snapshot(tmp_path / "copy", f"sqlite:///{tmp_path / 'new.db'}")
    assert restored.refused == {Fault.UNREADABLE_ROWS: lost.count}
    assert restored.written_count == 3_000 - lost.count


def test_an_export_fails_where_not_all_that_was_written_is_there(
    spark: SparkSession, store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a cluster whose workers each have a folder of that name."""

    def export_elsewhere(spark: SparkSession, route: Route, parts: Any) -> list[Exported]:
        made = export_tables(spark, route, parts)
        shutil.rmtree(route.folder / Path(made[0].ranges[-1].file.path).parent)
        return made

    monkeypatch.setattr(export, "export_tables", export_elsewhere)
    with pytest.raises(PipelineError, match="do all workers share the folder"):
        export_snapshot(spark, store_url, tmp_path / "here")
    assert list(tmp_path.iterdir()) == []


def test_retired_content_leaves_the_next_snapshot_and_roots_stay(
    spark: SparkSession, tmp_path: Path
) -> None:
    path = tmp_path / "sdstore.db"
    fill_store(f"sqlite:///{path}", conversation(seed=6), 200)
    before = export_snapshot(spark, f"sqlite:///{path}", tmp_path / "a")
    with sqlite3.connect(path) as connection:
        connection.execute("DELETE FROM frames WHERE seq = 7")
        connection.execute("UPDATE messages SET frame_bytes = 0 WHERE seq = 7")
    connection.close()
    after = export_snapshot(spark, f"sqlite:///{path}", tmp_path / "b", parent=tmp_path / "a")
    assert after.entries == before.entries
    assert len(after.created_at) == len("2026-01-01T00:00:00.000+00:00")
    table = pq.read_table(tmp_path / "b" / after.entry_ranges[0].file.path, partitioning=None)
    retired = table.filter(pc.is_null(table["frame"]))
    assert retired["seq"].to_pylist() == [7]
    verified = verify_snapshot(spark, tmp_path / "b")
    assert (verified.findings, verified.retired_count, verified.lost_count) == ((), 1, 0)
