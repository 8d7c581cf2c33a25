"""Two sides reconcile; the outcome is compared with plain Python sets."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from recon.events import Done, Have, Need
from recon.index import RangeIndex
from recon.initiator import Initiator, Options
from recon.ranges import ALL_ORDERS
from recon.responder import resolve_short_ids, respond
from recon.session import SessionHeader

Element = tuple[int, bytes]
HEADER = SessionHeader(b"i" * 16, b"r" * 16, b"")
ELEMENTS = st.sets(
    st.tuples(
        st.integers(0, 40) | st.integers(2**64 - 2, 2**64 - 1), st.binary(min_size=32, max_size=32)
    ),
    max_size=120,
)


def index_of(elements: set[Element]) -> RangeIndex:
    index = RangeIndex()
    rows = sorted(elements)
    ids = np.frombuffer(b"".join(e for _, e in rows), dtype=np.uint8).reshape(-1, 32)
    orders = np.array([o for o, _ in rows], dtype=np.uint64)
    index.insert(orders, ids, np.zeros(len(rows), dtype=np.uint32))
    return index


def identify(
    ours: set[Element], theirs: set[Element], options: Options
) -> tuple[set[Element], set[Element]]:
    """What the initiator has, and needs, in the end."""
    mine, yours = (index_of(s).view(HEADER.key(), None, ALL_ORDERS) for s in (ours, theirs))
    initiator = Initiator(mine, HEADER, options=options)
    have: set[Element] = set()
    need: set[Element] = set()
    done = False
    while (request := initiator.next_request()) is not None:
        for event in initiator.receive(request.request_id, respond(yours, request.message)):
            done = isinstance(event, Done)
            if isinstance(event, Have):
                have |= set(zip(event.orders.tolist(), map(bytes, event.ids), strict=True))
            if isinstance(event, Need):
                orders, ids = resolve_short_ids(yours, event.range, event.short_ids)
                need |= set(zip(orders.tolist(), map(bytes, ids), strict=True))
    assert done
    assert initiator.done
    return have, need


@settings(deadline=None, max_examples=150)
@given(ELEMENTS, ELEMENTS, ELEMENTS, st.integers(2, 20), st.integers(1, 20), st.integers(1, 8))
def test_a_session_finds_exactly_the_two_differences(
    common: set[Element],
    ours: set[Element],
    theirs: set[Element],
    parts: int,
    list_max: int,
    batch: int,
) -> None:
    mine, yours = common | ours, common | theirs
    have, need = identify(mine, yours, Options(parts, list_max, batch))
    assert have == mine - yours
    assert need == yours - mine
