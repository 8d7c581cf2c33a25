"""Faults planted in the SDS participant."""

from __future__ import annotations

from typing import Any

from tests.mutants.fault import Fault, Plant, after, instead, nothing, returns

_WORLDS = ("tests/simulation/test_participants.py::test_the_laws_hold_in_many_worlds",)
_UNITS = tuple(
    f"tests/sds/test_participant_{name}.py"
    for name in ("acks", "causality", "missing", "restore", "dialects")
)
_ORDERED = ("tests/sds/test_participant_ordered.py", "tests/participant/test_channel_order.py")
_BLOOM = ("tests/sds/test_bloom.py",)
_MEMBER = ("tests/simulation/test_member.py::test_worlds_that_failed_once_hold",)


def _fault(name: str, seam: str, plant: Plant, tests: tuple[str, ...] = _WORLDS) -> Fault:
    return Fault(f"participant: {name}", f"sdstore.sds.{seam}", plant, tests)


def _later_is_first(arrived: Any) -> tuple[int, bytes]:
    return -(arrived.message.lamport_timestamp or 0), arrived.message.message_id.encode()


def _buffered_is_met(causes: Any) -> Any:
    def wrong(incoming: Any, arrived: Any) -> Any:
        right = incoming._is_logged
        incoming._is_logged = lambda each: right(each) or incoming.waits(each)
        try:
            return causes(incoming, arrived)
        finally:
            incoming._is_logged = right

    return wrong


def _save_last(effects: Any, *_: Any) -> Any:
    from sdstore.sds.effects import Save

    return sorted(effects, key=lambda effect: isinstance(effect, Save))


def _forget_what_is_lost(_: Any, incoming: Any, message_id: str, *__: Any) -> None:
    incoming._lost.pop(message_id, None)


def _forget_what_was_skipped(_: Any, incoming: Any, saved: Any) -> None:
    for message_id in saved.passed:
        incoming._passed.discard(message_id)


def _by_name(participant: Any, message: Any) -> Any:
    from sdstore.sds.shares import Member

    return Member(participant._path, message.sender_id, message.sender_id)


def _of_each_one(incoming: Any, message_id: str, named_by: Any) -> bool:
    return message_id in incoming._sync_ids


def _lose_it(incoming: Any, message_id: str, elapsed_ms: int) -> None:
    incoming._lose(message_id, elapsed_ms)
    incoming._lost[message_id].account = None  # for all


def _log_it(participant: Any, message: Any, *, is_own: bool) -> None:
    from sdstore.sds import encode

    participant._take_new(message, encode(message), b"")


def _newest_alone(references: Any, *, is_sync: bool = False) -> Any:
    return tuple(references._entry(place[2]) for place in references._newest)


def _follow_the_wall_clock(clock: Any, now_ms: int) -> None:
    clock.elapsed_ms += now_ms - clock.now_ms
    clock.now_ms = now_ms


def _without_gap(ready: Any, *_: Any) -> Any:
    for arrived in ready:
        arrived.gap = ()
    return ready


def _always_synced(_: Any) -> Any:
    from sdstore.sds.effects import Status

    return property(lambda participant: Status())


def _again(clock: Any) -> int:
    return max(clock._lamport_at(clock.now_ms), clock.lamport)


def _one_filter_is_enough(_: Any, outgoing: Any, message_id: str, sent: Any, *__: Any) -> None:
    sent.chance, sent.is_in_several = 0.0, True


def _other_bytes(effects: Any, *_: Any) -> Any:
    from dataclasses import replace

    from sdstore.sds import Kind
    from sdstore.sds.effects import Broadcast

    return [
        replace(each, frame=each.frame + b"\xf8\x07\x01")
        if isinstance(each, Broadcast) and each.kind is Kind.CONTENT
        else each
        for each in effects
    ]


def _twice(effects: Any, *_: Any) -> Any:
    from sdstore.sds.effects import Deliver

    return [each for e in effects for each in ((e, e) if isinstance(e, Deliver) else (e,))]


FAULTS = [
    _fault("ordered mode names nothing more", "references:References._own", nothing, _ORDERED),
    _fault(
        "ordered mode ends with a restart", "references:References.sent_before", nothing, _ORDERED
    ),
    _fault("histories acknowledge nothing", "outgoing:Outgoing.review_history", nothing, _UNITS),
    _fault("filters acknowledge nothing", "outgoing:Outgoing.review_filter", nothing, _UNITS),
    _fault(
        "one filter acknowledges",
        "outgoing:Outgoing._found_in",
        after(_one_filter_is_enough),
        _UNITS,
    ),
    _fault(
        "IDs with like steps are not reckoned with",
        "bloom:ReceivedFilter.coincidence",
        instead(property(lambda received: 0.0)),
        _BLOOM,
    ),
    _fault(
        "an echo acknowledges",
        "participant:Participant._is_own",
        returns(False),
        (*_UNITS, *_WORLDS),
    ),
    _fault(
        "a dependent is dropped",
        "incoming:Incoming.take_dependents",
        after(lambda ready, *_: ready[1:]),
    ),
    _fault("ties are reversed", "incoming:Arrived.order", instead(property(_later_is_first))),
    _fault("what waits counts as met", "incoming:Incoming.causes", _buffered_is_met),
    _fault("duplicates are delivered", "participant:Participant._is_logged", returns(False)),
    _fault("a delivery comes twice", "participant:Participant._finish", after(_twice)),
    _fault("clocks of others have no bound", "clock:Clock.bound", returns(2**62)),
    _fault(
        "the wall clock ends time-outs",
        "clock:Clock.advance",
        instead(_follow_the_wall_clock),
        (*_WORLDS, *_UNITS),
    ),
    _fault("two messages have one timestamp", "clock:Clock.next_lamport", instead(_again)),
    _fault("Save comes last", "participant:Participant._finish", after(_save_last)),
    _fault(
        "a lost message is not remembered",
        "incoming:Incoming._lose",
        after(_forget_what_is_lost),
        (*_WORLDS, *_UNITS),
    ),
    _fault("the filter never rolls over", "bloom:BloomFilter.roll_over", nothing, _BLOOM),
    _fault("sync messages are logged", "participant:Participant._take_sync", instead(_log_it)),
    _fault(
        "heads are not named",
        "references:References.causal_history",
        instead(_newest_alone),
        (*_WORLDS, *_UNITS),
    ),
    _fault(
        "sync messages name the oldest heads again",
        "references:References.causal_history",
        lambda right: lambda references, **_: right(references),
        _UNITS,
    ),
    _fault("repairs are not answered", "repair:Repair.answers", returns([])),
    _fault(
        "numbers are used again",
        "restoring:last_number",
        instead(lambda log, after: after),
    ),
    _fault("nothing is sent again", "outgoing:Outgoing.due", returns(()), (*_WORLDS, *_UNITS)),
    _fault("a resend has other bytes", "participant:Participant.tick", after(_other_bytes)),
    _fault("nothing is given up", "outgoing:Outgoing.give_up", nothing, (*_WORLDS, *_UNITS)),
    _fault("nothing is delivered again", "participant:Participant._redeliver", nothing),
    _fault(
        "what waits is not saved",
        "incoming:Incoming._save_waiting",
        nothing,
        (*_WORLDS, *_UNITS),
    ),
    _fault("gaps are not declared", "incoming:Incoming.take_dependents", after(_without_gap)),
    _fault("the status is always synced", "participant:Participant.status", _always_synced),
    _fault("what is late is not marked", "incoming:Incoming.passed", nothing),
    _fault("waiting has no bound", "incoming:Incoming.overflow", returns(None)),
    _fault(
        "what is lost is not asked for again",
        "incoming:Incoming._retry_lost",
        nothing,
        (*_WORLDS, *_UNITS),
    ),
    _fault("old heads are not saved", "references:References._save", nothing, _UNITS),
    _fault(
        "what gave way for a missing message is forgotten at a restart",
        "incoming:Incoming.restore",
        after(_forget_what_was_skipped),
        _UNITS,
    ),
    # One hostile member.
    _fault(
        "requests for what one member named have no bound",
        "repair:Repair._may_ask_for",
        returns(True),
        _MEMBER,
    ),
    _fault(
        "a request counts against the first who named the message",
        "repair:Repair.named",
        nothing,
        _MEMBER,
    ),
    _fault(
        "a forged copy that comes first stays",
        "participant:Participant._take_copy_of_logged",
        nothing,
        _MEMBER,
    ),
    _fault(
        "a copy with invented causes waits on",
        "participant:Participant._take_copy_of_waiting",
        nothing,
        _MEMBER,
    ),
    _fault(
        "an author that is named later stays unknown",
        "incoming:Incoming.learn_author",
        nothing,
        _MEMBER,
    ),
    _fault(
        "a reference without the author consumes a head",
        "references:References._can_name_author",
        returns(False),
        _MEMBER,
    ),
    _fault(
        "a sync message of anybody hides the content with its ID",
        "incoming:Incoming._is_sync",
        instead(_of_each_one),
        _MEMBER,
    ),
    _fault(
        "each name has an account", "participant:Participant._member", instead(_by_name), _MEMBER
    ),
    _fault(
        "the causes of what gives way are lost",
        "incoming:Incoming._note",
        instead(_lose_it),
        _MEMBER,
    ),
    _fault(
        "heads are forgotten at a restart",
        "restoring:load_references",
        nothing,
        (*_WORLDS, *_UNITS),
    ),
]
