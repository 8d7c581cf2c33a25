"""Count, root and clock bounds of groups of rows of any table, computed by Spark."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby, islice
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import BinaryType, LongType, StructField, StructType

from pipeline.pieces import PIECE_FIELDS, Piece, Summing, bucket_bits, pack

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_PACKED_ROWS = 2**17  # packed at once, 4 MB of digests; more rows make longer pieces
_RESULTS_PER_BATCH = 4_096
_SUMMARY = [
    StructField("count", LongType()),
    StructField("root", BinaryType()),
    StructField("lamport_first", LongType()),
    StructField("lamport_last", LongType()),
]


def summaries(rows: DataFrame, keys: Sequence[str], rows_count: int) -> DataFrame:
    """(keys…, count, root, lamport_first, lamport_last) of every group of `rows`.

    `keys` are columns without nulls. `rows_count`, which can be an estimate, sets the number of buckets.
    """
    fields = [rows.schema[key] for key in keys]
    pieces = StructType([*fields, *from_arrow_schema(pa.schema(PIECE_FIELDS)).fields])
    results = StructType([*fields, *_SUMMARY])
    packed = rows.select(*keys, "lamport_timestamp", "digest").mapInArrow(
        partial(_pack, keys, bucket_bits(rows_count)), pieces
    )
    together = packed.repartition(*keys).sortWithinPartitions(*keys, "bucket")
    return together.mapInArrow(partial(_merge, to_arrow_schema(results)), results)


def _pack(
    keys: Sequence[str], bits: int, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    return (pack(rows, keys, bits) for rows in _portions(batches))


def _portions(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """The batches merged to `_PACKED_ROWS` rows or slightly more; never empty."""
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


def _merge(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """One row per group; the pieces must be sorted by group and bucket."""
    pieces = (
        piece
        for batch in batches
        for piece in zip(*(column.to_pylist() for column in batch.columns), strict=True)
    )
    keys_count = len(schema) - len(_SUMMARY)
    done = _summed(pieces, keys_count)
    while portion := list(islice(done, _RESULTS_PER_BATCH)):
        columns = zip(*portion, strict=True)
        arrays = [pa.array(each, type_) for each, type_ in zip(columns, schema.types, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _summed(pieces: Iterable[tuple[object, ...]], keys_count: int) -> Iterator[tuple[object, ...]]:
    for group, its in groupby(pieces, key=lambda piece: piece[:keys_count]):
        summing = Summing()
        for _, bucket in groupby(its, key=lambda piece: piece[keys_count]):
            summing.add_bucket(Piece(*piece[keys_count + 1 :]) for piece in bucket)  # type: ignore[arg-type]
        yield *group, *summing.summary()
