"""Recorded conversations of js-waku, with our participant in the place of each of theirs in turn.

Ours gets the frames that theirs got, at the same times. It must then send the same bytes, deliver the
same messages in the same order, and end in the same state, except where js-waku departs from the
specification. `DEPARTURES` lists these steps; each test says in its comment what the specification asks for.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from sdstore.sds import (
    Acknowledged,
    Broadcast,
    Deliver,
    Effect,
    Ephemeral,
    GaveUp,
    Kind,
    Lost,
    MemoryLog,
    Missing,
    Participant,
    ParticipantOptions,
    PossiblyAcknowledged,
    decode,
)
from sdstore.sds.model import SHA256_CONTENT
from sdstore.sds.outgoing import Acknowledgement
from tests.support.sds_vectors import load

SCENARIOS = {each["name"]: each for each in load("js_waku_two_participants")["scenarios"]}
NEVER_MS = 10**12

LIKE_JS_WAKU = ParticipantOptions(
    id_scheme=SHA256_CONTENT,
    history_size=2,
    history_max=2,  # js-waku does not refer to heads
    # A sync message is due at every tick, and nothing else is: the scenario says when to send one.
    sync_ms=1,
    sync_ms_max=1,
    resend_ms=NEVER_MS,
    resend_possibly_ms=NEVER_MS,
    resend_ms_max=NEVER_MS,
    clock_step_max_ms=NEVER_MS,
)

DELIVER, ACK, POSSIBLY, MISSING = "delivered", "acknowledged", "possibly", "missing"
Event = tuple[str, str]

DEPARTURES: dict[tuple[str, int], tuple[str, list[Event], list[Event]]] = {
    # (scenario, step): why, what js-waku does, what our participant does; by names of texts
    ("loss_then_store_then_acks", 7): (
        "js-waku names a missing message at every sweep; we pause between requests",
        [(MISSING, "a2")],
        [],
    ),
    ("loss_then_store_then_acks", 9): (
        "a message is delivered when its last cause is; js-waku waits for the next sweep",
        [(DELIVER, "a2")],
        [(DELIVER, "a2"), (DELIVER, "a3")],
    ),
    ("loss_then_store_then_acks", 10): ("the same", [(DELIVER, "a3")], []),
    ("loss_then_store_then_acks", 18): (
        "an ephemeral message is delivered at once; js-waku's channel drops it",
        [],
        [("ephemeral", "typing")],
    ),
    ("sds_r_repair_by_sender", 8): (
        "two minutes later we ask for it once more; js-waku does so at its sweeps",
        [],
        [(MISSING, "a2")],
    ),
    ("sds_r_repair_by_sender", 9): (
        "js-waku counts one filter twice if its sender repeats it; ours counts distinct filters",
        [(ACK, "a3")],
        [],
    ),
    ("sds_r_repair_by_sender", 11): (
        "a message is delivered when its last cause is; js-waku waits for the next sweep",
        [(DELIVER, "a2")],
        [(DELIVER, "a2"), (DELIVER, "a3")],
    ),
    ("sds_r_repair_by_sender", 12): ("the same", [(DELIVER, "a3")], []),
    ("sds_r_repair_by_sender", 14): (
        "as step 9: it counts when a history names it",
        [(ACK, "a2"), (DELIVER, "b1")],
        [(ACK, "a2"), (ACK, "a3"), (DELIVER, "b1")],
    ),
}


@dataclass
class Replay:
    """Our participant in the place of one of a scenario's."""

    scenario: dict[str, Any]
    who: str
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.log = MemoryLog()
        self.participant = Participant(
            self.scenario["channel_id"], self.who, options=LIKE_JS_WAKU, log=self.log
        )

    def name_of(self, message_id: str) -> str:
        """The text of a message."""
        return str(self.scenario["message_texts"].get(message_id, message_id))

    def frame(self, recorded: Any) -> bytes:
        name = recorded if isinstance(recorded, str) else recorded["frame"]
        return bytes.fromhex(self.scenario["frames"][name])

    def play(self, step: dict[str, Any]) -> list[Event]:
        """One step of the scenario; our events, in the order of the effects."""
        if step["who"] != self.who:
            return []
        now_ms, operation = step["clock_ms"], step["op"]
        if operation == "send":
            hint = bytes.fromhex(step["retrieval_hint_hex"])
            effects = self.participant.send(step["frame"]["text"].encode(), now_ms, hint)
            (broadcast,) = (each for each in effects if isinstance(each, Broadcast))
            assert broadcast.frame == self.frame(step["frame"])
        elif operation == "send_ephemeral":
            content = step["frame"]["text"].encode()
            effects = self.participant.send(content, now_ms, ephemeral=True)
            self.compare(step, effects, Kind.EPHEMERAL)
        elif operation == "send_sync":
            effects = self.participant.tick(now_ms)
            if step["sent"]:
                self.compare(step, effects, Kind.SYNC)
        elif operation == "receive":
            frame = self.frame(step["frame"])
            hint = hashlib.sha256(frame).digest()  # the recording's own choice
            effects = self.participant.receive(frame, now_ms, hint)
        elif operation == "sweep_repair_incoming":
            effects = self.participant.tick(now_ms)
            answers = [
                each.frame
                for each in effects
                if isinstance(each, Broadcast) and each.kind is Kind.CONTENT
            ]
            assert answers == [self.frame(name) for name in step["rebroadcast_frames"]]
        else:
            assert operation in {"sweep_outgoing", "sweep_incoming", "store_query"}
            effects = []
            if operation == "sweep_outgoing":
                assert self.ours_with(Acknowledgement.UNACKNOWLEDGED) == step["unacknowledged"]
                assert self.ours_with(Acknowledgement.POSSIBLY) == step["possibly_acknowledged"]
        return self.events_of(effects)

    def compare(self, step: dict[str, Any], effects: list[Effect], kind: Kind) -> None:
        """Sync and ephemeral messages are the recorded ones but for the ID, which is made up."""
        (ours,) = (each for each in effects if isinstance(each, Broadcast) and each.kind is kind)
        recorded, _ = decode(self.frame(step["frame"]))
        message, _ = decode(ours.frame)
        assert message.message_id != recorded.message_id
        assert replace(message, message_id=recorded.message_id) == recorded

    def events_of(self, effects: list[Effect]) -> list[Event]:
        events: list[Event] = []
        for effect in effects:
            match effect:
                case Deliver():
                    assert effect.after_gap == ()
                    events.append((DELIVER, self.name_of(effect.message.message_id)))
                case Acknowledged():
                    events.append((ACK, self.name_of(effect.message_id)))
                case PossiblyAcknowledged():
                    events.append((POSSIBLY, self.name_of(effect.message_id)))
                case Missing():
                    events += [(MISSING, self.name_of(e.message_id)) for e in effect.entries]
                case Ephemeral():
                    events.append(("ephemeral", effect.message.content.decode()))
                case GaveUp() | Lost():
                    raise AssertionError(effect)
        return events

    def theirs(self, step: dict[str, Any]) -> list[Event]:
        """The recorded events of js-waku, in the same form."""
        events: list[Event] = []
        for event in step["effects"].get(self.who, {"events": []})["events"]:
            if "delivered" in event:
                events.append((DELIVER, self.name_of(event["delivered"])))
            elif "acknowledged" in event:
                events.append((ACK, self.name_of(event["acknowledged"])))
            elif "possibly_acknowledged" in event:
                events.append((POSSIBLY, self.name_of(event["possibly_acknowledged"])))
            elif "missing" in event:
                events += [(MISSING, self.name_of(each["message_id"])) for each in event["missing"]]
        return events

    @property
    def final(self) -> dict[str, Any]:
        """Our state in the form of the recording."""
        newest = self.log.newest(len(self.log), 2**63 - 1)
        return {
            "lamport": str(self.participant.lamport_timestamp),
            "log": [each.entry.message_id for each in newest],
            "incoming_buffer": [""] * self.participant.status.waiting,
            "outgoing_buffer": self.ours_with(
                Acknowledgement.UNACKNOWLEDGED, Acknowledgement.POSSIBLY
            ),
        }

    def ours_with(self, *wanted: Acknowledgement) -> list[str]:
        """The IDs of our messages in one of these states, in the order of sending."""
        ids = [
            each["frame"]["message_id"] for each in self.scenario["steps"] if each["op"] == "send"
        ]
        states = {each: self.participant.sent_state(each) for each in ids}
        return [each for each, state in states.items() if state and state.acknowledgement in wanted]


ROLES = [(name, who) for name, each in SCENARIOS.items() for who in each["participants"]]


@pytest.mark.parametrize(("name", "who"), ROLES)
def test_our_participant_does_what_js_waku_did_but_for_the_departures(name: str, who: str) -> None:
    scenario = SCENARIOS[name]
    replay = Replay(scenario, who)
    for step in scenario["steps"]:
        theirs, ours = replay.theirs(step), replay.play(step)
        replay.events += ours
        if step["who"] == who and (name, step["step"]) in DEPARTURES:
            _, expected_theirs, expected_ours = DEPARTURES[name, step["step"]]
            assert (theirs, ours) == (expected_theirs, expected_ours), step["step"]
        else:
            assert ours == theirs, step["step"]
    expected = scenario["expected"][who]
    named = {
        kind: [text for found, text in replay.events if found == kind] for kind in (DELIVER, ACK)
    }
    assert named[DELIVER] == [replay.name_of(each) for each in expected["delivered_in_order"]]
    assert sorted(named[ACK]) == sorted(replay.name_of(each) for each in expected["acknowledged"])
    final = {key: value for key, value in expected["final"].items() if key != "possible_acks"}
    assert replay.final == final


def test_every_departure_is_met() -> None:
    """A row of the table that no step needs would hide a difference."""
    for (name, number), (_, theirs, ours) in DEPARTURES.items():
        (step,) = (each for each in SCENARIOS[name]["steps"] if each["step"] == number)
        assert Replay(SCENARIOS[name], step["who"]).theirs(step) == theirs != ours
