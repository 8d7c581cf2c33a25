"""Causal history on the wire: plain IDs in version 1, serialized entries since version 2.

Both are length-delimited elements of one field, so the frame does not say which of them it
holds. The decision is made per message:

1. Empty elements are empty IDs and are dropped.
2. All elements are strict entries: version 2.
3. Otherwise all are UTF-8 and not all begin with the tag of field 1: version 1 strings.
4. Otherwise a later version's entries: those that begin with field 1 are kept, fields this
   version does not know are ignored, what cannot be read is dropped.

A version 1 ID is mistaken for an entry only if it begins with a control character and its
second character happens to be a fitting length.
"""

from collections.abc import Iterable, Sequence

from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from sdstore.sds.model import HistoryEntry
from sdstore.wire import sds_raw_pb2 as raw

_TAG_MESSAGE_ID = b"\x0a"
_ONE_BYTE_LENGTH = 128


def parse_history(elements: Iterable[bytes]) -> tuple[tuple[HistoryEntry, ...], bool]:
    """Entries of a causal history, and whether they were plain strings (version 1).

    Raises `UnicodeDecodeError` for a kept entry whose ID or sender is not UTF-8.
    """
    present = [element for element in elements if element]
    strict = _strict_entries(present)
    if strict is not None:
        return strict, False
    if not all(element.startswith(_TAG_MESSAGE_ID) for element in present):
        try:
            return tuple(HistoryEntry(str(element, "utf-8")) for element in present), True
        except UnicodeDecodeError:
            pass  # not version 1 either
    return _lenient_entries(present), False


def parse_entries(elements: Iterable[bytes]) -> tuple[HistoryEntry, ...]:
    """Entries of a repair request, which no version writes as plain strings."""
    present = [element for element in elements if element]
    strict = _strict_entries(present)
    return _lenient_entries(present) if strict is None else strict


def serialize_entry(entry: HistoryEntry) -> bytes:
    """The element for `entry`; fields that are empty are left out."""
    return raw.Entry(
        message_id=entry.message_id.encode(),
        retrieval_hint=entry.retrieval_hint,
        sender_id=entry.sender_id.encode(),
    ).SerializeToString()


def _strict_entries(elements: Sequence[bytes]) -> tuple[HistoryEntry, ...] | None:
    entries = []
    for element in elements:
        entry = _strict_entry(element)
        if entry is None:
            return None
        entries.append(entry)
    return tuple(entries)


def _strict_entry(element: bytes) -> HistoryEntry | None:
    """The entry if `element` holds fields 1 to 3 and nothing else, each at most once."""
    try:
        entry = raw.Entry.FromString(element)
    except DecodeError:
        return None
    message_id, hint, sender = entry.message_id, entry.retrieval_hint, entry.sender_id
    if not message_id:
        return None
    if not _fills(element, message_id, hint, sender) and not _holds_each_field_once(element):
        return None
    try:
        text_id = str(message_id, "utf-8")
    except UnicodeDecodeError:
        return None
    return HistoryEntry(text_id, hint, str(sender, "utf-8"))


def _fills(element: bytes, message_id: bytes, hint: bytes, sender: bytes) -> bool:
    """Whether the shortest encoding of the three values is as long as `element`.

    Then there is no room for unknown, repeated or empty fields. Values of 128 bytes and more,
    whose length takes a second byte, are left to the slow check.
    """
    if len(element) >= _ONE_BYTE_LENGTH + 2:
        longest = max(len(message_id), len(hint), len(sender))
        if longest >= _ONE_BYTE_LENGTH:
            return False
    size = 2 + len(message_id)
    if hint:
        size += 2 + len(hint)
    if sender:
        size += 2 + len(sender)
    return size == len(element)


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
        entry = raw.Entry.FromString(element)
    except DecodeError:
        return None
    if not entry.message_id:
        return None
    return HistoryEntry(
        str(entry.message_id, "utf-8"), entry.retrieval_hint, str(entry.sender_id, "utf-8")
    )
