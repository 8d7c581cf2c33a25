"""Faults planted in the reconciliation engine."""

from __future__ import annotations

import importlib
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tests.mutants.fault import Fault, Plant, after, before, instead, nothing, returns

_ENDLESS = 1 << 60


def _tests(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/recon/test_{name}.py" for name in names)


_SYNC = _tests("transcript", "sync", "oracle", "worklist")
_INDEX = _tests("index", "oracle", "sync")
_WIRE = _tests("codec", "transcript", "vectors", "sync")
_LIARS = _tests("liars", "codec")
_KEYS = _tests("session", "index", "vectors", "proof")
_FETCH = _tests("fetch")
_RESPONDER = _tests("responder")
_LEARNING = _tests("learning")
_ASIDE = _tests("aside")
_PROOF = _tests("proof")


def _fault(name: str, seam: str, plant: Plant, tests: tuple[str, ...]) -> Fault:
    return Fault(f"recon: {name}", f"recon.{seam}", plant, tests)


def _module(name: str) -> Any:
    """A module of the engine, when the fault acts: not before it is planted."""
    return importlib.import_module(f"recon.{name}")


def _with(owner: Any, attribute: str, value: Any, act: Callable[[], Any]) -> Any:
    """The result of `act` while an attribute has another value."""
    right = getattr(owner, attribute)
    setattr(owner, attribute, value)
    try:
        return act()
    finally:
        setattr(owner, attribute, right)


# ---- the table


def _equal_by_hash(kinds: Any, ours: Any, _our_counts: Any, theirs: Any, *_: Any) -> Any:
    kinds[(ours == theirs).all(axis=1)] = _module("codec").EQUAL
    return kinds


def _equal_by_count(
    kinds: Any, _ours: Any, our_counts: Any, _theirs: Any, their_counts: Any, *_: Any
) -> Any:
    kinds[our_counts == their_counts] = _module("codec").EQUAL
    return kinds


def _never_empty(kinds: Any, *_: Any) -> Any:
    codec = _module("codec")
    kinds[kinds == codec.COUNT] = codec.SPLIT
    return kinds


def _drop_the_rest(from_answers: Any) -> Any:
    def wrong(learning: Any, answers: Any, phase: int) -> Any:
        learning._work = learning._work.take(slice(answers.answered))
        return from_answers(learning, answers, phase)

    return wrong


def _no_answer_is_fine(from_answers: Any) -> Any:
    def wrong(learning: Any, answers: Any, phase: int) -> Any:
        if answers.answered:
            return from_answers(learning, answers, phase)
        return _module("learning").Learned(learning._work, list_cap=learning._out.list_cap)

    return wrong


def _without_empty_lists(learning: Any, ranges: Any, counts: Any, short_ids: Any) -> Any:
    some = counts > 0
    return learning, ranges.take(some), counts[some], short_ids


def _joins_across_gaps(work: Any) -> Any:
    return work.listed[1:] & work.listed[:-1]


def _joins_with_comparisons(work: Any) -> Any:
    return work.ranges.touches_next() & work.listed[1:]


def _repeats_are_equal(match_chunk: Any) -> Any:
    def wrong(view: Any, where: Any, counts: Any, names: Any) -> Any:
        owner = np.arange(len(counts)).repeat(counts)
        keys = np.unique((owner.astype(np.uint64) << np.uint64(48)) | names)
        owner, names = (keys >> np.uint64(48)).astype(np.int64), keys & np.uint64(2**48 - 1)
        return match_chunk(view, where, np.bincount(owner, minlength=len(counts)), names)

    return wrong


# ---- cuts and the wire


def _round_further(below: Any, at: Any) -> Any:
    bits = _module("elements").bit_lengths(below ^ at).astype(np.uint64)
    return (at >> bits) << bits


def _imply_counts(cuts: Any, *_: Any) -> Any:
    return cuts if cuts.places is not None else replace(cuts, places=cuts.owner)


def _forget_the_sign(raw: Any, count: int) -> Any:
    zigzag, taken = _module("codec").unpack_varints(raw, count)
    steps = (zigzag >> np.uint64(1)).astype(np.int64) ^ (zigzag & np.uint64(1)).astype(np.int64)
    return np.cumsum(steps), taken


def _check_nothing_but_empty_parts(part_counts: Any, _counts: Any, _sizes: Any) -> None:
    if (part_counts < 1).any():
        raise _module("errors").RemoteProtocolError("split", "parts must be non-empty")


def _check_nothing_but_sums(part_counts: Any, counts: Any, sizes: Any) -> None:
    firsts = np.cumsum(sizes) - sizes
    if len(sizes) and (np.add.reduceat(part_counts, firsts) != counts).any():
        raise _module("errors").RemoteProtocolError("split", "parts must add up")


def _room_for_anything(request: Any, limits: Any) -> int:
    room = min(request.response_bytes_max or limits.response_bytes_max, limits.response_bytes_max)
    return int(room) - 128


def _send_the_first_guess(build: Any, costs: Any, room: int) -> Any:
    count = max(1, int(costs.cumsum().searchsorted(room, side="right")))
    return count, build(count)


def _cut_by_number(build: Any, costs: Any, room: int) -> Any:
    count = max(1, int(costs.cumsum().searchsorted(room, side="right")))
    while True:
        message = build(count)
        size = message.ByteSize()
        if size <= room or count == 1:
            return count, message
        count = max(1, int(count * room / size * 0.97))


def _make_columns_of_claims(unpack_sizes: Any) -> Any:
    def wrong(raw: Any, counts: Any, parts_max: int) -> Any:
        sizes, taken = unpack_sizes(raw, counts, parts_max)
        _module("codec").implied_counts(counts, sizes, 64)
        return sizes, taken

    return wrong


def _read_all_runs(unpack_runs: Any) -> Any:
    def wrong(raw: Any, ranges_max: int) -> Any:
        _module("codec").unpack_varints(raw, int(np.count_nonzero(raw < 0x80)))
        return unpack_runs(raw, ranges_max)

    return wrong


# ---- budgets


def _count_no_requests(check: Any) -> Any:
    return lambda budget, *args: _with(budget, "requests", 0, lambda: check(budget, *args))


def _read_before_the_budget(receive: Any) -> Any:
    def wrong(initiator: Any, request_id: int, response: Any, elapsed_s: float = 0.0) -> Any:
        budget, modules = initiator._budget, (_module("errors"), _module("events"))
        check = budget.check
        events = _with(
            budget,
            "check",
            nothing(None),
            lambda: receive(initiator, request_id, response, elapsed_s),
        )
        try:
            check(len(initiator._view), elapsed_s)
        except modules[0].RemoteProtocolError as error:
            initiator._over = True
            return [*events, modules[1].Fault(error)]
        return events

    return wrong


def _never_over(receive: Any) -> Any:
    def wrong(initiator: Any, *args: Any, **kwargs: Any) -> Any:
        initiator._over = False
        return receive(initiator, *args, **kwargs)

    return wrong


def _join_all(ranges: Any, counts: Any, cap: int) -> Any:
    starts = _module("worklist")._group_starts(np.ones(len(ranges) - 1, bool), counts, cap)
    return ranges.joined(starts), np.add.reduceat(counts, starts)


# ---- keys


def _fresh_for_ever(nonce: bytes, secret: bytes, pair: bytes, epoch: int) -> bool:
    make = _module("session").responder_nonce
    return any(nonce == make(secret, pair, each) for each in range(epoch + 1))


def _half_words(hasher: Any, orders: Any, ids: Any, low: Any, high: Any) -> Any:
    ids = ids.copy()
    ids[:, 16:] = 0
    return hasher, orders, ids, low, high


# ---- index and views


def _look_at_the_first_tie_only(index: Any, orders: Any, ids: Any, heads: Any) -> Any:
    found = np.zeros(len(orders), bool)
    snapshot, runs = index.state
    for run in runs:
        places = run.lower_bounds(snapshot, orders, heads)
        some = np.flatnonzero(run.holds_order(places, orders))
        stored = snapshot.take(run.rows_at(places[some]))
        found[some] |= (stored.ids == ids[some]).all(axis=1) & (stored.orders == orders[some])
    return found


def _younger_first(merge_runs: Any) -> Any:
    class Elder(_module("store").Run):  # type: ignore[misc]
        def lower_bounds(self, _snapshot: Any, orders: Any, _heads: Any) -> Any:
            return np.zeros(len(orders), np.int64)

    def wrong(snapshot: Any, elder: Any, younger: Any, *, summed: bool) -> Any:
        elder = Elder(elder.orders, elder.rows, elder.low, elder.high)
        return merge_runs(snapshot, elder, younger, summed=summed)

    return wrong


def _one_short(places: Any, run: Any, _orders: Any) -> Any:
    return np.minimum(places, len(run) - 1) if len(run) >= 1 << 17 else places


def _closed_above(window: Any, orders: Any) -> Any:
    lower, upper = window
    wanted = orders >= np.uint64(lower)
    return wanted if upper is None else wanted & (orders <= np.uint64(upper))


def _groups_do_not_grow(refresh: Any) -> Any:
    return lambda view: 0 if view._wanted is not None else refresh(view)


def _begin_at_the_present(view: Any, *_: Any) -> Any:
    view._snapshot = view._index.state.snapshot
    return view


def _in_any_window(of_groups: Any) -> Any:
    return lambda view, groups: _with(view, "_window", (0, None), lambda: of_groups(view, groups))


def _show_half_merged_segments(postings: Any, snapshot: Any) -> None:
    module = _module("index")
    segments = postings._segments
    start = segments[-1].stop if segments else 0
    if snapshot.size - start <= module.SCAN_ROWS_MAX:
        return
    new = module._segment(snapshot, start)
    while segments and len(segments[-1].rows) < 2 * len(new.rows):
        new, segments = module._merged(segments[-1], new), segments[:-1]
        postings._segments = (*postings._segments, new)
        time.sleep(0.005)  # long enough for a reader in another thread
    postings._segments = (*segments, new)


def _with_later_rows(postings: Any, snapshot: Any, groups: Any, stop: int) -> Any:
    covered = postings._segments[-1].stop if postings._segments else 0
    return postings, snapshot, groups, max(stop, covered)


# ---- fetching


def _forgive_a_still_bound(settle: Any) -> Any:
    def wrong(queue: Any, *args: Any, **kwargs: Any) -> None:
        try:
            settle(queue, *args, **kwargs)
        except _module("errors").RemoteProtocolError as error:
            if error.code != "no_progress":
                raise

    return wrong


def _drop_what_was_cut_off(settle: Any) -> Any:
    def wrong(queue: Any, *args: Any, **kwargs: Any) -> None:
        waiting = deque(queue._waiting)
        settle(queue, *args, **kwargs)
        queue._waiting = waiting

    return wrong


def _sort_what_arrives(accept: Any) -> Any:
    def wrong(queue: Any, batch: Any, orders: Any, ids: Any, resume: Any = None) -> Any:
        sequence = np.array(
            sorted(range(len(orders)), key=lambda at: (orders[at], bytes(ids[at]))), np.int64
        )
        taken = np.zeros(len(orders), bool)
        taken[sequence] = accept(queue, batch, orders[sequence], ids[sequence], resume)
        return taken

    return wrong


def _drop_repeats(accept: Any) -> Any:
    def wrong(queue: Any, batch: Any, orders: Any, ids: Any, resume: Any = None) -> Any:
        first: dict[Any, int] = {}
        keys = list(zip(orders.tolist(), map(bytes, ids), strict=True))
        for at, key in enumerate(keys):
            first.setdefault(key, at)
        some = np.array(list(first.values()), np.int64)
        taken = accept(queue, batch, orders[some], ids[some], resume)
        by_key = dict(zip(first, taken.tolist(), strict=True))
        return np.array([by_key[key] for key in keys], bool)

    return wrong


def _above_the_bound_too(accept: Any) -> Any:
    return lambda queue, batch, orders, ids, _resume=None: accept(queue, batch, orders, ids, None)


def _forget_owed_names(settle: Any) -> Any:
    def wrong(queue: Any, *args: Any, **kwargs: Any) -> None:
        settle(queue, *args, **kwargs)
        queue._owed_names = set()

    return wrong


def _in_range(upper: Any, _names: Any, key: Any, _name: Any) -> bool:
    return bool(key < upper or upper == _module("elements").END)


def _resume_above(found: Any, _view: Any, wanted: Any, _limits: Any) -> Any:
    where, resume = found
    later = [span.upper for span in wanted.ranges if span.lower == resume]
    return (where, later[0]) if later else found


def _only_named(asked: Any, wanted: Any, owner: Any, _lanes: Any) -> Any:
    return asked & (wanted.counts[owner] > 0)


# ---- proofs, elements set aside


def _believe_that_all_is_equal(initiator: Any, _flying: Any, response: Any) -> Any:
    theirs = _module("codec").read_total(response)
    return _module("events").Stated(theirs.count, theirs == initiator._total)


def _absent_total(response: Any) -> Any:
    return _module("hashing").Total(response.total.count, response.total.sum)


def _one_lane(total: Any) -> Any:
    def wrong(view: Any, added: Any = None, removed: Any = None) -> Any:
        right = total(view, added, removed)
        return replace(right, sum=right.sum[:8] + total(view).sum[8:])

    return wrong


def _offer_what_is_aside(have: Any) -> Any:
    def wrong(learning: Any, numbers: Any) -> None:
        have(learning, numbers)
        aside = numbers[learning._view.are_aside(numbers)]
        if len(aside):
            found = _module("events").Have(*learning._view.columns_of(aside))
            learning._out.events.append(found)

    return wrong


def _without_aside(learning: Any, numbers: Any) -> Any:
    return learning, numbers[~learning._view.are_aside(numbers)]


def _remove_by_order(without: Any) -> Any:
    def wrong(view: Any, run: Any, removed: Any) -> Any:
        heads = _module("elements").heads_of(removed.ids)
        places = run.lower_bounds(view._snapshot, removed.orders, heads)
        there = run.holds_order(places, removed.orders)
        ids = removed.ids.copy()
        ids[there] = view._snapshot.ids_of(run.rows_at(places[there]))
        return without(view, run, replace(removed, ids=ids))

    return wrong


def _forget_aside(count: int, view: Any) -> int:
    view._aside = _module("store").EMPTY_RUN
    return count


def _nothing_of(columns: Any) -> Any:
    return columns.take(slice(0))


FAULTS = [
    # The table
    _fault("equal hashes suffice", "responder:decide", after(_equal_by_hash), _RESPONDER),
    _fault("equal counts suffice", "responder:decide", after(_equal_by_count), _SYNC),
    _fault("an empty side is not seen", "responder:decide", after(_never_empty), _SYNC),
    _fault("ranges that we lack are not fetched", "learning:Learning._need_whole", nothing, _SYNC),
    _fault("the rest of a prefix is dropped", "learning:Learning.from_answers", _drop_the_rest, _SYNC),
    _fault("what we have is not reported", "learning:Learning._have", nothing, _SYNC),
    _fault("what we have is not sent where they hold nothing", "learning:Learning._compare_lists", before(_without_empty_lists), _RESPONDER),
    _fault("lists of neighbours join across gaps", "worklist:_joins", instead(_joins_across_gaps), _SYNC),
    _fault("lists join with comparisons", "worklist:_joins", instead(_joins_with_comparisons), _SYNC),
    _fault("a list means the same in every range", "hashing:names_in_ranges", instead(lambda _ranges, names: names), _SYNC),
    _fault("repeated short ids count twice", "learning:_distinct", instead(np.sort), _tests("liars", "responder")),
    _fault("a list that names one element often proves equality", "learning:_match_chunk", _repeats_are_equal, _RESPONDER),
    # Cuts
    _fault("cuts ignore ties", "cuts:bounds_at", after(lambda found, *_: (found[0], np.zeros_like(found[1]), found[2])), _SYNC),
    _fault("inseparable elements are cut", "cuts:bounds_at", after(lambda found, *_: (*found[:2], None)), _SYNC),
    _fault("bounds round too far", "cuts:between", instead(_round_further), _WIRE),
    _fault("bit lengths round up", "elements:bit_lengths", instead(lambda values: np.frexp(values.astype(np.float64))[1].astype(np.int64)), _WIRE),
    _fault("the phase is ignored by one side", "codec:implied_counts", before(lambda counts, sizes, _phase: (counts, sizes, 64)), _WIRE),
    _fault("with several runs counts are implied", "cuts:choose_cuts", after(_imply_counts), _SYNC),
    # The wire
    _fault("the last byte of a number is lost", "codec:pack_varints", before(lambda values: (values & np.uint64(2**63 - 1),)), _WIRE),
    _fault("zigzag forgets the sign", "codec:unpack_counts", instead(_forget_the_sign), _WIRE),
    _fault("columns may have bytes to spare", "codec:finished", nothing, _tests("responder", "codec")),
    _fault("ranges may overlap", "codec:_check_ranges_ascend", nothing, _RESPONDER),
    _fault("splits need not ascend", "codec:_check_parts_ascend", nothing, _RESPONDER),
    _fault("parts need not add up", "codec:_check_part_counts", instead(_check_nothing_but_empty_parts), _RESPONDER),
    _fault("parts may be empty", "codec:_check_part_counts", instead(_check_nothing_but_sums), _RESPONDER),
    _fault("no answer is progress", "learning:Learning.from_answers", _no_answer_is_fine, _LIARS),
    _fault("any frame is long enough", "responder:_room", instead(_room_for_anything), _RESPONDER),
    _fault("the frame limit is passed", "codec:fill", instead(_send_the_first_guess), _tests("filling", "responder")),
    _fault("a message that is too long is cut by number", "codec:fill", instead(_cut_by_number), _tests("filling")),
    # Budgets
    _fault("depth has no limit", "learning:Learning.__init__", before(lambda learning, view, asked, _depth, cap: (learning, view, asked, _ENDLESS, cap)), _LIARS),
    _fault("bytes have no limit", "limits:Budget.check", before(lambda budget, _count, elapsed_s: (budget, _ENDLESS, elapsed_s)), _LIARS),
    _fault("requests have no limit", "limits:Budget.check", _count_no_requests, _LIARS),
    _fault("time has no limit", "limits:Budget.check", before(lambda budget, count, _elapsed_s: (budget, count, 0.0)), _LIARS),
    _fault("a list that is refused is asked for again and again", "learning:Learning._lower_list_cap", nothing, (*_RESPONDER, *_SYNC)),
    _fault("an answer beyond the budget is read", "initiator:Initiator.receive", _read_before_the_budget, _LEARNING),
    _fault("an ended session goes on", "initiator:Initiator.receive", _never_over, _LEARNING),
    _fault("each part that we lack is a need", "worklist:join_ranges", instead(lambda ranges, counts, _cap: (ranges, counts)), _LEARNING),
    _fault("needs join across what we hold", "worklist:join_ranges", instead(_join_all), _LEARNING),
    _fault("claimed counts make columns", "codec:_unpack_sizes", _make_columns_of_claims, _tests("codec")),
    _fault("runs are read however many", "codec:_unpack_runs", _read_all_runs, _tests("codec")),
    # Keys
    _fault("one nonce is enough for a key", "session:derive_session_key", before(lambda first, _second, interest: (first, first, interest)), _KEYS),
    _fault("a nonce lives for ever", "session:nonce_is_fresh", instead(_fresh_for_ever), _KEYS),
    _fault("the order is not hashed", "hashing:ElementHasher.hash_into", before(lambda hasher, orders, *rest: (hasher, np.zeros_like(orders), *rest)), _KEYS),
    _fault("half of the id is not hashed", "hashing:ElementHasher.hash_into", before(_half_words), _KEYS),
    _fault("the key is not used", "hashing:ElementHasher.__init__", before(lambda hasher, key: (hasher, type(key)(bytes(16)))), _KEYS),
    _fault("a node does not know its own nonces", "session:is_own_nonce", returns(False), _KEYS),
    _fault("a prefix covers whatever sorts above it", "session:_begins_with_one", instead(lambda prefixes, name: bisect_right(prefixes, name) > 0), _KEYS),
    # Index and views
    _fault("duplicates in a batch are kept", "index:_repeats", instead(lambda orders, _heads, _ids: np.zeros(len(orders), bool)), _INDEX),
    _fault("duplicates of older runs are kept", "index:RangeIndex._held", instead(lambda _index, orders, *_: np.zeros(len(orders), bool)), _INDEX),
    _fault("inseparable duplicates are kept", "index:RangeIndex._held", instead(_look_at_the_first_tie_only), _INDEX),
    _fault("merging puts the younger first", "store:merge_runs", _younger_first, _INDEX),
    _fault("ties are not searched by head", "store:Run.lower_bounds", instead(lambda run, _snapshot, orders, _heads: run.first_at_least(orders)), _INDEX),
    _fault("long columns are searched one short", "store:Run.first_at_least", after(_one_short), _INDEX),
    _fault("a window is closed above", "view:_in_window", instead(_closed_above), _INDEX),
    _fault("views of groups do not grow", "view:View.refresh", _groups_do_not_grow, _INDEX),
    _fault("what came after the view of another session is missed", "view:View.under", after(_begin_at_the_present), _INDEX),
    _fault("the rows of groups are taken in any window", "view:View._of_groups", _in_any_window, _INDEX),
    Fault("recon: a turn comes back in the same pass", "app.server.sharing:Holding.release_after_pass", instead(lambda holding: holding.release()), ("tests/app/test_sharing.py",)),
    _fault("the cache grows for ever", "view:ViewCache.__init__", before(lambda cache, _bytes_max: (cache, _ENDLESS)), _INDEX),
    _fault("segments of rows are seen half merged", "index:Postings.extend", instead(_show_half_merged_segments), _tests("index")),
    _fault("rows that came later are in an older snapshot", "index:Postings.rows_of", before(_with_later_rows), _tests("index")),
    # Fetching
    _fault("anything that arrives is accepted", "fetch:_is_wanted", returns(True), _FETCH),
    _fault("short ids are not compared", "fetch:_is_wanted", instead(_in_range), _FETCH),
    _fault("a cut answer need not progress", "fetch:FetchQueue.settle", _forgive_a_still_bound, _FETCH),
    _fault("what was cut off is not asked for again", "fetch:FetchQueue.settle", _drop_what_was_cut_off, (*_FETCH, *_SYNC)),
    _fault("answers that bring nothing are forgiven for ever", "fetch:FetchQueue._count_barren", nothing, _FETCH),
    _fault("elements of an answer need not ascend", "fetch:FetchQueue.accept", _sort_what_arrives, _FETCH),
    _fault("an element may come twice", "fetch:FetchQueue.accept", _drop_repeats, _FETCH),
    _fault("elements may lie above the resume bound", "fetch:FetchQueue.accept", _above_the_bound_too, _FETCH),
    _fault("names that were never served are forgotten", "fetch:FetchQueue.settle", _forget_owed_names, _FETCH),
    _fault("what came is asked for again", "fetch:_without", instead(lambda need, _brought: need), _FETCH),
    _fault("content costs nothing", "initiator:Initiator.charge", nothing, _FETCH),
    _fault("a fetch may look at everything", "fetch:_within_limits", instead(lambda view, wanted, _limits: (view.locate(wanted.ranges), None)), _FETCH),
    _fault("a cut fetch skips a range", "fetch:_within_limits", after(_resume_above), _FETCH),
    _fault("a cut between runs takes the first", "fetch:_CLOSE", instead(1), _FETCH),
    _fault("whole ranges are not brought", "fetch:_asked_for", after(_only_named), _FETCH),
    _fault("all ranges are answered however many", "responder:_read", before(lambda ask, limits: (ask, replace(limits, ranges_answered_max=_ENDLESS))), _RESPONDER),
    # Proofs
    _fault("equal ranges need no equal total", "initiator:Initiator._stated", instead(_believe_that_all_is_equal), _PROOF),
    _fault("a total may be absent", "codec:read_total", instead(_absent_total), _PROOF),
    _fault("any total agrees", "initiator:Initiator._stated", after(lambda stated, *_: replace(stated, agrees=True)), _tests("transcript")),
    _fault("a total has one lane", "view:View.total", _one_lane, _PROOF),
    # Elements set aside
    _fault("elements set aside are offered", "learning:Learning._have", _offer_what_is_aside, _ASIDE),
    _fault("elements set aside are not added", "view:View.apart", before(lambda view, added, removed: (view, _nothing_of(added), removed)), _PROOF),
    _fault("elements set aside are not removed", "view:View.apart", before(lambda view, added, removed: (view, added, _nothing_of(removed))), _PROOF),
    _fault("an element of the same order is removed instead", "view:View._without", _remove_by_order, _ASIDE),
    _fault("elements set aside are forgotten when a view grows", "view:View.refresh", after(_forget_aside), _ASIDE),
    _fault("the peer's lack of an element set aside is not reported", "learning:Learning._have", before(_without_aside), _ASIDE),
    # Disk
    _fault("a checkpoint is not verified", "checkpoint:_digest", returns(bytes(32)), _tests("checkpoint")),
]  # fmt: skip
