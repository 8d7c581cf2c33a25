"""Messages as columns: every `bytes` field of proto/recon.proto, and the filling of a frame.

docs/recon-protocol.md, sections 4 to 6, describes each column. A receiver derives every size from
bytes that are there, never from a count in the message, before it allocates anything. It checks that
a column is used up, that ranges ascend, that a split tiles its range in two or more non-empty parts
that add up, and that a prefix of at least one range is answered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from google.protobuf.message import Message

from recon.elements import (
    END,
    F64,
    I64,
    START,
    U8,
    U64,
    WHOLE_RANGES,
    Mask,
    RangeColumns,
    bit_lengths,
    laid,
    spread,
    steps_of,
)
from recon.errors import RemoteProtocolError
from recon.hashing import Total
from recon.limits import (
    COUNT_MAX,
    PHASE_NONE,
    SHORT_ID_BYTES,
    SUM_BYTES,
    SUMMARY_HASH_BYTES,
)
from sdstore.wire.recon_pb2 import Answers, Ranges, ReconResponse

VARINT_BYTES_MAX = 10  # 64 bits in groups of 7
_MORE = 0x80  # set in every byte of a number but the last
_FIRST = np.zeros(1, np.int64)
_SHIFTS = np.arange(0, 7 * VARINT_BYTES_MAX, 7, dtype=np.uint64)


def pack_varints(values: U64) -> bytes:
    """Numbers as varints, one after the other."""
    longest = max(-(-int(values.max(initial=0)).bit_length() // 7), 1)
    if longest == 1:  # most columns: one byte each
        return values.astype(np.uint8).tobytes()
    groups = values[:, None] >> _SHIFTS[:longest]
    used = groups != 0
    used[:, 0] = True
    out = groups.astype(np.uint8) & (_MORE - 1)
    out[:, :-1] |= used[:, 1:].view(np.uint8) << 7
    packed: bytes = out[used].tobytes()
    return packed


def unpack_varints(raw: U8, count: int) -> tuple[U64, int]:
    """`count` numbers from the front of u8[n], and how many bytes they took."""
    ends = (raw[: count * VARINT_BYTES_MAX] < _MORE).nonzero()[0][:count] + 1
    if len(ends) < count:
        raise RemoteProtocolError("malformed", "a column of numbers is too short")
    taken = int(ends[-1]) if count else 0
    if taken == count:
        return raw[:count].astype(np.uint64), count
    starts = np.concatenate((_FIRST, ends[:-1]))
    lengths = ends - starts
    longest = int(lengths.max())
    if longest > VARINT_BYTES_MAX:
        raise RemoteProtocolError("malformed", "a number is too long")
    if longest == VARINT_BYTES_MAX and (raw[ends[lengths == longest] - 1] > 1).any():
        raise RemoteProtocolError("malformed", "a number exceeds 64 bits")
    groups = (raw[:taken] & (_MORE - 1)).astype(np.uint64)
    groups <<= _SHIFTS[np.arange(taken) - starts.repeat(lengths)]
    return np.bitwise_or.reduceat(groups, starts), taken


def pack_counts(counts: I64) -> bytes:
    """Counts as zigzag varints of the difference to the one before (the first: to 0)."""
    steps = steps_of(counts)
    return pack_varints(((steps << 1) ^ (steps >> 63)).astype(np.uint64))


def unpack_counts(raw: U8, count: int) -> tuple[I64, int]:
    """The inverse of `pack_counts`, and the bytes taken."""
    zigzag, taken = unpack_varints(raw, count)
    if (zigzag > np.uint64(2 * COUNT_MAX)).any():
        raise RemoteProtocolError("malformed", "a difference of counts is out of range")
    steps = (zigzag >> np.uint64(1)).astype(np.int64) ^ -(zigzag & np.uint64(1)).astype(np.int64)
    counts = np.cumsum(steps)
    if (counts.view(np.uint64) > np.uint64(COUNT_MAX)).any():  # negative ones are far above it
        raise RemoteProtocolError("malformed", "a count is out of range")
    return counts, taken


def pack_pairs_of_bits(values: U8) -> bytes:
    """Numbers 0 … 3, four to a byte, the first in the lowest bits."""
    padded = np.zeros(-(-len(values) // 4) * 4, np.uint8)
    padded[: len(values)] = values
    fours = padded.reshape(-1, 4)
    packed = fours[:, 0] | (fours[:, 1] << 2) | (fours[:, 2] << 4) | (fours[:, 3] << 6)
    return packed.astype(np.uint8).tobytes()


def unpack_pairs_of_bits(raw: U8, count: int) -> tuple[U8, int]:
    """The inverse of `pack_pairs_of_bits`, and the bytes taken."""
    taken = -(-count // 4)
    if len(raw) < taken:
        raise RemoteProtocolError("malformed", "a column of kinds is too short")
    spread = (raw[:taken, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
    values = spread.reshape(-1).astype(np.uint8)
    if values[count:].any():
        raise RemoteProtocolError("malformed", "a column of kinds has bits to spare")
    return values[:count], taken


# ---- bounds: as many bits as separate two neighbours, and no more
#
# Bounds ascend, so each is a step from the one before. Any value between two elements will do, so a
# bound is chosen with as many trailing zero bits as possible. Sixteen steps share one shift, which
# makes a clock in nanoseconds cost hardly more than a counter. Only bounds inside a tie carry bytes
# of an id.


BLOCK = 16  # steps that share a shift: one byte among sixteen
_ONE = np.uint64(1)
_HEAD_BYTES = (0, 1, 2, 8)  # bytes of an id that a head class carries
_HEAD_BITS = 64


def pack_bounds(steps: U64, heads: U64) -> bytes:
    """Shifts, steps as varints, classes of heads (one byte 0 where all are 0), bytes of heads."""
    if not len(steps):
        return b""
    shifts = _shared_zero_bits(steps)
    mantissas = steps >> np.repeat(shifts, BLOCK)[: len(steps)].astype(np.uint64)
    packed = shifts.tobytes() + pack_varints(mantissas)
    if not heads.any():
        return packed + b"\0"
    classes = _classes(heads)
    pieces = [packed, b"\1", pack_pairs_of_bits(classes)]
    raw = heads.astype(">u8").view(np.uint8).reshape(-1, 8)
    pieces += [raw[classes == c, : _HEAD_BYTES[c]].tobytes() for c in (1, 2, 3)]
    return b"".join(pieces)


def _shared_zero_bits(steps: U64) -> U8:
    union = np.bitwise_or.reduceat(steps, np.arange(0, len(steps), BLOCK))
    lowest = union & (~union + _ONE)
    return np.maximum(bit_lengths(lowest) - 1, 0).astype(np.uint8)


def _classes(heads: U64) -> U8:
    classes = np.full(len(heads), 3, np.uint8)
    classes[(heads << np.uint64(16)) == 0] = 2
    classes[(heads << np.uint64(8)) == 0] = 1
    classes[heads == 0] = 0
    return classes


def unpack_bounds(raw: U8, count: int) -> tuple[U64, U64, int]:
    """Steps u64[count], heads u64[count], and the bytes taken."""
    if not count:
        return np.empty(0, np.uint64), np.empty(0, np.uint64), 0
    blocks = -(-count // BLOCK)
    shifts = raw[:blocks]
    if len(shifts) < blocks or (shifts >= _HEAD_BITS).any():
        raise RemoteProtocolError("malformed", "a column of bounds has bad shifts")
    mantissas, taken = unpack_varints(raw[blocks:], count)
    shift = np.repeat(shifts, BLOCK)[:count].astype(np.uint64)
    steps = mantissas << shift
    if ((steps >> shift) != mantissas).any():
        raise RemoteProtocolError("malformed", "a bound exceeds 64 bits")
    heads, more = _unpack_heads(raw[blocks + taken :], count)
    return steps, heads, blocks + taken + more


def _unpack_heads(raw: U8, count: int) -> tuple[U64, int]:
    if not len(raw) or raw[0] > 1:
        raise RemoteProtocolError("malformed", "a column of bounds lacks its heads")
    if not raw[0]:
        return np.zeros(count, np.uint64), 1
    heads = np.zeros((count, 8), np.uint8)
    classes, more = unpack_pairs_of_bits(raw[1:], count)
    taken = 1 + more
    for kind in (1, 2, 3):
        rows: I64 = np.flatnonzero(classes == kind)
        size = _HEAD_BYTES[kind]
        piece = raw[taken : taken + size * len(rows)]
        if len(piece) < size * len(rows):
            raise RemoteProtocolError("malformed", "a column of heads is too short")
        heads[rows, :size] = piece.reshape(-1, size)
        taken += len(piece)
    return heads.view(">u8")[:, 0].astype(np.uint64), taken


# ---- requests: ranges and what is asked about them


_FROM_START, _TO_END = 1, 2
_WHOLE_RUN = bytes([1 << 2 | _FROM_START | _TO_END])
"""A run of one range that is everything, as in most sessions over the news. Comparing with it takes 1 µs,
unpacking it 50."""


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
    if ranges.is_whole:
        return _WHOLE_RUN, b""
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
    if runs_raw == _WHOLE_RUN and not bounds_raw:
        return WHOLE_RANGES
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
    _check_ranges_ascend(orders, heads, last)
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


def _check_ranges_ascend(orders: U64, heads: U64, last: I64) -> None:
    above = orders[1:] > orders[:-1]
    same = orders[1:] == orders[:-1]
    fine = above | (same & (heads[1:] > heads[:-1]))
    between_runs = last[:-1]  # a run can begin where the one before ended
    fine[between_runs] |= (same & (heads[1:] == heads[:-1]))[between_runs]
    if not fine.all():
        raise RemoteProtocolError("ranges_disordered", "ranges must ascend and not overlap")


@dataclass(frozen=True, slots=True)
class Asks:
    """The k ranges of a request, each compared by summary or asked for as a list."""

    ranges: RangeColumns
    listed: Mask  # bool[k]
    counts: I64  # i64[k], of summaries; 0 for lists
    hashes: U8  # u8[k, 6], of summaries; 0 for lists

    def first(self, count: int) -> Asks:
        """A prefix."""
        some = slice(count)
        return Asks(self.ranges.take(some), self.listed[some], self.counts[some], self.hashes[some])


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


# ---- responses: answers of four kinds


EQUAL, SPLIT, LIST, COUNT = range(4)
Tiles = tuple[I64, RangeColumns]  # parts of splits: the split that each belongs to, and its range


@dataclass(frozen=True, slots=True)
class Parts:
    """Splits: s of them, cut into parts laid end to end."""

    sizes: I64  # i64[s]: parts of each split
    cut_orders: U64  # the inner edges of each split, one after the other
    cut_heads: U64
    counts: I64  # elements of each part
    hashes: U8  # u8[parts, 6]


NO_PARTS = Parts(
    np.empty(0, np.int64),
    np.empty(0, np.uint64),
    np.empty(0, np.uint64),
    np.empty(0, np.int64),
    np.empty((0, SUMMARY_HASH_BYTES), np.uint8),
)
_NO_NAMES = np.empty((0, SHORT_ID_BYTES), np.uint8)
_NO_TILES: Tiles = np.empty(0, np.int64), RangeColumns.of()


@dataclass(frozen=True, slots=True)
class Reply:
    """Answers to the first k asks."""

    kinds: U8  # u8[k]: EQUAL, SPLIT, LIST or COUNT
    counts: I64  # i64[k]: the responder's elements; 0 where EQUAL
    parts: Parts
    short_ids: U8  # u8[n, 6] of the lists, one after the other


def part_sizes(counts: I64, parts: I64 | int) -> I64:
    """The number of parts of a split of `counts` elements: at least two elements each, i64[n]."""
    return np.minimum(parts, counts // 2)


def part_edges(counts: I64, sizes: I64, phase: int) -> tuple[I64, I64]:
    """The inner edges of equal parts: the split of each, and the number of elements before it.

    `phase`, 0 … 128, shifts all cuts by up to a quarter of a part, so that nobody can predict them.
    """
    owner, within = spread(sizes - 1)
    numerator = counts[owner] * (256 * (within + 1) + phase - PHASE_NONE)
    return owner, numerator // (256 * sizes[owner])


def implied_counts(counts: I64, sizes: I64, phase: int) -> I64:
    """Elements of each part of equal splits."""
    _, edges = part_edges(counts, sizes, phase)
    lasts = sizes.cumsum() - 1
    ends = laid(counts, lasts, edges)
    steps = steps_of(ends)
    firsts = lasts + 1 - sizes
    steps[firsts] = ends[firsts]
    return steps


def tile(ranges: RangeColumns, parts: Parts) -> Tiles:
    """The parts of split ranges: which split each belongs to, and the ranges."""
    owner = np.arange(len(parts.sizes)).repeat(parts.sizes)
    ends = parts.sizes.cumsum()
    firsts, lasts = ends - parts.sizes, ends - 1
    return owner, RangeColumns(
        laid(ranges.lower_orders, firsts, parts.cut_orders),
        laid(ranges.lower_heads, firsts, parts.cut_heads),
        laid(ranges.upper_orders, lasts, parts.cut_orders),
        laid(ranges.upper_heads, lasts, parts.cut_heads),
    )


def pack_reply(reply: Reply, ranges: RangeColumns, *, implied: bool) -> Answers:
    """The message of answers. `ranges`: those that are answered."""
    counted = reply.kinds != EQUAL
    parts = reply.parts
    explicit = b""
    if not implied and len(parts.sizes):
        explicit = pack_varints(parts.sizes.astype(np.uint64)) + pack_counts(parts.counts)
    return Answers(
        answered=len(reply.kinds),
        kinds=pack_pairs_of_bits(reply.kinds) if counted.any() else b"",
        counts=pack_counts(reply.counts[counted]),
        part_counts=explicit,
        bounds=_pack_cuts(ranges.take(reply.kinds == SPLIT), parts),
        hashes=parts.hashes.tobytes(),
        short_ids=reply.short_ids.tobytes(),
    )


def _pack_cuts(ranges: RangeColumns, parts: Parts) -> bytes:
    steps = steps_of(parts.cut_orders)
    cuts = parts.sizes - 1
    firsts = cuts.cumsum() - cuts
    steps[firsts] = parts.cut_orders[firsts] - ranges.lower_orders
    return pack_bounds(steps, parts.cut_heads)


def unpack_reply(
    message: Answers, ranges: RangeColumns, parts_max: int, phase: int
) -> tuple[Reply, Tiles]:
    """The inverse, checked: splits tile their range in two or more non-empty parts; and the parts."""
    answered = message.answered
    if not 0 < answered <= len(ranges):
        raise RemoteProtocolError("no_progress", f"{answered} answers for {len(ranges)} ranges")
    kinds = np.zeros(answered, np.uint8)
    if message == Answers(answered=answered):  # all are equal
        return Reply(kinds, np.zeros(answered, np.int64), NO_PARTS, _NO_NAMES), _NO_TILES
    if message.kinds:
        raw = column(message.kinds)
        kinds, taken = unpack_pairs_of_bits(raw, answered)
        finished(raw, taken)
    counted = np.flatnonzero(kinds != EQUAL)
    counts = np.zeros(answered, np.int64)
    raw = column(message.counts)
    counts[counted], taken = unpack_counts(raw, len(counted))
    finished(raw, taken)
    split = (kinds == SPLIT).nonzero()[0]
    parts, tiles = _unpack_parts(message, ranges.take(split), counts[split], parts_max, phase)
    listed = int(counts[kinds == LIST].sum())
    names = table(message.short_ids, SHORT_ID_BYTES, listed)
    return Reply(kinds, counts, parts, names), tiles


def _unpack_parts(
    message: Answers, ranges: RangeColumns, counts: I64, parts_max: int, phase: int
) -> tuple[Parts, Tiles]:
    if not (len(ranges) or message.part_counts or message.hashes or message.bounds):
        return NO_PARTS, _NO_TILES
    raw = column(message.part_counts)
    sizes, taken = _unpack_sizes(raw, counts, parts_max)
    # The message contains this many hashes, so later columns can be as long as the stated parts.
    hashes = table(message.hashes, SUMMARY_HASH_BYTES, int(sizes.sum()))
    if len(raw):
        part_counts, more = unpack_counts(raw[taken:], len(hashes))
        finished(raw, taken + more)
    else:
        part_counts = implied_counts(counts, sizes, phase)
    _check_part_counts(part_counts, counts, sizes)
    parts = Parts(sizes, *_unpack_cuts(message.bounds, ranges, sizes), part_counts, hashes)
    tiles = tile(ranges, parts)
    _check_parts_ascend(tiles[1])
    return parts, tiles


def _unpack_sizes(raw: U8, counts: I64, parts_max: int) -> tuple[I64, int]:
    """Parts of each split, explicit or implied, and the bytes taken."""
    if len(raw):
        wide, taken = unpack_varints(raw, len(counts))
        sizes = np.minimum(wide, np.uint64(parts_max + 1)).astype(np.int64)
    else:
        sizes, taken = part_sizes(counts, parts_max), 0
    if (sizes < 2).any() or (sizes > parts_max).any():
        raise RemoteProtocolError("split", f"a split must have 2 to {parts_max} parts")
    return sizes, taken


def _check_parts_ascend(ranges: RangeColumns) -> None:
    above = ranges.upper_orders > ranges.lower_orders
    same = ranges.upper_orders == ranges.lower_orders
    above |= same & (ranges.upper_heads > ranges.lower_heads)
    if not above.all():
        raise RemoteProtocolError("split", "parts must ascend inside their range")


def _check_part_counts(part_counts: I64, counts: I64, sizes: I64) -> None:
    firsts = np.cumsum(sizes) - sizes
    if not len(sizes):
        return
    if (part_counts < 1).any() or (np.add.reduceat(part_counts, firsts) != counts).any():
        raise RemoteProtocolError("split", "parts must be non-empty and add up")


def _unpack_cuts(bounds: bytes, ranges: RangeColumns, sizes: I64) -> tuple[U64, U64]:
    cuts = sizes - 1
    raw = column(bounds)
    steps, heads, taken = unpack_bounds(raw, int(cuts.sum()))
    finished(raw, taken)
    total = np.concatenate((np.zeros(1, np.uint64), steps.cumsum()))
    before = total[cuts.cumsum() - cuts]
    return total[1:] + (ranges.lower_orders - before).repeat(cuts), heads


# ---- filling a frame: a guess by expected cost, corrected by measuring


Built = TypeVar("Built", bound=Message)

_SHRINK = 0.97  # when a guess was too long: what is left of the proportional share


def fill(build: Callable[[int], Built], costs: F64, room: int) -> tuple[int, Built]:
    """The number of ranges that fit `room` bytes, at least one, and their message.

    `build(count)` makes the message of the first `count` ranges; `costs`, f64[n]: bytes that each
    is expected to add. A message that came out too long is cut in proportion to costs, not to
    numbers, so that a few dear ranges before many cheap ones take two messages and not fifty.
    """
    spent = costs.cumsum()
    count = max(1, int(spent.searchsorted(room, side="right")))
    while True:
        message = build(count)
        size = message.ByteSize()
        if size <= room or count == 1:
            return count, message
        affordable = spent[count - 1] * (room / size * _SHRINK)
        count = max(1, min(count - 1, int(spent.searchsorted(affordable, side="right"))))


# ---- the total


def read_total(response: ReconResponse) -> Total:
    """The total that was asked for. Raises `RemoteProtocolError`."""
    total = response.total
    if not response.HasField("total") or len(total.sum) != SUM_BYTES or total.count > COUNT_MAX:
        raise RemoteProtocolError("total", "the total that was asked for is missing or malformed")
    return Total(total.count, total.sum)
