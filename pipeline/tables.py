"""The tables of a snapshot: written as Parquet files in which a reader can skip rows, and read by Spark.

A file of entries holds one range of the arrival order within one UTC day, sorted in log order. So a day
is a folder, and a channel is a few row groups, which a reader finds by the footers.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from blake3 import blake3
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import DateType, StructField, StructType

from app.roots import root
from pipeline.columns import CHANNELS, ENTRIES, digest_array
from pipeline.manifest import (
    CHANNELS_FILE,
    ENTRIES_FOLDER,
    RANGE_BYTES,
    ClaimRange,
    EntryRange,
    FileRecord,
    claims_path,
    draft_of,
    entries_path,
    write_file,
)
from pipeline.roots import ChannelRow

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LOG_ORDER = ("channel_id", "lamport_timestamp", "message_id", "digest")

_ROW_GROUP_ROWS = 8_192  # the minimum that a reader of one channel reads from a file
_ROW_GROUP_BYTES = 16 * 1024 * 1024
_FEW_VALUES = ["channel_id", "sender_id", "dialect"]  # columns worth a dictionary


def write_entries(
    root_folder: Path, batches: Iterable[pa.RecordBatch], rows_max: int
) -> Iterator[EntryRange]:
    """Write `batches` (arrival order) as files of at most `rows_max` rows; returns their ranges."""
    for table in _portions(batches, rows_max):
        days = table["received_at"].cast(pa.date32(), safe=False)
        for day in pc.unique(days).to_pylist():
            yield _write_range(root_folder, day.isoformat(), table.filter(pc.equal(days, day)))


def _portions(batches: Iterable[pa.RecordBatch], rows_max: int) -> Iterator[pa.Table]:
    """The batches merged up to the bounds of one file."""
    held: list[pa.RecordBatch] = []
    rows_count = bytes_count = 0
    for batch in batches:
        if held and (
            rows_count + batch.num_rows > rows_max or bytes_count + batch.nbytes > RANGE_BYTES
        ):
            yield pa.Table.from_batches(held)
            held, rows_count, bytes_count = [], 0, 0
        held.append(batch)
        rows_count, bytes_count = rows_count + batch.num_rows, bytes_count + batch.nbytes
    if rows_count:
        yield pa.Table.from_batches(held)


def _write_range(root_folder: Path, day: str, table: pa.Table) -> EntryRange:
    """One file: the rows of `table`, which all arrived on `day`."""
    facts = entry_facts(table)
    # One chunk: gathering rows from many chunks takes three times as long.
    table = table.combine_chunks().sort_by([(name, "ascending") for name in LOG_ORDER])
    path = entries_path(day, facts["first"], facts["last"])
    return EntryRange(day=day, **facts, file=write_file(root_folder, path, parquet_bytes(table)))


def entry_facts(table: pa.Table) -> dict[str, Any]:
    """The manifest's facts about rows of entries: members of `EntryRange`."""
    seqs, channel_ids, lamports = (
        pc.min_max(table[name]).as_py() for name in ("seq", "channel_id", "lamport_timestamp")
    )
    return {
        "first": seqs["min"],
        "last": seqs["max"],
        "count": table.num_rows,
        "root": root(digest_array(table["digest"])).hex(),
        "frame_bytes": pc.sum(table["frame_bytes"]).as_py(),
        "lost_count": pc.sum(is_lost(table)).as_py(),
        "first_channel_id": channel_ids["min"],
        "last_channel_id": channel_ids["max"],
        "lamport_first": lamports["min"],
        "lamport_last": lamports["max"],
    }


def is_lost(table: pa.Table) -> pa.ChunkedArray:
    """A mask of the rows whose frame is lost: no frame, but not retired (0 bytes)."""
    return pc.and_(pc.is_null(table["frame"]), pc.greater(table["frame_bytes"], 0))


def write_claims(
    root_folder: Path, batches: Iterable[pa.RecordBatch], rows_max: int
) -> Iterator[ClaimRange]:
    """Write `batches` of claims (in the order of their numbers) as files; returns their ranges."""
    for table in _portions(batches, rows_max):
        facts = claim_facts(table)
        path = claims_path(facts["first"], facts["last"])
        yield ClaimRange(**facts, file=write_file(root_folder, path, parquet_bytes(table)))


def claim_facts(table: pa.Table) -> dict[str, Any]:
    """The manifest's facts about rows of claims: members of `ClaimRange`."""
    numbers = pc.min_max(table["claim_no"]).as_py()
    return {
        "first": numbers["min"],
        "last": numbers["max"],
        "count": table.num_rows,
        "root": root(digest_array(table["claim_id"])).hex(),
    }


def parquet_bytes(table: pa.Table) -> memoryview:
    """`table` as a Parquet file with page checksums and an index of its pages."""
    sink = pa.BufferOutputStream()
    rows_per_group = _ROW_GROUP_BYTES * max(table.num_rows, 1) // max(table.nbytes, 1)
    pq.write_table(
        table.combine_chunks(),
        sink,
        compression="zstd",
        row_group_size=max(1, min(_ROW_GROUP_ROWS, rows_per_group)),
        use_dictionary=[name for name in _FEW_VALUES if name in table.column_names],
        write_page_index=True,
        write_page_checksum=True,
    )
    return memoryview(sink.getvalue())


# ---- the table of channels, streamed: ten million channels need no more memory than ten

_ROWS_PER_BATCH = 4_096


def write_channels(folder: Path, rows: Iterator[ChannelRow]) -> FileRecord:
    """Write channels, sorted by ID, into the snapshot `folder`."""
    target = folder / CHANNELS_FILE
    draft = draft_of(target)
    with pq.ParquetWriter(draft, CHANNELS, compression="zstd", write_page_checksum=True) as writer:
        while portion := list(islice(rows, _ROWS_PER_BATCH)):
            columns = zip(*portion, strict=True)
            arrays = [pa.array(*each) for each in zip(columns, CHANNELS.types, strict=True)]
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=CHANNELS))
    with draft.open("rb") as file:
        digest = blake3().update_mmap(draft).hexdigest()
        os.fsync(file.fileno())
    draft.rename(target)
    return FileRecord(CHANNELS_FILE, target.stat().st_size, digest)


def different_channels(folder: Path, limit: int, rows: Iterator[ChannelRow]) -> list[str]:
    """The first `limit` channels whose row in the snapshot `folder` differs from that in `rows`.

    Both are sorted by ID. Raises pyarrow's errors if the file is not a channels table.
    """
    return list(islice(_different(rows, stored_channels(folder)), limit))


def stored_channels(folder: Path) -> Iterator[ChannelRow]:
    """The rows of the snapshot `folder`, sorted by ID. Raises pyarrow's errors."""
    with pq.ParquetFile(folder / CHANNELS_FILE) as file:
        for batch in file.iter_batches(_ROWS_PER_BATCH):
            columns = (column.to_pylist() for column in batch.cast(CHANNELS).columns)
            yield from map(ChannelRow, *columns)


def _different(computed: Iterator[ChannelRow], stored: Iterator[ChannelRow]) -> Iterator[str]:
    sides = (zip(side, repeat(number)) for number, side in enumerate((computed, stored)))
    both = heapq.merge(*sides, key=lambda each: each[0].channel_id)
    for channel_id, found in groupby(both, key=lambda each: each[0].channel_id):
        rows, numbers = zip(*found, strict=True)
        if numbers != (0, 1) or rows[0] != rows[1]:
            yield channel_id


# ---- reading into Spark


def read_entries(
    spark: SparkSession, snapshot: Path, files: Sequence[str] | None = None
) -> DataFrame:
    """The columns of `ENTRIES`, and `day`, the UTC day of arrival, which prunes folders.

    `files` are paths as in the manifest, by default all.
    """
    folder = snapshot.absolute() / ENTRIES_FOLDER
    if files is None:
        paths = [folder] if folder.exists() else []
    else:
        paths = [snapshot.absolute() / each for each in files]
    day = StructField("day", DateType(), nullable=False)
    columns = StructType([*from_arrow_schema(ENTRIES).fields, day])
    if not paths:  # a table without rows has no files
        return spark.createDataFrame([], columns)
    return spark.read.schema(columns).option("basePath", str(folder)).parquet(*map(str, paths))
