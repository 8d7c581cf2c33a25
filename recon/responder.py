"""The reconciliation table, and the responder: pure functions of (view, request, limits).

The responder keeps nothing between requests. Its answer follows from its view and the request, so
any process that holds the same set can answer the next request of a session.

It answers a prefix of the ranges: as many as fit the response. The initiator keeps the others on its
work list, so nothing that was narrowed down is lost.

Both sides cut ranges into parts of equal count. With one run in the view the parts are exactly equal, so their
counts follow from the total and need not be sent. With several runs, or where a cut would fall between elements
that no bound separates, cuts follow the longest run, and counts are sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from recon.codec import (
    COUNT,
    EQUAL,
    LIST,
    NO_PARTS,
    SPLIT,
    Asks,
    Parts,
    Reply,
    fill,
    pack_reply,
    part_edges,
    part_sizes,
    tile,
    unpack_asks,
)
from recon.elements import F64, I64, U8, U64, Mask, RangeColumns, bit_lengths, laid
from recon.errors import RemoteProtocolError
from recon.hashing import short_ids_of
from recon.index import Run
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

_ALWAYS_LISTED_COUNT = 3  # a split needs two parts of two elements
_ANSWER_BYTES = 3  # kind and count of an answer, about
_PART_BYTES = SUMMARY_HASH_BYTES + 2  # hash and bound of a part, about
_HEAD_BYTES = 8


def decide(
    initiator_hashes: U8,
    initiator_counts: I64,
    responder_hashes: U8,
    responder_counts: I64,
    list_max: int,
) -> U8:
    """The reconciliation table: what becomes of each range, u8[n], from both sides' summaries.

    Hashes are u8[n, 6], counts i64[n]. A count decides emptiness, a hash never does. The responder
    applies the table to the ranges of a request, the initiator to the parts of a split.
    """
    # Both hold some, they differ, and there are many: summaries of parts, each decided like this.
    # Both hold some, they differ, and there are few: the responder lists its elements by short id;
    # the initiator sends and fetches those that one side alone names.
    # The responder holds none: an empty list, so the initiator sends all that it holds there.
    kinds = list_or_split(responder_counts, list_max)
    # The initiator holds none: it fetches the whole range, without naming elements.
    kinds[initiator_counts == 0] = COUNT
    # Equal hashes and equal counts (also no elements on both sides): in sync.
    same_hash = (initiator_hashes == responder_hashes).all(axis=1)
    kinds[same_hash & (initiator_counts == responder_counts)] = EQUAL
    return kinds


def list_or_split(counts: I64, list_max: int) -> U8:
    """LIST for ranges of at most `list_max` elements, or few, and SPLIT for the others, u8[n]."""
    is_short = counts <= max(list_max, _ALWAYS_LISTED_COUNT)
    return np.where(is_short, LIST, SPLIT).astype(np.uint8)


class _Decided(NamedTuple):
    """Ranges, their places in the view, and the kind of answer and our count for each."""

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

    Fills `answers` and `total` only. The caller checks the nonce and the interest before, and adds
    the items of a fetch and the outcomes of a push. Raises `RemoteProtocolError` for a malformed
    request.
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
    decided = _decide_all(view, asks, request.ranges.list_max, room)
    build = partial(_answers, view, decided, request.ranges)
    _, answers = fill(build, _costs(decided, request.ranges.parts), room)
    response.answers.CopyFrom(answers)
    return response


def _room(request: ReconRequest, limits: Limits) -> int:
    """The bytes that the answers of a response can take."""
    room = limits.response_bytes_max
    if request.response_bytes_max:
        room = min(room, request.response_bytes_max)
    if room < FRAME_BYTES_MIN:
        raise RemoteProtocolError(
            "frame_too_small", f"a response of {room} bytes; the least is {FRAME_BYTES_MIN}"
        )
    return room - FRAME_RESERVE_BYTES


def _read(ask: Ranges, limits: Limits) -> Asks:
    """The ranges of a request, as many as one response answers."""
    if not ask.bounds and not ask.runs:
        return unpack_asks(Ranges(), limits.ranges_max)
    if not 2 <= ask.parts <= PARTS_MAX or ask.phase > PHASE_MAX:
        raise RemoteProtocolError(
            "malformed",
            f"parts {ask.parts} (2 to {PARTS_MAX}) or phase {ask.phase} (0 to {PHASE_MAX})",
        )
    return unpack_asks(ask, limits.ranges_max).first(limits.ranges_answered_max)


def _decide_all(view: View, asks: Asks, list_max: int, room: int) -> _Decided:
    where = view.locate(asks.ranges)
    hashes, counts = view.summaries(where)
    longest = min(LIST_COUNT_MAX, room // SHORT_ID_BYTES - FRAME_RESERVE_BYTES)
    kinds = decide(asks.hashes, asks.counts, hashes, counts, min(list_max, longest))
    if asks.listed.any():
        kinds = np.where(asks.listed, list_or_split(counts, longest), kinds)
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
    sent_counts = np.where(kinds == EQUAL, 0, counts)
    _, lanes, _ = view.members(where.take(kinds == LIST))
    reply = Reply(kinds, sent_counts, parts, short_ids_of(lanes))
    return pack_reply(reply, ranges, implied=implied)


def _split(
    view: View, ranges: RangeColumns, where: Places, kinds: U8, ask: Ranges
) -> tuple[U8, Parts, bool]:
    """Split ranges into parts: the kinds, the parts, and whether their counts are implied."""
    split = np.flatnonzero(kinds == SPLIT)
    if not len(split):
        return kinds, NO_PARTS, True
    cuts = choose_cuts(view, where.take(split), ask.parts, ask.phase)
    possible = cuts_of_each(cuts, len(split)) > 0
    kinds = kinds.copy()
    kinds[split[~possible]] = LIST  # no bound separates its elements: listed at any length
    split, implied = split[possible], cuts.places is not None
    cuts = take_cuts(cuts, possible)
    parts = summarise_parts(view, ranges.take(split), where.take(split), cuts, exact=implied)
    return kinds, parts, implied


# ---- cuts


@dataclass(frozen=True, slots=True)
class Cuts:
    """Inner edges of splits, laid end to end: owner i64[c], bounds u64[c], and places if equal."""

    owner: I64
    orders: U64
    heads: U64
    places: I64 | None


def choose_cuts(view: View, where: Places, parts: I64 | int, phase: int) -> Cuts:
    """Cuts of the ranges at `where` into (at most) `parts` parts each.

    A range gets fewer cuts, or none, where no bound separates its elements.
    """
    runs = view.runs
    if len(runs) == 1:
        return _cut_run(view, runs[0], where.starts[0], where.stops[0], parts, phase)
    sizes = np.stack([stop - start for start, stop in zip(where.starts, where.stops, strict=True)])
    longest = sizes.argmax(axis=0)
    pieces = []
    for number, run in enumerate(runs):
        mine = np.flatnonzero(longest == number)
        some = parts if isinstance(parts, int) else parts[mine]
        start, stop = where.starts[number][mine], where.stops[number][mine]
        cuts = _cut_run(view, run, start, stop, some, phase)
        pieces.append(replace(cuts, owner=mine[cuts.owner], places=None))
    owner = np.concatenate([piece.owner for piece in pieces])
    sequence = np.argsort(owner, kind="stable")
    orders = np.concatenate([piece.orders for piece in pieces])[sequence]
    heads = np.concatenate([piece.heads for piece in pieces])[sequence]
    return Cuts(owner[sequence], orders, heads, None)


def _cut_run(view: View, run: Run, start: I64, stop: I64, parts: I64 | int, phase: int) -> Cuts:
    counts = stop - start
    sizes = np.maximum(part_sizes(counts, parts), 1)
    owner, edges = part_edges(counts, sizes, phase)
    places = start[owner] + edges
    orders, heads, possible = bounds_at(view, run, places)
    if possible is None:
        return Cuts(owner, orders, heads, places)
    return Cuts(owner[possible], orders[possible], heads[possible], None)


def bounds_at(view: View, run: Run, places: I64) -> tuple[U64, U64, Mask | None]:
    """Bounds that part each place of a run from the one before: orders, heads, and which exist.

    The last is None when all do; two elements that agree in order and head cannot be parted.
    """
    below, at = run.orders[places - 1], run.orders[places]
    orders, heads = at.copy(), np.zeros(len(at), np.uint64)
    tied = below == at
    orders[~tied] = between(below[~tied], at[~tied])
    if not tied.any():
        return orders, heads, None
    heads_below = view.heads_of_places(run, places[tied] - 1)
    heads_at = view.heads_of_places(run, places[tied])
    parted = heads_below < heads_at
    rounded = np.zeros(len(parted), np.uint64)
    rounded[parted] = between_heads(heads_below[parted], heads_at[parted])
    heads[tied] = rounded
    if parted.all():
        return orders, heads, None
    possible = np.ones(len(at), bool)
    possible[tied] = parted
    return orders, heads, possible


def cuts_of_each(cuts: Cuts, count: int) -> I64:
    """Number of cuts of each of `count` ranges."""
    return np.bincount(cuts.owner, minlength=count)


def summarise_parts(
    view: View, ranges: RangeColumns, where: Places, cuts: Cuts, *, exact: bool
) -> Parts:
    """The parts of ranges that all have at least one cut, with their summaries."""
    sizes = cuts_of_each(cuts, len(ranges)) + 1
    empty = np.empty(0, np.int64)
    parts = Parts(sizes, cuts.orders, cuts.heads, empty, np.empty((0, 6), np.uint8))
    if cuts.places is not None and exact:
        places = _places_between(where, sizes, cuts.places)
    else:
        places = view.locate(tile(ranges, parts)[1])
    hashes, counts = view.summaries(places)
    return replace(parts, counts=counts, hashes=hashes)


def _places_between(where: Places, sizes: I64, cuts: I64) -> Places:
    ends = sizes.cumsum()
    starts = laid(where.starts[0], ends - sizes, cuts)
    return Places((starts,), (laid(where.stops[0], ends - 1, cuts),))


def take_cuts(cuts: Cuts, wanted: Mask) -> Cuts:
    """Cuts of some of the ranges, owners renumbered."""
    mine = wanted[cuts.owner]
    number = np.cumsum(wanted) - 1
    places = None if cuts.places is None else cuts.places[mine]
    return Cuts(number[cuts.owner[mine]], cuts.orders[mine], cuts.heads[mine], places)


def between(below: U64, at: U64) -> U64:
    """The roundest numbers above `below` and not above `at` (where below < at), u64[n]."""
    differing = (bit_lengths(below ^ at) - 1).astype(np.uint64)
    return (at >> differing) << differing


def between_heads(below: U64, at: U64) -> U64:
    """The roundest heads above `below` and not above `at`, in whole bytes, u64[n]."""
    differing = bit_lengths(below ^ at) - 1
    cleared = (differing // 8 * 8).astype(np.uint64)
    return (at >> cleared) << cleared
