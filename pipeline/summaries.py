"""Count, root and clock bounds of groups of rows, computed by Spark.

First many rows become one per group and bucket, a stretch of the digests' space, that holds the
digests one after the other. Then a group's rows come together bucket by bucket, and the digests
are sorted in numpy and hashed as they stream by. So Spark moves few, large rows, and memory is
bounded by a bucket, however large a group is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from blake3 import blake3
from numpy.typing import NDArray
from pyspark.sql import functions as f
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import BinaryType, IntegerType, LongType, StructField, StructType

from pipeline.roots import DIGEST_BYTES, EMPTY_ROOT, digest_array, in_order
from pipeline.scan import INT64_MAX, INT64_MIN

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_BUCKET_DIGESTS = 2**20  # 32 MB: what is sorted at once, some three times over
_BUCKET_BITS_MAX = 16  # enough for 6 * 10^10 digests of one group
_PACKED_ROWS = 2**17  # packed at once, 4 MB of digests: the more, the longer the pieces
_RESULTS_PER_BATCH = 4_096


def summaries(rows: DataFrame, keys: Sequence[str], rows_count: int) -> DataFrame:
    """(keys…, count, root, lamport_first, lamport_last) of every group of `rows`.

    `keys` are columns without nulls; without any there is one group. `rows_count`, of which an
    estimate will do, decides how finely groups are cut.
    """
    fields = [rows.schema[key] for key in keys]
    bounds = [StructField(name, LongType()) for name in ("lamport_first", "lamport_last")]
    counts = [StructField("count", LongType()), StructField("root", BinaryType())]
    digests = [StructField("bucket", IntegerType()), StructField("digests", BinaryType())]
    pieces = StructType([*fields, *digests, *bounds])
    results = StructType([*fields, *counts, *bounds])
    pack = partial(_pack, to_arrow_schema(pieces), _bucket_bits(rows_count))
    merge = partial(_merge, to_arrow_schema(results))
    packed = rows.select(*keys, "lamport_timestamp", "digest").mapInArrow(pack, pieces)
    together = packed.repartition(*keys) if keys else packed.repartition(1)
    return together.sortWithinPartitions(*keys, "bucket").mapInArrow(merge, results)


def root_of(rows: DataFrame, element: str, rows_count: int) -> tuple[int, bytes]:
    """(count, root) over the distinct values of the column `element`; hashed by one task."""
    clockless = rows.select(
        f.col(element).alias("digest"), f.lit(0).cast("bigint").alias("lamport_timestamp")
    )
    found = summaries(clockless, [], rows_count).collect()
    return (int(found[0]["count"]), bytes(found[0]["root"])) if found else (0, EMPTY_ROOT)


def _bucket_bits(rows_count: int) -> int:
    """How many leading bits of a digest name its bucket."""
    return min((rows_count // _BUCKET_DIGESTS).bit_length(), _BUCKET_BITS_MAX)


def _pack(
    schema: pa.Schema, bucket_bits: int, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    keys = schema.names[:-4]
    for rows in _portions(batches):
        digests = digest_array(rows["digest"])
        buckets = digests[:, 0].astype(np.int32) << 8 | digests[:, 1]
        buckets >>= _BUCKET_BITS_MAX - bucket_bits
        key_columns = [rows[key].combine_chunks() for key in keys]
        groups = _group_numbers(key_columns, rows.num_rows)
        cells = groups << _BUCKET_BITS_MAX | buckets
        order = np.argsort(cells, kind="stable")
        starts = np.flatnonzero(np.diff(cells[order], prepend=-1))
        lamports = rows["lamport_timestamp"].to_numpy()[order]
        firsts = order[starts]
        columns = [
            *(column.take(pa.array(firsts)) for column in key_columns),
            pa.array(buckets[firsts]),
            _pieces(digests[order], starts),
            pa.array(np.minimum.reduceat(lamports, starts)),
            pa.array(np.maximum.reduceat(lamports, starts)),
        ]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _portions(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The batches put together to `_PACKED_ROWS` rows or a little more; none is empty."""
    held: list[pa.RecordBatch] = []
    rows_count = 0
    for batch in batches:
        held.append(batch)
        rows_count += batch.num_rows
        if rows_count >= _PACKED_ROWS:
            yield pa.Table.from_batches(held)
            held, rows_count = [], 0
    if rows_count:
        yield pa.Table.from_batches(held)


def _group_numbers(columns: Sequence[pa.Array], rows_count: int) -> NDArray[np.int64]:
    """A number for each row, the same where all columns are."""
    numbers = np.zeros(rows_count, np.int64)
    for column in columns:
        encoded = column.dictionary_encode()
        numbers = numbers * len(encoded.dictionary) + encoded.indices.to_numpy()
    return numbers


def _pieces(digests: NDArray[np.uint8], starts: NDArray[np.int64]) -> pa.BinaryArray:
    """The digests from each start to the next, one after the other, without a copy."""
    offsets = (np.append(starts, len(digests)) * DIGEST_BYTES).astype(np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(digests))]
    return pa.Array.from_buffers(pa.binary(), len(starts), buffers)


_Piece = tuple[Any, ...]
"""Keys…, bucket, digests, first and last Lamport timestamp."""


def _merge(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """One row per group; the pieces come sorted by group and bucket."""
    pieces = (
        piece
        for batch in batches
        for piece in zip(*(column.to_pylist() for column in batch.columns), strict=True)
    )
    keys_count = len(schema) - 4
    groups = groupby(pieces, key=lambda piece: piece[:keys_count])
    done = ((*key, *_summary(group)) for key, group in groups)
    while portion := list(islice(done, _RESULTS_PER_BATCH)):
        columns = zip(*portion, strict=True)
        arrays = [pa.array(each, type_) for each, type_ in zip(columns, schema.types, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _summary(pieces: Iterator[_Piece]) -> tuple[int, bytes, int, int]:
    """(count, root, first and last Lamport timestamp) of one group."""
    hasher, bytes_count = blake3(), 0
    lamport_first, lamport_last = INT64_MAX, INT64_MIN
    for _, bucket in groupby(pieces, key=lambda piece: piece[-4]):
        _, digests, firsts, lasts = zip(*(piece[-4:] for piece in bucket), strict=True)
        ordered = in_order(b"".join(digests))
        hasher.update(ordered)
        bytes_count += len(ordered)
        lamport_first = min(lamport_first, *firsts)
        lamport_last = max(lamport_last, *lasts)
    return bytes_count // DIGEST_BYTES, hasher.digest(), lamport_first, lamport_last
