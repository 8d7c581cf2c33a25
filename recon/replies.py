"""Answers: splits, lists and counts as columns, and the `bytes` fields of proto/recon.proto.

The checks of what a responder may say stand here: a split tiles its range in two or more non-empty
parts that add up, a prefix of at least one range is answered.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recon.bounds import pack_bounds, unpack_bounds
from recon.codec import column, finished, table
from recon.columns import I64, U8, U64, laid, spread, steps_of
from recon.errors import RemoteProtocolError
from recon.limits import PHASE_NONE, SHORT_ID_BYTES, SUMMARY_HASH_BYTES
from recon.ranges import RangeColumns
from recon.varint import (
    pack_counts,
    pack_pairs_of_bits,
    pack_varints,
    unpack_counts,
    unpack_pairs_of_bits,
    unpack_varints,
)
from sdstore.wire.recon_pb2 import Answers

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
    steps = steps_of(parts.cut_orders)
    cuts = parts.sizes - 1
    firsts = cuts.cumsum() - cuts
    steps[firsts] = parts.cut_orders[firsts] - ranges.lower_orders
    return pack_bounds(steps, parts.cut_heads)


def unpack_reply(message: Answers, ranges: RangeColumns, parts_max: int, phase: int) -> Reply:
    """The inverse, checked: splits tile their range in two or more non-empty parts."""
    return unpack_tiles(message, ranges, parts_max, phase)[0]


def unpack_tiles(
    message: Answers, ranges: RangeColumns, parts_max: int, phase: int
) -> tuple[Reply, Tiles]:
    """The same, and the parts of all splits."""
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
    split = (kinds == SPLIT).nonzero()[0]
    parts, tiles = _unpack_parts(message, ranges.take(split), counts[split], parts_max, phase)
    listed = int(counts[kinds == LIST].sum())
    names = table(message.short_ids, SHORT_ID_BYTES, listed)
    return Reply(kinds, counts, parts, names), tiles


def _unpack_parts(
    message: Answers, ranges: RangeColumns, counts: I64, parts_max: int, phase: int
) -> tuple[Parts, Tiles]:
    raw = column(message.part_counts)
    sizes, taken = _unpack_sizes(raw, counts, parts_max)
    # So many hashes are there: from here on anything may be as long as the parts are said to be.
    hashes = table(message.hashes, SUMMARY_HASH_BYTES, int(sizes.sum()))
    if len(raw):
        part_counts, more = unpack_counts(raw[taken:], len(hashes))
        finished(raw, taken + more)
    else:
        part_counts = implied_counts(counts, sizes, phase)
    _check_part_counts(part_counts, counts, sizes)
    parts = Parts(sizes, *_unpack_cuts(message.bounds, ranges, sizes), part_counts, hashes)
    tiles = tile(ranges, parts)
    _check_ascending(tiles[1])
    return parts, tiles


def _unpack_sizes(raw: U8, counts: I64, parts_max: int) -> tuple[I64, int]:
    """Parts of each split, told or implied, and the bytes taken."""
    if len(raw):
        wide, taken = unpack_varints(raw, len(counts))
        sizes = np.minimum(wide, np.uint64(parts_max + 1)).astype(np.int64)
    else:
        sizes, taken = part_sizes(counts, parts_max), 0
    if (sizes < 2).any() or (sizes > parts_max).any():
        raise RemoteProtocolError("split", "a split has at least two parts and at most as wanted")
    return sizes, taken


def _check_ascending(ranges: RangeColumns) -> None:
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
