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


def _fields_of(element: bytes) -> Any:
    from sdstore.wire import sds_raw_pb2

    return sds_raw_pb2.EntryFields.FromString(element)


def _let_unknown_fields_pass(element: bytes) -> bool:
    fields = _fields_of(element)
    return max(map(len, (fields.message_id, fields.retrieval_hint, fields.sender_id))) == 1


def _without_count(layout: bytes, message: Any) -> bytes:
    texts = message.message_id, message.channel_id, message.sender_id
    at = sum(4 + len(text.encode()) for text in texts) + 9
    return layout[:at] + layout[at + 4 :]


def _senderless(message: Any) -> tuple[Any]:
    return (replace(message, sender_id=""),)


FAULTS = [
    _fault("the sender in field 7 wins", "codec:_decode_spec", after(_prefer_field_7)),
    _fault(
        "an entry may have unknown fields",
        "codec:_holds_each_field_once",
        instead(_let_unknown_fields_pass),
    ),
    _fault("timestamps below int32 are taken", "model:LAMPORT_MIN", instead(-(2**32))),
    _fault("the history is not counted", "model:entry_layout", after(_without_count)),
    _part(
        "an ID of ours does not cover the sender",
        "model:message_id_layout",
        before(_senderless),
        "schemes",
    ),
    _part("any number of hashes is believed", "bloom:HASH_COUNT_MAX", instead(2**64)),
    _part("a filter of any size is read", "bloom:FILTER_BYTES_MAX", instead(2**18)),
    _part("everybody answers", "repair:Repair._is_in_group", returns(True)),
    _part("what arrived is asked for", "repair:Repair.received", nothing),
    _part("requests that are put off go by message ID", "repair:Repair._turn_ms", returns(0)),
]
