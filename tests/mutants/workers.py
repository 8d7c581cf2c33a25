"""Faults planted in workers that hand requests on to the one that writes."""

from __future__ import annotations

from typing import Any

from tests.mutants.fault import Fault, Plant, instead, nothing, returns

_TESTS = "tests/app/http/test_workers_of_a_file.py"


def _fault(name: str, seam: str, plant: Plant, *tests: str) -> Fault:
    return Fault(f"workers: {name}", seam, plant, tuple(f"{_TESTS}::{each}" for each in tests))


def _sibling_alone(right: Any) -> Any:
    def wrong(call: Any) -> Any:
        return [each for each in right(call) if each[0] != b"sdstore-caller"]

    return wrong


def _everybody_is_trusted(right: Any) -> Any:
    from app.callers import Caller

    return lambda encoded: Caller(right(encoded).name)


FAULTS = [
    _fault(
        "headers of a client name the caller",
        "app.http.handing:_PRIVATE",
        instead(b"nothing-begins-so"),
        "test_nobody_outside_names_a_caller",
    ),
    _fault(
        "a request is handed on without its caller",
        "app.http.handing:_headers_of",
        _sibling_alone,
        "test_nobody_outside_names_a_caller",
        "test_grants_of_a_caller_hold_at_the_writer",
    ),
    _fault(
        "grants are lost on the way",
        "app.http.handing:_decoded",
        _everybody_is_trusted,
        "test_a_caller_is_the_same_at_the_other_worker",
    ),
    _fault(
        "a reader answers what writes",
        "app.http.handing:Handing.takes",
        returns(False),
        "test_readers_write_nothing_and_every_acknowledged_message_is_on_all_of_them",
    ),
    _fault(
        "a message goes to whichever worker is asked",
        "app.http.routing:_usually_answered_by",
        returns("any"),
        "test_each_route_that_is_no_get_goes_to_a_worker_that_writes_unless_it_is_known_to_read",
    ),
    _fault(
        "commits are not announced",
        "app.bus:SiblingBus.send_commit",
        nothing,
        "test_live_readers_on_every_worker_hear_commits_and_relayed_messages_soon",
    ),
]
