"""Frames to messages and back, in every dialect.

Decoding is a pure function of the frame, without settings, because an entry's digest depends on
it. Section 1 of docs/identity.md specifies it completely, including the precedence of error codes; a
second decoder in the tests is written from that section alone. The frame determines the dialect:

- field 2 holds bytes: the specification's numbering. Plain strings as causal history make it
  `V1`; otherwise a sender in field 7 and none in field 1 makes it `CHAT_PROTO`; otherwise `V2`.
- field 2 holds a varint: `NIM`.

A version 1 frame with an empty history has the bytes of version 2 and is called `V2`, just as
a chat_proto frame without a sender is.

protobuf's upb runtime parses the bytes. The pure Python runtime reads some frames differently (it
treats a known field with an overlong tag as unknown), so this module does not load on it.
"""

import base64
import re
from binascii import b2a_base64
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from google.protobuf.internal import api_implementation
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from sdstore.sds.model import Dialect, HistoryEntry, Message, MessageError, validated
from sdstore.wire import sds_raw_pb2 as raw

# ---- causal histories

ENTRIES_REMEMBERED = 16_384
"""Histories repeat (js-waku's: 199 of 200 entries from one message to the next). This covers the
windows of about 80 busy conversations, at most 16 MiB."""

REMEMBERED_BYTES_MAX = 512
"""A longer element is not cached, which bounds the cache's memory."""

_TAG_MESSAGE_ID = b"\x0a"
_parse_entry = raw.Entry.FromString


def parse_history(elements: Sequence[bytes]) -> tuple[tuple[HistoryEntry, ...], bool]:
    """Entries of a causal history, and whether they were plain strings (version 1).

    Raises `UnicodeDecodeError` for a kept entry whose ID or sender is not UTF-8.
    """
    strict = _strict_entries(elements)
    if strict is not None:
        return strict, False
    present = [element for element in elements if element]
    if not all(element.startswith(_TAG_MESSAGE_ID) for element in present):
        try:
            return tuple(HistoryEntry(element.decode()) for element in present), True
        except UnicodeDecodeError:
            pass  # not version 1 either
    return _lenient_entries(present), False


def parse_entries(elements: Sequence[bytes]) -> tuple[HistoryEntry, ...]:
    """Entries of a repair request, which no version writes as plain strings."""
    strict = _strict_entries(elements)
    return _lenient_entries(elements) if strict is None else strict


def serialize_entry(entry: HistoryEntry) -> bytes:
    """The element for `entry`; empty fields are left out."""
    message_id, hint = entry.message_id.encode(), entry.retrieval_hint
    sender_id = entry.sender_id.encode()
    if len(message_id) > 127 or len(hint) > 127 or len(sender_id) > 127:
        return raw.Entry(
            message_id=message_id, retrieval_hint=hint, sender_id=sender_id
        ).SerializeToString()
    # Lengths of one byte: the same bytes in a quarter of the time.
    element = b"\x0a%c%b" % (len(message_id), message_id) if message_id else b""
    if hint:
        element += b"\x12%c%b" % (len(hint), hint)
    if sender_id:
        element += b"\x1a%c%b" % (len(sender_id), sender_id)
    return element


def _strict_entries(elements: Sequence[bytes]) -> tuple[HistoryEntry, ...] | None:
    """All entries that are not empty, or `None` if one of them is not strict."""
    entries = []
    fault = None
    for element in elements:
        if not element:
            continue
        is_short = len(element) <= REMEMBERED_BYTES_MAX
        try:
            entry = _remembered_entry(element) if is_short else _strict_entry(element)
        except UnicodeDecodeError as error:
            fault = error  # raised only if the other elements make this a version 2 history
            continue
        if entry is None:
            return None
        entries.append(entry)
    if fault is not None:
        raise fault
    return tuple(entries)


def _strict_entry(element: bytes) -> HistoryEntry | None:
    """An entry is strict if it has only fields 1 to 3, each at most once, and field 1 is UTF-8.

    Raises `UnicodeDecodeError` for a sender that is not UTF-8.
    """
    try:
        entry = _parse_entry(element)
        message_id, hint, sender = entry.message_id, entry.retrieval_hint, entry.sender_id
        # If it is as long as the shortest encoding of its values (below 128 bytes each), it has no
        # room for unknown, empty or repeated fields.
        size = 2 + len(message_id)
        if hint:
            size += 2 + len(hint)
        if sender:
            size += 2 + len(sender)
        if size != len(element) and not _holds_each_field_once(element):
            return None
        text_id = message_id.decode()
    except (DecodeError, UnicodeDecodeError):
        return None
    return HistoryEntry(text_id, hint, sender.decode()) if text_id else None


_remembered_entry = lru_cache(ENTRIES_REMEMBERED)(_strict_entry)


def _holds_each_field_once(element: bytes) -> bool:
    fields = raw.EntryFields.FromString(element)
    repeats = max(len(fields.message_id), len(fields.retrieval_hint), len(fields.sender_id))
    return repeats == 1 and len(UnknownFieldSet(fields)) == 0


def _lenient_entries(elements: Sequence[bytes]) -> tuple[HistoryEntry, ...]:
    entries = (_lenient_entry(element) for element in elements)
    return tuple(entry for entry in entries if entry is not None)


def _lenient_entry(element: bytes) -> HistoryEntry | None:
    if not element.startswith(_TAG_MESSAGE_ID):
        return None
    try:
        entry = _parse_entry(element)
    except DecodeError:
        return None
    if not entry.message_id:
        return None
    return HistoryEntry(entry.message_id.decode(), entry.retrieval_hint, entry.sender_id.decode())


# ---- frames

__all__ = ["DECODER_VERSION", "MessageError", "decode", "encode"]

DECODER_VERSION = 1
"""Raise it with every change that decodes any frame to another message."""


_OVERLONG = b"\x92\x00\x02id\xd0\x80\x00\x07"  # message ID "id", timestamp 7; both tags overlong
_OVERLONG_READ = raw.SpecFrame.FromString(_OVERLONG)
if (_OVERLONG_READ.message_id, _OVERLONG_READ.lamport_timestamp) != (b"id", 7):
    raise ImportError(
        f"protobuf's {api_implementation.Type()!r} runtime reads frames differently from "
        "docs/identity.md, which gives other digests; use its binary wheel (the upb runtime), and "
        "unset PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION"
    )


def decode(frame: bytes) -> tuple[Message, Dialect]:
    """The message in `frame` and its dialect; `MessageError` if it is not a valid message."""
    try:
        spec = raw.SpecFrame.FromString(frame)
        if spec.message_id:
            return _decode_spec(spec)
        nim = raw.NimFrame.FromString(frame)
        if nim.HasField("lamport_timestamp"):
            return _decode_nim(nim)
    except DecodeError as error:
        raise MessageError("malformed_frame", "the frame is not a protobuf message") from error
    except UnicodeDecodeError as error:
        raise MessageError("invalid_utf8", f"a string is not UTF-8: {error.reason}") from error
    raise MessageError("missing_message_id", "the frame holds no message ID")


def encode(message: Message, dialect: Dialect = Dialect.V2) -> bytes:
    """The frame for `message`; decoding it gives the same message.

    Raises `MessageError` for an invalid message, with the code `dialect_cannot_express` if the dialect
    lacks a field that the message uses.
    """
    validated(message)
    try:
        if dialect is Dialect.NIM:
            return _encode_nim(message)
        if dialect is Dialect.V1:
            return _encode_v1(message)
        if dialect is Dialect.CHAT_PROTO:
            return _encode_chat_proto(message)
        return _encode_v2(message)
    except UnicodeEncodeError as error:
        raise MessageError("invalid_utf8", f"a string is not UTF-8: {error.reason}") from error


def _decode_spec(frame: raw.SpecFrame) -> tuple[Message, Dialect]:
    # [:] copies at once; iterating over a protobuf container costs twice as much.
    history, is_strings = parse_history(frame.causal_history[:])
    sender = frame.sender_id
    dialect = Dialect.V1 if is_strings else Dialect.V2
    if not sender:
        sender = frame.chat_sender_id
        if sender and not is_strings:
            dialect = Dialect.CHAT_PROTO
    return _message(frame, sender, history), dialect


def _decode_nim(frame: raw.NimFrame) -> tuple[Message, Dialect]:
    history, _ = parse_history(frame.causal_history[:])
    return _message(frame, frame.sender_id, history), Dialect.NIM


def _message(
    frame: raw.SpecFrame | raw.NimFrame, sender: bytes, history: tuple[HistoryEntry, ...]
) -> Message:
    # Positional: with keywords a frozen dataclass takes twice as long to make.
    return validated(
        Message(
            frame.message_id.decode(),
            frame.channel_id.decode(),
            sender.decode(),
            frame.lamport_timestamp if frame.HasField("lamport_timestamp") else None,
            history,
            frame.bloom_filter,
            parse_entries(repairs) if (repairs := frame.repair_request[:]) else (),
            frame.content,
        )
    )


def _encode_v2(message: Message) -> bytes:
    head = _spec_head(message, [serialize_entry(each) for each in message.causal_history])
    head.sender_id = message.sender_id.encode()
    return _spec_bytes(head, message)


def _encode_v1(message: Message) -> bytes:
    _require(not message.sender_id, "version 1 has no sender")
    _require(not message.repair_request, "version 1 has no repair requests")
    elements = [entry.message_id.encode() for entry in message.causal_history]
    history, is_strings = parse_history(elements)
    _require(
        history == message.causal_history and (is_strings or not history),
        "version 1 has no hints or senders in its history, and no IDs that look like entries",
    )
    return _spec_bytes(_spec_head(message, elements), message)


def _encode_chat_proto(message: Message) -> bytes:
    _require(
        message.lamport_timestamp != 0,
        "chat_proto cannot distinguish timestamp 0 from an absent one",
    )
    _require(not message.repair_request, "chat_proto has no repair requests")
    head = _spec_head(message, [serialize_entry(each) for each in message.causal_history])
    head.chat_sender_id = message.sender_id.encode()
    return _spec_bytes(head, message)


def _spec_head(message: Message, causal_history: list[bytes]) -> raw.SpecFrame:
    """The fields up to 11, but for the sender's."""
    return raw.SpecFrame(
        message_id=message.message_id.encode(),
        channel_id=message.channel_id.encode(),
        lamport_timestamp=message.lamport_timestamp,
        causal_history=causal_history,
    )


def _spec_bytes(head: raw.SpecFrame, message: Message) -> bytes:
    """The frame with these fields up to 11 and the message's from 12 on.

    protobuf would copy the filter, which is most of a frame, three times.
    """
    tail = raw.SpecFrame(content=message.content)
    if message.repair_request:
        tail.repair_request.extend([serialize_entry(each) for each in message.repair_request])
    bloom_filter = message.bloom_filter
    filter_header = _filter_header(len(bloom_filter)) if bloom_filter else b""
    return b"".join(
        (head.SerializeToString(), filter_header, bloom_filter, tail.SerializeToString())
    )


@lru_cache(64)
def _filter_header(size: int) -> bytes:
    """Tag and length of a filter of so many bytes, as protobuf writes them."""
    return raw.SpecFrame(bloom_filter=bytes(size)).SerializeToString()[:-size]


def _encode_nim(message: Message) -> bytes:
    _require(message.lamport_timestamp is not None, "nim-sds has no ephemeral messages")
    return raw.NimFrame(
        message_id=message.message_id.encode(),
        lamport_timestamp=message.lamport_timestamp,
        causal_history=map(serialize_entry, message.causal_history),
        channel_id=message.channel_id.encode(),
        content=message.content,
        bloom_filter=bytes(message.bloom_filter),
        sender_id=message.sender_id.encode(),
        repair_request=map(serialize_entry, message.repair_request),
    ).SerializeToString()


def _require(condition: bool, detail: str) -> None:
    if not condition:
        raise MessageError("dialect_cannot_express", detail)


_MESSAGE_KEYS = frozenset(
    {
        "sender_id",
        "message_id",
        "channel_id",
        "lamport_timestamp",
        "causal_history",
        "bloom_filter",
        "repair_request",
        "content",
    }
)
_ENTRY_KEYS = frozenset({"message_id", "retrieval_hint", "sender_id"})
_INTEGER = re.compile(r"-?[0-9]{1,20}")
_STANDARD_ALPHABET = str.maketrans("-_", "+/")


def to_json(message: Message) -> dict[str, Any]:
    """`message` as a JSON object; fields that are empty or unset are left out."""
    fields: dict[str, Any] = {}
    if message.sender_id:
        fields["sender_id"] = message.sender_id
    fields["message_id"] = message.message_id
    if message.channel_id:
        fields["channel_id"] = message.channel_id
    if message.lamport_timestamp is not None:
        fields["lamport_timestamp"] = str(message.lamport_timestamp)
    if message.causal_history:
        fields["causal_history"] = [_entry_to_json(entry) for entry in message.causal_history]
    if message.bloom_filter:
        fields["bloom_filter"] = _base64(message.bloom_filter)
    if message.repair_request:
        fields["repair_request"] = [_entry_to_json(entry) for entry in message.repair_request]
    if message.content:
        fields["content"] = _base64(message.content)
    return fields


def from_json(obj: object) -> Message:
    """The message in a parsed JSON value.

    Integers can be numbers or strings, bytes standard or URL-safe base64; `null` is unset.
    Raises `MessageError`: `invalid_json_message` for another shape or an unknown key, and the codes of
    `decode` for a message that breaks a rule.
    """
    fields = _object(obj, _MESSAGE_KEYS, "message")
    return validated(
        Message(
            message_id=_string(fields, "message_id"),
            channel_id=_string(fields, "channel_id"),
            sender_id=_string(fields, "sender_id"),
            lamport_timestamp=_integer(fields, "lamport_timestamp"),
            causal_history=_entries(fields, "causal_history"),
            bloom_filter=_bytes(fields, "bloom_filter"),
            repair_request=_entries(fields, "repair_request"),
            content=_bytes(fields, "content"),
        )
    )


def _entry_to_json(entry: HistoryEntry) -> dict[str, str]:
    fields = {"message_id": entry.message_id}
    if entry.retrieval_hint:
        fields["retrieval_hint"] = _base64(entry.retrieval_hint)
    if entry.sender_id:
        fields["sender_id"] = entry.sender_id
    return fields


def _base64(value: bytes) -> str:
    return b2a_base64(value, newline=False).decode("ascii")


def _object(obj: object, keys: frozenset[str], what: str) -> Mapping[str, object]:
    if not isinstance(obj, dict):
        raise _invalid(f"a {what} must be an object")
    if unknown := obj.keys() - keys:
        raise _invalid(f"unknown key in a {what}: {min(map(repr, unknown))[:80]}")
    return obj


def _entries(fields: Mapping[str, object], name: str) -> tuple[HistoryEntry, ...]:
    value = fields.get(name)
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _invalid(f"{name} must be a list")
    return tuple(_entry(item) for item in value)


def _entry(obj: object) -> HistoryEntry:
    fields = _object(obj, _ENTRY_KEYS, "history entry")
    return HistoryEntry(
        message_id=_string(fields, "message_id"),
        retrieval_hint=_bytes(fields, "retrieval_hint"),
        sender_id=_string(fields, "sender_id"),
    )


def _string(fields: Mapping[str, object], name: str) -> str:
    value = fields.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _invalid(f"{name} must be a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise MessageError("invalid_utf8", f"{name} holds a lone surrogate") from error
    return value


def _bytes(fields: Mapping[str, object], name: str) -> bytes:
    value = fields.get(name)
    if value is None:
        return b""
    if not isinstance(value, str):
        raise _invalid(f"{name} must be a base64 string")
    digits = value.translate(_STANDARD_ALPHABET).rstrip("=")
    try:
        return base64.b64decode(digits + "=" * (-len(digits) % 4), validate=True)
    except ValueError as error:
        raise _invalid(f"{name} is not base64") from error


def _integer(fields: Mapping[str, object], name: str) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        return int(value)
    raise _invalid(f"{name} must be an integer, as a number or a string")


def _invalid(detail: str) -> MessageError:
    return MessageError("invalid_json_message", detail)
