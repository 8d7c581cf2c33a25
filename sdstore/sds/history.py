"""Causal history on the wire: plain IDs in version 1, serialized entries since version 2.

Both are length-delimited elements of one field, so the frame does not show which it holds. These rules
decide for each message:

1. Empty elements are empty IDs and are dropped.
2. All elements are strict entries: version 2.
3. Otherwise all are UTF-8 and not all begin with the tag of field 1: version 1 strings.
4. Otherwise entries of a later version: those that begin with field 1 are kept, unknown fields are
   ignored, unreadable elements are dropped.

A version 1 ID is mistaken for an entry only if it begins with a control character and its
second character happens to be a matching length.
"""

from collections.abc import Sequence
from functools import lru_cache

from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from sdstore.sds.model import HistoryEntry
from sdstore.wire import sds_raw_pb2 as raw

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
