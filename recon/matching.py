"""Lists of short ids against our own elements, all ranges of an answer at once.

A short id means something inside its range only, so range number and short id together make one
64-bit name; sorted columns of names are compared, a stretch of ranges at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recon.columns import I64, U8, U32, U64, Mask
from recon.hashing import names_of, names_of_short_ids, short_ids_of_names
from recon.limits import SHORT_ID_BYTES
from recon.view import Places, View

RANGE_SHIFT = np.uint64(8 * SHORT_ID_BYTES)  # range number above, short id below
CHUNK_IDS = 1 << 14  # short ids compared at a time: sorting stays inside the cache
_NAME_MASK = np.uint64((1 << (8 * SHORT_ID_BYTES)) - 1)


@dataclass(frozen=True, slots=True)
class Matched:
    """What the lists of m ranges tell."""

    have_rows: U32  # our elements that the peer lacks
    need_owner: I64  # i64[k] ascending: ranges of the short ids we lack
    need_short_ids: U8  # u8[k, 6]
    equal: Mask  # bool[m]: nothing differs, and both sides count the same
    counts: I64  # i64[m]: our elements


def match_lists(view: View, where: Places, listed_counts: I64, short_ids: U8) -> Matched:
    """Compare the lists (their sizes i64[m], short ids laid end to end) with our elements."""
    ends = np.cumsum(listed_counts)
    lasts = np.append(np.flatnonzero(np.diff(ends // CHUNK_IDS)) + 1, len(ends))
    pieces, start, first_id = [], 0, 0
    for stop in lasts.tolist():
        chunk = slice(start, stop)
        end_id = int(ends[stop - 1])
        names = names_of_short_ids(short_ids[first_id:end_id])
        pieces.append(_match_chunk(view, where.take(chunk), listed_counts[chunk], names))
        start, first_id = stop, end_id
    return _joined(pieces)


def _joined(pieces: list[Matched]) -> Matched:
    if len(pieces) == 1:
        return pieces[0]
    firsts = np.cumsum([0, *(len(piece.counts) for piece in pieces)]).tolist()
    return Matched(
        np.concatenate([piece.have_rows for piece in pieces]),
        np.concatenate([p.need_owner + first for p, first in zip(pieces, firsts, strict=False)]),
        np.concatenate([piece.need_short_ids for piece in pieces]),
        np.concatenate([piece.equal for piece in pieces]),
        np.concatenate([piece.counts for piece in pieces]),
    )


def _match_chunk(view: View, where: Places, listed_counts: I64, names: U64) -> Matched:
    ranges = np.arange(len(listed_counts), dtype=np.uint64) << RANGE_SHIFT
    owner, lanes, rows = view.members(where)
    ours = names_of(lanes) | ranges[owner]
    theirs = _distinct(names | np.repeat(ranges, listed_counts))
    needed = theirs[~contains(np.sort(ours), theirs)]
    have = np.flatnonzero(~contains(theirs, ours))
    need_owner = (needed >> RANGE_SHIFT).astype(np.int64)
    counts = np.bincount(owner, minlength=len(listed_counts))
    equal = counts == listed_counts  # or one that we hold is listed twice
    equal[need_owner] = False
    equal[owner[have]] = False
    return Matched(rows[have], need_owner, short_ids_of_names(needed & _NAME_MASK), equal, counts)


def _distinct(names: U64) -> U64:
    """`np.unique`, in a third of the time: that one hashes before it sorts."""
    names = np.sort(names)
    firsts = np.ones(len(names), bool)
    firsts[1:] = names[1:] != names[:-1]
    return names[firsts]


def contains(sorted_names: U64, wanted: U64) -> Mask:
    """Which of the wanted names are among those that ascend, bool[n]."""
    if not len(sorted_names):
        return np.zeros(len(wanted), bool)
    places = np.minimum(np.searchsorted(sorted_names, wanted), len(sorted_names) - 1)
    there: Mask = sorted_names[places] == wanted
    return there
