"""The cost of one answer for the initiator is bounded for any claims in it."""

from __future__ import annotations

from dataclasses import replace

from recon.events import Expired, Fault
from recon.initiator import Initiator
from recon.limits import DEFAULT_LIMITS, PROTOCOL_VERSION
from sdstore.wire import recon_pb2
from sdstore.wire.recon_pb2 import Answers, ReconResponse
from tests.support.recon_talk import HEADER, NO_TOTAL, view_of

SPLITS, PARTS = 1000, 64


def test_an_answer_beyond_the_budget_is_not_read() -> None:
    limits = replace(DEFAULT_LIMITS, bytes_base=0, bytes_per_element=0)
    initiator = Initiator(view_of([]), HEADER, limits=limits)
    flying = initiator.next_request()
    assert flying is not None
    garbage = Answers(answered=7)
    (fault,) = initiator.receive(
        flying.request_id, ReconResponse(total=NO_TOTAL, version=PROTOCOL_VERSION, answers=garbage)
    )
    assert isinstance(fault, Fault)
    assert fault.error.code == "budget_bytes"


def test_what_was_in_flight_when_a_session_ended_tells_nothing() -> None:
    elements = [(order, bytes([order]) * 32) for order in range(200)]
    initiator = Initiator(view_of(elements), HEADER, limits=replace(DEFAULT_LIMITS, ranges_max=1))
    first, second = initiator.next_request(), initiator.next_request()
    assert first is not None
    assert second is not None
    expired = ReconResponse(status=recon_pb2.NONCE_EXPIRED, responder_nonce=b"n" * 16)
    assert [type(e) for e in initiator.receive(first.request_id, expired)] == [Expired]
    empty_list = Answers(answered=1, kinds=b"\x02", counts=b"\0")
    late = ReconResponse(total=NO_TOTAL, version=PROTOCOL_VERSION, answers=empty_list)
    assert initiator.receive(second.request_id, late) == []
    assert initiator.next_request() is None
