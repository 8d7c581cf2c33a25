"""The channels table of a snapshot: count, root and Lamport bounds of each channel.

Rows are streamed: a store of ten million channels needs no more memory than one of ten.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator
from itertools import groupby, islice, repeat
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from blake3 import blake3

from pipeline.columns import CHANNELS
from pipeline.layout import CHANNELS_FILE
from pipeline.manifest import FileRecord
from pipeline.proof import ChannelRow
from pipeline.publish import draft_of

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
    return list(islice(_different(rows, _stored(folder / CHANNELS_FILE)), limit))


def _stored(path: Path) -> Iterator[ChannelRow]:
    with pq.ParquetFile(path) as file:
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
