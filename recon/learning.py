"""The initiator reads an answer: ranges that are settled, events, and what to ask next.

Parts of splits are decided by the responder's table (`responder.decide`). Lists of short ids are
compared with our own elements, all ranges of an answer at once: a short id has a meaning inside its
range only, so range number and short id together make one 64-bit name, and sorted columns of names
are compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from recon.codec import COUNT, EQUAL, LIST, SPLIT, Reply, Tiles, tile, unpack_reply
from recon.elements import F64, I64, U8, U64, Mask, RangeColumns
from recon.errors import RemoteProtocolError
from recon.events import Event, Have, Need, NotThere
from recon.hashing import (
    contains,
    names_in_ranges,
    names_of,
    names_of_short_ids,
    ranges_of_names,
    short_ids_of,
)
from recon.limits import LIST_COUNT_MAX
from recon.responder import choose_cuts, cuts_of_each, decide, summarise_parts, take_cuts
from recon.view import Places, View
from recon.worklist import (
    SMALL_COUNT,
    Plan,
    RangeState,
    Stretch,
    Work,
    choose,
    differences,
    join_lists,
    join_ranges,
)
from sdstore.wire.recon_pb2 import Answers

CHUNK_IDS = 1 << 14  # short ids compared at a time: sorting stays inside the cache
_WHOLE_COUNT = 1 << 14  # elements of a need without names: some are fetched side by side
NO_ORDERS = np.empty(0, np.uint64)
_WHOLE_NEEDS = 1 << 10  # of ranges that touch, about, however many elements the peer claims


class Asked(NamedTuple):
    """A request in flight: its ranges, and what it asked for beside them."""

    work: Work
    parts: int  # of the splits that were wanted
    phase: int  # of their cuts
    told_interest: bool = False  # it carried the interest in full
    wants_total: bool = False


@dataclass(slots=True)
class Learned:
    """The outcome of one answer."""

    work: Work  # to ask about next
    settled: list[Stretch] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    peer_parts: int = 0  # parts of the splits to ask the responder for next; 0: as before
    list_cap: int = 0  # the longest list to ask for; a refused list lowers it


class Learning:
    """Reads one answer to what was asked."""

    def __init__(
        self,
        view: View,
        asked: Asked,
        depth_max: int,
        list_cap: int,
        removed_orders: U64 = NO_ORDERS,
    ) -> None:
        """`removed_orders`: ascending orders of elements that are here, but not in the view."""
        self._view = view
        self._removed_orders = removed_orders
        self._work = asked.work
        self._parts = asked.parts
        self._phase = asked.phase
        self._depth_max = depth_max
        self._out = Learned(Work.none(), list_cap=list_cap)

    def from_answers(self, answers: Answers, phase: int) -> Learned:
        """Settle what the answers settle, and put the rest on the work list.

        `phase` shifts the cuts of ranges that are cut here before they are asked about again.
        Raises `RemoteProtocolError` if the answers contradict the request or one another.
        """
        work = self._work
        reply, tiles = unpack_reply(answers, work.ranges, self._parts, self._phase)
        answered = len(reply.kinds)
        self._check_kinds(reply, work.listed[:answered], work.counts[:answered])
        is_empty = reply.counts == 0
        # In sync.
        equal = (reply.kinds == EQUAL).nonzero()[0]
        self._settle(work.ranges.take(equal), work.counts[equal], RangeState.IN_SYNC)
        # Only they hold some: fetch the whole range.
        whole = ((reply.kinds == COUNT) & ~is_empty).nonzero()[0]
        by_name = np.empty(0, np.int64)
        if len(whole):
            can_hold = self._can_hold_removed(work.ranges.take(whole))
            by_name, whole = whole[can_hold], whole[~can_hold]
            self._need_whole(work.ranges.take(whole), reply.counts[whole])
        # A list, perhaps an empty one: send and fetch what one side alone names.
        lists = ((reply.kinds == LIST) | ((reply.kinds == COUNT) & is_empty)).nonzero()[0]
        if len(lists):
            self._compare_lists(work.ranges.take(lists), reply.counts[lists], reply.short_ids)
        # Summaries of parts: the same table for each part.
        parents = (reply.kinds == SPLIT).nonzero()[0]
        again = self._compare_parts(parents, reply, tiles, phase)
        # Not answered: ask again.
        left = work.take(slice(answered, None))
        named = self._to_be_listed(work.take(by_name), reply.counts[by_name])
        self._out.work = Work.concatenate([left, again, named])
        return self._out

    def _can_hold_removed(self, ranges: RangeColumns) -> Mask:
        """Which ranges can contain elements that are here, but not in the view."""
        first = np.searchsorted(self._removed_orders, ranges.lower_orders, "left")
        return first < np.searchsorted(self._removed_orders, ranges.upper_orders, "right")

    def _to_be_listed(self, work: Work, theirs: I64) -> Work:
        """Ask for the names in ranges of which the view holds nothing: some of them can be here."""
        listed = replace(work, listed=np.ones(len(work), bool), sizes=theirs)
        return join_lists(listed, self._out.list_cap) if len(listed) else listed

    @staticmethod
    def _check_kinds(reply: Reply, listed: Mask, counts: I64) -> None:
        """A list is answered by a list or a split, and COUNT needs an initiator that holds none."""
        compares = (reply.kinds == EQUAL) | (reply.kinds == COUNT)
        if (listed & compares).any():
            raise RemoteProtocolError(
                "malformed", "a request for a list was answered by a comparison"
            )
        # (Elements that came in since the request do not count: the peer has them or the next session
        # finds them.)
        if counts[(reply.kinds == COUNT) & (reply.counts > 0)].any():
            raise RemoteProtocolError(
                "malformed", "a bare count answers a range that is not empty here"
            )

    def _settle(self, ranges: RangeColumns, counts: I64, state: RangeState) -> None:
        if len(counts):
            self._out.settled.append(Stretch(ranges, counts, state))

    def _have(self, numbers: I64) -> None:
        """The peer lacks these. Those that only this session's view holds are not offered."""
        are_added = self._view.are_added(numbers)
        if are_added.any():
            self._out.events.append(NotThere(*self._view.columns_of(numbers[are_added])))
            numbers = numbers[~are_added]
        if len(numbers):
            self._out.events.append(Have(*self._view.columns_of(numbers)))

    def _need_whole(self, ranges: RangeColumns, counts: I64) -> None:
        """Ranges of which we hold nothing: fetched without naming their elements."""
        if not len(ranges):
            return
        cap = max(_WHOLE_COUNT, int(counts.sum()) // _WHOLE_NEEDS)
        ranges, counts = join_ranges(ranges, counts, cap)
        pairs = zip(ranges, counts.tolist(), strict=True)
        self._out.events += [Need(span, None, count) for span, count in pairs]
        self._settle(ranges, counts, RangeState.DONT_HAVE)

    def _compare_lists(self, ranges: RangeColumns, counts: I64, short_ids: U8) -> None:
        found = match_lists(self._view, self._view.locate(ranges), counts, short_ids)
        self._have(found.have)
        owners, firsts = np.unique(found.need_owner, return_index=True)
        stops = np.append(firsts, len(found.need_owner))[1:].tolist()
        pieces = zip(ranges.take(owners), firsts.tolist(), stops, strict=True)
        self._out.events += [
            Need(span, found.need_short_ids[first:stop], stop - first)
            for span, first, stop in pieces
        ]
        lacking = np.zeros(len(ranges), bool)
        lacking[owners] = True
        sizes = np.maximum(counts, found.counts)
        self._settle(ranges.take(lacking), sizes[lacking], RangeState.DONT_HAVE)
        # Nothing to fetch in the rest, and what we send makes it equal.
        self._settle(ranges.take(~lacking), sizes[~lacking], RangeState.IN_SYNC)

    def _compare_parts(self, parents: I64, reply: Reply, tiles: Tiles, phase: int) -> Work:
        """Settle the parts of splits by the table; returns what to ask about those that stay open."""
        if not len(parents):
            return Work.none()
        depths = self._work.depths[parents] + 1
        if int(depths.max()) > self._depth_max:
            raise RemoteProtocolError("depth", f"more than {self._depth_max} splits deep")
        self._lower_list_cap(reply.counts[parents[self._work.listed[parents]]])
        owner, ranges = tiles
        where = self._view.locate(ranges)
        hashes, ours = self._view.summaries(where)
        theirs = reply.parts.counts
        # A part is never listed at once: whether to list or split it is planned below.
        kinds = decide(hashes, ours, reply.parts.hashes, theirs, list_max=0)
        equal, lacking = kinds == EQUAL, kinds == COUNT
        self._settle(ranges.take(equal), ours[equal], RangeState.IN_SYNC)
        by_name = lacking.copy()
        by_name[lacking] = self._can_hold_removed(ranges.take(lacking))
        whole = lacking & ~by_name
        self._need_whole(ranges.take(whole), theirs[whole])
        expected = differences(owner, reply.parts.sizes, ours, theirs, ~equal)
        # Parts that we lack count for the estimate of differences around them, but need no plan.
        expected = expected[~lacking[~equal]]
        open_ = (~equal & ~lacking).nonzero()[0]
        work = Work(
            ranges.take(open_),
            np.zeros(len(open_), bool),
            depths[owner[open_]],
            np.maximum(ours, theirs)[open_],
            ours[open_],
            hashes[open_],
        )
        named = Work(
            ranges.take(by_name),
            np.ones(int(by_name.sum()), bool),
            depths[owner[by_name]],
            theirs[by_name],
            ours[by_name],
            hashes[by_name],
        )
        planned = self._planned(work, where.take(open_), expected, phase)
        if len(named):
            planned = Work.concatenate([planned, self._to_be_listed(named, theirs[by_name])])
        return planned

    def _lower_list_cap(self, refused: I64) -> None:
        """Ask for lists of half the length that was refused, if that is shorter than now."""
        cap = min(self._out.list_cap, int(refused.min(initial=LIST_COUNT_MAX)) // 2)
        self._out.list_cap = max(cap, SMALL_COUNT)

    def _planned(self, work: Work, where: Places, expected: F64, phase: int) -> Work:
        if not len(work):
            return work
        plan = choose(work.sizes, expected)
        self._out.peer_parts = plan.peer_parts
        pieces = self._cut(work, where, plan, phase)
        return join_lists(Work.concatenate(pieces), self._out.list_cap)

    def _cut(self, work: Work, where: Places, plan: Plan, phase: int) -> list[Work]:
        """Cut ranges on our side before asking on: no round trip is spent on that."""
        own_parts = np.where(plan.listed, -(-work.sizes // self._out.list_cap), plan.own_parts)
        work = replace(work, listed=plan.listed)
        many = (own_parts > 1).nonzero()[0]
        if not len(many):
            return [work]
        cuts = choose_cuts(self._view, where.take(many), own_parts[many], phase)
        possible = cuts_of_each(cuts, len(many)) > 0
        cuts = take_cuts(cuts, possible)
        many = many[possible]
        some, places = work.take(many), where.take(many)
        parts = summarise_parts(self._view, some.ranges, places, cuts, exact=True)
        owner, ranges = tile(some.ranges, parts)
        share = np.maximum(parts.counts, some.sizes[owner] // parts.sizes[owner])
        whole = np.ones(len(work), bool)
        whole[many] = False
        listed, depths = some.listed[owner], some.depths[owner] + 1
        return [
            work.take(whole),
            Work(ranges, listed, depths, share, parts.counts, parts.hashes),
        ]


# ---- lists of short ids


@dataclass(frozen=True, slots=True)
class Matched:
    """The outcome of comparing the lists of m ranges."""

    have: I64  # i64[k]: our elements that the peer lacks, by number
    need_owner: I64  # i64[k] ascending: ranges of the short ids we lack
    need_short_ids: U8  # u8[k, 6]
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
        np.concatenate([piece.have for piece in pieces]),
        np.concatenate([p.need_owner + first for p, first in zip(pieces, firsts, strict=False)]),
        np.concatenate([piece.need_short_ids for piece in pieces]),
        np.concatenate([piece.counts for piece in pieces]),
    )


def _match_chunk(view: View, where: Places, listed_counts: I64, names: U64) -> Matched:
    owner, lanes, numbers = view.members(where)
    ours = names_in_ranges(owner, names_of(lanes))
    listed = np.arange(len(listed_counts)).repeat(listed_counts)
    theirs = _distinct(names_in_ranges(listed, names))
    needed = theirs[~contains(np.sort(ours), theirs)]
    have = np.flatnonzero(~contains(theirs, ours))
    need_owner = ranges_of_names(needed)
    counts = np.bincount(owner, minlength=len(listed_counts))
    return Matched(numbers[have], need_owner, short_ids_of(needed), counts)


def _distinct(names: U64) -> U64:
    """`np.unique`, in a third of the time: that one hashes before it sorts."""
    names = np.sort(names)
    firsts = np.ones(len(names), bool)
    firsts[1:] = names[1:] != names[:-1]
    return names[firsts]
