"""Columns of ranges and answers as bytes inside the protobuf messages."""

from __future__ import annotations

import numpy as np

from recon.errors import RemoteProtocolError
from recon.ranges import END, Bound, Range

_BOUND = np.dtype(">u8")


def pack_ranges(ranges: list[Range]) -> bytes:
    """Lower and upper bounds, 32 bytes a range."""
    flat = [value for span in ranges for bound in span for value in bound]
    return np.array(flat, dtype=_BOUND).tobytes()


def unpack_ranges(raw: bytes) -> list[Range]:
    """The inverse; ranges must ascend, be non-empty and not overlap."""
    if len(raw) % 32:
        raise RemoteProtocolError("malformed", "a range has 32 bytes")
    rows = np.frombuffer(raw, dtype=_BOUND).reshape(-1, 4).tolist()
    ranges = [Range(Bound(a, b), Bound(c, d)) for a, b, c, d in rows]
    last = Bound(0, 0)
    for lower, upper in ranges:
        if lower < last or (upper <= lower and upper != END):
            raise RemoteProtocolError("ranges_disordered", "ranges must ascend")
        last = upper
    return ranges


def pack_counts(counts: list[int]) -> bytes:
    """Counts as u32."""
    return np.array(counts, dtype=">u4").tobytes()


def unpack_counts(raw: bytes, expected: int | None = None) -> list[int]:
    """The inverse of `pack_counts`."""
    if len(raw) % 4 or (expected is not None and len(raw) != 4 * expected):
        raise RemoteProtocolError("malformed", "counts do not fit")
    return [int(count) for count in np.frombuffer(raw, dtype=">u4")]


def chunks(raw: bytes, size: int) -> list[bytes]:
    """Equal pieces."""
    if len(raw) % size:
        raise RemoteProtocolError("malformed", f"not a multiple of {size} bytes")
    return [raw[at : at + size] for at in range(0, len(raw), size)]
