"""What to ask next about ranges that differ: the cheapest way to name the differences.

A range of m elements with about r differences can be listed at once (6 m bytes), or cut by the
initiator into b1 parts whose summaries are sent (no round trip is spent on that), the differing
ones cut by the responder into b2 parts, and what then differs is listed. The expected bytes of each
choice follow from r, which the last answer tells: how many of a split's parts differ, and how far
the counts of both sides lie apart (random differences drive them apart like a random walk, so the
squares add up to their number). Wrong guesses cost bytes, never correctness.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recon.columns import F64, I64, Mask
from recon.limits import PARTS_MAX, SHORT_ID_BYTES

_ASK_BYTES = 8.5  # a summary in a request: hash, bound, count
_PART_BYTES = 7.5  # a part in an answer: hash, bound
_LIST_BYTES = 4.0  # asking for a list, and its count
_PATIENCE = 1.25  # a list may cost this much more than splitting: it saves a round trip
_OWN_PARTS = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, PARTS_MAX], dtype=np.float64)
_PEER_PARTS = np.array([4, 6, 8, 12, 16, 24, 32], dtype=np.float64)
_SPARSE_PARTS = 2  # so few differing parts of a split may be a cluster: assume one difference each
SMALL_COUNT = 16  # always listed


@dataclass(frozen=True, slots=True)
class Plan:
    """Per range: list it, or cut it into `own_parts`; for the request: parts of the responder."""

    listed: Mask
    own_parts: I64
    peer_parts: int


def differences(owner: I64, sizes: I64, ours: I64, theirs: I64, differs: Mask) -> F64:
    """Estimated differences in each differing part, f64[k].

    `owner`: the split of each part; `sizes`: parts of each split; counts of both sides per part.
    """
    splits = len(sizes)
    differing = np.bincount(owner[differs], minlength=splits).astype(np.float64)
    parts = sizes.astype(np.float64)
    hit = np.minimum(differing, parts - 0.5) / parts
    by_hits = -parts * np.log1p(-hit)
    apart = (theirs - ours).astype(np.float64)
    drift = np.bincount(owner, apart, minlength=splits)
    residual = np.where(differs, apart - (drift / np.maximum(differing, 1.0))[owner], 0.0)
    by_counts = np.maximum(np.bincount(owner, residual**2, minlength=splits), np.abs(drift))
    total = np.where(differing > _SPARSE_PARTS, np.maximum(by_hits, by_counts), by_hits)
    return np.maximum(total / np.maximum(differing, 1.0), 1.0)[owner[differs]]


def choose(sizes: I64, expected: F64) -> Plan:
    """Plan for ranges of `sizes` elements with `expected` differences each."""
    large = sizes > SMALL_COUNT
    listed = ~large
    own_parts = np.ones(len(sizes), np.int64)
    if not large.any():
        return Plan(listed, own_parts, SMALL_COUNT)
    kinds, which, weights = _kinds_of(sizes[large], expected[large])
    costs = _costs(*kinds)
    best_own = costs.min(axis=1)
    peer = int((best_own * weights[:, None]).sum(axis=0).argmin())
    own = costs[:, :, peer].argmin(axis=1)
    cheapest = best_own[:, peer]
    to_list = SHORT_ID_BYTES * kinds[0] + _LIST_BYTES <= cheapest * _PATIENCE
    listed[large] = to_list[which]
    own_parts[large] = _OWN_PARTS[own][which].astype(np.int64)
    return Plan(listed, own_parts, int(_PEER_PARTS[peer]))


def _kinds_of(sizes: I64, expected: F64) -> tuple[tuple[F64, F64], I64, F64]:
    """Similar ranges (within a factor of 1.4) are planned together."""
    step = 2.0
    size_class = np.round(np.log2(sizes) * step).astype(np.int64)
    expected_class = np.round(np.log2(expected) * step).astype(np.int64)
    keys, which, weights = np.unique(
        (size_class << 8) | np.minimum(expected_class, 255), return_inverse=True, return_counts=True
    )
    kinds = (2.0 ** ((keys >> 8) / step), 2.0 ** ((keys & 255) / step))
    return kinds, which, weights.astype(np.float64)


def _costs(sizes: F64, expected: F64) -> F64:
    """Expected bytes, f64[kinds, own parts, peer parts]."""
    size, differing = sizes[:, None, None], expected[:, None, None]
    own, wanted = _OWN_PARTS[None, :, None], _PEER_PARTS[None, None, :]
    part = size / own
    peer = np.clip(np.minimum(wanted, part / 2), 1, None)  # a split's parts hold two or more
    asked = _hit(differing, own)
    leaves = _hit(differing, own * peer)
    split = asked * _PART_BYTES * peer + leaves * (_LIST_BYTES + SHORT_ID_BYTES * part / peer)
    answer = np.where(part <= SMALL_COUNT, asked * SHORT_ID_BYTES * part, split)
    # Leaves far above a list's size need another round: count its summaries once more.
    again = leaves * 2 * _PART_BYTES * np.log2(np.maximum(part / peer / (2 * SMALL_COUNT), 1.0))
    return np.asarray(_ASK_BYTES * own + answer + np.where(part <= SMALL_COUNT, 0.0, again))


def _hit(balls: F64, boxes: F64) -> F64:
    """Expected number of boxes that are hit, at least one."""
    return np.maximum(-boxes * np.expm1(-balls / boxes), 1.0)
