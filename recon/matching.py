"""Lists of short ids against our own elements, all ranges of an answer at once.

A short id means something inside its range only, so range number and short id together make one
64-bit name; two sorted columns of names are compared.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recon.columns import I64, U8, U32, U64, Mask
from recon.hashing import names_of, names_of_short_ids, short_ids_of_names
from recon.limits import SHORT_ID_BYTES
from recon.view import Places, View

_RANGE_SHIFT = np.uint64(8 * SHORT_ID_BYTES)
_NAME_MASK = np.uint64((1 << (8 * SHORT_ID_BYTES)) - 1)


@dataclass(frozen=True, slots=True)
class Matched:
    """What the lists of m ranges tell."""

    have_rows: U32  # our elements that the peer lacks
    need_owner: I64  # i64[k] ascending: ranges of the short ids we lack
    need_short_ids: U8  # u8[k, 6]
    equal: Mask  # bool[m]: nothing differs
    counts: I64  # i64[m]: our elements


def match_lists(view: View, where: Places, listed_counts: I64, short_ids: U8) -> Matched:
    """Compare the lists (their sizes i64[m], short ids laid end to end) with our elements."""
    ranges = np.arange(len(listed_counts), dtype=np.uint64) << _RANGE_SHIFT
    owner, lanes, rows = view.members(where)
    ours = names_of(lanes) | ranges[owner]
    theirs = names_of_short_ids(short_ids) | np.repeat(ranges, listed_counts)
    theirs = np.unique(theirs)
    sequence = np.argsort(ours)
    sorted_ours = ours[sequence]
    needed = theirs[~_contains(sorted_ours, theirs)]
    lacking = ~_contains(theirs, sorted_ours)
    need_owner = (needed >> _RANGE_SHIFT).astype(np.int64)
    equal = np.ones(len(listed_counts), bool)
    equal[need_owner] = False
    equal[owner[sequence[lacking]]] = False
    have = np.sort(sequence[lacking])
    return Matched(
        rows[have],
        need_owner,
        short_ids_of_names(needed & _NAME_MASK),
        equal,
        np.bincount(owner, minlength=len(listed_counts)),
    )


def _contains(sorted_names: U64, wanted: U64) -> Mask:
    """Which of the (sorted) wanted names are there, bool[n]."""
    if not len(sorted_names):
        return np.zeros(len(wanted), bool)
    places = np.minimum(np.searchsorted(sorted_names, wanted), len(sorted_names) - 1)
    there: Mask = sorted_names[places] == wanted
    return there
