"""Messages that stores refuse or keep apart: what their author does, and what those who wait for them do."""

from __future__ import annotations

import pytest

from sdstore.sds import (
    Acknowledged,
    Broadcast,
    Deliver,
    GaveUp,
    HistoryEntry,
    LocalProtocolError,
    Lost,
    Message,
    OnLost,
    ParticipantOptions,
    Publish,
    Rejected,
    Status,
    StoredRemotely,
    decode,
    encode,
)
from sdstore.sds.participant import FRAME_BYTES_MAX
from tests.support.participants import CHANNEL, NOON_MS, Device, of

QUIET = ParticipantOptions(bloom=None, sync_ms=0)
ORDERED = ParticipantOptions(bloom=None, sync_ms=0, ordered=True)


def id_of(frame: bytes) -> str:
    return decode(frame)[0].message_id


def history_of(frame: bytes) -> list[str]:
    return [entry.message_id for entry in decode(frame)[0].causal_history]


def written(message_id: str, lamport: int, *causes: str, sender: str = "bob") -> bytes:
    history = tuple(HistoryEntry(cause) for cause in causes)
    return encode(
        Message(message_id, CHANNEL, sender, lamport, history, content=message_id.encode())
    )


# ---- the author


def test_a_refused_message_is_never_named_again_also_after_a_restart() -> None:
    ada = Device("ada", QUIET)
    first, bad = ada.say("first"), ada.say("bad")
    assert of(Rejected, ada.carry_out(ada.participant.rejected(id_of(bad), "policy_refused"))) == [
        Rejected(id_of(bad), "policy_refused")
    ]
    assert history_of(ada.say("second")) == [id_of(first)]
    ada.crash()
    later = [history_of(ada.say(str(number))) for number in range(3)]
    assert id_of(bad) not in {each for history in later for each in history}


def test_what_a_refused_message_named_is_named_by_the_next_one_instead() -> None:
    ada = Device("ada", ParticipantOptions(bloom=None, sync_ms=0, history_size=1))
    ada.hear(written("b1", NOON_MS + 1), written("b2", NOON_MS + 2))
    bad = ada.say("bad")
    assert history_of(bad) == ["b1", "b2"]
    ada.carry_out(ada.participant.rejected(id_of(bad), "policy_refused"))
    ada.crash()
    assert history_of(ada.say("good")) == ["b1", "b2"]


def test_a_refused_message_is_not_broadcast_again_nor_counted_and_can_still_be_acknowledged() -> (
    None
):
    ada = Device("ada", QUIET)
    bad = ada.say("bad")
    ada.carry_out(ada.participant.rejected(id_of(bad), "policy_refused"))
    ada.crash()
    assert not of(Broadcast, ada.wait(7_200, step_s=60))
    assert ada.participant.status.unacknowledged == 0
    assert ada.participant.store_status.unstored == 0
    heard = ada.hear(written("b1", NOON_MS + 1, id_of(bad)))
    assert of(Acknowledged, heard) == [Acknowledged(id_of(bad))]
    assert ada.participant.sent_state(id_of(bad)).is_rejected  # type: ignore[union-attr]


# ---- ordered: publish first


def test_an_ordered_message_enters_the_log_when_a_store_has_it() -> None:
    ada = Device("ada", ORDERED)
    ada.has_store = False
    effects = ada.carry_out(ada.participant.send(b"first", NOON_MS))
    (published,) = of(Publish, effects)
    assert not of(Broadcast, effects)
    assert len(ada.log) == 0
    assert ada.participant.store_status.unstored == 1
    with pytest.raises(LocalProtocolError, match="unpublished"):
        ada.participant.send(b"second", NOON_MS)
    effects = ada.carry_out(ada.participant.stored(published.message_id))
    assert [each.frame for each in of(Broadcast, effects)] == [published.frame]
    assert of(StoredRemotely, effects)
    assert ada.order == ["first"]


def test_a_refused_ordered_message_is_void_and_the_chain_goes_on_without_it() -> None:
    ada = Device("ada", ORDERED)
    first = ada.say("first")
    ada.has_store = False
    (bad,) = of(Publish, ada.carry_out(ada.participant.send(b"bad", NOON_MS)))
    ada.carry_out(ada.participant.rejected(bad.message_id, "quarantined"))
    assert Rejected(bad.message_id, "quarantined") in ada.effects
    ada.has_store = True
    assert history_of(ada.say("second")) == [id_of(first)]
    assert ada.order == ["first", "second"]


@pytest.mark.parametrize("is_heard_from_others", [False, True])
def test_a_restart_before_the_answer_publishes_the_same_message_again(
    is_heard_from_others: bool,
) -> None:
    ada = Device("ada", ORDERED)
    first = ada.say("first")
    ada.has_store = False
    (sent,) = of(Publish, ada.carry_out(ada.participant.send(b"second", NOON_MS)))
    ada.crash()
    assert of(Publish, ada.wait(1)) == [sent]
    if is_heard_from_others:  # the store had it: somebody named it, and it comes back
        ada.hear(written("b1", NOON_MS + 9, sent.message_id), sent.frame)
        assert ada.texts == ["b1"]
    else:
        ada.carry_out(ada.participant.stored(sent.message_id))
    ada.has_store = True
    assert history_of(sent.frame) == [id_of(first)]
    assert history_of(ada.say("third"))[0] == sent.message_id


# ---- those who wait


def test_what_no_store_will_ever_give_is_lost_at_once_and_heals_when_it_is_released() -> None:
    bob = Device("bob", QUIET)
    good = written("m2", NOON_MS, "m1", sender="ada")
    assert not of(Deliver, bob.hear(good))
    effects = bob.carry_out(bob.participant.unobtainable("m1", "withheld"))
    assert of(Lost, effects) == [Lost("m1", "withheld")]
    assert [each.after_gap for each in of(Deliver, effects)] == [("m1",)]
    assert bob.carry_out(bob.participant.unobtainable("m1", "withheld")) == []
    bob.hear(written("m1", NOON_MS - 1, sender="ada"))
    assert bob.texts == ["m2", "m1"]
    assert bob.delivered[-1].is_late
    assert bob.status == Status()


def test_under_hold_a_message_waits_for_a_refused_cause_until_it_arrives() -> None:
    bob = Device("bob", ParticipantOptions(bloom=None, sync_ms=0, on_lost=OnLost.HOLD))
    bob.hear(written("m2", NOON_MS, "m1"))
    effects = bob.carry_out(bob.participant.unobtainable("m1", "refused"))
    assert of(Lost, effects) == [Lost("m1", "refused")]
    assert bob.texts == []
    bob.hear(written("m1", NOON_MS - 1))
    assert bob.texts == ["m1", "m2"]


def test_the_largest_frame_is_sent_and_received_and_one_byte_more_is_not() -> None:
    ada, bob = Device("ada"), Device("bob")
    room = FRAME_BYTES_MAX - len(Device("ada").say("x" * 1_000_000))
    content = "x" * (1_000_000 + room)
    with pytest.raises(LocalProtocolError) as caught:
        ada.say(content + "x")
    assert caught.value.code == "frame_too_large"
    frame = ada.say(content)
    assert len(frame) == FRAME_BYTES_MAX
    bob.hear(frame)
    assert bob.texts == [content]


def test_a_refused_message_is_neither_broadcast_again_nor_given_up() -> None:
    ada = Device("ada", ParticipantOptions(bloom=None, sync_ms=0, sent_max=1))
    refused = id_of(ada.say("refused"))
    ada.carry_out(ada.participant.rejected(refused, "policy_refused"))
    effects = ada.wait(3_600, step_s=10)
    ada.say("next")
    assert not of(Broadcast, effects)
    assert refused not in [each.message_id for each in of(GaveUp, ada.effects)]
