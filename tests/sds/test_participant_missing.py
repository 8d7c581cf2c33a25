"""Messages that are missing, that are lost, and that arrive after all; and the bounds of waiting."""

from __future__ import annotations

import random

import pytest

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


def test_nothing_is_asked_for_once_it_arrived() -> None:
    bob = Device("bob")
    bob.hear(written("m2", 2, "m1"), written("m1", 1))
    assert asked(bob.wait(400)) == []


def test_what_arrives_within_one_call_is_not_asked_for() -> None:
    bob = Device("bob")
    stage(bob, written("m1", 9), written("m2", 2, "m1"))  # the cause is later in log order
    assert asked(bob.carry_out(bob.participant.take_staged(NOON_MS, 10))) == []
    assert bob.texts == ["m1", "m2"]


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


def test_a_hint_as_large_as_a_frame_is_not_remembered_anywhere() -> None:
    large = b"h" * 500_000
    bob = Device("bob", ParticipantOptions(bloom=None, sync_ms=0, lost_after_ms=5_000))
    for number, sender_id in enumerate(("", "ada", "ada")):
        history = tuple(HistoryEntry(f"m{n}", large, sender_id) for n in (0, number))
        bob.hear(encode(Message(f"d{number}", CHANNEL, "ada", 5, history, content=b"x")))
    bob.hear(encode(Message("s", CHANNEL, "ada", 5, (HistoryEntry("m9", large, "ada"),))))
    effects = bob.wait(20)
    assert bob.participant.status.lost == 4
    for missing in of(Missing, bob.effects + effects):
        assert {entry.retrieval_hint for entry in missing.entries} == {b""}
    # A lost message costs one small record; the frames that waited are in the log.
    assert sum(map(len, bob.state.values())) < 2_000


def test_hints_of_the_transport_enter_our_histories_before_those_of_others() -> None:
    bob = Device("bob")
    history = (HistoryEntry("m1", b"theirs", "ada"),)
    bob.hear(encode(Message("m2", CHANNEL, "ada", 2, history, content=b"x")))
    bob.carry_out(bob.participant.receive(written("m1", 1), NOON_MS, retrieval_hint=b"ours"))
    own_id = decode(bob.say("answer"))[0].message_id
    bob.carry_out(bob.participant.stored(own_id, b"its hint"))
    message, _ = decode(bob.say("again"))
    hints = {entry.message_id: entry.retrieval_hint for entry in message.causal_history}
    assert hints == {"m2": b"", own_id: b"its hint"}
    logged = {each.entry.message_id: each.entry.retrieval_hint for each in bob.log.newest(9, 2**63)}
    assert logged["m1"] == b"ours"


def test_the_hint_of_our_transport_comes_before_what_others_said_first() -> None:
    bob = Device("bob")
    own_id = decode(bob.say("mine"))[0].message_id
    history = (HistoryEntry(own_id, b"theirs", "bob"),)
    bob.hear(encode(Message("m1", CHANNEL, "ada", NOON_MS, history, content=b"x")))
    message, _ = decode(bob.say("next"))
    assert HistoryEntry(own_id, b"theirs", "bob") in message.causal_history
    bob.carry_out(bob.participant.stored(own_id, b"ours"))
    assert bob.participant._hints.of(own_id) == (b"ours", b"theirs")


def test_effects_name_a_bounded_number_of_messages() -> None:
    bob = Device("bob", quiet(fetches_per_effect=3))
    effects = bob.hear(written("d", 9, *(f"m{number}" for number in range(8))))
    assert [len(each.entries) for each in of(Missing, effects)] == [3, 3, 2]


# ---- lost


def test_a_clock_that_is_set_forward_loses_nothing() -> None:
    bob = Device("bob")
    bob.hear(written("m2", 2, "m1"))
    bob.now_ms += 365 * 24 * 3_600_000
    assert of(Lost, bob.wait(239)) == []  # the jump counts as one minute
    assert of(Lost, bob.wait(2)) == [Lost("m1")]


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
    assert str(bob.participant.status) == "all synced, 2 lost"
    bob.hear(written("m5", 5, "m2"))  # remembered: this one does not wait
    assert bob.delivered[-1].after_gap == ("m2",)
    bob.hear(written("m2", 2))
    assert bob.delivered[-1] == Deliver(4, decode(written("m2", 2))[0], (), True)
    assert bob.order == ["m2", "m3", "m4", "m5"]
    assert bob.participant.status == Status(lost=1)
    bob.hear(written("m6", 6, "m2"))
    assert bob.delivered[-1].after_gap == ()


def test_a_lost_message_that_arrives_still_waits_for_its_own_causes() -> None:
    bob = Device("bob")
    bob.hear(written("m3", 3, "m2"))
    bob.wait(301)
    bob.hear(written("m2", 2, "m1"))
    bob.crash()
    assert bob.texts == ["m3"]
    bob.hear(written("m1", 1))
    assert [(each.message.message_id, each.is_late) for each in bob.delivered] == [
        ("m3", False),
        ("m1", False),
        ("m2", True),
    ]


def test_a_lost_message_is_late_only_if_a_message_that_depends_on_it_was_delivered() -> None:
    bob = Device("bob")
    bob.hear(sync("s", "m1"))
    bob.wait(301)
    assert of(Lost, bob.effects) == [Lost("m1")]
    bob.hear(written("m1", 1))
    assert [each.is_late for each in bob.delivered] == [False]


def test_a_gap_holds_what_is_missing_at_the_delivery() -> None:
    bob = Device("bob")
    bob.hear(sync("s", "m1"))
    bob.wait(301)
    bob.hear(written("m3", 3, "m1", "m2"))  # m1 is lost, and arrives before m2
    bob.hear(written("m1", 1), written("m2", 2))
    assert [(each.message.message_id, each.after_gap) for each in bob.delivered] == [
        ("m1", ()),
        ("m2", ()),
        ("m3", ()),
    ]


@pytest.mark.parametrize("seed", [5, 9, 30, 38, 45])
def test_messages_that_displace_each_other_are_not_asked_for_without_end(seed: int) -> None:
    """A store that answers at once, and more messages in hand than may wait for a lost one."""
    rng = random.Random(seed)
    count, senders, waiting_max = rng.randint(4, 14), rng.randint(1, 4), rng.randint(1, 5)
    store, ids = {}, ["lost"]
    for number in range(count):
        causes = tuple(map(HistoryEntry, rng.sample(ids, min(len(ids), rng.randint(1, 3)))))
        sender_id = f"s{rng.randrange(senders)}"
        ids.append(f"m{number}")
        message = Message(ids[-1], CHANNEL, sender_id, NOON_MS + number, causes, content=b"x")
        store[ids[-1]] = encode(message)
    options = ParticipantOptions(
        bloom=None, sync_ms=0, on_lost=OnLost.HOLD, waiting_max=waiting_max
    )
    eve, asked = Device("eve", options), 0
    frames = list(store.values())
    rng.shuffle(frames)
    effects = eve.hear(*frames)
    while wanted := [entry.message_id for each in of(Missing, effects) for entry in each.entries]:
        asked += len(wanted)
        assert asked < 200
        effects = eve.hear(*[store[each] for each in wanted if each in store])
    assert [each for _ in range(30) for each in of(Missing, eve.wait(1))]  # but later


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


def test_lost_ids_are_remembered_up_to_a_bound() -> None:
    bob = Device("bob", quiet(lost_max=5))
    for number in range(9):
        bob.hear(written(f"d{number}", 5, f"m{number}"))
    bob.wait(301)
    assert len(bob.texts) == 9
    assert bob.participant.status.lost == 5
    assert len([key for key in bob.state if key.startswith("lost/")]) == 5


def test_messages_that_wait_for_each_other_are_delivered_in_the_end() -> None:
    bob = Device("bob")
    bob.hear(written("a", 5, "b"), written("b", 6, "a"), written("c", 7, "b"))
    bob.wait(299)
    assert bob.texts == []
    bob.wait(302)
    assert bob.texts == ["a", "b", "c"]
    assert [each.after_gap for each in bob.delivered] == [("b",), (), ()]
    assert bob.delivered[1].is_late


def test_a_message_behind_one_that_waits_has_the_time_of_what_that_one_misses() -> None:
    bob = Device("bob")
    bob.hear(written("c", 7, "b"))
    bob.wait(200)
    bob.hear(written("b", 6, "a"))
    bob.wait(150)
    assert bob.texts == []
    bob.hear(written("a", 5))
    assert [(each.message.message_id, each.after_gap) for each in bob.delivered] == [
        ("a", ()),
        ("b", ()),
        ("c", ()),
    ]


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


def test_a_flood_in_bytes_and_in_missing_ids_is_bounded_as_well() -> None:
    bob = Device("bob", quiet(waiting_bytes_max=10_000))
    for number in range(30):
        content = b"x" * 1_000
        history = (HistoryEntry(f"nothing{number}"),)
        bob.hear(encode(Message(f"big{number}", CHANNEL, "eve", 5, history, content=content)))
    assert 0 < bob.participant.status.waiting <= 10
    bob = Device("bob", quiet(missing_max=80, noted_max=20))
    for number in range(30):
        causes = [f"nothing{number}-{each}" for each in range(20)]
        bob.hear(written(f"m{number}", 5, *causes))
    assert 0 < bob.participant.status.missing <= 100
    assert (
        bob.participant.status.lost > 0
    )  # those that are forgotten, but not that they were skipped


def test_at_the_bound_a_held_message_is_dropped_and_asked_for_again_when_it_is_named() -> None:
    bob = Device("bob", quiet(on_lost=OnLost.HOLD, waiting_max=2))
    bob.hear(written("m2", 2, "m1"), written("m3", 3, "m2"))
    assert asked(bob.hear(written("m5", 5, "m4"))) == ["m4"]
    assert "m2" in asked(bob.wait(11))  # it gave way, and m3 names it
    assert bob.texts == []
    assert bob.participant.status == Status(missing=2, waiting=2)
    bob.hear(written("m1", 1), written("m2", 2, "m1"))
    assert bob.texts == ["m1", "m2", "m3"]


def test_a_message_that_others_wait_for_too_is_not_lost_when_one_gives_way() -> None:
    bob = Device("bob", quiet(waiting_max=2))
    bob.hear(written("e1", 2, "m1", sender="eve"), written("e2", 3, "m1", sender="eve"))
    bob.hear(written("a1", 4, "m1", sender="ada"))
    assert [each.message.message_id for each in bob.delivered] == ["e1"]
    assert of(Lost, bob.effects) == []
    bob.hear(written("m1", 1))
    assert [(each.message.message_id, each.is_late) for each in bob.delivered[1:]] == [
        ("m1", True),
        ("e2", False),
        ("a1", False),
    ]


def test_a_message_that_was_passed_is_late_also_after_a_restart() -> None:
    bob = Device("bob", quiet(waiting_max=1))
    bob.hear(written("a1", 5, "m"), written("a2", 6, "m"))
    assert bob.texts == ["a1"]
    bob.crash()
    bob.wait(1)
    bob.hear(written("m", 4))
    assert [(each.message.message_id, each.is_late) for each in bob.delivered] == [
        ("a1", False),
        ("m", True),
        ("a2", False),
    ]
    assert not [key for key in bob.state if key.startswith("passed/")]


def test_a_message_that_was_passed_is_late_though_none_waits_for_it_any_more() -> None:
    bob = Device("bob", quiet(waiting_max=1))
    bob.hear(written("a1", 5, "m"), written("a2", 6, "m"), written("a2", 6))
    assert (bob.texts, bob.status.missing, bob.status.lost) == (["a1", "a2"], 1, 0)
    bob.hear(written("m", 4))
    assert bob.delivered[-1].is_late


def test_a_message_that_was_passed_is_late_also_if_it_was_forgotten_meanwhile() -> None:
    bob = Device("bob", quiet(waiting_max=1, noted_max=1, lost_max=3))
    bob.hear(*(written(f"a{number}", 5, f"m{number}") for number in range(4)))
    assert (bob.status.missing, bob.status.lost) == (2, 2)
    bob.crash()
    bob.hear(*(written(f"m{number}", 4) for number in range(3)))
    assert [each.is_late for each in bob.delivered if each.message.lamport_timestamp == 4] == [
        True
    ] * 3


def test_each_message_waits_for_a_missing_one_for_its_own_time() -> None:
    bob = Device("bob", quiet())
    bob.hear(written("e", 5, "m", sender="eve"))
    bob.wait(200)
    bob.hear(written("a", 6, "m", sender="ada"))
    bob.wait(150)
    assert [each.message.message_id for each in bob.delivered] == ["e"]
    assert (bob.status.missing, bob.status.lost) == (1, 0)
    bob.wait(140)
    assert len(bob.delivered) == 1
    bob.wait(20)
    assert [each.message.message_id for each in bob.delivered] == ["e", "a"]
    assert bob.delivered[1].after_gap == ("m",)
    assert (bob.status.missing, bob.status.lost) == (0, 1)


def test_the_time_of_a_message_goes_on_when_a_copy_takes_its_place() -> None:
    bob = Device("bob", quiet())
    bob.hear(written("a", 6, "m", "n", "o"))
    for causes in (("p", "q"), ("r",)):
        bob.wait(140)
        bob.hear(written("a", 6, *causes))
    assert bob.texts == []
    bob.wait(25)
    assert [each.after_gap for each in bob.delivered] == [("r",)]


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


@pytest.mark.parametrize("is_restarted", [False, True])
def test_the_causes_of_a_message_that_gives_way_are_missing_still(is_restarted: bool) -> None:
    """A flood of a member names honest messages that are on their way."""
    bob = Device("bob", quiet(waiting_max=10))
    bob.hear(written("first", 1, sender="ada"))
    names = [HistoryEntry(f"m{number}", b"", "ada") for number in range(3)]
    for number in range(20):
        message = Message(f"e{number}", CHANNEL, f"eve {number}", 5, tuple(names), content=b"x")
        bob.hear(encode(message))
    assert of(Lost, bob.effects) == []
    if is_restarted:
        bob.crash()
    bob.hear(written("a", 6, "m0", "m1", "m2", sender="ada"))
    assert "a" not in [each.message.message_id for each in bob.delivered]
    bob.hear(*(written(each.message_id, 4, sender="ada") for each in names))
    assert not any(each.after_gap for each in bob.delivered if each.message.sender_id == "ada")
    assert "a" in [each.message.message_id for each in bob.delivered]


def test_after_a_restart_a_flood_of_strangers_displaces_itself() -> None:
    bob = Device("bob", quiet(waiting_max=10))
    bob.hear(written("first", 1, sender="ada"))
    bob.hear(*(written(f"a{number}", 6, "m", sender="ada") for number in range(5)))
    bob.crash()
    for number in range(50):
        bob.hear(written(f"e{number}", 5, f"ghost {number}", sender=f"eve {number}"))
    assert not any(each.message.message_id == "a0" for each in bob.delivered)
    bob.hear(written("m", 4))
    assert not any(each.after_gap for each in bob.delivered if each.message.sender_id == "ada")


def test_what_sync_messages_name_displaces_no_message_that_waits() -> None:
    bob = Device("bob", quiet(missing_max=5))
    bob.hear(sync("s", *(f"m{number}" for number in range(20))), written("a", 5, "b"))
    assert (bob.texts, bob.status.waiting, bob.status.missing) == ([], 1, 21)


def test_what_a_message_waits_for_is_asked_for_although_a_sync_message_named_it_first() -> None:
    bob = Device("bob", quiet(noted_max=3))
    bob.hear(sync("s1", "m"), written("a", 5, "m"), sync("s2", *(f"g{n}" for n in range(5))))
    assert bob.status.missing == 4
    assert "m" in asked(bob.wait(15))


def test_a_sync_message_without_a_sender_that_names_another_names_nothing_missing() -> None:
    bob = Device("bob")
    bob.hear(sync("s1", sender=""), sync("s2", "s1", sender=""))
    assert bob.status.missing == 0
    assert asked(bob.wait(15)) == []


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


def test_sync_ids_are_remembered_up_to_a_bound() -> None:
    bob = Device("bob", quiet(sync_ids_max=5))
    for number in range(20):
        bob.hear(sync(f"s{number}", sender=""))
    assert len([key for key in bob.state if key.startswith("sync/")]) == 5


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


def test_staged_messages_stop_where_no_more_can_wait() -> None:
    bob = Device("bob", quiet(waiting_max=5))
    stage(bob, *(written(f"m{number:02}", number, f"nothing{number}") for number in range(1, 20)))
    bob.carry_out(bob.participant.take_staged(NOON_MS, 100))
    assert bob.participant.status.waiting == 5
    assert bob.texts == []
    assert bob.participant.take_staged(NOON_MS, 100) == []
    assert len(bob.log.staged(100)) == 14
    bob.hear(written("nothing3", 1))
    bob.carry_out(bob.participant.take_staged(NOON_MS, 100))
    assert bob.texts == ["nothing3", "m03"]
    assert len(bob.log.staged(100)) == 13


def test_staged_messages_stop_where_no_more_can_be_missing() -> None:
    bob = Device("bob", quiet(missing_max=6))
    stage(bob, *(written(f"m{n}", 5 + n, f"g{n}", f"h{n}") for n in range(10)))
    bob.carry_out(bob.participant.take_staged(bob.now_ms, 100))
    assert (bob.texts, bob.status.waiting, bob.status.missing) == ([], 3, 6)


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


@pytest.mark.parametrize("on_lost", list(OnLost))
def test_a_store_that_answers_late_and_twice_changes_nothing(on_lost: OnLost) -> None:
    bob = Device("bob", quiet(on_lost=on_lost))
    bob.hear(written("m2", 2, "m1"))
    bob.wait(100)
    bob.hear(written("m1", 1), written("m1", 1))
    bob.wait(400)
    assert bob.texts == ["m1", "m2"]
    assert of(Lost, bob.effects) == []


@pytest.mark.parametrize(
    ("bound", "taken"),
    [({"waiting_max": 3}, 3), ({"waiting_bytes_max": 132}, 3), ({"missing_max": 6}, 3), ({}, 8)],
    ids=["messages", "bytes", "missing", "none"],
)
def test_staged_messages_are_taken_as_long_as_none_is_displaced(
    bound: dict[str, int], taken: int
) -> None:
    bob = Device("bob", quiet(**bound))
    frames = [written(f"m{number}", number, f"x{number}", f"y{number}") for number in range(8)]
    assert {len(each) for each in frames} == {44}, "three fill 132 bytes"
    bob.log.stage([Staged(decode(each)[0], each, bytes(32)) for each in frames], ())
    for _ in range(3):
        bob.carry_out(bob.participant.take_staged(bob.now_ms, 20))
    assert (bob.status.waiting, bob.texts) == (taken, [])
    assert len(bob.log.staged(20)) == 8 - taken


def test_what_a_message_that_gave_way_skipped_is_asked_for_after_a_restart() -> None:
    bob = Device("bob", quiet(waiting_max=1))
    bob.hear(written("a1", 5, "m"), written("a2", 6, "n"))
    assert bob.texts == ["a1"]
    bob.crash()
    assert {"m", "n"} <= set(asked(bob.wait(2)))
    assert bob.status.missing == 2
