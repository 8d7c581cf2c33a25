"""What one pass moved each way, and the arithmetic that proves the rest equal.

Both views of a pass are as of one place in arrival order each: this side's when the pass began, the
peer's when it gave its first answer. The peer states the total of its view. If this side's total,
without the elements that the peer lacks and with those that this side lacks, is the peer's, then the
pass found every difference between the two views. That holds however fast both sets grow meanwhile.

What was moved arrives after the receiver's place, so the next comparison would see it on one side
only. Therefore the `Baseline` of the next session counts it in or out by ID.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from recon.elements import U8, U64
from recon.hashing import Total
from recon.marks import Arrived
from recon.store import Columns
from recon.view import View
from sdstore.sync.memory import (
    ELEMENT_BYTES,
    SET_ASIDE_MAX,
    AsideElement,
    Baseline,
    LackedBy,
    SetAside,
    pack_elements,
    unpack_columns,
    unpack_elements,
)
from sdstore.sync.replica import Element, Replica, columns

MOVED_MAX = (
    65_536  # elements each way that a baseline counts in or out: 5 MB; more need a new session
)
NEEDED_MAX = MOVED_MAX + SET_ASIDE_MAX  # named at once, until those that are set aside are known
PASSED_OVER_MAX = 1 << 20  # elements that are neither stored nor remembered: 40 MB in one session


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
        removed = self.offered | self.unnamed
        needed, over = columns_of(self.needed), unpack_columns(self.passed_over)
        orders = np.concatenate((needed.orders, over[0]))
        ids = np.concatenate((needed.ids, over[1]))
        added = Columns(orders, ids, np.zeros(len(ids), np.uint32))
        return view.total(added, columns_of(removed)) == theirs

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


def news_of(
    baseline: Baseline, arrived: Arrived, replica: Replica, aside: SetAside
) -> Columns | None:
    """The elements to compare with what arrived at the peer after the baseline.

    Those that arrived here since, without the ones that the last session brought or set aside, and with
    the ones that it sent. None if something that it brought is gone again: it arrived after this side's
    mark, so the mark does not show that.
    """
    out = unpack_elements(baseline.counted_out)
    brought = [(order, each) for each, order in out.items() if each not in aside]
    if brought and not replica.holds(*columns(brought)).all():
        return None
    came = zip(map(bytes, arrived.ids), arrived.orders.tolist(), strict=True)
    news = {each: order for each, order in came if each not in out}
    return columns_of(news | unpack_elements(baseline.counted_in))
