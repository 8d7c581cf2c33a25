"""What a participant writes in each dialect, its clock, sync messages and ephemeral messages."""

from __future__ import annotations

import pytest

from sdstore.sds import (
    Broadcast,
    Dialect,
    Ephemeral,
    HistoryEntry,
    Kind,
    LocalProtocolError,
    Message,
    ParticipantOptions,
    decode,
    encode,
    verifies,
)
from sdstore.sds.bloom import Form, read_filter
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


# ---- message IDs


def test_the_same_text_twice_is_two_messages() -> None:
    ada, bob = Device("ada"), Device("bob")
    bob.hear(ada.say("ok"), ada.say("ok"))
    bob.hear(Device("cleo").say("ok"))
    assert bob.texts == ["ok", "ok", "ok"]


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
