"""The total that a peer states."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recon.codec import read_total, unpack_asks
from recon.errors import RemoteProtocolError
from recon.events import Fault, Stated
from recon.index import Columns
from recon.initiator import Initiator
from recon.limits import COUNT_MAX, PROTOCOL_VERSION, RANGES_MAX, SUM_BYTES
from recon.responder import respond
from sdstore.wire.recon_pb2 import Answers, ReconRequest, ReconResponse, Total
from tests.recon.test_sync import crowd
from tests.support.recon_talk import HEADER, Element, columns_of, honest, view_of

ELEMENTS = crowd(1, 40, 2**40)
SETS = st.sets(st.sampled_from(sorted(ELEMENTS)))


@settings(deadline=None, max_examples=100)
@given(ours=SETS, theirs=SETS)
def test_the_total_tells_equal_sets_from_all_others(
    ours: set[Element], theirs: set[Element]
) -> None:
    mine = view_of(sorted(ours))
    for other in (theirs, ours):
        request = ReconRequest(version=PROTOCOL_VERSION, total=True)
        total = read_total(respond(view_of(sorted(other)), request))
        assert (total == mine.total()) == (ours == other)
        assert total.count == len(other)


def columns(elements: set[Element]) -> Columns:
    orders, ids = columns_of(sorted(elements))
    return Columns(orders, ids, np.zeros(len(orders), np.uint32))


@settings(deadline=None, max_examples=100)
@given(
    held=SETS,
    added=SETS,
    removed=SETS,
    batch=st.sampled_from([7, 1 << 20]),
)
def test_a_view_with_elements_set_apart_is_the_view_of_that_set(
    held: set[Element], added: set[Element], removed: set[Element], batch: int
) -> None:
    added, removed = added - held, removed & held
    base = view_of(sorted(held), batch)
    apart = base.corrected(columns(added), columns(removed))
    wanted = view_of(sorted((held | added) - removed))
    assert apart.total() == base.total([columns(added)], [columns(removed)]) == wanted.total()
    assert len(base) == len(held)
    initiator = Initiator(apart, HEADER, seed=3)
    request = initiator.next_request()
    assert request is not None
    events = initiator.receive(request.request_id, honest(wanted)(request.message))
    assert events[0] == Stated(len(wanted), agrees=True)
    assert initiator.done
    assert len(apart) == len(wanted)


@pytest.mark.parametrize(
    "total",
    [
        None,
        Total(count=40),
        Total(count=40, sum=bytes(SUM_BYTES + 1)),
        Total(count=COUNT_MAX + 1, sum=bytes(SUM_BYTES)),
    ],
)
def test_an_answer_without_a_total_is_no_proof(total: Total | None) -> None:
    with pytest.raises(RemoteProtocolError) as refusal:
        read_total(ReconResponse(total=total))
    assert refusal.value.code == "total"


@pytest.mark.parametrize("held", [0, 1, 39])
def test_a_peer_that_says_equal_has_to_state_the_same_total(held: int) -> None:
    ours = view_of(sorted(ELEMENTS)[:held])
    for total in (view_of(sorted(ELEMENTS)[: held + 1]).total(), None):
        initiator = Initiator(ours, HEADER)
        request = initiator.next_request()
        assert request is not None
        ranges = len(unpack_asks(request.message.ranges, RANGES_MAX).ranges)
        response = ReconResponse(answers=Answers(answered=ranges))
        if total is not None:
            response.total.count, response.total.sum = total.count, total.sum
        (event,) = initiator.receive(request.request_id, response)
        assert isinstance(event, Fault)
        assert event.error.code == "total"
