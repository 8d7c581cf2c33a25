"""The check of one file finds its faults, even if file and manifest were forged together; no Spark."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.columns import ENTRIES
from pipeline.database import Scan, open_database
from pipeline.manifest import SCHEMA_VERSION, EntryRange, write_file
from pipeline.tables import entry_facts, parquet_bytes, write_entries
from pipeline.verify import Fault, FileCheck, check_file
from sdstore.sds.codec import decode
from tests.support.snapshots import conversation, fill_store

ROWS = 60


@pytest.fixture
def written(tmp_path: Path) -> EntryRange:
    url = f"sqlite:///{tmp_path / 'sdstore.db'}"
    fill_store(url, conversation(seed=1), ROWS)
    with open_database(url) as database:
        [each] = write_entries(tmp_path, database.entries(Scan()), ROWS)
    return each


def check_forged(folder: Path, each: EntryRange, **columns: list[object]) -> FileCheck:
    """The file is written with other columns, and the manifest lies accordingly."""
    table = pq.read_table(folder / each.file.path, partitioning=None)
    arrays = [pa.array(columns.get(f.name, table[f.name].to_pylist()), f.type) for f in ENTRIES]
    table = pa.Table.from_arrays(arrays, schema=ENTRIES)
    file = write_file(folder, each.file.path, parquet_bytes(table))
    return check_file(folder, SCHEMA_VERSION, replace(each, **entry_facts(table), file=file))


def test_what_was_written_is_sound(tmp_path: Path, written: EntryRange) -> None:
    assert check_file(tmp_path, SCHEMA_VERSION, written) == FileCheck((), ROWS)


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("first_channel_id", "a"),
        ("last_channel_id", "zzz"),
        ("lamport_first", 0),
        ("lamport_last", 2**62),
        ("frame_bytes", 1),
        ("lost_count", 1),
        ("last", 10**6),
    ],
)
def test_a_manifest_that_says_something_else_than_the_rows_is_noticed(
    tmp_path: Path, written: EntryRange, member: str, value: object
) -> None:
    lie = replace(written, **{member: value})  # type: ignore[arg-type]
    [finding] = check_file(tmp_path, SCHEMA_VERSION, lie).findings
    assert finding.fault is Fault.SUMMARY_DIFFERS
    assert finding.detail.startswith(member)


def test_frames_that_were_taken_out_leave_columns_that_nothing_proves(
    tmp_path: Path, written: EntryRange
) -> None:
    nothing: dict[str, list[object]] = {"frame": [None] * ROWS, "channel_id": ["mallory"] * ROWS}
    found = check_forged(tmp_path, written, **nothing)
    assert {each.fault for each in found.findings} == {Fault.COLUMN_DIFFERS}
    assert {each.row for each in found.findings} == set(range(ROWS))
    nothing |= {
        "sender_id": [""] * ROWS,
        "content_bytes": [0] * ROWS,
        "content": [None] * ROWS,
        "causal_history": [[]] * ROWS,
    }
    assert check_forged(tmp_path, written, **nothing) == FileCheck((), ROWS, lost_count=ROWS)
    nothing["frame_bytes"] = [0] * ROWS
    assert check_forged(tmp_path, written, **nothing) == FileCheck((), ROWS, retired_count=ROWS)


def test_content_that_is_not_that_of_the_frame_is_noticed(
    tmp_path: Path, written: EntryRange
) -> None:
    table = pq.read_table(tmp_path / written.file.path, partitioning=None)
    contents = table["content"].to_pylist()
    assert contents == [decode(frame)[0].content for frame in table["frame"].to_pylist()]
    for row, forged in ((0, b"forged"), (5, None)):
        changed = [*contents[:row], forged, *contents[row + 1 :]]
        [finding] = check_forged(tmp_path, written, content=changed).findings
        assert (finding.fault, finding.row) == (Fault.COLUMN_DIFFERS, row)
