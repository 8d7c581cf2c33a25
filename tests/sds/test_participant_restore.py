"""A restored participant continues where its saved state and its log end, whichever is older."""

from __future__ import annotations

import zlib
from copy import deepcopy

import pytest

from sdstore.sds import (
    Acknowledgement,
    Broadcast,
    Deliver,
    LocalProtocolError,
    Participant,
    ParticipantOptions,
    Save,
    Status,
    decode,
)
from tests.support.participants import CHANNEL, NOON_MS, Device, of


def conversation() -> list[bytes]:
    """Eight messages of two people who answer each other."""
    ada, bob = Device("ada"), Device("bob")
    frames = []
    for number in range(4):
        frames.append(ada.say(f"ada {number}"))
        bob.hear(frames[-1])
        frames.append(bob.say(f"bob {number}"))
        ada.hear(frames[-1])
    return frames


def test_a_crash_at_any_point_repeats_the_same_numbers_and_loses_nothing() -> None:
    arrivals = conversation()
    arrivals = [arrivals[each] for each in (1, 0, 5, 4, 2, 3, 7, 6)]
    steady = Device("eve")
    steady.hear(*arrivals)
    expected = {each.number: each.message.message_id for each in steady.delivered}
    assert len(expected) == 8
    for crash_at in range(len(arrivals) + 1):
        for is_saved in (False, True):  # the crash comes before or after the save of that call
            eve = Device("eve")
            seen: dict[int, str] = {}
            for at, frame in enumerate(arrivals):
                log_before = deepcopy(eve.log)
                effects = eve.participant.receive(frame, eve.now_ms)
                if at == crash_at:
                    if is_saved:
                        for save in of(Save, effects):
                            eve.write(save)
                    else:
                        eve.log = log_before
                    eve.crash()
                    effects = eve.participant.receive(frame, eve.now_ms)
                eve.carry_out(effects)
            for each in eve.delivered:
                assert seen.setdefault(each.number, each.message.message_id) == (
                    each.message.message_id
                )
            assert seen == expected


def test_unconfirmed_deliveries_come_again_with_their_numbers() -> None:
    eve = Device("eve")
    participant = eve.participant
    for frame in conversation():
        for save in of(Save, participant.receive(frame, NOON_MS)):
            eve.write(save)
    for save in of(Save, participant.confirm(3)):
        eve.write(save)
    eve.crash()
    effects = eve.participant.tick(NOON_MS + 1)
    assert [each.number for each in of(Deliver, effects)] == [4, 5, 6, 7, 8]
    assert of(Deliver, eve.participant.tick(NOON_MS + 2)) == []


def test_deliveries_beyond_the_bound_wait_in_the_log_for_confirmations() -> None:
    options = ParticipantOptions(bloom=None, sync_ms=0, deliveries_max=3)
    participant = Participant(CHANNEL, "eve", options=options)
    numbers = []
    for frame in conversation():
        numbers += [each.number for each in of(Deliver, participant.receive(frame, NOON_MS))]
    assert numbers == [1, 2, 3]
    assert [each.number for each in of(Deliver, participant.confirm(2))] == [4, 5]
    assert [each.number for each in of(Deliver, participant.confirm(5))] == [6, 7, 8]
    assert participant.confirm(5) == []
    with pytest.raises(LocalProtocolError, match="unknown_delivery"):
        participant.confirm(9)


def test_a_waiting_message_survives_a_restart() -> None:
    frames = conversation()
    eve = Device("eve")
    eve.hear(frames[1])
    eve.crash()
    assert eve.participant.status == Status(missing=1, waiting=1)
    eve.hear(frames[0])
    assert eve.texts == ["ada 0", "bob 0"]
    assert not [key for key in eve.state if key.startswith("waiting/")]


def test_the_heads_are_found_again_after_a_restart() -> None:
    eve = Device("eve")
    for number in range(5):
        eve.hear(Device(f"peer {number}").say("at the same time"))
    eve.hear(conversation()[0])
    eve.crash()
    message, _ = decode(eve.say("all of you"))
    assert len(message.causal_history) == 6
    eve.crash()
    message, _ = decode(eve.say("and again"))
    assert len(message.causal_history) == 2


@pytest.mark.parametrize("later", [0, 1, 127, 128, 129, 130, 255, 256, 257, 1_000])
@pytest.mark.parametrize("order", ["first", "between", "last"])
def test_a_head_is_named_after_a_restart_however_old_it_is(later: int, order: str) -> None:
    """Ada is not heard by those who talk on; their messages arrive before, around or after hers."""
    ada, bob = Device("ada"), Device("bob")
    bob.now_ms += 1
    heads = [ada.say("is anybody there?"), Device("carol").say("and here?")]
    talk = [bob.say(str(number)) for number in range(later)]
    start = {"first": 0, "between": later // 2, "last": later}[order]
    eve = Device("eve")
    eve.hear(*talk[:start], *heads, *talk[start:])
    for _ in range(2):  # also if the first run after the restart says nothing
        eve.crash()
        eve.wait(1)
        eve.crash()
    message, _ = decode(eve.say("yes"))
    named = {entry.message_id for entry in message.causal_history}
    assert {decode(each)[0].message_id for each in heads} <= named
    eve.hear(*[bob.say("and on") for _ in range(150)])
    eve.crash()
    message, _ = decode(eve.say("no more"))
    named = {entry.message_id for entry in message.causal_history}
    assert not {decode(each)[0].message_id for each in heads} & named  # its first answer did


def test_sent_messages_and_their_acknowledgement_survive_a_restart() -> None:
    ada, bob = Device("ada"), Device("bob")
    first, second = ada.say("one"), ada.say("two")
    first_id, second_id = (decode(each)[0].message_id for each in (first, second))
    bob.hear(first)
    ada.hear(bob.say("one has arrived"))
    ada.crash()
    for message_id, state in (
        (first_id, Acknowledgement.ACKNOWLEDGED),
        (second_id, Acknowledgement.UNACKNOWLEDGED),
    ):
        sent = ada.participant.sent_state(message_id)
        assert sent is not None
        assert sent.acknowledgement is state
    again = of(Broadcast, ada.wait(40))
    assert [each.frame for each in again] == [second]  # identical bytes


def test_the_clock_does_not_go_back_over_a_restart() -> None:
    ada = Device("ada")
    ada.say("one")
    ada.now_ms -= 3_600_000
    ada.crash()
    ada.say("two")
    assert ada.order == ["one", "two"]


def test_a_log_that_is_behind_the_state_gets_its_messages_again_under_new_numbers() -> None:
    eve = Device("eve")
    frames = conversation()
    eve.hear(*frames[:4])
    old_log = deepcopy(eve.log)
    eve.hear(*frames[4:])
    eve.log = old_log
    eve.crash()
    eve.hear(*frames[4:])
    assert [each.number for each in eve.delivered[8:]] == [9, 10, 11, 12]
    assert len(eve.log) == 8
    eve.crash()
    assert eve.wait(1) == []


@pytest.mark.parametrize("key", ["owner", "progress", "waiting/", "sent/"])
def test_a_damaged_value_is_refused_whatever_bit_is_wrong(key: str) -> None:
    eve = Device("eve")
    eve.hear(conversation()[1])
    eve.say("mine")
    (full_key,) = (each for each in eve.state if each.startswith(key))
    value = eve.state[full_key]
    for bit in range(8 * len(value)):
        damaged = bytearray(value)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(LocalProtocolError) as raised:
            Participant.restore(CHANNEL, "eve", {**eve.state, full_key: bytes(damaged)}, eve.log)
        assert raised.value.code == "state_damaged"
    for size in range(len(value)):
        with pytest.raises(LocalProtocolError, match="state_damaged"):
            Participant.restore(CHANNEL, "eve", {**eve.state, full_key: value[:size]}, eve.log)


def test_a_later_format_is_refused() -> None:
    ada = Device("ada")
    ada.say("one")
    later = b"\x02" + ada.state["progress"][1:-4]
    later += zlib.crc32(later, zlib.crc32(b"progress")).to_bytes(4, "big")
    with pytest.raises(LocalProtocolError, match="state_too_new"):
        Participant.restore(CHANNEL, "ada", {**ada.state, "progress": later}, ada.log)


def test_the_state_of_another_participant_is_refused() -> None:
    ada = Device("ada")
    ada.say("one")
    with pytest.raises(LocalProtocolError, match="state_of_another"):
        Participant.restore(CHANNEL, "bob", ada.state, ada.log)
    with pytest.raises(LocalProtocolError, match="state_of_another"):
        Participant.restore("elsewhere", "ada", ada.state, ada.log)


def test_a_message_costs_one_small_record() -> None:
    ada, bob = Device("ada"), Device("bob")
    for number in range(50):
        frame = ada.say(str(number))
        before = len(ada.effects)
        bob.hear(frame)
        assert before
    for save in of(Save, ada.effects)[1:]:
        assert len(save.changes) == 2
        assert sum(len(value or b"") for _, value in save.changes) < 60
    for save in of(Save, bob.effects)[1:]:
        assert [key for key, _ in save.changes] == ["progress"]
