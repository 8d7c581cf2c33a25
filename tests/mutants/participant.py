"""Faults planted in the SDS participant."""

from __future__ import annotations

from typing import Any

from tests.mutants.fault import Fault, Plant, after, instead, nothing, returns

_WORLDS = ("tests/simulation/test_participants.py::test_the_laws_hold_in_many_worlds",)
_UNITS = tuple(
    f"tests/sds/test_participant_{name}.py"
    for name in ("acks", "causality", "missing", "restore", "dialects")
)
_MEMBER = ("tests/simulation/test_member.py::test_worlds_that_failed_once_hold",)


def _fault(name: str, seam: str, plant: Plant, tests: tuple[str, ...] = _WORLDS) -> Fault:
    return Fault(f"participant: {name}", f"sdstore.sds.{seam}", plant, tests)


def _later_is_first(arrived: Any) -> tuple[int, bytes]:
    return -(arrived.message.lamport_timestamp or 0), arrived.message.message_id.encode()


def _save_last(effects: Any, *_: Any) -> Any:
    from sdstore.sds.effects import Save

    return sorted(effects, key=lambda effect: isinstance(effect, Save))


def _without_gap(ready: Any, *_: Any) -> Any:
    for arrived in ready:
        arrived.gap = ()
    return ready


FAULTS = [
    _fault("histories acknowledge nothing", "outgoing:Outgoing.review_history", nothing, _UNITS),
    _fault(
        "a dependent is dropped",
        "incoming:Incoming.take_dependents",
        after(lambda ready, *_: ready[1:]),
    ),
    _fault("ties are reversed", "incoming:Arrived.order", instead(property(_later_is_first))),
    _fault("duplicates are delivered", "participant:Participant._is_logged", returns(False)),
    _fault("clocks of others have no bound", "clock:Clock.bound", returns(2**62)),
    _fault("Save comes last", "participant:Participant._finish", after(_save_last)),
    _fault("repairs are not answered", "repair:Repair.answers", returns([])),
    _fault(
        "numbers are used again",
        "restoring:last_number",
        instead(lambda log, after: after),
    ),
    _fault("nothing is sent again", "outgoing:Outgoing.due", returns(()), (*_WORLDS, *_UNITS)),
    _fault(
        "what waits is not saved",
        "incoming:Incoming._save_waiting",
        nothing,
        (*_WORLDS, *_UNITS),
    ),
    _fault("gaps are not declared", "incoming:Incoming.take_dependents", after(_without_gap)),
    _fault("waiting has no bound", "incoming:Incoming.overflow", returns(None)),
    _fault(
        "a forged copy that comes first stays",
        "participant:Participant._take_copy_of_logged",
        nothing,
        _MEMBER,
    ),
]
