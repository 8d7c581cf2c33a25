"""The store's decoder and a plain one, written from docs/identity.md alone, read every frame alike."""

import json
import os
import secrets
import struct
import time
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sdstore.sds.codec import decode
from sdstore.sds.model import HistoryEntry, MessageError, entry_digest
from tests.sds import frame_mutator, plain_decoder
from tests.support.sds_vectors import valid_frames

VECTORS = Path(__file__).parent.parent.parent / "docs" / "vectors" / "digest.json"
DISPUTED = Path(__file__).parent / "disputed_frames.txt"
FRAMES = 10_000
FRAMES_SOAK = 1_000_000
SECONDS_MAX = 60
Outcome = str | tuple[Any, ...]
"""The code of a refusal; or dialect, all fields and digest."""


def outcome_here(frame: bytes) -> Outcome:
    try:
        message, dialect = decode(frame)
    except MessageError as error:
        return error.code
    return (
        dialect.label,
        message.message_id,
        message.channel_id,
        message.sender_id,
        message.lamport_timestamp,
        as_tuples(message.causal_history),
        as_tuples(message.repair_request),
        message.bloom_filter,
        message.content,
        entry_digest(message),
    )


def as_tuples(entries: tuple[HistoryEntry, ...]) -> list[tuple[str, bytes, str]]:
    return [(each.message_id, each.retrieval_hint, each.sender_id) for each in entries]


def outcome_there(frame: bytes, decoder: types.ModuleType = plain_decoder) -> Outcome:
    try:
        message = decoder.decode(frame)
    except decoder.RefusedError as refused:
        return str(refused.code)
    return (
        message.dialect,
        message.message_id,
        message.channel,
        message.sender,
        message.lamport,
        message.history,
        message.repair,
        message.bloom,
        message.content,
        decoder.digest(message),
    )


def compare(frames_count: int, seconds_max: float) -> Counter[str]:
    """Compares generated frames until one of the bounds; counts codes and dialects.

    A frame that the decoders dispute goes into `disputed_frames.txt`, which is replayed by every
    run from then on.
    """
    first = secrets.randbits(48)
    ends = time.monotonic() + seconds_max
    met: Counter[str] = Counter()
    for seed in range(first, first + frames_count):
        frame = frame_mutator.frame(seed)
        here, there = outcome_here(frame), outcome_there(frame)
        if here != there:
            with DISPUTED.open("a", encoding="ascii") as kept:
                kept.write(frame.hex() + "\n")
        assert here == there, f"seed {seed}, frame {frame.hex()}"
        met[here if isinstance(here, str) else here[0]] += 1
        if time.monotonic() > ends:
            break
    return met


def test_frames_that_were_disputed_once_are_read_alike() -> None:
    for line in DISPUTED.read_text(encoding="ascii").splitlines():
        frame = bytes.fromhex(line)
        assert outcome_here(frame) == outcome_there(frame), line


def test_recorded_frames_are_read_alike() -> None:
    for frame in valid_frames():
        assert outcome_here(frame) == outcome_there(frame)


def test_mutated_frames_are_read_alike() -> None:
    met = compare(FRAMES, SECONDS_MAX)
    outcomes = {"v1", "v2", "chat_proto", "nim", "malformed_frame", "missing_message_id"}
    outcomes |= {"invalid_utf8", "nul_character", "lamport_out_of_range", "no_content_no_lamport"}
    assert met.keys() == outcomes  # the generator makes something of everything


@pytest.mark.soak
def test_a_million_mutated_frames_are_read_alike() -> None:
    met = compare(FRAMES_SOAK, 60 * float(os.environ.get("SOAK_MINUTES", "60")))
    print(f"{met.total()} frames: {dict(met)}")


# Errors that an implementer could make, as changes to the plain decoder.
FAULTS = {
    "the sender in field 7 wins": (
        "is_from_field_7 = sender == b",
        "is_from_field_7 = last_bytes(fields, 7) != b",
    ),
    "a timestamp 0 of chat_proto is none": (
        "    lamport = found.varint\n",
        "    lamport = found.varint\n    if found.dialect == 'chat_proto' and lamport == 0:\n        lamport = None\n",
    ),
    "repair requests may be plain strings": (
        "all_bytes(fields, 13), may_be_plain=False",
        "all_bytes(fields, 13), may_be_plain=True",
    ),
    "groups are malformed": (
        'return b"", skip_group(data, at, number, groups_open + 1)',
        "raise MalformedError",
    ),
    "a field in a group counts": (
        'def last_bytes(fields: list[Field], number: int) -> bytes:\n    found = b""\n',
        ('def last_bytes(fields: list[Field], number: int) -> bytes:\n    found = b""\n'
        "    if any(each.wire_type == 3 and each.number == number for each in fields):\n"
        '        return b"in a group"\n'),
    ),
    "99 groups": ("GROUPS_OPEN_MAX = 100", "GROUPS_OPEN_MAX = 99"),
    "101 groups": ("GROUPS_OPEN_MAX = 100", "GROUPS_OPEN_MAX = 101"),
    "field number 0 is malformed in a group": (
        "        _, at = read_value(data, at, inner",
        ("        if inner == 0:\n            raise MalformedError\n"
        "        _, at = read_value(data, at, inner"),
    ),
    "tags of 10 bytes": ("read_varint(data, at, 5)\n    if tag", "read_varint(data, at, 10)\n    if tag"),
    "tags above 2^32": ("if tag >= 2**32", "if tag >= 2**35"),
    "lengths of 10 bytes": ("length, at = read_varint(data, at, 5)", "length, at = read_varint(data, at, 10)"),
    "varints above 2^64 are malformed": (
        "return value % 2**64, at",
        "return (value if value < 2**64 else int('no'), at)",
    ),
    "the first one counts": (
        "if each.number == number and each.wire_type == 2:",
        'if each.number == number and each.wire_type == 2 and found == b"":',
    ),
    "an entry may have unknown fields": (
        "if each.number not in (1, 2, 3) or each.wire_type != 2:\n            return False",
        "if False:\n            return False",
    ),
    "a strict entry may have a field twice": ("    if len(numbers) != len(set(numbers)):", "    if False:"),
    "a strict entry must begin with its ID": (
        '    return message_id != b"" and is_utf8(message_id)',
        '    return element[0] == 0x0A and message_id != b"" and is_utf8(message_id)',
    ),
    "a strict entry has a sender in UTF-8": (
        '    return message_id != b"" and is_utf8(message_id)',
        '    return message_id != b"" and is_utf8(message_id) and is_utf8(last_bytes(fields, 3))',
    ),
    "later entries may begin with any field": ("return element[0] == 0x0A and fields is not", "return fields is not"),
    "plain strings may all begin with 0x0A": ("any(element[0] != 0x0A for element in present)", "True"),
    "no plain string begins with 0x0A": (
        "any(element[0] != 0x0A for element in present)",
        "all(element[0] != 0x0A for element in present)",
    ),
    "each element is read alone": (
        "        return [Entry(element) for element in present], True",
        "        return [entry_of(e) if is_strict(e) else Entry(e) for e in present], True",
    ),
    "empty elements are IDs": ('if element != b""]', 'if element != b"" or len(elements) > 1]'),
    "surrogates are UTF-8": ('data.decode("utf-8")', 'data.decode("utf-8", "surrogatepass")'),
    "repair requests need no UTF-8": (
        "if not all(is_utf8(string) for string in strings + entry_strings):",
        "if not all(is_utf8(string) for string in strings + [s for e in found.history for s in (e.message_id, e.sender)]):",
    ),
    "a hint may be no U+0000": (
        "entry_strings = [s for entry in entries for s in (entry.message_id, entry.sender)]",
        "entry_strings = [s for entry in entries for s in (entry.message_id, entry.hint, entry.sender)]",
    ),
    "timestamps are unsigned": ("        lamport -= 2**64", "        pass"),
    "timestamps from -2^31-1": ("lamport < -(2**31)", "lamport < -(2**31) - 1"),
    "U+0000 is looked for first": (
        '    if found.message_id == b"":',
        ('    if any(b"\\0" in string for string in strings + entry_strings):\n'
        '        raise RefusedError("nul_character")\n    if found.message_id == b"":'),
    ),
    "range before content": (
        '    if any(b"\\0" in string for string in strings):',
        ("    if lamport is not None and lamport < -(2**31):\n"
        '        raise RefusedError("lamport_out_of_range")\n'
        '    if any(b"\\0" in string for string in strings):'),
    ),
}  # fmt: skip


def with_fault(fault: str) -> types.ModuleType:
    right, wrong = FAULTS[fault]
    source = Path(plain_decoder.__file__).read_text(encoding="utf-8")
    assert source.count(right) == 1, f"{fault} does not fit"
    module = types.ModuleType(plain_decoder.__name__)
    exec(compile(source.replace(right, wrong), "faulty", "exec"), module.__dict__)
    return module


def disagrees(decoder: types.ModuleType, frame: bytes, expected: Outcome) -> bool:
    try:
        return outcome_there(frame, decoder) != expected
    except (ValueError, IndexError, TypeError, AssertionError, struct.error):
        return True  # an error of another kind is not an outcome


@pytest.fixture(scope="module")
def vectors() -> list[tuple[bytes, Outcome]]:
    documented = json.loads(VECTORS.read_text(encoding="utf-8"))
    named = documented["entries"] + documented["refusals"]
    return [
        (frame, outcome_here(frame)) for frame in (bytes.fromhex(v["frame_hex"]) for v in named)
    ]


@pytest.fixture(scope="module")
def generated() -> list[tuple[bytes, Outcome]]:
    return [(frame, outcome_here(frame)) for frame in map(frame_mutator.frame, range(FRAMES))]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_vectors_catch_a_decoder_with_an_error(
    fault: str, vectors: list[tuple[bytes, Outcome]]
) -> None:
    decoder = with_fault(fault)
    assert any(disagrees(decoder, frame, right) for frame, right in vectors)


@pytest.mark.parametrize("fault", FAULTS)
def test_the_generator_catches_a_decoder_with_an_error(
    fault: str, generated: list[tuple[bytes, Outcome]]
) -> None:
    decoder = with_fault(fault)
    assert any(disagrees(decoder, frame, right) for frame, right in generated)
