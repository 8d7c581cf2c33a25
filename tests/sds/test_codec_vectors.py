"""Frames of js-waku, nim-sds and the specification's versions decode as their writers meant."""

from typing import Any

import pytest

from sdstore.sds.bloom import Form, read_filter
from sdstore.sds.codec import decode, encode
from sdstore.sds.model import Dialect, HistoryEntry, Kind, Message, MessageError, verifies
from tests.support.sds_vectors import VECTORS, load, message_vectors

# The writer's IDs and ours differ by design: an empty element is dropped, and these bytes are a
# version 2 entry as well as a version 1 ID.
UNDECIDABLE = {
    "spec_versions_messages:v1_empty_id": (),
    "js_waku_messages:history_entry_empty_id": (),
    "spec_versions_messages:v1_ambiguous_id": (HistoryEntry("abc"),),
}

# Written with a field that is set but empty, which the model does not keep.
SET_BUT_EMPTY = {
    "js_waku_messages:history_entry_empty_hint",
    "js_waku_messages:history_entry_empty_id",
    "js_waku_messages:bloom_empty_bytes",
    "spec_versions_messages:v1_empty_id",
    "spec_versions_messages:v2_empty_hint",
}

VALID = [(name, vector) for name, vector in message_vectors() if vector["fields"]]


def by_name(vectors: list[tuple[str, dict[str, Any]]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("name", "vector"), vectors, ids=[name for name, _ in vectors])


def entries_of(recorded: list[dict[str, str]]) -> tuple[HistoryEntry, ...]:
    return tuple(
        HistoryEntry(
            entry["message_id"],
            bytes.fromhex(entry.get("retrieval_hint_hex") or ""),
            entry.get("sender_id") or "",
        )
        for entry in recorded
    )


def lamport_of(recorded: str | None) -> int | None:
    if recorded is None:
        return None
    lamport = int(recorded)
    return lamport - 2**64 if lamport >= 2**63 else lamport


@by_name(VALID)
def test_a_recorded_frame_decodes_to_the_fields_its_writer_set(
    name: str, vector: dict[str, Any]
) -> None:
    message, _ = decode(bytes.fromhex(vector["hex"]))
    fields = vector["fields"]
    assert message.message_id == fields["message_id"]
    assert message.channel_id == fields["channel_id"]
    assert message.sender_id == (fields["sender_id"] or "")
    assert message.content == bytes.fromhex(fields["content_hex"] or "")
    assert message.lamport_timestamp == lamport_of(fields["lamport_timestamp"])
    expected = UNDECIDABLE.get(name, entries_of(fields["causal_history"]))
    assert message.causal_history == expected
    assert message.repair_request == entries_of(fields.get("repair_request", []))
    if "bloom_filter_len" in fields:
        assert len(message.bloom_filter) == (fields["bloom_filter_len"] or 0)
    else:
        assert message.bloom_filter == bytes.fromhex(fields["bloom_filter_hex"] or "")


@by_name(VALID)
def test_encoding_a_decoded_frame_gives_the_recorded_bytes(
    name: str, vector: dict[str, Any]
) -> None:
    frame = bytes.fromhex(vector["hex"])
    again = encode(*decode(frame))
    assert (again != frame) == (name in SET_BUT_EMPTY)
    assert decode(again) == decode(frame)


def test_each_writers_dialect_is_recognised() -> None:
    found = {name: decode(bytes.fromhex(vector["hex"]))[1] for name, vector in VALID}
    assert {d for name, d in found.items() if name.startswith("js_waku")} == {Dialect.V2}
    assert {d for name, d in found.items() if name.startswith("nim_sds")} == {Dialect.NIM}
    strings = {name for name, dialect in found.items() if dialect is Dialect.V1}
    assert strings == {
        name
        for name, vector in VALID
        if vector.get("version") == "v1"
        and vector["fields"]["causal_history"]
        and name not in UNDECIDABLE
    }


@by_name([v for v in VALID if "js_decodes_as" in v[1]])
def test_kinds_are_what_js_waku_says(name: str, vector: dict[str, Any]) -> None:
    assert decode(bytes.fromhex(vector["hex"]))[0].kind.value == vector["js_decodes_as"]


def test_the_recorded_filters_are_read_in_their_writers_form() -> None:
    found = {}
    for name, vector in VALID:
        message, _ = decode(bytes.fromhex(vector["hex"]))
        if message.bloom_filter:
            received = read_filter(message.bloom_filter)
            found[name] = None if received is None else received.form
    full_size = {name for name, form in found.items() if form is Form.JS}
    assert len(full_size) >= 3
    # The others are samples of a few bytes, which are no filters.
    assert set(found.values()) == {Form.JS, None}
    assert {
        len(decode(bytes.fromhex(dict(VALID)[n]["hex"]))[0].bloom_filter) for n in full_size
    } == {18_752}


def test_every_file_of_vectors_is_read_by_a_test() -> None:
    sources = [path.read_text(encoding="utf-8") for path in VECTORS.parent.rglob("*.py")]
    for path in VECTORS.glob("*.json"):
        assert any(f'"{path.stem}' in source for source in sources), path.name


def test_a_frame_without_content_and_timestamp_is_refused_as_js_waku_does() -> None:
    [vector] = [v for _, v in message_vectors() if v.get("js_decodes_as") == "undecodable"]
    with pytest.raises(MessageError) as refused:
        decode(bytes.fromhex(vector["hex"]))
    assert refused.value.code == "no_content_no_lamport"


def conversation_frames() -> list[tuple[str, bytes, dict[str, Any]]]:
    return [
        (
            f"{scenario['name']}:{step['frame']['frame']}",
            bytes.fromhex(scenario["frames"][step["frame"]["frame"]]),
            step["frame"],
        )
        for scenario in load("js_waku_two_participants")["scenarios"]
        for step in scenario["steps"]
        if isinstance(step.get("frame"), dict) and "message_id" in step["frame"]
    ]


def test_frames_of_js_waku_conversations_decode_encode_and_verify() -> None:
    frames = conversation_frames()
    assert len(frames) > 10
    for name, frame, recorded in frames:
        message, dialect = decode(frame)
        assert encode(message, dialect) == frame, name
        assert message.kind is Kind(recorded["kind"])
        assert message.message_id == recorded["message_id"]
        assert message.sender_id == recorded["sender_id"]
        assert [e.message_id for e in message.causal_history] == [
            e["message_id"] if isinstance(e, dict) else e for e in recorded["causal_history"]
        ]
        assert verifies(message) == (message.kind is not Kind.SYNC)


def test_chat_proto_frames_keep_their_sender_in_field_7() -> None:
    message = Message("id", "chan", sender_id="alice", lamport_timestamp=5, content=b"hi")
    frame = b"\x12\x02id\x1a\x04chan\x3a\x05alice\x50\x05\xa2\x01\x02hi"
    assert decode(frame) == (message, Dialect.CHAT_PROTO)
    assert encode(message, Dialect.CHAT_PROTO) == frame
