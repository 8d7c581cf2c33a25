"""Roots: BLAKE3 over the sorted 32-byte digests of a set, in numpy and in Spark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from blake3 import blake3

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

DIGEST_BYTES = 32
EMPTY_ROOT = blake3(b"").digest()


def root(digests: np.ndarray[Any, np.dtype[Any]]) -> bytes:
    """The root of `digests`, an (n, 32) array of bytes in any order."""
    # As fixed strings numpy compares them like memcmp; padding NULs cannot confuse equal lengths.
    in_order = np.sort(np.ascontiguousarray(digests, np.uint8).view(f"S{DIGEST_BYTES}").ravel())
    return blake3(in_order.tobytes()).digest()


def digest_array(column: pa.Array | pa.ChunkedArray) -> np.ndarray[Any, np.dtype[Any]]:
    """A binary column of 32-byte values as an (n, 32) array; ValueError for other lengths."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if len(column) == 0:
        return np.empty((0, DIGEST_BYTES), np.uint8)
    lengths = pc.unique(pc.binary_length(column)).to_pylist()
    if lengths != [DIGEST_BYTES]:
        raise ValueError(f"digests have 32 bytes, not {lengths[:5]}")
    _, offsets, values = column.cast(pa.binary()).buffers()
    start = int(np.frombuffer(offsets, np.int32)[column.offset])
    stop = start + len(column) * DIGEST_BYTES
    return np.frombuffer(values, np.uint8)[start:stop].reshape(-1, DIGEST_BYTES)


def roots_by(frame: DataFrame, keys: Sequence[str], digest: str = "digest") -> DataFrame:
    """(keys…, count, root) of every group of `frame`.

    Groups are sorted by Spark, which spills to disk, and hashed as they stream by: memory does not
    grow with a group. `keys` are columns without nulls.
    """
    schema = ", ".join(
        [f"`{key}` {frame.schema[key].dataType.simpleString()}" for key in keys]
        + ["count bigint", "root binary"]
    )
    return (
        frame.select(*keys, frame[digest].alias("digest"))
        .repartition(*keys)
        .sortWithinPartitions(*keys, "digest")
        .mapInArrow(partial(_stream_roots, tuple(keys)), schema)
    )


def root_of(frame: DataFrame, digest: str = "digest") -> tuple[int, bytes]:
    """(count, root) of all rows, sorted by the whole cluster and hashed by one task."""
    rows = (
        frame.select(frame[digest].alias("digest"))
        .sort("digest")
        .coalesce(1)
        .mapInArrow(partial(_stream_roots, ()), "count bigint, root binary")
        .collect()
    )
    return (int(rows[0]["count"]), bytes(rows[0]["root"])) if rows else (0, EMPTY_ROOT)


def _stream_roots(
    keys: tuple[str, ...], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """One row per run of equal keys; the rows come sorted by keys, then by digest."""
    current: tuple[Any, ...] | None = None
    count, hasher = 0, blake3()
    for batch in batches:
        done = []
        digests = digest_array(batch.column("digest"))
        for start, stop in _runs([batch.column(key) for key in keys], batch.num_rows):
            key = tuple(batch.column(name)[start].as_py() for name in keys)
            if key != current:
                if current is not None:
                    done.append((*current, count, hasher.digest()))
                current, count, hasher = key, 0, blake3()
            hasher.update(digests[start:stop].tobytes())
            count += stop - start
        yield from _as_batch(keys, batch, done)
    if current is not None:
        yield from _as_batch(keys, batch, [(*current, count, hasher.digest())])


def _runs(columns: Sequence[pa.Array], rows_count: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of every run of rows that agree in all columns."""
    if rows_count == 0:
        return
    changes = np.zeros(rows_count - 1, bool)
    for column in columns:
        changes |= pc.not_equal(column[1:], column[:-1]).to_numpy(zero_copy_only=False)
    bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), rows_count]
    yield from pairwise(bounds)


def _as_batch(
    keys: tuple[str, ...], like: pa.RecordBatch, rows: list[tuple[Any, ...]]
) -> Iterator[pa.RecordBatch]:
    if not rows:
        return
    types = [like.schema.field(key).type for key in keys] + [pa.int64(), pa.binary()]
    arrays = [
        pa.array(column, type_)
        for column, type_ in zip(zip(*rows, strict=True), types, strict=True)
    ]
    yield pa.RecordBatch.from_arrays(arrays, [*keys, "count", "root"])
