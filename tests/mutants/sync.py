"""Faults planted in the driver of a session."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from tests.mutants.fault import Fault, Plant, after, instead, nothing, returns

_SESSION = ("tests/sync/test_session.py",)
_NEWS = ("tests/sync/test_news.py",)
_RECEIVED = ("tests/sync/test_received.py",)
_INTERESTS = ("tests/app/federation/test_interests.py",)
_NODES_NEWS = ("tests/app/federation/test_news.py",)


def _fault(name: str, seam: str, plant: Plant, tests: tuple[str, ...] = _SESSION) -> Fault:
    return Fault(f"sync: {name}", f"sdstore.sync.{seam}", plant, tests)


def _awaited(change: Callable[..., Any]) -> Plant:
    """Return `change(result, *args)` of an asynchronous function."""

    async def later(result: Awaitable[Any], *args: Any) -> Any:
        return change(await result, *args)

    return after(later)


async def _proof_at_once(session: Any, header: Any) -> Any:
    """Take our own set for the peer's."""
    view = session.replica.view(header.key(), session._mutual)
    return session._proof_of(session.aside.view(view))


def _unlike_the_name(right: Any) -> Any:
    """Take each entry for the element that the peer says it is."""

    async def wrong(replica: Any, items: Any, ids: Any) -> Any:
        class Trusting:
            async def prepare(self, items: Any) -> Any:
                prepared = await replica.prepare(items)
                return [
                    replace(each, order=item.order, element_id=item.id)
                    for item, each in zip(items, prepared, strict=True)
                ]

        return await right(Trusting(), items, ids)

    return wrong


def _twice(right: Any) -> Any:
    """Read items once more."""

    async def wrong(replica: Any, items: Any, ids: Any) -> Any:
        await replica.prepare(items)
        return await right(replica, items, ids)

    return wrong


def _swallowed(right: Any) -> Any:
    """Go on when the replica cannot store."""

    async def wrong(moves: Any, rows: Any) -> None:
        with suppress(Exception):
            await right(moves, rows)

    return wrong


async def _at_once(*_: Any) -> None:
    """Wait for nothing."""


async def _side_by_side(behind: Any) -> None:
    """Leave the commit that runs to itself."""
    behind._writing = None


def _whatever_is_gone(right: Any) -> Any:
    """Trust that everything the last session brought is still here."""

    def wrong(baseline: Any, arrived: Any, replica: Any, aside: Any) -> Any:
        class Everything:
            def holds(self, orders: Any, ids: Any) -> Any:
                return orders == orders

        del replica
        return right(baseline, arrived, Everything(), aside)

    return wrong


async def _nothing_mended(_aside: Any, _replica: Any) -> None:
    pass


def _without_up_to(_: Any, exchange: Any, message: Any) -> None:
    del exchange
    message.up_to = b""


FAULTS = [
    _fault("answers have no policy", "exchange:_WITH_POLICY", instead(frozenset()), _INTERESTS),
    # News
    _fault("what was brought is compared again", "news:Moved.counted_out", returns({}), _NEWS),
    _fault("what was sent is fetched again", "news:Moved.counted_in", returns({}), _NEWS),
    _fault("any differences explain any totals", "news:Moved.accounts_for", returns(True), _NEWS),
    _fault("what was brought is never gone", "news:news_of", _whatever_is_gone, _NEWS),
    _fault("news are compared for ever", "memory:Baseline.is_due", returns(False), _NEWS),
    _fault(
        "a baseline outlives what it set aside",
        "memory:SetAside.name",
        instead(property(lambda _: b"")),
        _NEWS,
    ),
    _fault(
        "a session is not as of one moment",
        "exchange:Exchange._add_marks",
        after(_without_up_to),
        _NODES_NEWS,
    ),
    _fault(
        "a whole session keeps the old baseline",
        "memory:PeerMemory.with_baseline",
        after(lambda result, memory, _, baseline: result if baseline else memory),
        _NEWS,
    ),
    Fault("sync: any mark is a mark", "recon.marks:is_mark_of", returns(True), _NEWS),
    Fault(
        "sync: what arrived after a mark is before it",
        "recon.marks:Arrived._is_after",
        after(lambda later, *_: later & False),
        _NODES_NEWS,
    ),
    Fault(
        "sync: a mark does not name what was there",
        "app.recon.index:NodeIndex.sums_of",
        returns((0, bytes(32))),
        _NODES_NEWS,
    ),
    Fault(
        "sync: a view over the news is kept whatever becomes of the index",
        "app.recon.endpoint:NewsViews.find",
        lambda _: (
            lambda views, key, request, *_, **__: (
                (news := views._kept.get((key.raw, request.since))) and news.view
            )
        ),
        _NODES_NEWS,
    ),
    Fault(
        "sync: the news of a node have no claims",
        "app.store.arrivals:Arrivals.claims_between",
        _awaited(lambda *_: []),
        _NODES_NEWS,
    ),
    # The proof
    _fault(
        "a set is proved equal whatever the peer states",
        "session:Session._compare_everything",
        instead(_proof_at_once),
    ),
    # Content
    _fault("content may be another entry", "moves:read_items", _unlike_the_name),
    _fault("an item is read twice", "moves:read_items", _twice),
    _fault("a commit that fails is not noticed", "received:WriteBehind.store", _swallowed),
    _fault(
        "what came before a fault is not stored", "moves:Moves.flush", instead(_at_once), _RECEIVED
    ),
    _fault(
        "the end does not wait for a commit",
        "received:WriteBehind.flush",
        instead(_at_once),
        _RECEIVED,
    ),
    _fault(
        "two commits at a time", "received:WriteBehind._written", instead(_side_by_side), _RECEIVED
    ),
    _fault(
        "commits are small",
        "received:WriteBehind._is_enough",
        instead(property(lambda b: bool(b._held))),
        _RECEIVED,
    ),
    _fault("nobody asks for lost content", "moves:Moves.fetch_lost", _awaited(lambda *_: set())),
    _fault(
        "what the peer does not serve is not missed",
        "moves:Moves.unserved_count",
        instead(0),
    ),
    # What is set aside and remembered
    _fault("what is refused is not set aside", "moves:Moves._set_aside", nothing),
    _fault(
        "what was set aside is forgotten", "memory:PeerMemory.with_aside", after(lambda _, m, __: m)
    ),
    _fault(
        "a new policy is not noticed",
        "session:Session._learn_policy",
        after(lambda *_: False),
        _NEWS,
    ),
    _fault(
        "what was mended is not sent",
        "memory:SetAside.forget_mended",
        instead(_nothing_mended),
        _NEWS,
    ),
    _fault(
        "a time that is still to come is waited for",
        "memory:_is_due",
        lambda right: lambda at_s: at_s <= right.__globals__["time"].time(),
    ),
    # Errors
    _fault("every error is this side's", "report:outcome_of", returns("local_fault")),
]
