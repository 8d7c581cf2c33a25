"""Faults planted in sessions."""

from __future__ import annotations

from typing import Any

from tests.mutants.fault import Fault, Plant, nothing, returns

_SESSION = ("tests/sync/test_session.py",)
_NEWS = ("tests/sync/test_news.py",)
_NODES_NEWS = ("tests/app/federation/test_news.py",)
_ACKNOWLEDGED = ("tests/app/federation/test_acknowledgements.py",)


def _fault(name: str, seam: str, plant: Plant, tests: tuple[str, ...] = _SESSION) -> Fault:
    return Fault(f"sync: {name}", f"sdstore.sync.{seam}", plant, tests)


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


FAULTS = [
    _fault(
        "any differences explain any totals", "differences:Moved.accounts_for", returns(True), _NEWS
    ),
    _fault("news are compared for ever", "memory:Baseline.is_due", returns(False), _NEWS),
    _fault(
        "a session is not as of one moment", "comparison:Requests.ask", _at_any_moment, _NODES_NEWS
    ),
    Fault("sync: any mark is a mark", "recon.marks:is_mark_of", returns(True), _NEWS),
    _fault(
        "what a peer acknowledged is believed",
        "session:Sync._confirm",
        _confirms_nothing,
        _ACKNOWLEDGED,
    ),
    _fault("content may be another entry", "content:Inbox._take_entry", _takes_any_entry),
    _fault("nobody asks for lost content", "content:Content.add_lost", nothing),
    _fault("what the peer does not serve is not missed", "content:Content.check_served", nothing),
    _fault("what is refused is not set aside", "content:Books.set_aside", nothing),
    _fault("every error is this side's", "report:outcome_of", returns("local_fault")),
]
