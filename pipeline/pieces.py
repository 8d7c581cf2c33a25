"""Counts and roots at scale: digests of groups are cut into pieces and merged.

A bucket is a range of the digest space. First, many rows become one piece per group and bucket, the
concatenated digests. Then a group's pieces are merged bucket by bucket: numpy sorts the digests, which
are hashed as a stream. So few, large values move between tasks, and a bucket bounds the memory, however
large a group is. The caller moves the pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from blake3 import blake3
from numpy.typing import NDArray

from app.roots import DIGEST_BYTES, in_order
from pipeline.columns import digest_array
from pipeline.scan import INT64_MAX, INT64_MIN

_BUCKET_DIGESTS = 2**20  # 32 MB sorted at once; sorting takes about three times as much memory
_BUCKET_BITS_MAX = 16  # enough for 6 * 10^10 digests of one group

PIECE_FIELDS = [
    pa.field("bucket", pa.int32()),
    pa.field("digests", pa.binary()),
    pa.field("lamport_first", pa.int64()),
    pa.field("lamport_last", pa.int64()),
]


class Piece(NamedTuple):
    """Digests of a group, 32 bytes each, and the bounds of their clocks."""

    digests: bytes
    lamport_first: int
    lamport_last: int


class GroupSummary(NamedTuple):
    """The summary of a group; `root` has 32 bytes."""

    elements_count: int
    root: bytes
    lamport_first: int
    lamport_last: int


def bucket_bits(rows_count: int) -> int:
    """The number of leading bits of a digest that select its bucket; `rows_count` can be an estimate."""
    return min((rows_count // _BUCKET_DIGESTS).bit_length(), _BUCKET_BITS_MAX)


def pack(rows: pa.Table, keys: Sequence[str], bits: int) -> pa.RecordBatch:
    """The pieces of `rows`: their columns `keys`, without nulls, and `PIECE_FIELDS`.

    Groups are rows with the same `keys`; without keys there is one group. It also reads the columns
    `digest` and `lamport_timestamp`.
    """
    digests = digest_array(rows["digest"])
    buckets = digests[:, 0].astype(np.int32) << 8 | digests[:, 1]
    buckets >>= _BUCKET_BITS_MAX - bits
    key_columns = [rows[key].combine_chunks() for key in keys]
    cells = _group_numbers(key_columns, rows.num_rows) << _BUCKET_BITS_MAX | buckets
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
    return pa.RecordBatch.from_arrays(columns, schema=piece_schema(rows.schema, keys))


def piece_schema(rows: pa.Schema, keys: Sequence[str]) -> pa.Schema:
    """The columns of the result of `pack`."""
    return pa.schema([*(rows.field(key) for key in keys), *PIECE_FIELDS])


class Summing:
    """Merges a group. Add its buckets in ascending order, each with all its pieces."""

    def __init__(self) -> None:
        self._hasher = blake3()
        self._bytes_count = 0
        self._lamport_first, self._lamport_last = INT64_MAX, INT64_MIN

    def add_bucket(self, pieces: Iterable[Piece]) -> bytes:
        """Add a bucket; returns its digests, sorted and unique."""
        digests, firsts, lasts = zip(*pieces, strict=True)
        ordered = in_order(b"".join(digests))
        self._hasher.update(ordered)
        self._bytes_count += len(ordered)
        self._lamport_first = min(self._lamport_first, *firsts)
        self._lamport_last = max(self._lamport_last, *lasts)
        return ordered

    def summary(self) -> GroupSummary:
        """The summary of all buckets so far."""
        count = self._bytes_count // DIGEST_BYTES
        return GroupSummary(count, self._hasher.digest(), self._lamport_first, self._lamport_last)


def _group_numbers(columns: Sequence[pa.Array], rows_count: int) -> NDArray[np.int64]:
    """A number for each row, equal for rows with equal columns."""
    numbers = np.zeros(rows_count, np.int64)
    for column in columns:
        encoded = column.dictionary_encode()
        numbers = numbers * len(encoded.dictionary) + encoded.indices.to_numpy()
    return numbers


def _pieces(digests: NDArray[np.uint8], starts: NDArray[np.int64]) -> pa.BinaryArray:
    """The digests from each start to the next, concatenated, without a copy."""
    offsets = (np.append(starts, len(digests)) * DIGEST_BYTES).astype(np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(digests))]
    return pa.Array.from_buffers(pa.binary(), len(starts), buffers)
