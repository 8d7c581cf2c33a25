"""Ranges and requests: columns on this side, `bytes` fields of proto/recon.proto on the other.

Every size is derived from bytes that are really there, never from a count in the message, before
anything is allocated. docs/recon-protocol.md describes each column.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recon.bounds import pack_bounds, unpack_bounds
from recon.columns import I64, U8, U64, Mask, laid, steps_of
from recon.errors import RemoteProtocolError
from recon.limits import SUMMARY_HASH_BYTES
from recon.ranges import END, START, RangeColumns
from recon.varint import (
    pack_counts,
    pack_varints,
    unpack_counts,
    unpack_varints,
)
from sdstore.wire.recon_pb2 import Ranges

_FROM_START, _TO_END = 1, 2


def column(raw: bytes) -> U8:
    """Bytes as u8[n], not copied."""
    return np.frombuffer(raw, dtype=np.uint8)


def finished(raw: U8, taken: int) -> None:
    """A column must be used up."""
    if taken != len(raw):
        raise RemoteProtocolError("malformed", "a column is too long")


def table(raw: bytes, width: int, rows: int) -> U8:
    """A column of fixed-size values, u8[rows, width]."""
    if len(raw) != rows * width:
        raise RemoteProtocolError("malformed", f"{len(raw)} bytes for {rows} values of {width}")
    return column(raw).reshape(rows, width)


# Ranges: runs of neighbours, and their edges.


def pack_ranges(ranges: RangeColumns) -> tuple[bytes, bytes]:
    """The `runs` and `bounds` columns of ascending ranges."""
    if not len(ranges):
        return b"", b""
    ends = np.append((~ranges.touches_next()).nonzero()[0] + 1, len(ranges))
    lengths = steps_of(ends)
    starts = ends - lengths
    # Each run's lower edge goes before the upper edges of its ranges.
    at = starts + np.arange(len(starts))
    orders = laid(ranges.lower_orders[starts], at, ranges.upper_orders)
    heads = laid(ranges.lower_heads[starts], at, ranges.upper_heads)
    from_start = (int(orders[0]), int(heads[0])) == START
    to_end = (int(orders[-1]), int(heads[-1])) == END
    inner = slice(1 if from_start else 0, -1 if to_end else None)
    orders, heads = orders[inner], heads[inner]
    runs = lengths.astype(np.uint64)
    runs[0] = (lengths[0] << 2) | (from_start * _FROM_START) | (to_end * _TO_END)
    return pack_varints(runs), pack_bounds(steps_of(orders), heads)


def unpack_ranges(runs_raw: bytes, bounds_raw: bytes, ranges_max: int) -> RangeColumns:
    """The inverse. Ranges must be non-empty, ascend and not overlap."""
    lengths, flags = _unpack_runs(column(runs_raw), ranges_max)
    edges = int(lengths.sum()) + len(lengths)
    orders, heads = np.zeros(edges, np.uint64), np.zeros(edges, np.uint64)
    inner = slice(flags & _FROM_START, edges - bool(flags & _TO_END))
    raw = column(bounds_raw)
    steps, heads[inner], taken = unpack_bounds(raw, max(inner.stop - inner.start, 0))
    finished(raw, taken)
    orders[inner] = steps.cumsum()
    if flags & _TO_END:
        orders[-1], heads[-1] = END
    last = (lengths + 1).cumsum() - 1
    _check_ascending(orders, heads, last)
    is_upper = np.ones(edges, bool)
    is_upper[last - lengths] = False
    is_lower = np.ones(edges, bool)
    is_lower[last] = False
    return RangeColumns(orders[is_lower], heads[is_lower], orders[is_upper], heads[is_upper])


def _unpack_runs(raw: U8, ranges_max: int) -> tuple[I64, int]:
    count = int(np.count_nonzero(raw < 0x80))
    if count > ranges_max:
        raise _too_many(ranges_max)
    values, taken = unpack_varints(raw, count)
    finished(raw, taken)
    if not count:
        return np.empty(0, np.int64), 0
    flags = int(values[0]) & 3
    values[0] >>= np.uint64(2)
    if (values == 0).any() or (values > ranges_max).any() or int(values.sum()) > ranges_max:
        raise _too_many(ranges_max)
    return values.astype(np.int64), flags


def _too_many(ranges_max: int) -> RemoteProtocolError:
    return RemoteProtocolError("too_many_ranges", f"at most {ranges_max}, at least 1 in a run")


def _check_ascending(orders: U64, heads: U64, last: I64) -> None:
    above = orders[1:] > orders[:-1]
    same = orders[1:] == orders[:-1]
    fine = above | (same & (heads[1:] > heads[:-1]))
    between_runs = last[:-1]  # one run may begin where the one before ended
    fine[between_runs] |= (same & (heads[1:] == heads[:-1]))[between_runs]
    if not fine.all():
        raise RemoteProtocolError("ranges_disordered", "ranges must ascend and not overlap")


@dataclass(frozen=True, slots=True)
class Asks:
    """What a request asks: k ranges, each compared by summary or asked for as a list."""

    ranges: RangeColumns
    listed: Mask  # bool[k]
    counts: I64  # i64[k], of summaries; 0 for lists
    hashes: U8  # u8[k, 6], of summaries; 0 for lists


def pack_asks(asks: Asks, parts: int, list_max: int, phase: int) -> Ranges:
    """The message of a request's ranges."""
    runs, bounds = pack_ranges(asks.ranges)
    compared = ~asks.listed
    return Ranges(
        parts=parts,
        list_max=list_max,
        phase=phase,
        runs=runs,
        bounds=bounds,
        asks=np.packbits(asks.listed, bitorder="little").tobytes() if asks.listed.any() else b"",
        counts=pack_counts(asks.counts[compared]),
        hashes=asks.hashes[compared].tobytes(),
    )


def unpack_asks(message: Ranges, ranges_max: int) -> Asks:
    """The inverse of `pack_asks`."""
    ranges = unpack_ranges(message.runs, message.bounds, ranges_max)
    size = len(ranges)
    listed = np.zeros(size, bool)
    if message.asks:
        bits = table(message.asks, 1, -(-size // 8))[:, 0]
        listed = np.unpackbits(bits, bitorder="little", count=size).astype(bool)
    compared = np.flatnonzero(~listed)
    counts, hashes = np.zeros(size, np.int64), np.zeros((size, SUMMARY_HASH_BYTES), np.uint8)
    raw = column(message.counts)
    counts[compared], taken = unpack_counts(raw, len(compared))
    finished(raw, taken)
    hashes[compared] = table(message.hashes, SUMMARY_HASH_BYTES, len(compared))
    return Asks(ranges, listed, counts, hashes)
