"""The differences of two sets: found, moved, set aside, acknowledged; the proof; and where the next session starts.

The states of an element that one side lacks, and where each is written down:

| | lacked there | lacked here |
|---|---|---|
| found | `Moved.offered` | `Moved.needed`, once it is named |
| moved | acknowledged: `Ledger`; then confirmed | stored: `Moved.held` |
| refused, or not served | `SetAside`, `THERE` | `SetAside`, `HERE` |
| so, and no room among those set aside | `Moved.not_taken` | `Moved.passed_over` |
| set aside, and found to be settled | sent again after a while | not named any more: `Moved.unnamed` |
| in the next baseline | `counted_in`: offered, and not set aside | `counted_out`: needed or set aside |

**Set aside.** One disputed element must not block the rest. An element that this side refuses, or cannot get from
the peer, is added to the session's view. An element that the peer refuses, or that cannot be sent, is
removed from it. So both views are equal although the sets are not: nothing is fetched or sent again,
and idle peers still agree. Other peers are not affected, and this peer is asked again after a while.

**Arithmetic.** Both views of a comparison are as of one place in arrival order each: this side's when it
began, the peer's when it gave its first answer. With that answer the peer states the total of its view. If
this side's total, without the elements that the peer lacks and with those that this side lacks, is the
peer's, then the comparison found every difference between the two views (`Moved.accounts_for`). That holds
however fast both sets grow meanwhile, and the peer cannot calculate the total without the names of all its
elements, because the sums have a key.

**Acknowledgements.** That total is from before the session pushed anything. So what was pushed is compared
once more, with what arrived at the peer after its mark: `Sync` confirms, by the same arithmetic. `Ledger`
knows what the peer has acknowledged. A peer that lacks such an element in a comparison is asked again, for
the processes of one store can see a commit a moment apart; if it lacks it twice, it is at fault.

**The next session.** What was moved arrived after the receiver's place, so the next comparison would see it
on one side only. Therefore the `Baseline` counts it in or out by ID (`news_of`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import chain

import blake3
import numpy as np

from recon.elements import U8, U64, Mask, heads_of
from recon.hashing import Total
from recon.index import Columns
from recon.marks import Arrived
from recon.view import View
from sdstore.sync.memory import (
    ELEMENT_BYTES,
    LOST,
    REFUSED,
    RETIRED,
    SET_ASIDE_MAX,
    Aside,
    AsideElement,
    Baseline,
    Element,
    LackedBy,
    columns,
    is_due_at,
    pack_elements,
    unpack_columns,
    unpack_elements,
    wait_s,
)
from sdstore.sync.report import misbehaved

MOVED_MAX = (
    65_536  # elements each way that a baseline counts in or out: 5 MB; more need a new session
)
NEEDED_MAX = MOVED_MAX + SET_ASIDE_MAX  # named at once, until those that are set aside are known
PASSED_OVER_MAX = 1 << 20  # elements that are neither stored nor remembered: 40 MB in one session
REPORTED_MAX = 100  # elements named in a report; the count is always exact
RETRIES_MAX = 256  # elements that a session retries: about one batch
NAMED_MAX = 5  # elements in a report's detail: log lines stay short


# --- what is set aside ---------------------------------------------------------------------------


class SetAside:
    """A running session's elements set aside with one peer over one interest, by ID."""

    def __init__(self, aside: Aside) -> None:
        self._interest = aside.interest
        self._elements = {each.element_id: each for each in aside.elements}
        self._tried_again = {each.element_id: each for each in aside.tried_again}
        self._columns: dict[LackedBy, Columns] = {}
        self.beyond_count = aside.beyond_count
        self.theirs, self.ours = aside.theirs, aside.ours
        # Retired elements that were named, by the side that lacks them.
        self._retired = Counter(e.lacked_by for e in aside.elements if e.code == RETIRED)
        self._retired_before = self._retired.copy()
        self._cut: set[LackedBy] = set()
        # Elements that a cut leaves out, and that the other side has all the same.
        self.cut_in_vain_count = 0

    def value(self) -> Aside:
        """The elements as a value."""
        elements, tried = self._elements.values(), self._tried_again.values()
        lists = tuple(elements), tuple(tried)
        return Aside(self._interest, *lists, self.beyond_count, self.theirs, self.ours)

    def names_more_retired(self, lacked_by: LackedBy, most: int) -> bool:
        """Whether more retired elements than `most` are named, and more than before this attempt."""
        return self._retired[lacked_by] > max(most, self._retired_before[lacked_by])

    def cut(self, lacked_by: LackedBy, until: bytes) -> None:
        """Leave out what the other side of `lacked_by` had retired by a moment, instead of naming it."""
        self._cut.add(lacked_by)
        if lacked_by is LackedBy.HERE:
            self.theirs = self.theirs.cut(until)
        else:
            self.ours = self.ours.cut(until)
        self._forget_retired(lacked_by)

    def forget_cuts(self) -> None:
        """Name again what was retired; elements that were refused because they are retired are in both sets."""
        self.theirs, self.ours = replace(self.theirs, pairs=()), replace(self.ours, pairs=())
        self._forget_retired(LackedBy.THERE, REFUSED)

    def _forget_retired(self, lacked_by: LackedBy, code: str = RETIRED) -> None:
        elements = self._elements.values()
        self.forget([e.element_id for e in elements if (e.lacked_by, e.code) == (lacked_by, code)])
        self.beyond_count = 0

    @property
    def name(self) -> bytes:
        """A name of what is set aside: it changes whenever an element joins, leaves or changes sides."""
        rows = sorted(e.lacked_by.encode() + e.element_id for e in self._elements.values())
        return blake3.blake3(b"".join(rows)).digest() if rows else b""

    def __len__(self) -> int:
        return len(self._elements)

    def __contains__(self, element_id: bytes) -> bool:
        return element_id in self._elements

    def get(self, element_id: bytes) -> AsideElement | None:
        """The set-aside element with this ID, or None."""
        return self._elements.get(element_id)

    def reported(self) -> tuple[dict[str, str], ...]:
        """The first of them as JSON, entries before claims."""
        ranked = sorted(self._elements.values(), key=lambda each: bool(each.entry_id))
        return tuple(each.document() for each in ranked[:REPORTED_MAX])

    def add(self, element: AsideElement, now_s: float) -> bool:
        """Set an element aside; each failed retry makes the wait four times as long.

        False if there is no room: then it is only counted.
        """
        if element.code == RETIRED:
            self._retired[element.lacked_by] += 1
            if element.lacked_by in self._cut:
                return True  # answers that were on their way
        if len(self._elements) >= SET_ASIDE_MAX and element.element_id not in self._elements:
            self.beyond_count += 1
            return False
        before = self._tried_again.pop(element.element_id, None)
        retries = before.retries + 1 if before else element.retries
        element = replace(element, retries=retries, retry_at_s=now_s + wait_s(retries))
        self._elements[element.element_id] = element
        self._columns.clear()
        return True

    def forget(self, ids: Iterable[bytes]) -> None:
        """Remove elements that both sides hold or neither names any more, and the claims on them."""
        if not (self._elements or self._tried_again):
            return
        named = set(ids)
        for each in named & self._tried_again.keys():
            del self._tried_again[each]
        gone = named & self._elements.keys()
        if gone:
            gone |= {e.element_id for e in self._elements.values() if e.entry_id in gone}
            self._elements = {key: e for key, e in self._elements.items() if key not in gone}
            self._columns.clear()

    def forget_held(self, here: Columns, is_held: Mask) -> None:
        """Remove elements that arrived from elsewhere, and the claims on them.

        `here`: `columns(LackedBy.HERE)` of the moment when they were looked up; `is_held`: bool[n].
        """
        self.forget([row.tobytes() for row in here.ids[is_held]])

    def unsent_ids(self) -> list[bytes]:
        """Entries that could not be sent because their content was lost here."""
        return [
            each.element_id
            for each in self._elements.values()
            if each.lacked_by is LackedBy.THERE and each.code == LOST
        ]

    def is_due(self, now_s: float) -> bool:
        """Whether an element is due for a retry.

        If there are more than are remembered, a retry would fetch all the others again: they wait for
        the next session that compares everything.
        """
        return not self.beyond_count and any(
            is_due_at(each.retry_at_s, now_s) for each in self._elements.values()
        )

    def try_again(self, now_s: float) -> None:
        """Before everything is compared: remove a bounded number of due elements, so that they are moved."""
        self.beyond_count = 0
        due = [each for each in self._elements.values() if is_due_at(each.retry_at_s, now_s)]
        before = self._elements
        self.forget([each.element_id for each in due[:RETRIES_MAX]])
        if len(self._tried_again) > SET_ASIDE_MAX:
            self._tried_again.clear()
        self._tried_again |= {key: e for key, e in before.items() if key not in self._elements}

    def columns(self, lacked_by: LackedBy) -> Columns:
        """The elements that one side lacks."""
        if lacked_by not in self._columns:
            rows = [e for e in self._elements.values() if e.lacked_by is lacked_by]
            orders, ids = columns((each.order, each.element_id) for each in rows)
            self._columns[lacked_by] = Columns(orders, ids, np.zeros(len(rows), np.uint32))
        return self._columns[lacked_by]

    def view(self, base: View) -> View:
        """A session's view: the replica's own, corrected by the set-aside elements."""
        if not self._elements:
            return base
        return base.corrected(self.columns(LackedBy.HERE), self.columns(LackedBy.THERE))


# --- what was moved ----------------------------------------------------------------------------


class Moved:
    """The differences that one pass found, by ID with their orders.

    `offered`: the peer lacks them. `needed`: this side lacks them. `unnamed`: set-aside elements that
    the view has and the peer no longer names. `held`: needed elements that this side has committed, those
    inside others, too.
    `passed_over`: needed elements, packed, that could not be stored and not be remembered as set aside;
    `not_taken`: the same of the offered ones. `is_overfull`: there were too many to remember.
    """

    def __init__(self) -> None:
        self.offered: dict[bytes, int] = {}
        self.needed: dict[bytes, int] = {}
        self.unnamed: dict[bytes, int] = {}
        self.held: set[bytes] = set()
        self.not_taken: set[bytes] = set()
        self.passed_over = bytearray()
        self.is_overfull = False

    def offer(self, orders: U64, ids: U8) -> None:
        """Record elements that the peer lacks: orders u64[n], ids u8[n, 32]."""
        if len(self.offered) + len(ids) > MOVED_MAX:
            self.give_up()
        if not self.is_overfull:
            self.offered |= zip(map(bytes, ids), orders.tolist(), strict=True)

    def need(self, elements: Iterable[Element]) -> None:
        """Record elements that this side lacked, once their names are known."""
        if self.is_overfull:
            return
        self.needed |= {each.element_id: each.order for each in elements}
        if len(self.needed) > NEEDED_MAX:
            self.give_up()

    def pass_over(self, element: AsideElement) -> None:
        """Record an element that was found, and for which there was no room among those set aside."""
        element_id = element.element_id
        if element_id in self.offered:
            self.not_taken.add(element_id)
        elif (order := self.needed.pop(element_id, None)) is not None:
            self.passed_over += pack_elements({element_id: order})
        if self.passed_over_count > PASSED_OVER_MAX:
            self.give_up()

    @property
    def passed_over_count(self) -> int:
        """The number of needed elements that were passed over."""
        return len(self.passed_over) // ELEMENT_BYTES

    def hold(self, element_id: bytes) -> None:
        """Record a needed element that this side has committed."""
        if not self.is_overfull:
            self.held.add(element_id)

    def leave_unnamed(self, orders: U64, ids: U8) -> None:
        """Record set-aside elements that the peer no longer names."""
        self.unnamed |= zip(map(bytes, ids), orders.tolist(), strict=True)

    def give_up(self) -> None:
        """Remember nothing: the pass moves too much for a baseline."""
        self.is_overfull = True
        for each in (self.offered, self.needed, self.unnamed):
            each.clear()
        self.held.clear()
        self.not_taken.clear()
        self.passed_over.clear()

    def accounts_for(self, view: View, theirs: Total) -> bool:
        """Whether these differences explain the whole difference between `view` and the peer's total."""
        if self.is_overfull:
            return False
        added = chain([columns_of(self.needed)], self._passed_over_in_pieces())
        return view.total(added, [columns_of(self.offered | self.unnamed)]) == theirs

    def _passed_over_in_pieces(self) -> Iterator[Columns]:
        """The needed elements that were passed over, a few MB at a time."""
        piece_bytes = MOVED_MAX * ELEMENT_BYTES
        for start in range(0, len(self.passed_over), piece_bytes):
            orders, ids = unpack_columns(self.passed_over[start : start + piece_bytes])
            yield Columns(orders, ids, np.zeros(len(ids), np.uint32))

    def counted_in(self, aside: SetAside) -> dict[bytes, int]:
        """The elements that the next baseline counts in: those that the peer got."""
        left = self.offered.keys() - self.not_taken
        return {each: self.offered[each] for each in left if each not in aside}

    def counted_out(self, aside: SetAside) -> dict[bytes, int]:
        """The elements that it counts out: those that the peer has before its mark."""
        here = aside.columns(LackedBy.HERE)
        return self.needed | dict(zip(map(bytes, here.ids), here.orders.tolist(), strict=True))


def columns_of(elements: dict[bytes, int]) -> Columns:
    """Elements, orders by ID, as columns."""
    orders, ids = columns((order, each) for each, order in elements.items())
    return Columns(orders, ids, np.zeros(len(ids), np.uint32))


# --- what the peer acknowledged ----------------------------------------------------------------


@dataclass(slots=True)
class Ledger:
    """Facts that the attempts of a session share, 8 bytes an element.

    Each is a set of heads: `acknowledged` elements, which the peer claims to have stored; `offered` ones, which
    it lacked; `doubted` ones, which it acknowledged and lacked in a later comparison.
    `kept_before`: the elements that the last session sent, and that a total of the peer contained;
    `dropped`: those of them that it lacked now, and stored again. `has_doubts`: it lacked one of them, so its
    other news prove nothing.
    """

    acknowledged: list[U64] = field(default_factory=list)
    offered: list[U64] = field(default_factory=list)
    doubted: list[U64] = field(default_factory=list)
    kept_before: AbstractSet[bytes] = frozenset()
    dropped: set[bytes] = field(default_factory=set)
    has_doubts: bool = False

    @property
    def said(self) -> str:
        """Which elements the peer has dropped since the last session, for people; empty: none."""
        if not self.dropped:
            return ""
        return f"the peer acknowledged {_counted(self.dropped)}, and had dropped them since"

    def acknowledge(self, elements: Collection[Element], stored: Iterable[Element]) -> None:
        """Record elements that the peer claims to have, and those of them that it claims to have stored now."""
        if elements:
            self.acknowledged.append(heads_of(columns(elements)[1]))
        # It had these in the last session, and lacked them now, whatever it claims.
        self.has_doubts |= any(each.element_id in self.kept_before for each in elements)
        self.dropped |= {each.element_id for each in stored} & self.kept_before

    @property
    def offered_count(self) -> int:
        """How many elements the peer lacked."""
        return sum(map(len, self.offered))

    def offer(self, ids: U8) -> None:
        """Record elements that the peer lacks, u8[n, 32].

        Raises SyncError if it has acknowledged one of them, and lacked it before.
        """
        heads = heads_of(np.ascontiguousarray(ids))
        if (again := _known(self.doubted, heads)).any():
            lacking = _counted(set(map(bytes, ids[again])))
            raise misbehaved(f"the peer acknowledged {lacking}, and does not hold them")
        self.doubted.append(heads[_known(self.acknowledged, heads)])
        self.offered.append(heads[~_known(self.offered, heads)])


def _counted(ids: Collection[bytes]) -> str:
    """How many elements, and the names of the first."""
    named = ", ".join(each.hex() for each in sorted(ids)[:NAMED_MAX])
    return f"{len(ids)} elements ({named}{', …' if len(ids) > NAMED_MAX else ''})"


def _known(pieces: list[U64], heads: U64) -> Mask:
    return np.isin(heads, np.concatenate(pieces)) if pieces else np.zeros(len(heads), bool)


# --- the next session --------------------------------------------------------------------------


def brought_columns(baseline: Baseline | None, aside: SetAside) -> tuple[U64, U8]:
    """What the last session brought and did not set aside: orders u64[n], ids u8[n, 32].

    It arrived after this side's mark, so the mark does not show whether it is still here.
    """
    out = unpack_elements(baseline.counted_out) if baseline else {}
    return columns((order, each) for each, order in out.items() if each not in aside)


def news_of(baseline: Baseline, arrived: Arrived) -> Columns:
    """The elements to compare with what arrived at the peer after the baseline.

    Those that arrived here since, without the ones that the last session brought or set aside, and with
    the ones that it sent.
    """
    out = unpack_elements(baseline.counted_out)
    came = zip(map(bytes, arrived.ids), arrived.orders.tolist(), strict=True)
    news = {each: order for each, order in came if each not in out}
    return columns_of(news | unpack_elements(baseline.counted_in))
