"""Faults planted in the reconciliation engine."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.mutants.fault import Fault, Plant, after, before, instead, nothing, returns

_ENDLESS = 1 << 60


def _tests(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/recon/test_{name}.py" for name in names)


_SYNC = _tests("transcript", "sync", "oracle")
_INDEX = _tests("index", "oracle", "sync")
_WIRE = _tests("codec", "transcript", "vectors", "sync")
_LIARS = _tests("liars", "codec")
_KEYS = _tests("agreement", "index", "vectors", "proof")
_FETCH = _tests("fetch")
_RESPONDER = _tests("responder")
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


# ---- cuts and the wire


def _round_further(below: Any, at: Any) -> Any:
    bits = _module("elements").bit_lengths(below ^ at).astype(np.uint64)
    return (at >> bits) << bits


def _send_the_first_guess(build: Any, costs: Any, room: int) -> Any:
    count = max(1, int(costs.cumsum().searchsorted(room, side="right")))
    return count, build(count)


# ---- budgets


def _count_no_requests(check: Any) -> Any:
    return lambda budget, *args: _with(budget, "requests", 0, lambda: check(budget, *args))


# ---- keys


def _fresh_for_ever(nonce: bytes, secret: bytes, pair: bytes, epoch: int) -> bool:
    make = _module("agreement").responder_nonce
    return any(nonce == make(secret, pair, each) for each in range(epoch + 1))


# ---- index and views


def _closed_above(window: Any, orders: Any) -> Any:
    lower, upper = window
    wanted = orders >= np.uint64(lower)
    return wanted if upper is None else wanted & (orders <= np.uint64(upper))


def _with_later_rows(postings: Any, snapshot: Any, groups: Any, stop: int) -> Any:
    covered = postings._segments[-1].stop if postings._segments else 0
    return postings, snapshot, groups, max(stop, covered)


# ---- fetching


def _above_the_bound_too(accept: Any) -> Any:
    return lambda queue, batch, orders, ids, _resume=None: accept(queue, batch, orders, ids, None)


# ---- proofs, elements set aside


def _believe_that_all_is_equal(initiator: Any, _flying: Any, response: Any) -> Any:
    theirs = _module("codec").read_total(response)
    return _module("events").Stated(theirs.count, theirs == initiator._total)


def _offer_what_is_aside(have: Any) -> Any:
    def wrong(learning: Any, numbers: Any) -> None:
        have(learning, numbers)
        aside = numbers[learning._view.are_added(numbers)]
        if len(aside):
            found = _module("events").Have(*learning._view.columns_of(aside))
            learning._out.events.append(found)

    return wrong


FAULTS = [
    _fault("equal hashes suffice", "responder:decide", after(_equal_by_hash), _RESPONDER),
    _fault("equal counts suffice", "responder:decide", after(_equal_by_count), _SYNC),
    _fault("ranges that we lack are not fetched", "learning:Learning._need_whole", nothing, _SYNC),
    _fault("what we have is not reported", "learning:Learning._have", nothing, _SYNC),
    _fault("bounds round too far", "responder:between", instead(_round_further), _WIRE),
    _fault("ranges may overlap", "codec:_check_ranges_ascend", nothing, _RESPONDER),
    _fault("splits need not ascend", "codec:_check_parts_ascend", nothing, _RESPONDER),
    _fault("the frame limit is passed", "codec:fill", instead(_send_the_first_guess), _tests("filling", "responder")),
    _fault("depth has no limit", "learning:Learning.__init__", before(lambda learning, view, asked, _depth, cap: (learning, view, asked, _ENDLESS, cap)), _LIARS),
    _fault("bytes have no limit", "initiator:Budget.check", before(lambda budget, _count, elapsed_s: (budget, _ENDLESS, elapsed_s)), _LIARS),
    _fault("requests have no limit", "initiator:Budget.check", _count_no_requests, _LIARS),
    _fault("time has no limit", "initiator:Budget.check", before(lambda budget, count, _elapsed_s: (budget, count, 0.0)), _LIARS),
    _fault("one nonce is enough for a key", "agreement:derive_session_key", before(lambda first, _second, interest: (first, first, interest)), _KEYS),
    _fault("a nonce lives for ever", "agreement:nonce_is_fresh", instead(_fresh_for_ever), _KEYS),
    _fault("the order is not hashed", "hashing:ElementHasher.hash_into", before(lambda hasher, orders, *rest: (hasher, np.zeros_like(orders), *rest)), _KEYS),
    _fault("the key is not used", "hashing:ElementHasher.__init__", before(lambda hasher, key: (hasher, type(key)(bytes(16)))), _KEYS),
    _fault("a node does not know its own nonces", "agreement:is_own_nonce", returns(False), _KEYS),
    _fault("duplicates of older runs are kept", "index:RangeIndex._held", instead(lambda _index, orders, *_: np.zeros(len(orders), bool)), _INDEX),
    _fault("a window is closed above", "view:_in_window", instead(_closed_above), _INDEX),
    _fault("rows that came later are in an older snapshot", "index:Postings.rows_of", before(_with_later_rows), _tests("index")),
    _fault("anything that arrives is accepted", "fetch:_is_wanted", returns(True), _FETCH),
    _fault("elements may lie above the resume bound", "fetch:FetchQueue.accept", _above_the_bound_too, _FETCH),
    _fault("equal ranges need no equal total", "initiator:Initiator._stated", instead(_believe_that_all_is_equal), _PROOF),
    _fault("elements set aside are offered", "learning:Learning._have", _offer_what_is_aside, _ASIDE),
    _fault("a checkpoint is not verified", "checkpoint:_digest", returns(bytes(32)), _tests("checkpoint")),
]  # fmt: skip
