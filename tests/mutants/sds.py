"""Faults planted in the decoder and in identity."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.mutants.fault import Fault, Plant, after, before, instead, nothing, returns

_TESTS = tuple(f"tests/sds/test_{name}.py" for name in ("two_decoders", "digest", "codec_rules"))


def _fault(name: str, seam: str, plant: Plant) -> Fault:
    return Fault(f"sds: {name}", f"sdstore.sds.{seam}", plant, _TESTS)


def _part(name: str, seam: str, plant: Plant, part: str = "") -> Fault:
    part = part or seam.partition(":")[0]
    return Fault(f"sds: {name}", f"sdstore.sds.{seam}", plant, (f"tests/sds/test_{part}.py",))


def _prefer_field_7(decoded: Any, frame: Any) -> Any:
    message, dialect = decoded
    other = frame.chat_sender_id.decode()
    return (replace(message, sender_id=other) if other else message), dialect


def _call_it_chat_proto(decoded: Any, frame: Any) -> Any:
    from sdstore.sds.model import Dialect

    message, dialect = decoded
    is_v2 = dialect is Dialect.V2 and not frame.sender_id
    return message, Dialect.CHAT_PROTO if is_v2 else dialect


def _take_0_for_none(message: Any, *_: Any) -> Any:
    return message if message.lamport_timestamp else replace(message, lamport_timestamp=None)


def _fields_of(element: bytes) -> Any:
    from sdstore.wire import sds_raw_pb2

    return sds_raw_pb2.EntryFields.FromString(element)


def _let_unknown_fields_pass(element: bytes) -> bool:
    fields = _fields_of(element)
    return max(map(len, (fields.message_id, fields.retrieval_hint, fields.sender_id))) == 1


def _let_repeats_pass(element: bytes) -> bool:
    from google.protobuf.unknown_fields import UnknownFieldSet

    return len(UnknownFieldSet(_fields_of(element))) == 0


def _take_field_1_for_text(parse_history: Any) -> Any:
    def wrong(elements: Any) -> Any:
        from sdstore.sds.codec import _strict_entries
        from sdstore.sds.model import HistoryEntry

        present = [element for element in elements if element]
        if present and _strict_entries(elements) is None:
            try:
                return tuple(HistoryEntry(element.decode()) for element in present), True
            except UnicodeDecodeError:
                pass
        return parse_history(elements)

    return wrong


def _begin_with_any_field(lenient_entry: Any) -> Any:
    def wrong(element: bytes) -> Any:
        from google.protobuf.message import DecodeError

        from sdstore.wire import sds_raw_pb2

        try:
            entry = sds_raw_pb2.Entry.FromString(element)
        except DecodeError:
            return None
        # In the right sequence the tag of field 1 comes first.
        return lenient_entry(entry.SerializeToString())

    return wrong


def _need_no_id(lenient_entry: Any) -> Any:
    def wrong(element: bytes) -> Any:
        from sdstore.sds.model import HistoryEntry

        return HistoryEntry("") if element == b"\x0a\x00" else lenient_entry(element)

    return wrong


def _take_strings_for_repairs(_: Any) -> Any:
    def wrong(elements: Any) -> Any:
        from sdstore.sds.codec import parse_history

        return parse_history(elements)[0]

    return wrong


def _without_count(layout: bytes, message: Any) -> bytes:
    texts = message.message_id, message.channel_id, message.sender_id
    at = sum(4 + len(text.encode()) for text in texts) + 9
    return layout[:at] + layout[at + 4 :]


def _none_as_0(message: Any) -> tuple[Any]:
    is_none = message.lamport_timestamp is None
    return (replace(message, lamport_timestamp=0) if is_none else message,)


def _senderless(message: Any) -> tuple[Any]:
    return (replace(message, sender_id=""),)


def _is_64_digits(_: bool, message: Any) -> bool:
    return len(message.message_id) == 64


def _hash_utf8(_: Any) -> Any:
    def wrong(text: str) -> int:
        import mmh3

        return mmh3.hash(text)

    return wrong


def _reverse_hash(hash_of_text: Any) -> Any:
    def wrong(text: str) -> int:
        return int.from_bytes(hash_of_text(text).to_bytes(8), "little")

    return wrong


FAULTS = [
    _fault("the sender in field 7 wins", "codec:_decode_spec", after(_prefer_field_7)),
    _fault("a timestamp that is set to 0 is unset", "codec:_message", after(_take_0_for_none)),
    _fault(
        "an empty sender in field 7 makes chat_proto",
        "codec:_decode_spec",
        after(_call_it_chat_proto),
    ),
    _fault(
        "an entry may have unknown fields",
        "codec:_holds_each_field_once",
        instead(_let_unknown_fields_pass),
    ),
    _fault(
        "an entry may have a field twice",
        "codec:_holds_each_field_once",
        instead(_let_repeats_pass),
    ),
    _fault(
        "an entry with an unusual length is never looked into",
        "codec:_holds_each_field_once",
        returns(True),
    ),
    _fault(
        "plain strings may all begin with field 1",
        "codec:parse_history",
        _take_field_1_for_text,
    ),
    _fault(
        "an entry of a later version begins with any field",
        "codec:_lenient_entry",
        _begin_with_any_field,
    ),
    _fault("an entry of a later version needs no ID", "codec:_lenient_entry", _need_no_id),
    _fault(
        "repair requests may be plain strings",
        "codec:parse_entries",
        _take_strings_for_repairs,
    ),
    _fault(
        "U+0000 in a sender of a history is taken",
        "model:_check_entries",
        before(lambda entries: ([replace(each, sender_id="") for each in entries],)),
    ),
    _fault("timestamps below int32 are taken", "model:LAMPORT_MIN", instead(-(2**32))),
    _fault("the history is not counted", "model:entry_layout", after(_without_count)),
    _fault("no timestamp is timestamp 0", "model:entry_layout", before(_none_as_0)),
    _part(
        "an ID of ours does not cover the sender",
        "model:message_id_layout",
        before(_senderless),
        "schemes",
    ),
    _part(
        "an ID may be that of any 64 digits",
        "model:_is_of_message",
        after(_is_64_digits),
        "schemes",
    ),
    _part(
        "both hashes of an ID are the same", "bloom:hash_pair", after(lambda pair, *_: pair[:1] * 2)
    ),
    _part("nim's hash is unsigned", "bloom:_magnitude", instead(lambda hashed: hashed)),
    _part("code points are hashed as UTF-8", "bloom:_murmur3_of_code_points", _hash_utf8),
    _part("a full filter is not rebuilt", "bloom:BloomFilter.roll_over", nothing),
    _part("a filter keeps all at its capacity", "bloom:KEPT_SHARE", instead(0.99)),
    _part("any number of hashes is believed", "bloom:HASH_COUNT_MAX", instead(2**64)),
    _part("a filter of any size is read", "bloom:FILTER_BYTES_MAX", instead(2**18)),
    _part(
        "every filter is as good as a half full one",
        "bloom:ReceivedFilter.fill",
        instead(property(lambda _: 0.5)),
    ),
    _part("the hash of participants is little-endian", "repair:hash_of_text", _reverse_hash),
    _part("everybody answers", "repair:Repair._is_in_group", returns(True)),
    _part("answers do not wait", "repair:Repair._t_resp_ms", instead(lambda _, __, now_ms: now_ms)),
    _part("what arrived is asked for", "repair:Repair.received", nothing),
    _part("requesters are refused for ever", "repair:Repair._turn_window", nothing),
    _part("a group has 129 participants", "repair:PARTICIPANTS_PER_GROUP", instead(129)),
    _part("outdated times count", "repair:_Schedule.discard", nothing),
]
