"""The responder: pure functions of (view, request, limits).

The table (we: the initiator; they: the responder), by (hash, count), count deciding emptiness:
equal: in sync. We 0, they n: we lack the range, fetch it. We n, they 0: send it. Both and
different: split, or a list of short ids where the range is small.

When the reply would pass the frame limit, a prefix of the ranges is answered; the rest stays on the
initiator's work list, so nothing that was narrowed down is lost.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from recon.codec import (
    COUNT,
    EQUAL,
    LIST,
    SPLIT,
    Asks,
    Parts,
    Reply,
    fill,
    pack_reply,
    part_sizes,
    unpack_asks,
)
from recon.cuts import choose_cuts, cuts_of_each, summarise_parts, take_cuts
from recon.elements import F64, I64, U8, RangeColumns
from recon.errors import RemoteProtocolError
from recon.hashing import short_ids_of
from recon.limits import (
    DEFAULT_LIMITS,
    FRAME_BYTES_MIN,
    FRAME_RESERVE_BYTES,
    LIST_COUNT_MAX,
    PARTS_MAX,
    PHASE_MAX,
    PROTOCOL_VERSION,
    SHORT_ID_BYTES,
    SUMMARY_HASH_BYTES,
    Limits,
)
from recon.view import Places, View
from sdstore.wire.recon_pb2 import (
    UNSUPPORTED_VERSION,
    Answers,
    Ranges,
    ReconRequest,
    ReconResponse,
)

_ANSWER_BYTES = 3  # kind and count of an answer, about
_PART_BYTES = SUMMARY_HASH_BYTES + 2  # hash and bound of a part, about
_HEAD_BYTES = 8
_NO_PARTS = Parts(
    np.empty(0, np.int64),
    np.empty(0, np.uint64),
    np.empty(0, np.uint64),
    np.empty(0, np.int64),
    np.empty((0, SUMMARY_HASH_BYTES), np.uint8),
)


class _Decided(NamedTuple):
    """What to answer: ranges, where they lie in the view, and the kind and our count of each."""

    ranges: RangeColumns
    where: Places
    kinds: U8
    counts: I64

    def first(self, count: int) -> _Decided:
        """A prefix."""
        some = slice(count)
        return _Decided(
            self.ranges.take(some), self.where.take(some), self.kinds[some], self.counts[some]
        )


def respond(view: View, request: ReconRequest, limits: Limits = DEFAULT_LIMITS) -> ReconResponse:
    """Answer the ranges of a request, and state the total, from the view as it is now.

    Fills `answers` and `total` only; the caller checks nonce and interest before, and adds items for `fetch`
    and outcomes for `push`. Raises `RemoteProtocolError` for a malformed request.
    """
    if request.version != PROTOCOL_VERSION:
        return ReconResponse(status=UNSUPPORTED_VERSION, version=PROTOCOL_VERSION)
    response = ReconResponse(version=PROTOCOL_VERSION)
    if request.total:
        total = view.total()
        response.total.count, response.total.sum = total.count, total.sum
    room = _room(request, limits)
    asks = _read(request.ranges, limits)
    if not len(asks.ranges):
        return response
    decided = _decide(view, asks, request.ranges, room)
    build = partial(_answers, view, decided, request.ranges)
    _, answers = fill(build, _costs(decided, request.ranges.parts), room)
    response.answers.CopyFrom(answers)
    return response


def _room(request: ReconRequest, limits: Limits) -> int:
    room = limits.response_bytes_max
    if request.response_bytes_max:
        room = min(room, request.response_bytes_max)
    if room < FRAME_BYTES_MIN:
        raise RemoteProtocolError("frame_too_small", f"{room} bytes")
    return room - FRAME_RESERVE_BYTES


def _read(ask: Ranges, limits: Limits) -> Asks:
    if not ask.bounds and not ask.runs:
        return unpack_asks(Ranges(), limits.ranges_max)
    if not 2 <= ask.parts <= PARTS_MAX or ask.phase > PHASE_MAX:
        raise RemoteProtocolError("malformed", "parts or phase out of range")
    asks = unpack_asks(ask, limits.ranges_max)
    first = slice(limits.ranges_answered_max)
    return Asks(asks.ranges.take(first), asks.listed[first], asks.counts[first], asks.hashes[first])


def _decide(view: View, asks: Asks, ask: Ranges, room: int) -> _Decided:
    where = view.locate(asks.ranges)
    hashes, counts = view.summaries(where)
    longest = min(LIST_COUNT_MAX, room // SHORT_ID_BYTES - FRAME_RESERVE_BYTES)
    list_max = np.where(asks.listed, longest, min(ask.list_max, longest))
    kinds = np.where(counts <= np.maximum(list_max, 3), LIST, SPLIT).astype(np.uint8)
    same = (hashes == asks.hashes).all(axis=1) & (counts == asks.counts)
    compared = ~asks.listed
    kinds[compared & (asks.counts == 0)] = COUNT
    kinds[compared & same] = EQUAL
    return _Decided(asks.ranges, where, kinds, counts)


def _costs(decided: _Decided, parts: int) -> F64:
    """Bytes that each answer is expected to add."""
    ranges, _, kinds, counts = decided
    costs = np.where(kinds == EQUAL, 1.0, _ANSWER_BYTES)
    split = kinds == SPLIT
    # Bounds inside a tie carry a head.
    part_bytes = np.where(ranges.lower_heads[split], _PART_BYTES + _HEAD_BYTES, _PART_BYTES)
    costs[split] += part_sizes(counts[split], parts) * part_bytes
    listed = kinds == LIST
    costs[listed] += counts[listed] * SHORT_ID_BYTES
    return costs


def _answers(view: View, decided: _Decided, ask: Ranges, count: int) -> Answers:
    """The message of the first `count` answers."""
    ranges, where, kinds, counts = decided.first(count)
    kinds, parts, implied = _split(view, ranges, where, kinds, ask)
    told = np.where(kinds == EQUAL, 0, counts)
    _, lanes, _ = view.members(where.take(kinds == LIST))
    return pack_reply(Reply(kinds, told, parts, short_ids_of(lanes)), ranges, implied=implied)


def _split(
    view: View, ranges: RangeColumns, where: Places, kinds: U8, ask: Ranges
) -> tuple[U8, Parts, bool]:
    """Kinds as far as ranges can be split, the parts, and whether their counts are implied."""
    split = np.flatnonzero(kinds == SPLIT)
    if not len(split):
        return kinds, _NO_PARTS, True
    cuts = choose_cuts(view, where.take(split), ask.parts, ask.phase)
    possible = cuts_of_each(cuts, len(split)) > 0
    kinds = kinds.copy()
    kinds[split[~possible]] = LIST  # cannot be separated, so it is listed at any length
    split, implied = split[possible], cuts.places is not None
    cuts = take_cuts(cuts, possible)
    parts = summarise_parts(view, ranges.take(split), where.take(split), cuts, exact=implied)
    return kinds, parts, implied
