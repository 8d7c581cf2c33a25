"""The base index on disk, so that a restart costs a read instead of a rebuild from SQL.

This is the only module of `recon` that touches files. A checkpoint is a cache. It is memory-mapped
and checked against its own digest and for sortedness; the caller compares its `stamp`, which names a
state of the database. If anything is wrong, the application builds the index from SQL.

Layout, numbers little-endian: magic (16 bytes), element count u64, stamp length u32, padding u32,
BLAKE3 digest of everything before and after it (32 bytes), stamp padded to a multiple of 64 bytes,
then the columns orders u64[n], ids u8[n, 32], groups u32[n], sorted by (order, id).
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import blake3
import numpy as np

from recon.elements import U8, U32, U64, heads_of
from recon.errors import LocalProtocolError
from recon.index import Columns, RangeIndex, Snapshot, element_sequence
from recon.limits import ID_BYTES

if TYPE_CHECKING:
    from typing_extensions import Buffer

_MAGIC = b"sdstore-recon-1\n"
_HEADER = struct.Struct("<16sQII")
_DIGEST_BYTES = 32
_HEAD_BYTES = _HEADER.size + _DIGEST_BYTES
_ALIGNMENT = 64
STAMP_BYTES_MAX = 4096  # names a state of the database; not a place for data
_ROW_BYTES = 8 + ID_BYTES + 4


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An index read from disk, and the stamp that was written with it."""

    index: RangeIndex
    stamp: bytes


def write_checkpoint(path: Path, snapshot: Snapshot, stamp: bytes) -> None:
    """Write an index as it was at `snapshot`: temporary file, fsync, rename. May run in any thread."""
    if len(stamp) > STAMP_BYTES_MAX:
        raise LocalProtocolError(f"a stamp has at most {STAMP_BYTES_MAX} bytes")
    columns = _sorted_columns(snapshot)
    header = _HEADER.pack(_MAGIC, len(columns), len(stamp), 0)
    arrays = (columns.orders, columns.ids, columns.groups)
    body = [_padded(stamp), *(array.tobytes() for array in arrays)]
    digest = _digest(header, *body)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(header + digest)
        for piece in body:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_checkpoint(path: Path) -> Checkpoint | None:
    """The index of a checkpoint, memory-mapped; None if the file is absent or damaged.

    Everything is verified: length, digest, order. The caller compares the stamp.
    """
    try:
        raw = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError):  # absent, or empty
        return None
    if len(raw) < _HEAD_BYTES:
        return None
    header, digest = raw[: _HEADER.size].tobytes(), raw[_HEADER.size : _HEAD_BYTES].tobytes()
    magic, count, stamp_length, _ = _HEADER.unpack(header)
    start = _HEAD_BYTES + _padded_length(stamp_length)
    if magic != _MAGIC or stamp_length > STAMP_BYTES_MAX or len(raw) != start + count * _ROW_BYTES:
        return None
    body = raw[_HEAD_BYTES:]
    if _digest(header, body.data if len(body) else b"") != digest:
        return None
    stamp = raw[_HEAD_BYTES : _HEAD_BYTES + stamp_length].tobytes()
    try:
        return Checkpoint(RangeIndex.from_sorted(*_columns_of(raw[start:], count)), stamp)
    except LocalProtocolError:
        return None


def _digest(*pieces: Buffer) -> bytes:
    hasher = blake3.blake3(max_threads=blake3.blake3.AUTO)
    for piece in pieces:
        hasher.update(piece)
    return hasher.digest()


def _columns_of(raw: U8, count: int) -> tuple[U64, U8, U32]:
    ids, groups = count * 8, count * (8 + ID_BYTES)
    return (
        raw[:ids].view(np.uint64),
        raw[ids:groups].reshape(count, ID_BYTES),
        raw[groups:].view(np.uint32),
    )


def _sorted_columns(snapshot: Snapshot) -> Columns:
    everything = snapshot.slice(0, snapshot.size)
    words = everything.ids.view(">u8")
    sequence = element_sequence(everything.orders, heads_of(everything.ids))
    heads, orders = words[sequence, 0], everything.orders[sequence]
    if ((orders[1:] == orders[:-1]) & (heads[1:] == heads[:-1])).any():
        sequence = np.lexsort(
            (words[:, 3], words[:, 2], words[:, 1], words[:, 0], everything.orders)
        )
    return everything.take(sequence.astype(np.uint32))


def _padded_length(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _padded(stamp: bytes) -> bytes:
    return stamp.ljust(_padded_length(len(stamp)), b"\0")
