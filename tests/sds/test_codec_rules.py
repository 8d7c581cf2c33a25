"""The rules of decoding, on frames built by hand."""

import os
import subprocess
import sys

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sdstore.sds.codec import decode, encode
from sdstore.sds.model import Dialect, HistoryEntry, Kind, Message, MessageError
from sdstore.wire import sds_pb2
from tests.support.frame_fields import field
from tests.support.sds_strategies import messages
from tests.support.sds_vectors import valid_frames

FRAMES = valid_frames()
CODES = {
    "malformed_frame",
    "missing_message_id",
    "invalid_utf8",
    "nul_character",
    "lamport_out_of_range",
    "no_content_no_lamport",
}


def frame_with(*fields: bytes) -> bytes:
    """A valid version 2 frame and then `fields`."""
    return field(2, b"id") + field(3, b"chan") + field(10, 7) + b"".join(fields) + field(20, b"x")


def history_of(*elements: bytes) -> tuple[list[str], Dialect]:
    message, dialect = decode(frame_with(*(field(11, element) for element in elements)))
    return [entry.message_id for entry in message.causal_history], dialect


def code_of(frame: bytes) -> str:
    with pytest.raises(MessageError) as refused:
        decode(frame)
    return refused.value.code


ENTRY = field(1, b"abc")


def test_history_of_strict_entries_is_version_2() -> None:
    full = ENTRY + field(2, b"hint") + field(3, b"bob")
    assert history_of(full, ENTRY) == (["abc", "abc"], Dialect.V2)


def test_entry_fields_in_another_order_are_still_strict() -> None:
    assert history_of(field(3, b"bob") + ENTRY) == (["abc"], Dialect.V2)


def test_entry_values_longer_than_127_bytes_are_strict() -> None:
    long = b"i" * 1024
    assert history_of(field(1, long) + field(2, b"h" * 256)) == ([long.decode()], Dialect.V2)


def test_one_string_among_entries_makes_all_of_them_strings() -> None:
    assert history_of(ENTRY, b"plain") == (["\n\x03abc", "plain"], Dialect.V1)


@pytest.mark.parametrize(
    "unknown", [field(4, b"new"), field(4, 1), field(1, b"again"), field(2, b"") * 2]
)
def test_entries_of_a_future_version_are_kept_without_what_is_unknown(unknown: bytes) -> None:
    ids, dialect = history_of(ENTRY + unknown)
    assert dialect is Dialect.V2
    assert ids == (["again"] if b"again" in unknown else ["abc"])


def test_a_future_entry_that_cannot_be_read_is_dropped_and_the_rest_kept() -> None:
    assert history_of(ENTRY + field(4, 1), b"\x0a\x05abc", b"\xff\xff") == (["abc"], Dialect.V2)


def test_empty_elements_are_dropped_in_both_versions() -> None:
    assert history_of(b"", ENTRY, b"") == (["abc"], Dialect.V2)
    assert history_of(b"", b"plain") == (["plain"], Dialect.V1)
    assert history_of(b"") == ([], Dialect.V2)


def test_an_entry_without_an_id_is_not_strict() -> None:
    hint_alone = field(2, b"hi")
    assert history_of(hint_alone) == ([hint_alone.decode()], Dialect.V1)


def test_a_hint_set_but_empty_is_absent() -> None:
    message, dialect = decode(frame_with(field(11, ENTRY + field(2, b"") + field(3, b""))))
    assert (message.causal_history, dialect) == ((HistoryEntry("abc"),), Dialect.V2)


def test_nim_frames_may_hold_plain_ids_too() -> None:
    frame = field(1, b"id") + field(2, 5) + field(3, b"plain") + field(4, b"c") + field(5, b"x")
    message, dialect = decode(frame)
    assert (message.causal_history, dialect) == ((HistoryEntry("plain"),), Dialect.NIM)


def test_a_sender_in_field_1_wins_over_field_7() -> None:
    message, dialect = decode(field(1, b"one") + frame_with(field(7, b"seven")))
    assert (message.sender_id, dialect) == ("one", Dialect.V2)


def test_plain_ids_make_version_1_wherever_the_sender_stands() -> None:
    message, dialect = decode(frame_with(field(7, b"seven"), field(11, b"plain")))
    assert (message.sender_id, dialect) == ("seven", Dialect.V1)


def test_content_of_length_0_makes_a_sync_message() -> None:
    message, _ = decode(field(2, b"id") + field(10, 7) + field(20, b""))
    assert message.kind is Kind.SYNC


def test_timestamp_0_is_a_timestamp() -> None:
    message, _ = decode(field(2, b"id") + field(10, 0) + field(20, b"x"))
    assert (message.lamport_timestamp, message.kind) == (0, Kind.CONTENT)


def test_unset_and_empty_channel_are_the_same_and_differ_from_0() -> None:
    unset, _ = decode(field(2, b"id") + field(10, 7))
    empty, _ = decode(field(2, b"id") + field(3, b"") + field(10, 7))
    zero, _ = decode(field(2, b"id") + field(3, b"0") + field(10, 7))
    assert unset == empty
    assert (empty.channel_id, zero.channel_id) == ("", "0")


def test_unknown_fields_of_a_frame_are_ignored() -> None:
    assert decode(frame_with(field(99, b"new"))) == decode(frame_with())


@pytest.mark.parametrize("nim", [False, True])
@pytest.mark.parametrize(
    ("on_wire", "lamport"),
    [
        (0, 0),
        (1, 1),
        (2**31 - 1, 2**31 - 1),
        (2**31, 2**31),
        (2**63 - 1, 2**63 - 1),
        (2**63, None),
        (2**64 - 2**31 - 1, None),
        (2**64 - 2**31, -(2**31)),
        (2**64 - 1, -1),
    ],
)
def test_timestamps_are_read_as_they_are_or_as_sign_extended_int32(
    on_wire: int, lamport: int | None, nim: bool
) -> None:
    if nim:
        frame = field(1, b"id") + field(2, on_wire) + field(5, b"x")
    else:
        frame = field(2, b"id") + field(10, on_wire) + field(20, b"x")
    if lamport is None:
        assert code_of(frame) == "lamport_out_of_range"
    else:
        assert decode(frame)[0].lamport_timestamp == lamport


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (b"", "missing_message_id"),
        (field(2, b""), "missing_message_id"),
        (field(10, 7) + field(20, b"x"), "missing_message_id"),
        (field(2, 7) + field(5, b"x"), "missing_message_id"),
        (field(1, b"nim without a timestamp") + field(5, b"x"), "missing_message_id"),
        (b"\xff", "malformed_frame"),
        (frame_with()[:-1], "malformed_frame"),
        (field(2, b"\xff") + field(10, 7), "invalid_utf8"),
        (field(2, b"\xed\xa0\x80") + field(10, 7), "invalid_utf8"),
        (frame_with(field(3, b"\xff")), "invalid_utf8"),
        (frame_with(field(1, b"\xff")), "invalid_utf8"),
        (frame_with(field(11, field(1, b"\xff"))), "invalid_utf8"),
        (frame_with(field(11, ENTRY + field(3, b"\xff"))), "invalid_utf8"),
        (frame_with(field(2, b"a\0b")), "nul_character"),
        (frame_with(field(3, b"\0")), "nul_character"),
        (frame_with(field(1, b"\0")), "nul_character"),
        (frame_with(field(11, field(1, b"\0"))), "nul_character"),
        (frame_with(field(11, ENTRY + field(3, b"\0"))), "nul_character"),
        (frame_with(field(13, field(1, b"\0"))), "nul_character"),
        (field(2, b"id"), "no_content_no_lamport"),
        (field(2, b"id") + field(20, b""), "no_content_no_lamport"),
    ],
)
def test_each_refusal_has_its_code(frame: bytes, code: str) -> None:
    assert code_of(frame) == code


@pytest.mark.parametrize(
    ("message", "dialect"),
    [
        (Message("id", "c", sender_id="s", lamport_timestamp=1), Dialect.V1),
        (Message("id", "c", lamport_timestamp=1, repair_request=(HistoryEntry("r"),)), Dialect.V1),
        (
            Message("id", "c", lamport_timestamp=1, causal_history=(HistoryEntry("r", b"h"),)),
            Dialect.V1,
        ),
        (
            Message("id", "c", lamport_timestamp=1, causal_history=(HistoryEntry("\n\x03abc"),)),
            Dialect.V1,
        ),
        (Message("id", "c", lamport_timestamp=0), Dialect.CHAT_PROTO),
        (
            Message("id", "c", lamport_timestamp=1, repair_request=(HistoryEntry("r"),)),
            Dialect.CHAT_PROTO,
        ),
        (Message("id", "c", content=b"x"), Dialect.NIM),
    ],
)
def test_what_a_dialect_has_no_room_for_is_refused_not_dropped(
    message: Message, dialect: Dialect
) -> None:
    with pytest.raises(MessageError) as refused:
        encode(message, dialect)
    assert refused.value.code == "dialect_cannot_express"


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (Message("", "c", lamport_timestamp=1), "missing_message_id"),
        (Message("id", "c"), "no_content_no_lamport"),
        (Message("id", "c", lamport_timestamp=2**63), "lamport_out_of_range"),
        (Message("id", "c", lamport_timestamp=-(2**31) - 1), "lamport_out_of_range"),
        (Message("i\0d", "c", lamport_timestamp=1), "nul_character"),
        (Message("\ud800", "c", lamport_timestamp=1), "invalid_utf8"),
        (
            Message("id", "c", lamport_timestamp=1, causal_history=(HistoryEntry(""),)),
            "missing_message_id",
        ),
    ],
)
def test_encoding_refuses_what_decoding_would(message: Message, code: str) -> None:
    with pytest.raises(MessageError) as refused:
        encode(message)
    assert refused.value.code == code


@pytest.mark.parametrize("dialect", Dialect)
@given(data=st.data())
@settings(deadline=None, max_examples=100)
def test_decoding_undoes_encoding_in_every_dialect(dialect: Dialect, data: st.DataObject) -> None:
    message = data.draw(messages(dialect))
    decoded, found = decode(encode(message, dialect))
    assert decoded == message
    unmarked = (dialect is Dialect.V1 and not message.causal_history) or (
        dialect is Dialect.CHAT_PROTO and not message.sender_id
    )
    assert found is (Dialect.V2 if unmarked else dialect)


@given(messages())
@settings(deadline=None, max_examples=200)
def test_the_published_schema_reads_and_writes_the_same_frames(message: Message) -> None:
    frame = encode(message)
    official = sds_pb2.Message.FromString(frame)
    assert official.message_id == message.message_id
    assert official.sender_id == message.sender_id
    assert official.HasField("lamport_timestamp") == (message.lamport_timestamp is not None)
    assert official.lamport_timestamp == (message.lamport_timestamp or 0)
    assert [e.message_id for e in official.causal_history] == [
        e.message_id for e in message.causal_history
    ]
    assert official.SerializeToString(deterministic=True) == frame


@given(st.binary(max_size=200))
@example(b"\x12\x01a\x5a\x02\x0b\x0c")
@settings(deadline=None, max_examples=1000)
def test_any_bytes_decode_or_are_refused_with_a_code(frame: bytes) -> None:
    check_decodes_or_refuses(frame)


@given(st.sampled_from([f for f in FRAMES if len(f) < 1000]), st.data())
@settings(deadline=None, max_examples=1000)
def test_damaged_frames_decode_or_are_refused_with_a_code(
    frame: bytes, data: st.DataObject
) -> None:
    damaged = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        kind = data.draw(st.sampled_from(["set", "cut", "insert"]))
        if kind == "set":
            damaged[at] = data.draw(st.integers(0, 255))
        elif kind == "insert":
            damaged[at:at] = data.draw(st.binary(min_size=1, max_size=4))
        elif len(damaged) > 1:
            del damaged[at]
    check_decodes_or_refuses(bytes(damaged))


def check_decodes_or_refuses(frame: bytes) -> None:
    message, code = decoded_or_code(frame)
    assert (message is None) == (code in CODES)
    if message is not None:
        assert decode(encode(message))[0] == message


def decoded_or_code(frame: bytes) -> tuple[Message | None, str]:
    try:
        return decode(frame)[0], ""
    except MessageError as error:
        return None, error.code


def test_a_protobuf_runtime_that_reads_frames_otherwise_is_refused() -> None:
    """The pure Python runtime takes a known field with an overlong tag for an unknown one."""
    program = (
        "from sdstore.sds.codec import decode; print(decode(bytes.fromhex('12026964d0800007')))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (run.returncode, run.stdout) == (1, "")
    assert "'python' runtime reads frames differently" in run.stderr
