"""The channels table of a snapshot: count, root and Lamport bounds of each channel."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
from blake3 import blake3

from pipeline.columns import CHANNELS
from pipeline.layout import CHANNELS_FILE
from pipeline.manifest import FileRecord
from pipeline.publish import draft_of
from pipeline.summaries import summaries

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def channel_summaries(entries: DataFrame, entries_count: int) -> DataFrame:
    """The columns of `CHANNELS` for every channel in `entries`."""
    return summaries(entries, ["channel_id"], entries_count).select(*CHANNELS.names)


def write_channels(entries: DataFrame, entries_count: int, folder: Path) -> FileRecord:
    """Write the channels of `entries` into the snapshot `folder`, sorted by channel ID.

    One task writes the file as the rows stream by, so that a store of ten million channels needs
    no more memory than one of ten.
    """
    written = (
        channel_summaries(entries, entries_count)
        .repartition(1)
        .sortWithinPartitions("channel_id")
        .mapInArrow(partial(_write, folder), "bytes bigint, digest string")
        .collect()
    )
    bytes_count, digest = written[0] if written else _write_table(folder, [])
    return FileRecord(CHANNELS_FILE, bytes_count, digest)


def _write(folder: Path, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    bytes_count, digest = _write_table(folder, batches)
    yield pa.RecordBatch.from_pydict({"bytes": [bytes_count], "digest": [digest]})


def _write_table(folder: Path, batches: Iterable[pa.RecordBatch]) -> tuple[int, str]:
    target = folder / CHANNELS_FILE
    draft = draft_of(target)
    with pq.ParquetWriter(draft, CHANNELS, compression="zstd", write_page_checksum=True) as writer:
        for batch in batches:
            writer.write_batch(batch.cast(CHANNELS))
    with draft.open("rb") as file:
        digest = blake3().update_mmap(draft).hexdigest()
        os.fsync(file.fileno())
    draft.rename(target)
    return target.stat().st_size, digest
