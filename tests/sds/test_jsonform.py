"""Messages as JSON: what proto3's own JSON mapping writes and reads, strictly."""

import json
from typing import Any

import pytest
from google.protobuf import json_format
from hypothesis import given, settings
from hypothesis import strategies as st

from sdstore.sds.codec import decode, encode, from_json, to_json
from sdstore.sds.model import HistoryEntry, Message, MessageError, entry_digest
from sdstore.wire import sds_pb2
from tests.support.sds_strategies import messages

BASE: dict[str, Any] = {"message_id": "id", "channel_id": "c", "lamport_timestamp": "7"}


def code_of(obj: object) -> str:
    with pytest.raises(MessageError) as refused:
        from_json(obj)
    return refused.value.code


@given(messages())
@settings(deadline=None, max_examples=200)
def test_json_is_the_official_proto3_json_of_the_schema(message: Message) -> None:
    official = sds_pb2.Message.FromString(encode(message))
    expected = json_format.MessageToDict(official, preserving_proto_field_name=True)
    assert to_json(message) == expected


@given(messages())
@settings(deadline=None, max_examples=200)
def test_reading_undoes_writing(message: Message) -> None:
    assert from_json(json.loads(json.dumps(to_json(message)))) == message


def test_a_message_reads_well() -> None:
    message = Message(
        "m2", "chat", "alice", -5, (HistoryEntry("m1", b"\xff", "bob"),), content=b"hi"
    )
    assert to_json(message) == {
        "sender_id": "alice",
        "message_id": "m2",
        "channel_id": "chat",
        "lamport_timestamp": "-5",
        "causal_history": [{"message_id": "m1", "retrieval_hint": "/w==", "sender_id": "bob"}],
        "content": "aGk=",
    }


@pytest.mark.parametrize("lamport", [7, "7"])
def test_integers_are_read_as_numbers_and_as_strings(lamport: object) -> None:
    assert from_json(BASE | {"lamport_timestamp": lamport}).lamport_timestamp == 7


@pytest.mark.parametrize("content", ["/+8=", "_-8=", "_-8"])
def test_bytes_are_read_in_both_base64_alphabets(content: str) -> None:
    assert from_json(BASE | {"content": content}).content == b"\xff\xef"


def test_null_is_unset() -> None:
    assert from_json(BASE | {"content": None, "causal_history": None}) == from_json(BASE)


@pytest.mark.parametrize(
    ("obj", "code"),
    [
        ([], "invalid_json_message"),
        (None, "invalid_json_message"),
        (BASE | {"extra": 1}, "invalid_json_message"),
        (BASE | {"messageId": "x"}, "invalid_json_message"),
        (BASE | {"message_id": 5}, "invalid_json_message"),
        (BASE | {"lamport_timestamp": True}, "invalid_json_message"),
        (BASE | {"lamport_timestamp": 1.5}, "invalid_json_message"),
        (BASE | {"lamport_timestamp": ""}, "invalid_json_message"),
        (BASE | {"lamport_timestamp": " 7"}, "invalid_json_message"),
        (BASE | {"lamport_timestamp": "٧"}, "invalid_json_message"),
        (BASE | {"lamport_timestamp": "9" * 5000}, "invalid_json_message"),
        (BASE | {"content": "%%%%"}, "invalid_json_message"),
        (BASE | {"content": "a"}, "invalid_json_message"),
        (BASE | {"content": "é==="}, "invalid_json_message"),
        (BASE | {"content": [1]}, "invalid_json_message"),
        (BASE | {"causal_history": {}}, "invalid_json_message"),
        (BASE | {"causal_history": ["id"]}, "invalid_json_message"),
        (BASE | {"causal_history": [{"id": "x"}]}, "invalid_json_message"),
        (BASE | {"causal_history": [{}]}, "missing_message_id"),
        (BASE | {"lamport_timestamp": str(2**63)}, "lamport_out_of_range"),
        (BASE | {"message_id": "\ud800"}, "invalid_utf8"),
        (BASE | {"message_id": "a\0"}, "nul_character"),
        (BASE | {"message_id": ""}, "missing_message_id"),
        ({"message_id": "id", "channel_id": "c"}, "no_content_no_lamport"),
    ],
)
def test_each_refusal_has_its_code(obj: object, code: str) -> None:
    assert code_of(obj) == code


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*BASE, "content", "causal_history", "x"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(json_values)
@settings(deadline=None, max_examples=500)
def test_any_json_value_is_a_message_or_refused_with_a_code(obj: object) -> None:
    try:
        message = from_json(obj)
    except MessageError:
        return
    assert from_json(to_json(message)) == message


def respelled(draw: st.DrawFn, base64: str) -> str:
    """The same bytes as others write them: without padding, in the URL-safe alphabet."""
    if draw(st.booleans()):
        base64 = base64.rstrip("=")
    return base64.translate(str.maketrans("+/", "-_")) if draw(st.booleans()) else base64


@st.composite
def other_spellings(draw: st.DrawFn) -> tuple[Message, dict[str, Any]]:
    """A message, and a JSON object that means it and is written otherwise than ours."""
    message = draw(messages())
    fields = to_json(message)
    for name in ("content", "bloom_filter"):
        if name in fields:
            fields[name] = respelled(draw, fields[name])
        elif draw(st.booleans()):
            fields[name] = draw(st.sampled_from([None, ""]))
    for entry in [*fields.get("causal_history", ()), *fields.get("repair_request", ())]:
        if "retrieval_hint" in entry:
            entry["retrieval_hint"] = respelled(draw, entry["retrieval_hint"])
        if "sender_id" not in entry and draw(st.booleans()):
            entry["sender_id"] = draw(st.sampled_from([None, ""]))
    if message.lamport_timestamp is not None and draw(st.booleans()):
        fields["lamport_timestamp"] = message.lamport_timestamp
    for name in ("causal_history", "repair_request"):
        if name not in fields and draw(st.booleans()):
            fields[name] = draw(st.sampled_from([None, []]))
    return message, dict(draw(st.permutations(list(fields.items()))))


@given(other_spellings())
@settings(deadline=None, max_examples=100)
def test_the_same_message_in_another_spelling_is_the_same_entry(
    spelled: tuple[Message, dict[str, Any]],
) -> None:
    message, fields = spelled
    read = from_json(json.loads(json.dumps(fields)))
    assert read == message
    assert entry_digest(decode(encode(read))[0]) == entry_digest(message)


odd_values = st.one_of(
    st.sampled_from([None, True, 0, -1, 7.0, 2**63, -(2**31) - 1, "", " ", "a", "ab", "abc", "=="]),
    st.sampled_from(["YQ==", "YQ=", "YQ", "YR==", "Y Q==", "YQ==\n", "-0", "007", "+7", "1e3"]),
    st.sampled_from(["a\0", "\ud800", [], {}, [None], [{}], [{"message_id": "x"}], {"a": 1}]),
)


@st.composite
def changed_objects(draw: st.DrawFn) -> dict[str, Any]:
    """The JSON of a message in which some members, of itself or of an entry, are others."""
    fields = to_json(draw(messages()))
    entries = [*fields.get("causal_history", ()), *fields.get("repair_request", ())]
    for _ in range(draw(st.integers(1, 3))):
        within = draw(st.sampled_from([fields, *entries]))
        name = draw(st.sampled_from([*BASE, "content", "retrieval_hint", "sender_id", "x"]))
        if draw(st.booleans()):
            within[name] = draw(odd_values)
        else:
            within.pop(name, None)
    return fields


@given(changed_objects())
@settings(deadline=None, max_examples=300)
def test_what_is_read_is_what_the_official_parser_reads(fields: dict[str, Any]) -> None:
    try:
        message = from_json(fields)
    except MessageError:
        return
    official = json_format.ParseDict(fields, sds_pb2.Message())
    assert decode(official.SerializeToString())[0] == message
