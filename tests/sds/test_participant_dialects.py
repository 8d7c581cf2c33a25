"""What a participant writes in each dialect, its clock, sync messages and ephemeral messages."""

from __future__ import annotations

import pytest

from sdstore.sds import (
    Broadcast,
    Dialect,
    Ephemeral,
    HistoryEntry,
    Kind,
    LamportUnit,
    LocalProtocolError,
    Message,
    Participant,
    ParticipantOptions,
    decode,
    encode,
    verifies,
)
from sdstore.sds.bloom import Form, read_filter
from sdstore.sds.model import SHA256_CONTENT
from tests.support.participants import CHANNEL, NOON_MS, Device, of

INT32_MAX = 2**31 - 1


def quiet(**options: object) -> ParticipantOptions:
    return ParticipantOptions(bloom=None, sync_ms=0, **options)  # type: ignore[arg-type]


# ---- dialects


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize("form", [None, *Form])
def test_participants_of_one_dialect_understand_each_other(
    dialect: Dialect, form: Form | None
) -> None:
    options = ParticipantOptions(dialect=dialect, bloom=form, sync_ms=0)
    ada, bob = Device("ada", options), Device("bob", options)
    hello = ada.say("hello")
    bob.hear(hello)
    answer = bob.say("answer")
    ada.hear(answer)
    assert (ada.order, bob.order) == (["hello", "answer"],) * 2
    assert ada.participant.status.unacknowledged == 0
    message, written_in = decode(answer)
    assert written_in is dialect
    assert message.sender_id == ("" if dialect is Dialect.V1 else "bob")
    found = read_filter(message.bloom_filter)
    assert (found is None) if form is None else (found is not None and found.form is form)
    assert verifies(message)


def test_participants_of_all_dialects_share_a_channel() -> None:
    devices = [Device(each.label, quiet(dialect=each)) for each in Dialect]
    for number in range(3):
        for device in devices:
            device.now_ms += 2_000 * (number + 1)
            frame = device.say(f"{device.name} {number}")
            for other in devices:
                if other is not device:
                    other.hear(frame)
    assert [sorted(device.order) for device in devices] == [sorted(devices[0].order)] * 4
    assert {len(device.log) for device in devices} == {12}


@pytest.mark.parametrize("dialect", [Dialect.V1, Dialect.CHAT_PROTO])
def test_an_int32_dialect_counts_seconds_and_stays_an_int32(dialect: Dialect) -> None:
    ada = Device("ada", quiet(dialect=dialect))
    ada.hear(encode(Message("ms", CHANNEL, "bob", NOON_MS, content=b"in milliseconds")))
    assert ada.texts == ["in milliseconds"]
    message, _ = decode(ada.say("hello"))
    assert message.lamport_timestamp == NOON_MS // 1_000 + 1
    assert [entry.message_id for entry in message.causal_history] == ["ms"]  # a head, though ahead
    ada.now_ms = (INT32_MAX - 1) * 1_000
    ada.say("the second but last second of 2038-01-19")
    ada.say("the last one")
    with pytest.raises(LocalProtocolError, match="lamport_exhausted"):
        ada.say("too late")
    assert len(ada.log) == 4


def test_a_peer_cannot_exhaust_the_clock() -> None:
    for options, highest in (
        (quiet(), 2**63 - 1),
        (quiet(dialect=Dialect.V1, clock_ahead_ms=10**14), INT32_MAX),
    ):
        ada = Device("ada", options)
        for lamport in (highest, highest - 1):
            ada.hear(encode(Message(f"m{lamport}", CHANNEL, "eve", lamport, content=b"x")))
        ada.say("still possible")
        assert len(ada.log) == 3


@pytest.mark.parametrize("message_id", ["\n\x01a", "\n", "\x12", "\x1a\x01b"])
def test_an_id_that_version_1_cannot_name_does_not_silence_it(message_id: str) -> None:
    ada = Device("ada", ParticipantOptions(dialect=Dialect.V1, bloom=None))
    ada.hear(encode(Message(message_id, CHANNEL, "eve", 1, content=b"x")))
    ada.hear(encode(Message("m2", CHANNEL, "eve", 2, content=b"x")))
    message, _ = decode(ada.say("still here"))
    assert message.causal_history == (HistoryEntry("m2"),)
    assert syncs(ada, 60)


def test_long_ids_do_not_silence_anybody() -> None:
    ada = Device("ada", ParticipantOptions(bloom=None))
    long = "x" * 500_000
    for number, message in enumerate((
        Message(long, CHANNEL, "eve", 1, content=b"x"),
        Message("m1", CHANNEL, long, 1, content=b"x"),
        Message("m2", CHANNEL, "eve", 1, (HistoryEntry(long),), content=b"x"),
        Message("m3", CHANNEL, "eve", 1, (HistoryEntry("m0", b"", long),), content=b"x"),
        Message("m4", CHANNEL, "eve", 1, (HistoryEntry(long, b"", "eve"),)),
    ), start=1):  # fmt: skip
        ada.hear(encode(message))
        assert ada.participant.ignored["id_too_long"] == number
    ada.hear(encode(Message("y" * 1_024, CHANNEL, "z" * 1_024, 1, content=b"x")))
    assert len(ada.log) == 1
    assert len(ada.say("still here")) < 5_000
    assert syncs(ada, 60)


def test_sync_messages_end_with_the_timestamps_of_the_dialect() -> None:
    ada = acknowledged("ada", ParticipantOptions(dialect=Dialect.V1, bloom=None))
    ada.now_ms = (INT32_MAX - 20) * 1_000
    ada.wait(1)
    assert len(syncs(ada, 400)) <= 21


# ---- the Lamport clock


def test_a_timestamp_too_far_ahead_does_not_move_our_clock() -> None:
    ahead_ms = ParticipantOptions().clock_ahead_ms
    ada = Device("ada")
    ada.hear(encode(Message("far", CHANNEL, "bob", NOON_MS + ahead_ms + 1, content=b"far")))
    assert ada.participant.lamport_timestamp == NOON_MS
    ada.hear(encode(Message("near", CHANNEL, "bob", NOON_MS + ahead_ms, content=b"near")))
    assert ada.participant.lamport_timestamp == NOON_MS + ahead_ms
    message, _ = decode(ada.say("mine"))
    assert message.lamport_timestamp == NOON_MS + ahead_ms + 1
    # It is a head, so whoever lacks it learns of it; but it is not one of the newest.
    assert [entry.message_id for entry in message.causal_history] == ["near", "far"]
    assert ada.order == ["near", "far", "mine"] or ada.order == ["near", "mine", "far"]


def test_a_negative_timestamp_is_logged_first_and_moves_nothing() -> None:
    ada = Device("ada")
    ada.hear(encode(Message("neg", CHANNEL, "bob", -(2**31), content=b"overflowed")))
    assert ada.participant.lamport_timestamp == NOON_MS
    message, _ = decode(ada.say("mine"))
    assert [entry.message_id for entry in message.causal_history] == ["neg"]
    assert ada.order == ["overflowed", "mine"]


def test_the_timestamp_follows_the_time_and_grows_without_it() -> None:
    ada = Device("ada")
    stamps = []
    for now_ms in (NOON_MS, NOON_MS, NOON_MS + 500, NOON_MS - 10_000):
        ada.now_ms = now_ms
        stamps.append(decode(ada.say(str(now_ms)))[0].lamport_timestamp)
    assert stamps == [NOON_MS + 1, NOON_MS + 2, NOON_MS + 500, NOON_MS + 501]


def test_the_unit_of_the_clock_is_an_option() -> None:
    ada = Device("ada", quiet(lamport_unit=LamportUnit.SECONDS))
    assert decode(ada.say("x"))[0].lamport_timestamp == NOON_MS // 1_000 + 1


def test_a_peer_whose_clock_counts_nanoseconds_is_followed_in_that_unit() -> None:
    ada = Device("ada", quiet(lamport_unit=LamportUnit(1_000_000_000)))
    noon_ns = NOON_MS * 1_000_000
    assert decode(ada.say("x"))[0].lamport_timestamp == noon_ns + 1
    hour_ns = 3_600 * 10**9
    ada.hear(encode(Message("ns", CHANNEL, "bob", noon_ns + hour_ns, content=b"ns")))
    answer, _ = decode(ada.say("after it"))
    assert answer.lamport_timestamp == noon_ns + hour_ns + 1
    assert "ns" in {entry.message_id for entry in answer.causal_history}


# ---- message IDs


def test_the_same_text_twice_is_two_messages() -> None:
    ada, bob = Device("ada"), Device("bob")
    bob.hear(ada.say("ok"), ada.say("ok"))
    bob.hear(Device("cleo").say("ok"))
    assert bob.texts == ["ok", "ok", "ok"]


def test_with_ids_of_the_content_alone_the_same_text_is_refused() -> None:
    ada = Device("ada", quiet(id_scheme=SHA256_CONTENT))
    ada.say("ok")
    before = ada.participant.lamport_timestamp
    with pytest.raises(LocalProtocolError, match="message_id_taken"):
        ada.say("ok")
    assert ada.participant.lamport_timestamp == before
    assert len(ada.log) == 1


@pytest.mark.parametrize(
    ("content", "code"), [(b"", "empty_content"), (b"x" * (1 << 20), "frame_too_large")]
)
def test_content_that_cannot_be_sent_is_refused_without_a_trace(content: bytes, code: str) -> None:
    ada = Device("ada")
    with pytest.raises(LocalProtocolError) as raised:
        ada.participant.send(content, NOON_MS)
    assert raised.value.code == code
    assert ada.participant.tick(NOON_MS + 1) == []
    assert len(ada.log) == 0


def test_ids_that_no_message_can_hold_are_refused() -> None:
    for channel_id, sender_id in (("a\0b", "ada"), ("room", "\0"), ("\ud800", "ada")):
        with pytest.raises(LocalProtocolError):
            Participant(channel_id, sender_id)


# ---- ephemeral messages


def test_an_ephemeral_message_is_passed_on_and_leaves_no_trace() -> None:
    ada, bob = Device("ada", ParticipantOptions(sync_ms=0)), Device("bob")
    effects = ada.carry_out(ada.participant.send(b"typing", NOON_MS, ephemeral=True))
    (broadcast,) = effects
    assert isinstance(broadcast, Broadcast)
    assert broadcast.kind is Kind.EPHEMERAL
    message, _ = decode(broadcast.frame)
    assert (message.lamport_timestamp, message.causal_history, message.bloom_filter) == (
        None, (), b"",
    )  # fmt: skip
    assert message.sender_id == "ada"
    assert bob.hear(broadcast.frame) == [Ephemeral(message)]
    assert ada.hear(broadcast.frame) == []
    assert len(ada.log) == len(bob.log) == 0
    again = ada.carry_out(ada.participant.send(b"typing", NOON_MS, ephemeral=True))
    assert of(Broadcast, again)[0].message_id != broadcast.message_id


def test_nim_has_no_ephemeral_messages() -> None:
    nim = Device("nim", quiet(dialect=Dialect.NIM))
    with pytest.raises(LocalProtocolError, match="dialect_cannot_express"):
        nim.participant.send(b"typing", NOON_MS, ephemeral=True)


# ---- what is ignored


def test_frames_that_are_no_messages_of_the_channel_are_counted() -> None:
    ada = Device("ada")
    for frame in (b"", b"\xff", b"\x12\x02id", b"x" * ((1 << 20) + 1)):
        assert ada.hear(frame) == []
    assert ada.hear(encode(Message("m", "elsewhere", "bob", 1, content=b"x"))) == []
    assert dict(ada.participant.ignored) == {
        "missing_message_id": 1,
        "malformed_frame": 1,
        "no_content_no_lamport": 1,
        "frame_too_large": 1,
        "other_channel": 1,
    }


# ---- sync messages


def syncs(device: Device, seconds: float) -> list[bytes]:
    broadcasts = of(Broadcast, device.wait(seconds))
    return [each.frame for each in broadcasts if each.kind is Kind.SYNC]


def acknowledged(name: str, options: ParticipantOptions) -> Device:
    """A device with one message in its log, which was received."""
    device = Device(name, options)
    device.hear(encode(Message("m1", CHANNEL, "zoe", 1, content=b"one")))
    return device


def test_a_sync_message_carries_history_and_filter_and_enters_nothing() -> None:
    options = ParticipantOptions(sync_ms=10_000)
    ada = acknowledged("ada", options)
    (frame,) = syncs(ada, 6)
    message, _ = decode(frame)
    assert message.kind is Kind.SYNC
    assert message.causal_history == (HistoryEntry("m1", b"", "zoe"),)
    assert message.lamport_timestamp is not None
    assert message.lamport_timestamp > NOON_MS
    found = read_filter(message.bloom_filter)
    assert found is not None
    assert found.fill > 0
    later, _ = decode(ada.say("next"))
    assert [entry.message_id for entry in later.causal_history] == ["m1"]
    bob = Device("bob")
    clock = bob.participant.lamport_timestamp
    bob.hear(frame)
    assert len(bob.log) == 0
    assert bob.participant.lamport_timestamp >= clock
    assert bob.participant.lamport_timestamp <= NOON_MS
    assert len(ada.log) == 2


def test_pauses_between_sync_messages_double_up_to_a_bound_and_content_shortens_them() -> None:
    options = ParticipantOptions(bloom=None, sync_ms=20_000, sync_ms_max=80_000, resend_ms=10**9)
    ada = acknowledged("ada", options)
    counts = [len(syncs(ada, 400)) for _ in range(2)]
    assert counts[0] > counts[1]
    assert 5 <= counts[1] <= 10  # each 40 to 80 s
    ada.hear(encode(Message("m2", CHANNEL, "zoe", 2, content=b"two")))
    assert len(syncs(ada, 10)) == 1


def test_participants_draw_different_pauses_and_equal_seeds_draw_the_same() -> None:
    def first_second(name: str, seed: bytes) -> int:
        device = acknowledged(name, ParticipantOptions(bloom=None, sync_ms=10**6, seed=seed))
        return next(second for second in range(1, 1_001) if syncs(device, 1))

    times = {first_second(f"peer {number}", b"") for number in range(8)}
    assert len(times) >= 6
    assert first_second("ada", b"1") == first_second("ada", b"1") != first_second("ada", b"2")


def test_a_sync_message_of_another_that_names_our_heads_puts_ours_off() -> None:
    ada = acknowledged("ada", ParticipantOptions(bloom=None, sync_ms=30_000))
    (frame,) = syncs(ada, 31)
    history = decode(frame)[0].causal_history
    for number in range(40):
        ada.hear(encode(Message(f"s{number}", CHANNEL, "zoe", NOON_MS, history)))
        assert syncs(ada, 7) == []
    assert syncs(ada, 61)


def test_a_sync_message_of_another_that_lacks_a_head_does_not_put_ours_off() -> None:
    ada = acknowledged("ada", ParticipantOptions(bloom=None, sync_ms=30_000))
    count = 0
    for number in range(40):
        ada.hear(encode(Message(f"s{number}", CHANNEL, "zoe", NOON_MS)))
        count += len(syncs(ada, 7))
    assert count >= 2


def test_a_conversation_puts_sync_messages_off_and_a_monologue_does_not() -> None:
    def count(senders: list[str]) -> int:
        ada = acknowledged("ada", ParticipantOptions(bloom=None, sync_ms=30_000))
        sent = 0
        for number in range(30):
            sender = senders[number % len(senders)]
            ada.hear(encode(Message(f"{sender}{number}", CHANNEL, sender, number, content=b"x")))
            sent += len(syncs(ada, 5))
        return sent

    assert count(["zoe"]) >= 9
    assert count(["zoe", "yan"]) == 0


def test_an_empty_log_sends_sync_messages_only_if_asked_to() -> None:
    assert syncs(Device("ada", ParticipantOptions(sync_ms=10_000)), 60) == []
    assert syncs(Device("ada", ParticipantOptions(sync_ms=10_000, sync_when_empty=True)), 60)


def test_content_of_our_own_starts_the_pause_before_our_sync_message_anew() -> None:
    ada = Device("ada", ParticipantOptions(bloom=None, sync_ms=30_000))
    ada.say("first")
    for number in range(20):  # the pause is 15 s at least
        assert syncs(ada, 14) == []
        ada.say(str(number))
    assert syncs(ada, 30)


def test_a_lurker_acknowledges_a_speaker_by_sync_messages() -> None:
    ada = Device("ada", ParticipantOptions(sync_ms=0))
    bob = Device("bob", ParticipantOptions())
    for number in range(20):
        bob.hear(ada.say(str(number)))
        ada.wait(8)
        for frame in syncs(bob, 8):
            ada.hear(frame)
    for frame in syncs(bob, 60):
        ada.hear(frame)
    assert ada.participant.status.unacknowledged == 0
