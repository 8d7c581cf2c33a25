"""The clauses of the SDS specification that concern a participant, one by one, in its order.

tests/sds/specification.md lists every clause with the test that covers it; those that other files cover better
are not repeated here.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from sdstore.sds import (
    Acknowledged,
    Broadcast,
    Deliver,
    Dialect,
    HistoryEntry,
    Kind,
    MemoryLog,
    Message,
    Missing,
    Participant,
    ParticipantOptions,
    PossiblyAcknowledged,
    decode,
    encode,
)
from sdstore.sds.bloom import ERROR_RATE, BloomFilter, Form, hash_pair, read_filter
from sdstore.sds.outgoing import Acknowledgement
from sdstore.sds.repair import RepairOptions
from tests.support.participants import CHANNEL, NOON_MS, Device, of

FILTERED = ParticipantOptions(sync_ms=0, repair=None)
SYNCING = ParticipantOptions(sync_ms=30_000, repair=None)


def sent(effects: list[object], kind: Kind = Kind.CONTENT) -> Message:
    """The only broadcast message of a kind."""
    (frame,) = [e.frame for e in effects if isinstance(e, Broadcast) and e.kind is kind]
    return decode(frame)[0]


def contains(message: Message, message_id: str) -> bool:
    received = read_filter(message.bloom_filter)
    return received is not None and received.contains(hash_pair(message_id, received.form))


def synced(device: Device) -> Message:
    """The next sync message of a device."""
    for _ in range(400):
        effects = device.wait(1)
        if any(isinstance(each, Broadcast) and each.kind is Kind.SYNC for each in effects):
            return sent(effects, Kind.SYNC)
    raise AssertionError("no sync message")


# ---- wire protocol


def test_a_message_names_its_sender_its_channel_and_itself() -> None:
    message, _ = decode(Device("ada").say("one"))
    assert message.sender_id == "ada"
    assert message.channel_id == CHANNEL
    assert message.message_id


def test_a_channel_can_be_called_0() -> None:
    message = sent(Participant("0", "ada").send(b"one", NOON_MS))
    assert message.channel_id == "0"
    assert of(Deliver, Participant("0", "bob").receive(encode(message), NOON_MS))
    assert not of(Deliver, Participant("", "bob").receive(encode(message), NOON_MS))


def test_message_ids_differ_between_participants_channels_and_times() -> None:
    ids = {
        sent(Participant(channel, sender).send(b"ok", now_ms)).message_id
        for channel in ("a", "b", "ab")
        for sender in ("a", "b", "ba", "")
        for now_ms in (NOON_MS, NOON_MS + 1)
    }
    assert len(ids) == 24


# ---- state


def test_the_clock_begins_at_the_current_time_in_milliseconds() -> None:
    participant = Participant(CHANNEL, "ada")
    participant.tick(NOON_MS)
    assert participant.lamport_timestamp == NOON_MS
    old = Participant(CHANNEL, "ada", options=ParticipantOptions(dialect=Dialect.V1))
    old.tick(NOON_MS)
    assert old.lamport_timestamp == NOON_MS // 1_000  # nanoseconds do not fit into an int32


def test_every_channel_has_a_clock_a_filter_and_a_log_of_its_own() -> None:
    one, other = Participant("one", "ada"), Participant("other", "ada")
    one.send(b"text", NOON_MS)
    assert (len(one.log), len(other.log)) == (1, 0)
    assert sent(other.send(b"text", NOON_MS)).bloom_filter == BloomFilter().to_bytes()


def test_the_filter_of_a_participant_is_rolled_over_at_its_capacity() -> None:
    ada = Device("ada", replace(FILTERED, bloom_capacity=50))
    ids = [decode(ada.say(str(number)))[0].message_id for number in range(200)]
    message, _ = decode(ada.say("last"))
    received = read_filter(message.bloom_filter, 50)
    assert received is not None
    assert all(received.contains(hash_pair(each)) for each in ids[-25:])
    assert sum(received.contains(hash_pair(each)) for each in ids[:100]) <= 2
    assert received.false_positive_rate <= ERROR_RATE
    assert len(message.bloom_filter) == len(BloomFilter(50).to_bytes())


def test_a_sent_message_goes_through_the_three_states() -> None:
    ada, bob = Device("ada", FILTERED), Device("bob", FILTERED)
    frames = [ada.say(text) for text in ("one", "two", "three")]
    message_id = decode(frames[0])[0].message_id

    def state() -> Acknowledgement:
        found = ada.participant.sent_state(message_id)
        assert found is not None
        return found.acknowledgement

    assert state() is Acknowledgement.UNACKNOWLEDGED
    bob.hear(*frames)
    effects = ada.hear(bob.say("four"))  # names two and three; its filter has one
    assert [each.message_id for each in of(PossiblyAcknowledged, effects)] == [message_id]
    assert state() is Acknowledgement.POSSIBLY
    assert ada.participant.status.unacknowledged == 1
    ada.hear(bob.say("five"))
    assert state() is Acknowledgement.ACKNOWLEDGED
    assert ada.participant.status.unacknowledged == 0


def test_the_log_is_ordered_by_timestamp_whatever_the_order_of_arrival() -> None:
    bob = Device("bob")
    for lamport in (5, 3, 9, 1, 7):
        bob.hear(encode(Message(f"m{lamport}", CHANNEL, "ada", lamport, content=b"%d" % lamport)))
    assert bob.order == ["1", "3", "5", "7", "9"]
    assert bob.texts == ["5", "3", "9", "1", "7"]  # none depends on another


# ---- sending


def test_the_timestamp_of_a_message_is_the_larger_of_the_time_and_one_more() -> None:
    participant = Participant(CHANNEL, "ada")
    stamps = [
        sent(participant.send(b"%d" % number, now_ms)).lamport_timestamp
        for number, now_ms in enumerate((NOON_MS, NOON_MS, NOON_MS + 50, NOON_MS - 9_000))
    ]
    assert stamps == [NOON_MS + 1, NOON_MS + 2, NOON_MS + 50, NOON_MS + 51]


def test_the_history_lists_the_two_messages_before_in_order_with_their_senders() -> None:
    ada, bob = Device("ada"), Device("bob")
    first, second, third = ada.say("1"), ada.say("2"), ada.say("3")
    bob.hear(first, second, third)
    message, _ = decode(bob.say("4"))
    ids = [decode(frame)[0].message_id for frame in (second, third)]
    assert message.causal_history == tuple(HistoryEntry(each, b"", "ada") for each in ids)


def test_the_history_carries_the_retrieval_hints_that_are_known() -> None:
    participant = Participant(CHANNEL, "ada")
    participant.send(b"one", NOON_MS, b"hint of one")
    participant.receive(
        encode(Message("m", CHANNEL, "bob", NOON_MS + 5, content=b"x")), NOON_MS, b"hint of m"
    )
    message = sent(participant.send(b"two", NOON_MS + 9))
    assert {entry.retrieval_hint for entry in message.causal_history} == {
        b"hint of one",
        b"hint of m",
    }


def test_the_filter_of_a_message_is_the_state_before_it() -> None:
    ada = Device("ada", FILTERED)
    first, _ = decode(ada.say("one"))
    second, _ = decode(ada.say("two"))
    assert contains(second, first.message_id)
    assert not contains(second, second.message_id)
    assert first.bloom_filter == BloomFilter().to_bytes()


@pytest.mark.parametrize("form", Form)
def test_the_filter_is_sent_in_the_chosen_form(form: Form) -> None:
    ada = Device("ada", replace(FILTERED, bloom=form))
    ada.say("one")
    received = read_filter(decode(ada.say("two"))[0].bloom_filter)
    assert received is not None
    assert received.form is form


# ---- receiving


def test_a_received_id_enters_the_filter_when_it_has_content_only() -> None:
    bob = Device("bob", FILTERED)
    waiting = Message("m2", CHANNEL, "ada", 2, (HistoryEntry("m1"),), content=b"x")
    sync = Message("sync-1", CHANNEL, "ada", 3)
    ephemeral = Message("e1", CHANNEL, "ada", content=b"x")
    bob.hear(*map(encode, (waiting, sync, ephemeral)))
    message, _ = decode(bob.say("one"))
    assert contains(message, "m2")  # although it waits for m1
    assert not contains(message, "sync-1")
    assert not contains(message, "e1")


def test_acknowledgements_are_reviewed_before_the_message_is_delivered() -> None:
    ada, bob = Device("ada"), Device("bob")
    bob.hear(ada.say("one"))
    effects = ada.hear(bob.say("two"))
    kinds = [type(each) for each in effects]
    assert kinds.index(Acknowledged) < kinds.index(Deliver)


# ---- delivering


def test_a_delivered_message_moves_the_clock_to_its_timestamp_and_a_waiting_one_does_not() -> None:
    bob = Device("bob")
    bob.participant.tick(NOON_MS)
    later = Message("m2", CHANNEL, "ada", NOON_MS + 700, (HistoryEntry("m1"),), content=b"x")
    bob.hear(encode(later))
    assert bob.participant.lamport_timestamp == NOON_MS
    bob.hear(encode(Message("m1", CHANNEL, "ada", NOON_MS + 600, content=b"x")))
    assert bob.participant.lamport_timestamp == NOON_MS + 700
    bob.hear(encode(Message("m0", CHANNEL, "ada", NOON_MS - 500, content=b"x")))
    assert bob.participant.lamport_timestamp == NOON_MS + 700


def test_answers_to_a_message_of_the_far_future_come_before_it_in_the_log_and_after_it_in_delivery() -> (
    None
):
    bob, cleo = Device("bob"), Device("cleo")
    future = encode(Message("future", CHANNEL, "ada", 2**63 - 1, content=b"future"))
    bob.hear(future)
    answer = bob.say("answer")
    assert [entry.message_id for entry in decode(answer)[0].causal_history] == ["future"]
    assert bob.participant.lamport_timestamp == NOON_MS + 1
    cleo.hear(answer, future)
    assert cleo.texts == ["future", "answer"]
    assert cleo.order == bob.order == ["answer", "future"]


def test_equal_timestamps_are_ordered_by_ascending_id() -> None:
    bob = Device("bob")
    for message_id in ("b", "a", "B", "c"):
        bob.hear(encode(Message(message_id, CHANNEL, "ada", 5, content=message_id.encode())))
    assert bob.order == ["B", "a", "b", "c"]


# ---- sync messages


def test_a_sync_message_has_no_content_and_a_timestamp_history_and_filter_like_any_other() -> None:
    ada = Device("ada", SYNCING)
    first, _ = decode(ada.say("one"))
    sync = synced(ada)
    assert sync.content == b""
    assert sync.lamport_timestamp == ada.now_ms
    assert [entry.message_id for entry in sync.causal_history] == [first.message_id]
    assert contains(sync, first.message_id)


def test_a_sync_message_of_ours_leaves_no_trace_but_the_clock() -> None:
    ada = Device("ada", SYNCING)
    ada.say("one")
    sync = synced(ada)
    assert ada.participant.sent_state(sync.message_id) is None
    assert not ada.log.contains(sync.message_id)
    assert len(ada.log) == 1
    message, _ = decode(ada.say("two"))
    assert sync.message_id not in {entry.message_id for entry in message.causal_history}
    assert not contains(message, sync.message_id)
    assert (message.lamport_timestamp or 0) > (sync.lamport_timestamp or 0)


def test_a_received_sync_message_is_reviewed_shows_what_is_missing_and_is_forgotten() -> None:
    ada = Device("ada")
    one, _ = decode(ada.say("one"))
    sync = Message(
        "sync-1", CHANNEL, "bob", NOON_MS + 5, (HistoryEntry(one.message_id), HistoryEntry("gone"))
    )
    before = ada.participant.lamport_timestamp
    effects = ada.hear(encode(sync))
    assert [each.message_id for each in of(Acknowledged, effects)] == [one.message_id]
    assert [e.message_id for each in of(Missing, effects) for e in each.entries] == ["gone"]
    assert ada.participant.status.waiting == 0
    assert len(ada.log) == 1
    assert ada.participant.lamport_timestamp == before
    effects = ada.hear(encode(replace(sync, causal_history=(HistoryEntry("gone too"),))))
    assert of(Missing, effects)  # the same ID again is not a duplicate


def test_sync_messages_of_version_1_repeat_a_timestamp() -> None:
    """There a sync message does not increment the clock. It is read like any other."""
    ada, bob = Device("ada"), Device("bob")
    message, _ = decode(ada.say("one"))
    sync = Message("s", CHANNEL, "", message.lamport_timestamp, (HistoryEntry(message.message_id),))
    effects = bob.hear(encode(sync, Dialect.V1))
    assert [e.message_id for each in of(Missing, effects) for e in each.entries] == [
        message.message_id
    ]


# ---- ephemeral messages


def test_an_ephemeral_message_has_no_timestamp_history_or_filter_and_is_not_sent_again() -> None:
    ada = Device("ada", ParticipantOptions(sync_ms=0, repair=None, resend_ms=1_000))
    ada.carry_out(ada.participant.send(b"typing", ada.now_ms, ephemeral=True))
    message = sent(ada.effects, Kind.EPHEMERAL)
    assert (message.lamport_timestamp, message.causal_history, message.bloom_filter) == (
        None,
        (),
        b"",
    )
    assert ada.participant.status.unacknowledged == 0
    assert not of(Broadcast, ada.wait(60))
    assert len(ada.log) == 0


# ---- SDS-R

REPAIRING = ParticipantOptions(bloom=None, resend_ms=10**9, resend_ms_max=10**9)


def orphan(number: int) -> bytes:
    """A message of ada whose cause, a message of cleo, is missing."""
    cause = HistoryEntry(f"lost {number}", b"", "cleo")
    return encode(Message(f"m{number}", CHANNEL, "ada", number, (cause,), content=b"x"))


def test_content_and_sync_messages_ask_for_what_is_due_at_most_three_and_nothing_before() -> None:
    bob = Device("bob", replace(REPAIRING, sync_ms=0))
    bob.hear(*(orphan(number) for number in range(1, 6)))
    assert decode(bob.say("too early"))[0].repair_request == ()
    bob.wait(120)
    first, second = (decode(bob.say(text))[0].repair_request for text in ("now", "and now"))
    assert len(first) == 3
    assert {entry.message_id for entry in first + second} >= {f"lost {n}" for n in range(1, 6)}
    assert {entry.sender_id for entry in first} == {"cleo"}
    cleo = Device("cleo", REPAIRING)
    cleo.hear(orphan(1))
    asked = [decode(e.frame)[0].repair_request for e in of(Broadcast, cleo.wait(121))]
    assert any(asked)


def test_a_due_request_is_sent_although_others_sent_sync_messages() -> None:
    bob = Device("bob", REPAIRING)
    bob.hear(orphan(1))
    sync = encode(Message("s", CHANNEL, "dan", 1))
    requests = []
    for _ in range(121):
        bob.hear(sync)  # puts our own sync message off
        broadcasts = of(Broadcast, bob.wait(1))
        requests += [decode(each.frame)[0].repair_request for each in broadcasts]
    assert [len(each) for each in requests] == [1] * len(requests) != []


def test_a_request_is_answered_with_the_frame_as_its_author_sent_it() -> None:
    ada, bob = Device("ada", REPAIRING), Device("bob", REPAIRING)
    frame = ada.say("one") + b"\xf8\x07\x01"  # with an unknown field
    bob.hear(frame)
    request = HistoryEntry(decode(frame)[0].message_id, b"", "ada")
    bob.hear(encode(Message("s", CHANNEL, "cleo", NOON_MS, repair_request=(request,))))
    answers = [e.frame for e in of(Broadcast, bob.wait(121)) if e.kind is Kind.CONTENT]
    assert answers == [frame]


def test_a_copy_of_a_message_cancels_the_answer_with_it() -> None:
    ada, bob = Device("ada", REPAIRING), Device("bob", REPAIRING)
    frame = ada.say("one")
    bob.hear(frame)
    request = HistoryEntry(decode(frame)[0].message_id, b"", "ada")
    bob.hear(encode(Message("s", CHANNEL, "cleo", NOON_MS, repair_request=(request,))), frame)
    assert not [e for e in of(Broadcast, bob.wait(121)) if e.kind is Kind.CONTENT]


def test_a_participant_without_repair_neither_asks_nor_answers() -> None:
    bob = Device("bob", replace(REPAIRING, repair=None))
    own = bob.say("one")
    bob.hear(orphan(1))
    request = HistoryEntry(decode(own)[0].message_id, b"", "bob")
    bob.hear(encode(Message("s", CHANNEL, "cleo", NOON_MS, repair_request=(request,))))
    for effect in of(Broadcast, bob.wait(200)):
        assert effect.kind is Kind.SYNC
        assert decode(effect.frame)[0].repair_request == ()


def test_the_defaults_of_repair_are_those_that_the_specification_recommends() -> None:
    options = RepairOptions()
    assert options.t_min_ms >= 30_000
    assert 120_000 <= options.t_max_ms <= 600_000
    assert options.requests_per_frame == 3
    assert ParticipantOptions().repair == options


def test_a_log_keeps_the_frame_of_every_message() -> None:
    ada = Device("ada")
    frame = ada.say("one")
    bob = Participant(CHANNEL, "bob", log=MemoryLog())
    bob.receive(frame, NOON_MS)
    message_id = decode(frame)[0].message_id
    assert bob.log.frame(message_id) == ada.log.frame(message_id) == frame
