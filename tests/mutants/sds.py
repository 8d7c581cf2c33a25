"""Faults planted in the decoder and in identity."""

from __future__ import annotations

from tests.mutants.fault import Fault

_TESTS = tuple(f"tests/sds/test_{name}.py" for name in ("two_decoders", "digest", "codec_rules"))


def _fault(name: str, module: str, right: str, wrong: str) -> Fault:
    return Fault(f"sds: {name}", f"sdstore/sds/{module}.py", right, wrong, _TESTS)


FAULTS = [
    _fault("the sender in field 7 wins", "codec", "    if not sender:\n", "    if frame.chat_sender_id:\n"),
    _fault("a timestamp that is set to 0 is none", "codec", 'frame.lamport_timestamp if frame.HasField("lamport_timestamp") else None', "frame.lamport_timestamp or None"),
    _fault("an empty sender in field 7 makes chat_proto", "codec", "if sender and not is_strings", "if not is_strings"),
    _fault("an entry may have unknown fields", "history", "return repeats == 1 and len(UnknownFieldSet(fields)) == 0", "return repeats == 1"),
    _fault("an entry may have a field twice", "history", "return repeats == 1 and", "return"),
    _fault("the length of an entry is never looked at", "history", "if size != len(element) and not", "if False and not"),
    _fault("plain strings may all begin with field 1", "history", "if not all(element.startswith(_TAG_MESSAGE_ID) for element in present):", "if present:"),
    _fault("an entry of a later version begins with any field", "history", "    if not element.startswith(_TAG_MESSAGE_ID):\n        return None\n", ""),
    _fault("an entry of a later version needs no ID", "history", "    if not entry.message_id:\n        return None\n", ""),
    _fault("repair requests may be plain strings", "codec", "parse_entries(repairs)", "parse_history(repairs)[0]"),
    _fault("U+0000 in a sender of a history is taken", "model", 'if "\\0" in message_id or "\\0" in entry.sender_id:', 'if "\\0" in message_id:'),
    _fault("timestamps below int32 are taken", "model", "LAMPORT_MIN = -(2**31)", "LAMPORT_MIN = -(2**32)"),
    _fault("the history is counted nowhere", "digest", "        _U32(len(message.causal_history)),\n", ""),
    _fault("no timestamp is timestamp 0", "digest", "_LAMPORT(0, 0) if lamport is None", "_LAMPORT(1, 0) if lamport is None"),
]  # fmt: skip
