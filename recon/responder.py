"""The responder: pure functions of (view, request, limits).

The table (we: the initiator; they: the responder), by (hash, count), count deciding emptiness:
equal: in sync. We 0, they n: we lack the range, fetch it. We n, they 0: send it. Both and
different: split, or a list of short ids where the range is small.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from recon.codec import chunks, pack_counts, pack_ranges, unpack_counts, unpack_ranges
from recon.errors import RemoteProtocolError
from recon.limits import (
    DEFAULT_LIMITS,
    FRAME_BYTES_MIN,
    LIST_COUNT_MAX,
    PARTS_MAX,
    PROTOCOL_VERSION,
    SHORT_ID_BYTES,
    SUMMARY_HASH_BYTES,
    Limits,
)
from recon.ranges import Bound, Range
from recon.view import View, columns
from sdstore.wire.recon_pb2 import UNSUPPORTED_VERSION, Answers, Fetch, ReconRequest, ReconResponse

EQUAL, SPLIT, LIST, COUNT = range(4)


def respond(view: View, request: ReconRequest, limits: Limits = DEFAULT_LIMITS) -> ReconResponse:
    """Answer the ranges of a request from the view as it is now.

    Fills `answers` only; the caller checks nonce and interest before, and adds items for `fetch`
    and outcomes for `push`. Raises `RemoteProtocolError` for a malformed request.
    """
    if request.version != PROTOCOL_VERSION:
        return ReconResponse(status=UNSUPPORTED_VERSION, version=PROTOCOL_VERSION)
    ask = request.ranges
    ranges = unpack_ranges(ask.bounds)
    if len(ranges) > limits.ranges_max:
        raise RemoteProtocolError("too_many_ranges", str(len(ranges)))
    counts = unpack_counts(ask.counts, len(ranges))
    hashes = chunks(ask.hashes, SUMMARY_HASH_BYTES)
    if len(hashes) != len(ranges) or not 2 <= ask.parts <= PARTS_MAX:
        raise RemoteProtocolError("malformed", "hashes or parts")
    room = limits.response_bytes_max
    if request.response_bytes_max:
        room = min(room, request.response_bytes_max)
    if room < FRAME_BYTES_MIN:
        raise RemoteProtocolError("frame_too_small", f"{room} bytes")
    answers = _Answers(view, ask.parts, min(ask.list_max, LIST_COUNT_MAX), room - 256)
    for span, count, digest in zip(ranges, counts, hashes, strict=True):
        if not answers.add(span, count, digest):
            break
    return ReconResponse(version=PROTOCOL_VERSION, answers=answers.message())


class _Answers:
    def __init__(self, view: View, parts: int, list_max: int, room: int) -> None:
        self._view = view
        self._parts = parts
        self._list_max = list_max
        self._room = room
        self._kinds: list[int] = []
        self._counts: list[int] = []
        self._part_counts: list[int] = []
        self._bounds: list[Range] = []
        self._hashes: list[bytes] = []
        self._short_ids: list[bytes] = []

    def add(self, span: Range, count: int, digest: bytes) -> bool:
        ours, our_count = self._view.summary(span)
        if (ours, our_count) == (digest, count):
            return self._put(EQUAL, 0, 1)
        if count == 0:
            return self._put(COUNT, our_count, 5)
        cuts = [] if our_count <= self._list_max else self._cuts(span)
        if not cuts:
            if not self._put(LIST, our_count, 5 + our_count * SHORT_ID_BYTES):
                return False
            self._short_ids += [self._view.short_id(e) for e in self._view.slice(span)]
            return True
        if not self._put(SPLIT, len(cuts), 5 + len(cuts) * 42):
            return False
        for part in cuts:
            part_hash, part_count = self._view.summary(part)
            self._bounds.append(part)
            self._hashes.append(part_hash)
            self._part_counts.append(part_count)
        return True

    def _cuts(self, span: Range) -> list[Range]:
        elements = self._view.slice(span)
        marks = [len(elements) * i // self._parts for i in range(1, self._parts)]
        bounds = [Bound(o, int.from_bytes(i[:8], "big")) for o, i in (elements[m] for m in marks)]
        inner = sorted({b for b in bounds if b > span.lower})
        edges = [span.lower, *inner, span.upper]
        parts = [Range(a, b) for a, b in pairwise(edges)]
        return parts if all(self._view.summary(p)[1] for p in parts) and inner else []

    def _put(self, kind: int, count: int, size: int) -> bool:
        if size > self._room and self._kinds:
            return False
        self._room -= size
        self._kinds.append(kind)
        self._counts.append(count)
        return True

    def message(self) -> Answers:
        return Answers(
            answered=len(self._kinds),
            kinds=bytes(self._kinds),
            counts=pack_counts(self._counts),
            part_counts=pack_counts(self._part_counts),
            bounds=pack_ranges(self._bounds),
            hashes=b"".join(self._hashes),
            short_ids=b"".join(self._short_ids),
        )


def resolve_short_ids(
    view: View, span: Range, wanted: NDArray[np.uint8] | None
) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
    """The elements of a range that bear one of the short ids u8[k, 6]; None: all of the range.

    Returns orders u64[n] and ids u8[n, 32], sorted.
    """
    elements = view.slice(span)
    if wanted is None:
        return columns(elements)
    by_short = defaultdict(list)
    for element in elements:
        by_short[view.short_id(element)].append(element)
    found = {e for row in wanted for e in by_short.get(row.tobytes(), [])}
    return columns(sorted(found))


def read_fetch(
    fetch: Fetch, limits: Limits = DEFAULT_LIMITS
) -> list[tuple[Range, NDArray[np.uint8] | None]]:
    """The ranges and short ids u8[k, 6] (None: the whole range) that a request wants to fetch."""
    ranges = unpack_ranges(fetch.bounds)
    counts = unpack_counts(fetch.counts, len(ranges))
    if len(fetch.short_ids) != sum(counts) * SHORT_ID_BYTES or sum(counts) > limits.fetch_ids_max:
        raise RemoteProtocolError("malformed", "short ids do not fit the counts")
    table = np.frombuffer(fetch.short_ids, dtype=np.uint8).reshape(-1, SHORT_ID_BYTES)
    starts = np.cumsum([0, *counts]).tolist()
    return [
        (span, table[start : start + count] if count else None)
        for span, count, start in zip(ranges, counts, starts, strict=False)
    ]
