"""Requests and answers: columns on this side, `bytes` fields of proto/recon.proto on the other.

Every size is derived from bytes that are really there, never from a count in the message, before
anything is allocated. docs/recon-protocol.md describes each column.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recon.bounds import pack_bounds, unpack_bounds
from recon.columns import I64, U8, U64, Mask, spread
from recon.errors import RemoteProtocolError
from recon.limits import SHORT_ID_BYTES, SUMMARY_HASH_BYTES
from recon.ranges import END, START, RangeColumns
from recon.varint import (
    pack_counts,
    pack_pairs_of_bits,
    pack_varints,
    unpack_counts,
    unpack_pairs_of_bits,
    unpack_varints,
)
from sdstore.wire.recon_pb2 import Answers, Ranges

EQUAL, SPLIT, LIST, COUNT = range(4)
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
    first = np.concatenate((np.ones(1, bool), ~ranges.touches_next()))
    starts = np.flatnonzero(first)
    lengths = np.diff(np.append(starts, len(ranges)))
    # Each run's lower edge goes before the upper edges of its ranges.
    orders = np.insert(ranges.upper_orders, starts, ranges.lower_orders[starts])
    heads = np.insert(ranges.upper_heads, starts, ranges.lower_heads[starts])
    from_start = (int(orders[0]), int(heads[0])) == START
    to_end = (int(orders[-1]), int(heads[-1])) == END
    inner = slice(1 if from_start else 0, -1 if to_end else None)
    orders, heads = orders[inner], heads[inner]
    runs = lengths.astype(np.uint64)
    runs[0] = (lengths[0] << 2) | (from_start * _FROM_START) | (to_end * _TO_END)
    return pack_varints(runs), pack_bounds(np.diff(orders, prepend=np.uint64(0)), heads)


def unpack_ranges(runs_raw: bytes, bounds_raw: bytes, ranges_max: int) -> RangeColumns:
    """The inverse. Ranges must be non-empty, ascend and not overlap."""
    lengths, flags = _unpack_runs(column(runs_raw), ranges_max)
    edges = int(lengths.sum()) + len(lengths)
    orders, heads = np.zeros(edges, np.uint64), np.zeros(edges, np.uint64)
    inner = slice(flags & _FROM_START, edges - bool(flags & _TO_END))
    raw = column(bounds_raw)
    steps, heads[inner], taken = unpack_bounds(raw, max(inner.stop - inner.start, 0))
    finished(raw, taken)
    orders[inner] = np.cumsum(steps)
    if flags & _TO_END:
        orders[-1], heads[-1] = END
    last = np.cumsum(lengths + 1) - 1
    _check_ascending(orders, heads, last)
    is_upper = np.ones(edges, bool)
    is_upper[last - lengths] = False
    is_lower = np.ones(edges, bool)
    is_lower[last] = False
    return RangeColumns(orders[is_lower], heads[is_lower], orders[is_upper], heads[is_upper])


def _unpack_runs(raw: U8, ranges_max: int) -> tuple[I64, int]:
    count = int((raw < 0x80).sum())
    values, taken = unpack_varints(raw, count)
    finished(raw, taken)
    if not count:
        return np.empty(0, np.int64), 0
    flags = int(values[0]) & 3
    values[0] >>= np.uint64(2)
    if (values == 0).any() or (values > ranges_max).any() or int(values.sum()) > ranges_max:
        raise RemoteProtocolError("too_many_ranges", f"at most {ranges_max}, at least 1 in a run")
    return values.astype(np.int64), flags


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


@dataclass(frozen=True, slots=True)
class Parts:
    """Splits: s of them, cut into parts laid end to end."""

    sizes: I64  # i64[s]: parts of each split
    cut_orders: U64  # the inner edges of each split, one after the other
    cut_heads: U64
    counts: I64  # elements of each part
    hashes: U8  # u8[parts, 6]


@dataclass(frozen=True, slots=True)
class Reply:
    """Answers to the first k asks."""

    kinds: U8  # u8[k]: EQUAL, SPLIT, LIST or COUNT
    counts: I64  # i64[k]: the responder's elements; 0 where EQUAL
    parts: Parts
    short_ids: U8  # u8[n, 6] of the lists, one after the other


def part_sizes(counts: I64, parts: I64 | int) -> I64:
    """How many parts ranges of these sizes are split into: at least two elements each."""
    return np.minimum(parts, counts // 2)


def part_edges(counts: I64, sizes: I64, phase: int) -> tuple[I64, I64]:
    """Where equal parts end: owner split and number of elements before each inner edge.

    `phase`, 0 … 128, shifts all cuts by up to a quarter of a part, so that nobody can know them.
    """
    owner, within = spread(sizes - 1)
    numerator = counts[owner] * (256 * (within + 1) + phase - 64)
    return owner, numerator // (256 * sizes[owner])


def implied_counts(counts: I64, sizes: I64, phase: int) -> I64:
    """Elements of each part of equal splits."""
    _, edges = part_edges(counts, sizes, phase)
    ends = np.insert(edges, np.cumsum(sizes - 1), counts)
    steps = np.diff(ends, prepend=0)
    firsts = np.cumsum(sizes) - sizes
    steps[firsts] = ends[firsts]
    return steps


def tile(ranges: RangeColumns, parts: Parts) -> tuple[I64, RangeColumns]:
    """The parts of split ranges: which split each belongs to, and the ranges."""
    owner, within = spread(parts.sizes)
    last = within == parts.sizes[owner] - 1
    uppers = ranges.take(owner)
    columns = [column.copy() for column in uppers.columns()]
    columns[2][~last], columns[3][~last] = parts.cut_orders, parts.cut_heads
    first = within == 0
    columns[0][~first], columns[1][~first] = parts.cut_orders, parts.cut_heads
    return owner, RangeColumns(*columns)


def pack_reply(reply: Reply, ranges: RangeColumns, *, implied: bool) -> Answers:
    """The message of answers. `ranges`: those that are answered."""
    told = reply.kinds != EQUAL
    parts = reply.parts
    explicit = b""
    if not implied and len(parts.sizes):
        explicit = pack_varints(parts.sizes.astype(np.uint64)) + pack_counts(parts.counts)
    return Answers(
        answered=len(reply.kinds),
        kinds=pack_pairs_of_bits(reply.kinds) if told.any() else b"",
        counts=pack_counts(reply.counts[told]),
        part_counts=explicit,
        bounds=_pack_cuts(ranges.take(reply.kinds == SPLIT), parts),
        hashes=parts.hashes.tobytes(),
        short_ids=reply.short_ids.tobytes(),
    )


def _pack_cuts(ranges: RangeColumns, parts: Parts) -> bytes:
    owner, within = spread(parts.sizes - 1)
    before = np.concatenate((np.zeros(1, np.uint64), parts.cut_orders[:-1]))[: len(owner)]
    first = within == 0
    before[first] = ranges.lower_orders[owner[first]]
    return pack_bounds(parts.cut_orders - before, parts.cut_heads)


def unpack_reply(message: Answers, ranges: RangeColumns, parts_max: int, phase: int) -> Reply:
    """The inverse, checked: splits tile their range in two or more non-empty parts."""
    answered = message.answered
    if not 0 < answered <= len(ranges):
        raise RemoteProtocolError("no_progress", f"{answered} answers for {len(ranges)} ranges")
    kinds = np.zeros(answered, np.uint8)
    if message.kinds:
        raw = column(message.kinds)
        kinds, taken = unpack_pairs_of_bits(raw, answered)
        finished(raw, taken)
    told = np.flatnonzero(kinds != EQUAL)
    counts = np.zeros(answered, np.int64)
    raw = column(message.counts)
    counts[told], taken = unpack_counts(raw, len(told))
    finished(raw, taken)
    parts = _unpack_parts(
        message,
        ranges.take(slice(answered)).take(kinds == SPLIT),
        counts[kinds == SPLIT],
        parts_max,
        phase,
    )
    listed = int(counts[kinds == LIST].sum())
    return Reply(kinds, counts, parts, table(message.short_ids, SHORT_ID_BYTES, listed))


def _unpack_parts(
    message: Answers, ranges: RangeColumns, counts: I64, parts_max: int, phase: int
) -> Parts:
    if message.part_counts:
        raw = column(message.part_counts)
        wide, taken = unpack_varints(raw, len(ranges))
        sizes = np.minimum(wide, np.uint64(parts_max + 1)).astype(np.int64)
        _check_sizes(sizes, parts_max)
        part_counts, more = unpack_counts(raw[taken:], int(sizes.sum()))
        finished(raw, taken + more)
    else:
        sizes = part_sizes(counts, parts_max)
        _check_sizes(sizes, parts_max)
        part_counts = implied_counts(counts, sizes, phase)
    _check_part_counts(part_counts, counts, sizes)
    hashes = table(message.hashes, SUMMARY_HASH_BYTES, int(sizes.sum()))
    return Parts(sizes, *_unpack_cuts(message.bounds, ranges, sizes), part_counts, hashes)


def _check_sizes(sizes: I64, parts_max: int) -> None:
    if (sizes < 2).any() or (sizes > parts_max).any():
        raise RemoteProtocolError("split", "a split has at least two parts and at most as wanted")


def _check_part_counts(part_counts: I64, counts: I64, sizes: I64) -> None:
    firsts = np.cumsum(sizes) - sizes
    if not len(sizes):
        return
    if (part_counts < 1).any() or (np.add.reduceat(part_counts, firsts) != counts).any():
        raise RemoteProtocolError("split", "parts must be non-empty and add up")


def _unpack_cuts(bounds: bytes, ranges: RangeColumns, sizes: I64) -> tuple[U64, U64]:
    owner, within = spread(sizes - 1)
    raw = column(bounds)
    steps, heads, taken = unpack_bounds(raw, len(owner))
    finished(raw, taken)
    if not len(owner):
        return steps, heads
    total = np.cumsum(steps)
    first = np.flatnonzero(within == 0)
    before = np.concatenate((np.zeros(1, np.uint64), total))[first]
    orders = total - before[owner] + ranges.lower_orders[owner]
    edges = Parts(sizes, orders, heads, np.empty(0, np.int64), np.empty((0, 0), np.uint8))
    _, tiled = tile(ranges, edges)
    above = tiled.upper_orders > tiled.lower_orders
    above |= (tiled.upper_orders == tiled.lower_orders) & (tiled.upper_heads > tiled.lower_heads)
    if not above.all():
        raise RemoteProtocolError("split", "parts must ascend inside their range")
    return orders, heads
