"""Roots: BLAKE3 over the sorted 32-byte digests of a set, in numpy and in Spark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from blake3 import blake3
from numpy.typing import NDArray

from pipeline.scan import INT64_MAX, INT64_MIN

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

DIGEST_BYTES = 32
EMPTY_ROOT = blake3(b"").digest()


def root(digests: NDArray[np.uint8]) -> bytes:
    """The root of `digests`, an (n, 32) array of bytes in any order."""
    # As fixed strings numpy compares them like memcmp; padding NULs cannot confuse equal lengths.
    in_order = np.sort(np.ascontiguousarray(digests, np.uint8).view(f"S{DIGEST_BYTES}").ravel())
    return blake3(in_order.tobytes()).digest()


def digest_array(column: pa.Array | pa.ChunkedArray) -> NDArray[np.uint8]:
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


def summaries(entries: DataFrame, keys: Sequence[str]) -> DataFrame:
    """(keys…, count, root, lamport_first, lamport_last) of every group of `entries`.

    Groups are sorted by Spark, which spills to disk, and hashed as they stream by: memory does not
    grow with a group. `keys` are columns without nulls.
    """
    columns = [f"`{key}` {entries.schema[key].dataType.simpleString()}" for key in keys]
    columns += ["count bigint", "root binary", "lamport_first bigint", "lamport_last bigint"]
    return (
        entries.select(*keys, "lamport_timestamp", "digest")
        .repartition(*keys)
        .sortWithinPartitions(*keys, "digest")
        .mapInArrow(partial(_stream_groups, tuple(keys)), ", ".join(columns))
    )


def root_of(frame: DataFrame, element: str = "digest") -> tuple[int, bytes]:
    """(count, root) of all rows, sorted by the whole cluster and hashed by one task."""
    rows = (
        frame.select(frame[element].alias("element"))
        .sort("element")
        .coalesce(1)
        .mapInArrow(_stream_root, "count bigint, root binary")
        .collect()
    )
    return (int(rows[0]["count"]), bytes(rows[0]["root"])) if rows else (0, EMPTY_ROOT)


def _stream_root(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    count, hasher = 0, blake3()
    for batch in batches:
        hasher.update(digest_array(batch.column("element")).tobytes())
        count += batch.num_rows
    yield pa.RecordBatch.from_pydict({"count": [count], "root": [hasher.digest()]})


@dataclass(slots=True)
class _Group:
    """A group that is being read."""

    key: tuple[Any, ...]
    count: int = 0
    lamport_first: int = INT64_MAX
    lamport_last: int = INT64_MIN
    hasher: Any = field(default_factory=blake3)

    def take(self, digests: NDArray[np.uint8], lamports: NDArray[np.int64]) -> None:
        self.hasher.update(digests.tobytes())
        self.count += len(digests)
        self.lamport_first = min(self.lamport_first, int(lamports.min()))
        self.lamport_last = max(self.lamport_last, int(lamports.max()))

    def row(self) -> tuple[Any, ...]:
        bounds = self.lamport_first, self.lamport_last
        return (*self.key, self.count, self.hasher.digest(), *bounds)


def _stream_groups(
    keys: tuple[str, ...], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """One row per run of equal keys; the rows come sorted by keys, then by digest."""
    group: _Group | None = None
    schema = pa.schema([])
    for batch in batches:
        schema = _summary_schema(batch.schema, keys)
        done: list[tuple[Any, ...]] = []
        digests = digest_array(batch.column("digest"))
        lamports = batch.column("lamport_timestamp").to_numpy()
        for start, stop in _runs([batch.column(key) for key in keys], batch.num_rows):
            key = tuple(batch.column(name)[start].as_py() for name in keys)
            if group is None or key != group.key:
                done += [] if group is None else [group.row()]
                group = _Group(key)
            group.take(digests[start:stop], lamports[start:stop])
        if done:
            yield _as_batch(done, schema)
    if group is not None:
        yield _as_batch([group.row()], schema)


def _summary_schema(rows: pa.Schema, keys: Sequence[str]) -> pa.Schema:
    numbers = ("count", pa.int64()), ("root", pa.binary())
    bounds = ("lamport_first", pa.int64()), ("lamport_last", pa.int64())
    return pa.schema([*(rows.field(key) for key in keys), *numbers, *bounds])


def _runs(columns: Sequence[pa.Array], rows_count: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of every run of rows that agree in all columns."""
    if rows_count == 0:
        return
    changes = np.zeros(rows_count - 1, bool)
    for column in columns:
        changes |= pc.not_equal(column[1:], column[:-1]).to_numpy(zero_copy_only=False)
    bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), rows_count]
    yield from pairwise(bounds)


def _as_batch(rows: Sequence[tuple[Any, ...]], schema: pa.Schema) -> pa.RecordBatch:
    columns = zip(*rows, strict=True)
    arrays = [pa.array(each, type_) for each, type_ in zip(columns, schema.types, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
