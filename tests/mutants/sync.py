"""Faults planted in sessions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from tests.mutants.fault import Fault, Plant, after, instead, nothing, returns

_SESSION = ("tests/sync/test_session.py",)
_NEWS = ("tests/sync/test_news.py",)
_MACHINE = ("tests/sync/test_machine.py",)
_CONTENT = ("tests/sync/test_content.py",)
_INTERESTS = ("tests/app/federation/test_interests.py",)
_NODES_NEWS = ("tests/app/federation/test_news.py",)
_ACKNOWLEDGED = ("tests/app/federation/test_acknowledgements.py",)


def _keep_views(forget: Any) -> Any:
    def wrong(index: Any) -> None:
        views = vars(index).get("views")
        forget(index)
        index.views = views or index.views

    return wrong


def _fault(name: str, seam: str, plant: Plant, tests: tuple[str, ...] = _SESSION) -> Fault:
    return Fault(f"sync: {name}", f"sdstore.sync.{seam}", plant, tests)


def _awaited(change: Callable[..., Any]) -> Plant:
    """Return `change(result, *args)` of an asynchronous function."""

    async def later(result: Awaitable[Any], *args: Any) -> Any:
        return change(await result, *args)

    return after(later)


def _confirms_nothing(_: Any) -> Any:
    """Believe every acknowledgement."""
    return lambda sync, main: sync._look_up_needed(main)


def _at_any_moment(right: Any) -> Any:
    """Send requests without the marks that bound them."""

    def ask(requests: Any, message: Any, taker: Any) -> None:
        requests.release()
        right(requests, message, taker)

    return ask


def _takes_any_entry(right: Any) -> Any:
    """Take each entry for the element that the peer says it is."""

    def take(inbox: Any, named: Any, entry: Any, **others: Any) -> None:
        entry.order, entry.element_id = named.element
        right(inbox, named, entry, **others)

    return take


def _takes_any_number(_: Any) -> Any:
    """Take results of steps that are not under way."""
    return lambda steps, number: steps._under_way.pop(number, (None, lambda _: None))


FAULTS = [
    _fault(
        "a new policy is not noticed",
        "comparison:Requests.is_other_policy",
        returns(False),
        _NEWS + _INTERESTS,
    ),
    # The machine
    _fault("any number has a result", "steps:Steps.take", _takes_any_number, _MACHINE),
    _fault(
        "an attempt ends before what came is stored",
        "content:Inbox.is_storing",
        instead(property(lambda _: False)),
        _CONTENT,
    ),
    # News
    _fault("what was brought is compared again", "proof:Moved.counted_out", returns({}), _NEWS),
    _fault("what was sent is fetched again", "proof:Moved.counted_in", returns({}), _NEWS),
    _fault("any differences explain any totals", "proof:Moved.accounts_for", returns(True), _NEWS),
    _fault(
        "what was brought is never gone",
        "proof:brought_columns",
        lambda right: lambda _baseline, aside: right(None, aside),
        _NEWS,
    ),
    _fault("news are compared for ever", "memory:Baseline.is_due", returns(False), _NEWS),
    _fault(
        "a baseline outlives what it set aside",
        "memory:SetAside.name",
        instead(property(lambda _: b"")),
        _NEWS,
    ),
    _fault(
        "a session is not as of one moment", "comparison:Requests.ask", _at_any_moment, _NODES_NEWS
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
        "app.recon.index:NodeIndex._forget_elements",
        _keep_views,
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
        "what a peer acknowledged is believed",
        "session:Sync._confirm",
        _confirms_nothing,
        _ACKNOWLEDGED,
    ),
    # Content
    _fault("content may be another entry", "content:Inbox._take_entry", _takes_any_entry),
    _fault("nobody asks for lost content", "content:Content.add_lost", nothing),
    _fault("what the peer does not serve is not missed", "content:Content.check_served", nothing),
    # What is set aside and remembered
    _fault("what is refused is not set aside", "content:Books.set_aside", nothing),
    _fault(
        "what was set aside is forgotten", "memory:PeerMemory.with_aside", after(lambda _, m, __: m)
    ),
    _fault("what was mended is not sent", "memory:SetAside.unsent_ids", returns([]), _NEWS),
    _fault(
        "a time that is still to come is waited for",
        "memory:_is_due",
        lambda _: lambda at_s, now_s: at_s <= now_s,
    ),
    # Errors
    _fault("every error is this side's", "report:outcome_of", returns("local_fault")),
]
