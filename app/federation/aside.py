"""What a session with one peer sets aside, so that one disputed element never blocks the rest.

An element that this node refuses, or cannot get from this peer, is added to the session's view; one
that the peer refuses, or that this node cannot send, is taken out of it. So both views are equal
although the stores are not, nothing is fetched or sent again, and the idle comparison holds. Other
peers are asked as if nothing had happened, and after a while so is this one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from app.errors import Code, Problem
from app.federation.local import ContentStore, ElementIndex
from recon.hashing import Total
from recon.limits import ID_BYTES
from recon.store import Columns
from recon.view import View

SET_ASIDE_MAX = 65_536  # elements a peer and interest: 25 MB; a session that finds more is partial
REPORTED_MAX = 100  # names in a report; their number is always exact
RETRIES_MAX = 256  # elements of a session that are tried again: about one batch
RETRY_S_MIN = 900.0  # when an element is tried again first: a mended store is found the same hour
RETRY_S_MAX = 86_400.0  # and at last: once a day
RETRY_FACTOR = 4.0

NO_ENTRY = "no_entry"  # a claim whose entry the other side lacks
REFUSED = "refused"  # by the peer, which does not say why
LOST = "lost"
RETIRED = "retired"
TOO_MANY_CLAIMS = "too_many_claims"


class LackedBy(StrEnum):
    """The side that does not hold an element set aside."""

    HERE = "here"
    THERE = "there"


@dataclass(frozen=True, slots=True)
class AsideElement:
    """An element set aside: which side lacks it, and why.

    `entry_digest`: of a claim, the entry it is about. `retries`: how often it was tried again.
    """

    lacked_by: LackedBy
    order: int
    element_id: bytes
    code: str
    entry_digest: bytes = b""
    retries: int = 0
    retry_at_s: float = 0.0

    def document(self) -> dict[str, str]:
        """The element as JSON."""
        kind = "claim" if self.entry_digest else "entry"
        return {
            "id": self.element_id.hex(),
            "kind": kind,
            "lacked_by": self.lacked_by,
            "code": self.code,
        }


class SetAside:
    """The elements set aside with one peer over one interest, by ID. Kept in memory only."""

    def __init__(self) -> None:
        self._elements: dict[bytes, AsideElement] = {}
        self._tried_again: dict[bytes, AsideElement] = {}
        self._columns: dict[LackedBy, Columns] = {}

    def __len__(self) -> int:
        return len(self._elements)

    def __contains__(self, element_id: bytes) -> bool:
        return element_id in self._elements

    def get(self, element_id: bytes) -> AsideElement | None:
        """The element of this ID, if it is set aside."""
        return self._elements.get(element_id)

    def reported(self) -> list[dict[str, str]]:
        """The first of them as JSON, entries before claims."""
        ranked = sorted(self._elements.values(), key=lambda each: bool(each.entry_digest))
        return [each.document() for each in ranked[:REPORTED_MAX]]

    def add(self, element: AsideElement) -> None:
        """Set an element aside; one tried again in vain waits longer. Raises Problem where full."""
        before = self._tried_again.pop(element.element_id, None)
        if before is not None:
            element = replace(element, retries=before.retries + 1)
        wait_s = min(RETRY_S_MIN * RETRY_FACTOR**element.retries, RETRY_S_MAX)
        if len(self._elements) >= SET_ASIDE_MAX and element.element_id not in self._elements:
            detail = f"more than {SET_ASIDE_MAX} elements would have to be set aside"
            raise Problem(Code.OVERLOADED, detail)
        self._elements[element.element_id] = replace(element, retry_at_s=time.monotonic() + wait_s)
        self._columns.clear()

    def forget(self, ids: Iterable[bytes]) -> None:
        """Elements that both sides hold, or neither names any more, and the claims on them."""
        named = set(ids)
        for each in named & self._tried_again.keys():
            del self._tried_again[each]
        gone = named & self._elements.keys()
        if gone:
            gone |= {e.element_id for e in self._elements.values() if e.entry_digest in gone}
            self._elements = {key: e for key, e in self._elements.items() if key not in gone}
            self._columns.clear()

    def forget_refused_there(self) -> None:
        """The peer's policy has changed: it may take what it refused."""
        there = [e.element_id for e in self._elements.values() if e.lacked_by is LackedBy.THERE]
        self.forget(there)

    def retry_unserved(self) -> None:
        """Make due what the peer could not serve, and claims that waited for an entry."""
        for each in self._elements.values():
            if each.code in {LOST, RETIRED, NO_ENTRY}:
                self._elements[each.element_id] = replace(each, retry_at_s=0.0)

    def forget_held(self, index: ElementIndex) -> None:
        """What came from elsewhere is not lacked here; claims may come once their entry is here."""
        here = self.columns(LackedBy.HERE)
        if not len(here):
            return
        held = index.holds(here.orders, here.ids)
        claims = [
            each
            for each in self._elements.values()
            if each.lacked_by is LackedBy.HERE and each.code == NO_ENTRY
        ]
        with_entry = index.holds(*_pairs((each.order, each.entry_digest) for each in claims))
        self.forget([row.tobytes() for row in here.ids[held]])
        self.forget([c.element_id for c, found in zip(claims, with_entry, strict=True) if found])

    async def forget_mended(self, store: ContentStore) -> None:
        """What could not be sent because its content was lost, and is whole again."""
        lost = [
            each.element_id
            for each in self._elements.values()
            if each.lacked_by is LackedBy.THERE and each.code == LOST
        ]
        if lost:
            self.forget(set(lost) - (await store.content_states(lost)).keys())

    def is_due(self) -> bool:
        """Whether an element is to be tried again."""
        now = time.monotonic()
        return any(each.retry_at_s <= now for each in self._elements.values())

    def try_again(self) -> None:
        """Take out what is due, a bounded number: the session finds it lacking, and moves it."""
        now = time.monotonic()
        due = [each for each in self._elements.values() if each.retry_at_s <= now][:RETRIES_MAX]
        before = dict(self._elements)
        self.forget([each.element_id for each in due])
        if len(self._tried_again) > SET_ASIDE_MAX:
            self._tried_again.clear()
        self._tried_again |= {key: e for key, e in before.items() if key not in self._elements}

    def columns(self, lacked_by: LackedBy) -> Columns:
        """The elements that one side lacks."""
        if lacked_by not in self._columns:
            rows = [e for e in self._elements.values() if e.lacked_by is lacked_by]
            orders, ids = _pairs((each.order, each.element_id) for each in rows)
            self._columns[lacked_by] = Columns(orders, ids, np.zeros(len(rows), np.uint32))
        return self._columns[lacked_by]

    def view(self, base: View) -> View:
        """A session's view: the node's own, with and without what is set aside."""
        if not self._elements:
            return base
        return base.apart(self.columns(LackedBy.HERE), self.columns(LackedBy.THERE))

    def total(self, base: View) -> Total:
        """The total of that view, at the cost of what is set aside."""
        return base.total(self.columns(LackedBy.HERE), self.columns(LackedBy.THERE))


def _pairs(
    elements: Iterable[tuple[int, bytes]],
) -> tuple[
    np.ndarray[tuple[int], np.dtype[np.uint64]], np.ndarray[tuple[int, int], np.dtype[np.uint8]]
]:
    rows = list(elements)
    ids = np.frombuffer(b"".join(each for _, each in rows), np.uint8).reshape(-1, ID_BYTES)
    return np.array([order for order, _ in rows], np.uint64), ids
