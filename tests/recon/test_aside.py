"""Views with elements set aside: they are compared, never offered, and known for what they are."""

from __future__ import annotations

import numpy as np
import pytest

from recon.agreement import SessionKey
from recon.errors import LocalProtocolError
from recon.events import Have, NotThere
from recon.index import Columns
from recon.initiator import Initiator
from recon.view import View
from tests.recon.test_sync import crowd
from tests.support.recon_talk import (
    HEADER,
    Element,
    columns_of,
    converse,
    honest,
    index_of,
    insert,
    set_of,
    view_of,
)

ELEMENTS = sorted(crowd(9, 400, 2**40))
NOTHING: list[Element] = []


def aside(elements: list[Element]) -> Columns:
    orders, ids = columns_of(elements)
    return Columns(orders, ids, np.zeros(len(orders), np.uint32))


def told(view: View, theirs: list[Element]) -> tuple[set[Element], set[Element]]:
    """The elements to send, and the set-aside elements that the peer does not name."""
    out = converse(Initiator(view, HEADER), honest(view_of(theirs)))
    assert out.done
    have, gone = (
        set().union(*(set_of(e.orders, e.ids) for e in out.events if isinstance(e, kind)))
        for kind in (Have, NotThere)
    )
    return have, gone


def test_what_was_set_aside_is_never_offered() -> None:
    ours, disputed = ELEMENTS[:200] + ELEMENTS[210:], ELEMENTS[200:210]
    view = view_of(ours).corrected(aside(disputed), aside(NOTHING))
    have, gone = told(view, ELEMENTS[:100] + ELEMENTS[205:])
    assert have == set(ELEMENTS[100:200])
    assert gone == set(ELEMENTS[200:205])


def test_of_elements_that_share_an_order_the_right_one_is_removed() -> None:
    tied = [(5, bytes([n]) * 32) for n in range(20)]
    unknown = [(5, bytes([7] * 8 + [9] * 24))]  # the same head as one of them
    view = view_of(tied).corrected(aside(NOTHING), aside([tied[3], *unknown]))
    assert len(view) == len(tied) - 1
    assert told(view, tied[:3] + tied[4:]) == (set(), set())


@pytest.mark.parametrize("added", [ELEMENTS[100:110], NOTHING], ids=["added", "nothing"])
def test_a_corrected_view_stays_as_it_is(added: list[Element]) -> None:
    index = index_of(ELEMENTS[:100])
    view = View(index, HEADER.key()).corrected(aside(added), aside(ELEMENTS[:5]))
    insert(index, ELEMENTS[90:120])
    held = ELEMENTS[5:100] + added
    assert view.total() == view_of(held).total()
    assert told(view, held) == (set(), set())
    # The added elements have come by now: a view that grew would count them twice.
    for change in (view.refresh, lambda: view.under(SessionKey(bytes(16)))):
        with pytest.raises(LocalProtocolError):
            change()


def test_an_index_tells_which_elements_it_holds() -> None:
    index = index_of(ELEMENTS[:300:2], batch=40)
    held = index.holds(*columns_of(ELEMENTS))
    assert set(np.flatnonzero(held).tolist()) == set(range(0, 300, 2))
    assert index.holds(*columns_of(NOTHING)).tolist() == []
