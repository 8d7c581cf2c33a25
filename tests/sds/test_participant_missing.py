"""Messages that are missing, that are lost, and that arrive after all; and the bounds of waiting."""

from __future__ import annotations

from sdstore.sds import (
    Broadcast,
    Deliver,
    HistoryEntry,
    Kind,
    Lost,
    Message,
    Missing,
    OnLost,
    ParticipantOptions,
    Staged,
    Status,
    decode,
    encode,
    entry_digest,
)
from tests.support.participants import CHANNEL, NOON_MS, Device, of


def written(message_id: str, lamport: int, *causes: str, sender: str = "ada") -> bytes:
    """The frame of a message written by hand; its content is its ID."""
    history = tuple(HistoryEntry(cause, sender_id="ada") for cause in causes)
    return encode(
        Message(message_id, CHANNEL, sender, lamport, history, content=message_id.encode())
    )


def sync(message_id: str, *causes: str, sender: str = "ada") -> bytes:
    history = tuple(HistoryEntry(cause) for cause in causes)
    return encode(Message(message_id, CHANNEL, sender, NOON_MS, history))


def quiet(**options: object) -> ParticipantOptions:
    return ParticipantOptions(bloom=None, sync_ms=0, **options)  # type: ignore[arg-type]


def asked(effects: list[object]) -> list[str]:
    return [entry.message_id for each in of(Missing, effects) for entry in each.entries]  # type: ignore[arg-type]


# ---- asking


def test_a_missing_message_is_asked_for_with_doubling_pauses_until_it_is_lost() -> None:
    bob = Device("bob", quiet(fetch_retry_ms_max=100_000))
    assert asked(bob.hear(written("m2", 2, "m1"))) == ["m1"]
    times = [second for second in range(1, 400) if asked(bob.wait(1))]
    assert times == [10, 30, 70, 150, 250]
    assert of(Lost, bob.effects) == [Lost("m1")]


def test_every_known_hint_of_a_missing_message_is_named() -> None:
    bob = Device("bob")
    for number, hint in enumerate((b"one", b"two", b"one", b"x" * 257)):
        history = (HistoryEntry("m1", hint, "ada"),)
        bob.hear(encode(Message(f"d{number}", CHANNEL, "ada", 5, history, content=b"x")))
    (missing,) = of(Missing, bob.wait(10))
    assert missing.entries == (
        HistoryEntry("m1", b"one", "ada"),
        HistoryEntry("m1", b"two", "ada"),
    )


# ---- lost


def test_a_lost_cause_is_a_gap_and_arrives_late() -> None:
    bob = Device("bob")
    bob.hear(written("m3", 3, "m2"), written("m4", 4, "m3", "m1"))
    bob.wait(301)
    assert set(of(Lost, bob.effects)) == {Lost("m1"), Lost("m2")}
    assert [(each.message.message_id, each.after_gap) for each in bob.delivered] == [
        ("m3", ("m2",)),
        ("m4", ("m1",)),
    ]
    assert bob.participant.status == Status(lost=2)
    assert str(bob.participant.status) == "2 lost"
    bob.hear(written("m5", 5, "m2"))  # remembered: this one does not wait
    assert bob.delivered[-1].after_gap == ("m2",)
    bob.hear(written("m2", 2))
    assert bob.delivered[-1] == Deliver(4, decode(written("m2", 2))[0], (), True)
    assert bob.order == ["m2", "m3", "m4", "m5"]
    assert bob.participant.status == Status(lost=1)
    bob.hear(written("m6", 6, "m2"))
    assert bob.delivered[-1].after_gap == ()


def test_held_messages_wait_for_lost_causes_forever() -> None:
    bob = Device("bob", quiet(on_lost=OnLost.HOLD))
    bob.hear(written("m2", 2, "m1"))
    bob.wait(3_600, 10)
    assert bob.texts == []
    assert of(Lost, bob.effects) == [Lost("m1")]
    assert bob.participant.status == Status(waiting=1, lost=1)
    assert asked(bob.hear(written("m3", 3, "m1"))) == ["m1"]  # named again: asked for again
    bob.hear(written("m1", 1))
    assert [(each.message.message_id, each.is_late) for each in bob.delivered] == [
        ("m1", False),
        ("m2", False),
        ("m3", False),
    ]
    assert bob.participant.status == Status()


def test_a_lost_message_is_asked_for_again_with_ever_longer_pauses_also_after_a_restart() -> None:
    bob = Device("bob", quiet(lost_retry_ms=1_000_000))
    history = (HistoryEntry("m1", b"hint", "ada"),)
    bob.hear(encode(Message("m2", CHANNEL, "ada", 2, history, content=b"x")))
    bob.wait(310)
    times = [second for second in range(310, 8_000, 10) if asked(bob.wait(10, 10))]
    assert times == [1_290, 3_290, 7_290]
    bob.crash()
    bob.wait(990, 10)
    (missing,) = of(Missing, bob.wait(20))
    assert missing.entries == history
    bob.hear(written("m1", 1))
    assert bob.delivered[-1].is_late
    assert asked(bob.wait(10_000, 50)) == []


def test_messages_that_wait_for_each_other_are_delivered_in_the_end() -> None:
    bob = Device("bob")
    bob.hear(written("a", 5, "b"), written("b", 6, "a"), written("c", 7, "b"))
    bob.wait(299)
    assert bob.texts == []
    bob.wait(302)
    assert bob.texts == ["a", "b", "c"]
    assert [each.after_gap for each in bob.delivered] == [("b",), (), ()]
    assert bob.delivered[1].is_late


# ---- bounds
# ---- bounds


def test_a_flood_of_orphans_displaces_itself_and_honest_messages_go_on() -> None:
    bob = Device("bob", quiet(waiting_max=50))
    ada = Device("ada")
    honest = [ada.say(str(number)) for number in range(20)]
    bob.hear(honest[1])  # waits for honest[0]
    for number in range(1_000):
        bob.hear(written(f"orphan{number}", 10**13, f"nothing{number}", sender="eve"))
        if number % 50 == 49:
            bob.hear(honest[2 + number // 60])
    assert bob.participant.status.waiting <= 50
    assert "1" not in bob.texts
    honest_texts = [text for text in bob.texts if not text.startswith("orphan")]
    assert honest_texts == []
    bob.hear(honest[0])
    assert [text for text in bob.texts if not text.startswith("orphan")][:3] == ["0", "1", "2"]
    orphans = [each for each in bob.delivered if each.message.sender_id == "eve"]
    assert [each.message.message_id for each in orphans[:2]] == ["orphan0", "orphan1"]
    assert orphans[0].after_gap == ("nothing0",)


def test_what_is_lost_for_one_member_is_waited_for_by_the_message_of_another() -> None:
    bob = Device("bob", quiet())
    for sender in ("ada", "eve"):
        bob.hear(written(f"first of {sender}", 1, sender=sender))
    bob.hear(written("e", 5, "m", sender="eve"))
    bob.wait(310)
    assert bob.status.lost == 1
    bob.hear(written("f", 6, "m", sender="eve"), written("a", 6, "m", sender="ada"))
    assert [each.message.message_id for each in bob.delivered][2:] == ["e", "f"]
    bob.hear(written("m", 4))
    assert [(each.message.message_id, each.after_gap) for each in bob.delivered][4:] == [
        ("m", ()),
        ("a", ()),
    ]
    assert bob.delivered[4].is_late


def test_what_sync_messages_name_displaces_no_message_that_waits() -> None:
    bob = Device("bob", quiet(missing_max=5))
    bob.hear(sync("s", *(f"m{number}" for number in range(20))), written("a", 5, "b"))
    assert (bob.texts, bob.status.waiting, bob.status.missing) == ([], 1, 21)


def test_a_history_beyond_the_bound_is_ignored() -> None:
    bob = Device("bob")
    bob.hear(written("m", 5, *(f"c{number}" for number in range(257))))
    assert bob.participant.ignored == {"history_too_long": 1}
    assert bob.participant.status == Status()


# ---- sync messages of others


def test_a_sync_message_shows_the_trailing_edge() -> None:
    bob = Device("bob")
    effects = bob.hear(sync("s1", "m1", "m2"))
    assert asked(effects) == ["m1", "m2"]
    assert bob.participant.status == Status(missing=2)
    assert len(bob.log) == 0
    bob.hear(sync("s2", "m1", "m2"), written("m1", 1))
    assert bob.participant.status == Status(missing=1)
    bob.wait(301)
    assert of(Lost, bob.effects) == [Lost("m2")]


def test_what_sync_messages_name_is_bounded() -> None:
    bob = Device("bob", quiet(noted_max=10))
    for number in range(100):
        bob.hear(sync(f"s{number}", f"m{number}"))
    assert bob.participant.status.missing == 10
    bob.hear(written("d", 200, "m99"))
    assert bob.participant.status.waiting == 1


def test_the_id_of_a_sync_message_is_a_met_cause_also_after_a_restart() -> None:
    # Participants of version 1 log sync messages and name them as causes.
    bob = Device("bob")
    bob.hear(sync("s1", sender=""))
    bob.crash()
    bob.hear(written("m1", 1, "s1", sender=""))
    assert bob.texts == ["m1"]
    bob.hear(written("m2", 2, "s1"))  # not of version 1: only the content of s1 would do
    assert bob.texts == ["m1"]


# ---- what a backfill staged


def stage(device: Device, *frames: bytes) -> None:
    messages = [(decode(frame)[0], frame) for frame in frames]
    device.log.stage([Staged(each, frame, entry_digest(each)) for each, frame in messages], [])


def test_staged_messages_are_received_in_log_order() -> None:
    bob = Device("bob")
    frames = [written(f"m{number}", number, f"m{number - 1}") for number in range(2, 30)]
    stage(bob, *reversed(frames), written("m1", 1))
    while effects := bob.participant.take_staged(NOON_MS, 7):
        bob.carry_out(effects)
    assert bob.texts == [f"m{number}" for number in range(1, 30)]
    assert bob.log.staged(10) == []


# ---- repair


def talk(devices: list[Device], seconds: int) -> None:
    """Ticks of everybody; everybody hears every broadcast."""
    for _ in range(seconds):
        for device in devices:
            for each in of(Broadcast, device.wait(1)):
                for other in devices:
                    if other is not device:
                        other.hear(each.frame)


def test_participants_repair_each_other_without_a_store() -> None:
    options = ParticipantOptions(bloom=None, sync_ms=10_000, resend_ms=10**9, resend_ms_max=10**9)
    ada, bob, cleo = (Device(name, options) for name in ("ada", "bob", "cleo"))
    lost = ada.say("lost for cleo")
    bob.hear(lost)
    reply = bob.say("reply")
    ada.hear(reply)
    cleo.hear(reply)
    assert cleo.texts == []
    talk([bob, cleo], 240)  # the author is gone
    assert cleo.texts == ["lost for cleo", "reply"]
    answers = [e for e in of(Broadcast, bob.effects) if e.kind is Kind.CONTENT and e.frame == lost]
    assert len(answers) == 1  # identical bytes


def test_a_participant_with_an_empty_log_asks_for_repairs() -> None:
    options = ParticipantOptions(bloom=None, sync_ms=10_000)
    ada, bob = Device("ada", options), Device("bob", options)
    ada.say("lost for bob")
    talk([ada, bob], 1)
    bob.hear(*(each.frame for each in of(Broadcast, ada.wait(29)) if each.kind is Kind.SYNC))
    requests = [decode(each.frame)[0].repair_request for each in of(Broadcast, bob.wait(130))]
    assert any(requests)
