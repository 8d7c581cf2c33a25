"""The JSON form of a message: proto3 JSON with the field names of proto/sds.proto."""

import base64
import re
from binascii import b2a_base64
from collections.abc import Mapping
from typing import Any

from sdstore.sds.model import HistoryEntry, Message, MessageError, validated

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
