"""What makes our messages acknowledged, and when they are broadcast again."""

from __future__ import annotations

import pytest

from sdstore.sds import (
    Acknowledged,
    Acknowledgement,
    Broadcast,
    GaveUp,
    HistoryEntry,
    Message,
    ParticipantOptions,
    PossiblyAcknowledged,
    Status,
    StoredRemotely,
    decode,
    encode,
)
from sdstore.sds.bloom import BloomFilter
from tests.support.participants import CHANNEL, NOON_MS, Device, of


def id_of(frame: bytes) -> str:
    return decode(frame)[0].message_id


def sync_message(
    sender: str,
    *ids: str,
    message_id: str = "sync",
    history: tuple[str, ...] = (),
    bloom: BloomFilter | bytes | None = None,
) -> bytes:
    """A sync message whose filter holds `ids`, or that has the filter `bloom`."""
    if bloom is None:
        bloom = BloomFilter()
        bloom.rebuild(ids)
    data = bloom if isinstance(bloom, bytes) else bloom.to_bytes()
    entries = tuple(HistoryEntry(each) for each in history)
    return encode(Message(f"{message_id}-{sender}", CHANNEL, sender, NOON_MS, entries, data))


def state_of(device: Device, message_id: str) -> Acknowledgement:
    state = device.participant.sent_state(message_id)
    assert state is not None
    return state.acknowledgement


def test_a_history_that_names_the_message_acknowledges_it() -> None:
    ada, bob = Device("ada"), Device("bob")
    frame = ada.say("hello")
    bob.hear(frame)
    effects = ada.hear(bob.say("yes"))
    assert of(Acknowledged, effects) == [Acknowledged(id_of(frame))]
    assert ada.participant.status == Status()
    assert of(Broadcast, ada.wait(3_600)) == []


def test_an_acknowledgement_in_a_message_that_waits_for_its_causes_counts() -> None:
    ada, bob = Device("ada"), Device("bob")
    mine = ada.say("hello")
    bob.hear(mine)
    bob.say("is lost on the way")
    assert of(Acknowledged, ada.hear(bob.say("arrives"))) == [Acknowledged(id_of(mine))]
    assert ada.texts == []


def test_an_acknowledgement_in_a_duplicate_counts() -> None:
    ada = Device("ada")
    ada.hear(encode(Message("m1", CHANNEL, "bob", 1, content=b"early")))
    mine = id_of(ada.say("hello"))
    history = (HistoryEntry(mine),)
    again = encode(Message("m1", CHANNEL, "bob", 1, history, content=b"early"))
    assert of(Acknowledged, ada.hear(again)) == [Acknowledged(mine)]
    assert ada.texts == ["early"]


def test_our_own_message_that_comes_back_acknowledges_nothing() -> None:
    for sender in ("ada", ""):  # an empty sender is recognised by the message ID
        ada = Device(sender)
        frames = [ada.say("one"), ada.say("two")]
        ada.hear(*frames)
        assert of(Acknowledged, ada.effects) == []
        assert ada.participant.status.unacknowledged == 2


def test_one_filter_is_possibly_and_a_second_distinct_one_is_enough() -> None:
    ada = Device("ada")
    mine = id_of(ada.say("hello"))
    effects = ada.hear(sync_message("bob", mine))
    assert of(PossiblyAcknowledged, effects) == [PossiblyAcknowledged(mine)]
    assert ada.participant.status.unacknowledged == 1
    assert of(Acknowledged, ada.hear(sync_message("bob", mine))) == []  # the same message again
    effects = ada.hear(sync_message("cleo", mine))
    assert of(Acknowledged, effects) == [Acknowledged(mine)]
    assert of(PossiblyAcknowledged, effects) == []


def test_one_filter_that_a_sender_repeats_in_other_messages_acknowledges_nothing() -> None:
    ada = Device("ada")
    mine = id_of(ada.say("hello"))
    for number in range(5):
        ada.hear(sync_message("bob", mine, message_id=str(number)))
        assert state_of(ada, mine) is Acknowledgement.POSSIBLY
    ada.hear(sync_message("bob", mine, "another", message_id="later"))
    assert state_of(ada, mine) is Acknowledgement.ACKNOWLEDGED


def full_filter(*ids: str, of_ids: str = "other", count: int = 9_990) -> BloomFilter:
    bloom = BloomFilter(capacity=10_000)
    bloom.rebuild([*(f"{of_ids}-{number}" for number in range(count)), *ids])
    return bloom


def test_full_filters_of_equal_logs_are_no_independent_grounds() -> None:
    # Each of them contains by chance one ID in 1,300; two equal ones are wrong about the same IDs.
    ada = Device("ada")
    mine = id_of(ada.say("hello"))
    ada.hear(sync_message("bob", bloom=full_filter(mine)))
    ada.hear(sync_message("cleo", bloom=full_filter(mine)))
    ada.hear(sync_message("dan", bloom=full_filter(mine, "one more")))
    assert state_of(ada, mine) is Acknowledgement.POSSIBLY


def test_full_filters_of_different_logs_are_independent_grounds() -> None:
    ada = Device("ada")
    mine = id_of(ada.say("hello"))
    for number in range(3):  # 8e-4, 6e-7, 5e-10
        assert state_of(ada, mine) is not Acknowledgement.ACKNOWLEDGED
        bloom = full_filter(mine, of_ids=f"log {number}")
        ada.hear(sync_message(f"peer {number}", bloom=bloom))
        if state_of(ada, mine) is Acknowledgement.ACKNOWLEDGED:
            break
    assert number == 1


@pytest.mark.parametrize("count", [21_000, 100_000])
def test_a_saturated_filter_proves_nothing(count: int) -> None:
    ada = Device("ada")
    mine = id_of(ada.say("hello"))
    for peer in "bcdefg":
        bloom = full_filter(mine, of_ids=peer, count=0)
        words = bytearray(bloom.to_bytes())
        words[: len(words) * (3 if count < 50_000 else 4) // 4] = b"\xff" * (
            len(words) * (3 if count < 50_000 else 4) // 4
        )
        ada.hear(sync_message(peer, bloom=bytes(words)))
    assert state_of(ada, mine) is Acknowledgement.UNACKNOWLEDGED
    assert ada.effects[-1] == Status(unacknowledged=1)


# ---- broadcasting again


def broadcast_times(device: Device, seconds: int, step_s: float = 1.0) -> list[float]:
    """Seconds from now to each broadcast of content."""
    start_ms = device.now_ms
    times = []
    for _ in range(round(seconds / step_s)):
        effects = device.wait(step_s, step_s)
        times += [(device.now_ms - start_ms) / 1_000 for _ in of(Broadcast, effects)]
    return times


def test_an_unacknowledged_message_is_broadcast_again_with_doubling_pauses_and_then_given_up() -> (
    None
):
    options = ParticipantOptions(bloom=None, sync_ms=0, attempts_max=5, resend_ms_max=200_000)
    ada = Device("ada", options)
    frame = ada.say("hello")
    assert broadcast_times(ada, 1_000) == [30, 90, 210, 410]
    assert {each.frame for each in of(Broadcast, ada.effects)} == {frame}  # identical bytes
    assert of(GaveUp, ada.effects) == [GaveUp(id_of(frame))]
    assert state_of(ada, id_of(frame)) is Acknowledgement.GIVEN_UP
    assert ada.participant.status == Status()


def test_a_possibly_acknowledged_message_has_longer_pauses() -> None:
    ada = Device("ada")
    mine = id_of(ada.say("hello"))
    ada.hear(sync_message("bob", mine))
    assert broadcast_times(ada, 400) == [120, 360]


def test_a_stored_message_has_longer_pauses_and_says_so() -> None:
    ada = Device("ada")
    mine = id_of(ada.say("hello"))
    assert of(StoredRemotely, ada.carry_out(ada.participant.stored(mine))) == [StoredRemotely(mine)]
    assert ada.participant.stored(mine) == []
    assert ada.participant.stored("unknown") == []
    assert broadcast_times(ada, 400) == [120, 360]
    ada.crash()
    state = ada.participant.sent_state(mine)
    assert state is not None
    assert state.is_stored


def test_the_table_of_our_messages_is_bounded() -> None:
    ada = Device("ada", ParticipantOptions(bloom=None, sync_ms=0, sent_max=10))
    ids = [id_of(ada.say(str(number))) for number in range(15)]
    assert [each.message_id for each in of(GaveUp, ada.effects)] == ids[:5]
    assert ada.participant.sent_state(ids[0]) is None
    assert len([key for key in ada.state if key.startswith("sent/")]) == 10
    assert ada.participant.status.unacknowledged == 10
    assert len(of(Broadcast, ada.wait(31))) == 10
