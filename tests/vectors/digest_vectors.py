"""Writes docs/vectors/digest.json: `python -m tests.vectors.digest_vectors`."""

import json
import random
from pathlib import Path
from typing import Any

from recon.elements import order_of_lamport
from sdstore.sds.codec import DECODER_VERSION, MessageError, decode, encode, to_json
from sdstore.sds.model import (
    CLAIM_CONTEXT,
    ENTRY_CONTEXT,
    LAMPORT_MAX,
    LAMPORT_MIN,
    Dialect,
    HistoryEntry,
    Message,
    claim_id,
    entry_digest,
    entry_layout,
    frame_hash,
)
from tests.support.frame_fields import BYTES, GROUP, GROUP_END, field, group, tag, varint

DOCUMENTED = Path(__file__).parent.parent.parent / "docs" / "vectors" / "digest.json"
SEED = 109
RANDOM_ENTRIES = 12

BAD_UTF8 = {
    "a lone byte": b"\xff",
    "a sequence that is cut": b"a\xe2\x82",
    "a surrogate": b"\xed\xa0\x80",
    "an overlong form": b"\xc0\x80",
    "above U+10FFFF": b"\xf4\x90\x80\x80",
}
PLAIN_ID = field(2, b"id")
ENTRY = field(1, b"abc")
FULL_ENTRY = field(1, b"abc") + field(2, b"hint") + field(3, b"bob")
BAD_SENDER = ENTRY + field(3, b"\xff")


def document() -> str:
    """The whole file."""
    accepted = [(name, encode(message, dialect)) for name, message, dialect in _named_messages()]
    accepted += _accepted_frames()
    digest = entry_digest(decode(accepted[0][1])[0])
    vectors = {
        "decoder_version": DECODER_VERSION,
        "entry_context": ENTRY_CONTEXT,
        "claim_context": CLAIM_CONTEXT,
        "entries": [_entry_vector(name, frame) for name, frame in accepted],
        "refusals": [_refusal_vector(*refused) for refused in _refused_frames()],
        "claims": [_claim_vector(digest, hint) for hint in (b"", b"\0", b"hint", bytes(32))],
        "order_values": [
            {"lamport": str(lamport), "order_value": str(order_of_lamport(lamport))}
            for lamport in (LAMPORT_MIN, -1, 0, 1, LAMPORT_MAX)
        ],
    }
    return json.dumps(vectors, indent=2, ensure_ascii=False) + "\n"


def _named_messages() -> list[tuple[str, Message, Dialect]]:
    first = Message("id", "chan", "alice", 7, content=b"hello")
    history = (HistoryEntry("before", b"\x01\x02", "bob"), HistoryEntry("earlier"))
    plain = (HistoryEntry("before"), HistoryEntry("earlier"))
    return [
        ("no history", first, Dialect.V2),
        ("history with hint and sender", Message("id", "chan", "alice", 7, history), Dialect.V2),
        ("bloom and repair do not enter", _rebroadcast(first), Dialect.V2),
        ("chat_proto, the same entry", first, Dialect.CHAT_PROTO),
        ("nim, the same entry", first, Dialect.NIM),
        ("plain IDs as history", Message("id", "", "", -5, plain, content=b"x"), Dialect.V1),
        ("ephemeral", Message("идент-→★", "0", content=b"x"), Dialect.V2),
        ("timestamp 0", Message("id", "0", lamport_timestamp=0, content=b"x"), Dialect.V2),
        *(_random_message(number) for number in range(RANDOM_ENTRIES)),
    ]


def _rebroadcast(message: Message) -> Message:
    return Message(
        message.message_id,
        message.channel_id,
        message.sender_id,
        message.lamport_timestamp,
        bloom_filter=b"\xff" * 8,
        repair_request=(HistoryEntry("wanted"),),
        content=message.content,
    )


def _random_message(number: int) -> tuple[str, Message, Dialect]:
    rng = random.Random(SEED + number)
    history = tuple(
        HistoryEntry(rng.randbytes(32).hex(), rng.randbytes(rng.choice([0, 32])), f"p{i}")
        for i in range(rng.randrange(4))
    )
    message = Message(
        rng.randbytes(32).hex(),
        f"/app/{number}/chat/proto",
        rng.choice(["", "alice"]),
        rng.choice([LAMPORT_MIN, LAMPORT_MAX, rng.getrandbits(63)]),
        history,
        content=rng.randbytes(rng.randrange(1, 40)),
    )
    return f"random {number}", message, rng.choice([Dialect.V2, Dialect.NIM])


def _spec(*more: bytes, lamport: int = 7) -> bytes:
    """A frame in the specification's numbering, with `more` before its content."""
    head = field(2, b"id") + field(3, b"chan") + field(10, lamport)
    return head + b"".join(more) + field(20, b"x")


def _nim(*more: bytes, lamport: int = 7) -> bytes:
    """The same in nim's numbering."""
    head = field(1, b"id") + field(2, lamport)
    return head + b"".join(more) + field(4, b"chan") + field(5, b"x")


def _history(*elements: bytes, number: int = 11) -> bytes:
    return b"".join(field(number, element) for element in elements)


def _accepted_frames() -> list[tuple[str, bytes]]:
    return [
        *_accepted_fields(),
        *_accepted_dialects(),
        *_accepted_histories(),
        *_accepted_repair_requests(),
        *_accepted_timestamps(),
    ]


def _accepted_fields() -> list[tuple[str, bytes]]:
    """Section 1.1: what a well-formed frame may look like."""
    ten_bytes = b"\xff" * 9
    return [
        ("fields in reverse order", b"".join([field(20, b"x"), field(10, 7), field(2, b"id")])),
        ("tag of 2 bytes", _spec(field(1, b"alice", tag_size=2))),
        ("tag of 5 bytes", _spec(field(1, b"alice", tag_size=5))),
        ("timestamp with a tag of 5 bytes", PLAIN_ID + field(10, 7, tag_size=5)),
        ("largest field number", _spec(field(2**29 - 1, 1))),
        ("length of 5 bytes", _spec(field(1, b"alice", value_size=5))),
        ("message ID with overlong tag and length", field(2, b"id", 3, 4) + field(10, 7)),
        ("varint of 10 bytes", PLAIN_ID + field(10, 7, value_size=10)),
        ("varint with bits above the 64th", PLAIN_ID + tag(10, 0) + ten_bytes + b"\x7f"),
        ("varint with the 65th bit alone", PLAIN_ID + tag(10, 0) + b"\x85" + b"\x80" * 8 + b"\x02"),
        ("unknown field with a varint", _spec(field(99, 2**64 - 1))),
        ("unknown field with 8 bytes", _spec(tag(99, 1) + b"\xff" * 8)),
        ("unknown field with bytes", _spec(field(99, b"new"))),
        ("unknown field with 4 bytes", _spec(tag(99, 5) + b"\xff" * 4)),
        ("unknown field that holds no message", _spec(field(14, b"\xff\xff"))),
        ("message ID twice", _spec(field(2, b"other"))),
        ("channel twice, empty at last", _spec(field(3, b""))),
        ("sender twice", _spec(field(1, b"alice"), field(1, b"bob"))),
        ("sender twice, bad UTF-8 first", _spec(field(1, b"\xff"), field(1, b"bob"))),
        ("timestamp twice", _spec(field(10, 9))),
        ("timestamp twice, out of range first", _spec(field(10, 9), lamport=2**63)),
        ("content twice", _spec(field(20, b"y"))),
        ("content twice, empty at last", _spec() + field(20, b"")),
        ("bloom filter twice", _spec(field(12, b"old"), field(12, b"new"))),
        ("nim: message ID twice", _nim(field(1, b"other"))),
        ("nim: content twice, empty at last", _nim() + field(5, b"")),
        ("message ID as a varint beside the real one", _spec(field(2, 5))),
        ("timestamp as bytes beside the real one", _spec(field(10, b"\x09"))),
        ("timestamp as bytes alone", PLAIN_ID + field(10, b"\x09") + field(20, b"x")),
        ("timestamp as 8 bytes beside the real one", _spec(tag(10, 1) + b"\x09" * 8)),
        ("timestamp as 4 bytes beside the real one", _spec(tag(10, 5) + b"\x09" * 4)),
        ("channel as a varint", PLAIN_ID + field(3, 5) + field(10, 7)),
        ("sender as a varint", _spec(field(1, 5))),
        ("history as a varint", _spec(field(11, 5))),
        ("content as a varint", PLAIN_ID + field(10, 7) + field(20, 5)),
        ("bloom filter as 4 bytes", _spec(tag(12, 5) + b"\x09" * 4)),
        ("empty group", _spec(group(14))),
        ("group with the number of the message ID", _spec(group(2, field(1, b"x")))),
        ("fields in a group do not count", _spec(group(14, field(2, b"no") + field(10, 9)))),
        ("history in a group does not count", _spec(group(11, field(11, ENTRY)))),
        ("group that holds all wire types", _spec(group(14, _all_wire_types()))),
        ("groups in a group, side by side", _spec(group(14, group(15) + group(14)))),
        ("field number 0 in a group", _spec(group(14, field(0, 5) + field(0, b"x")))),
        ("group with number 0 in a group", _spec(group(14, group(0)))),
        ("100 groups open", _spec(group(14, depth=100))),
        ("100 groups open, twice", _spec(group(14, depth=100), group(15, depth=100))),
        ("group end with an overlong tag", _spec(tag(14, GROUP) + tag(14, GROUP_END, 5))),
    ]


def _all_wire_types() -> bytes:
    fixed = tag(8, 1) + b"\xff" * 8 + tag(9, 5) + b"\xff" * 4
    return field(6, 2**64 - 1) + fixed + field(7, b"\xff") + group(4, field(5, b"x"))


def _accepted_dialects() -> list[tuple[str, bytes]]:
    """Section 1.2."""
    return [
        ("sender in fields 1 and 7", _spec(field(1, b"one"), field(7, b"seven"))),
        ("sender in field 7, field 1 empty", _spec(field(1, b""), field(7, b"seven"))),
        ("bad UTF-8 in a field 7 that is not read", _spec(field(1, b"one"), field(7, b"\xff"))),
        ("U+0000 in a field 7 that is not read", _spec(field(1, b"one"), field(7, b"\0"))),
        ("empty field 7", _spec(field(7, b""))),
        ("chat_proto, timestamp 0 set", _spec(field(7, b"alice"), lamport=0)),
        ("chat_proto, timestamp 0 and no content", PLAIN_ID + field(7, b"a") + field(10, 0)),
        ("chat_proto, no timestamp", PLAIN_ID + field(7, b"a") + field(20, b"x")),
        ("chat_proto with a repair request", _spec(field(7, b"a"), field(13, ENTRY))),
        ("plain IDs and a sender in field 7", _spec(field(7, b"a"), field(11, b"plain"))),
        ("plain IDs and a sender in field 1", _spec(field(1, b"a"), field(11, b"plain"))),
        ("v1 with a repair request", _spec(field(11, b"plain"), field(13, ENTRY))),
        ("nim, field 2 also set and empty", _nim(field(2, b""))),
        ("field 2 as bytes and as a varint", _nim(field(2, b"spec"), field(10, 7))),
        ("nim, fields of the specification are unknown", _nim(_history(ENTRY), field(20, b"y"))),
        ("nim, sender in field 7", _nim(field(7, b"alice"))),
        ("nim, timestamp 0", _nim(lamport=0)),
        ("nim, no content", field(1, b"id") + field(2, 7)),
        ("nim, sync with empty fields", field(1, b"id") + field(2, 7) + _history(b"", number=4)),
        ("nim, timestamp twice", _nim(field(2, 9))),
        ("nim, plain IDs", _nim(_history(b"before", b"earlier", number=3))),
        ("nim, entries", _nim(_history(FULL_ENTRY, ENTRY, number=3))),
        ("nim, bloom filter in field 6", _nim(field(6, b"\x01\x02"))),
        ("unset channel", PLAIN_ID + field(10, 7)),
        ("empty channel", PLAIN_ID + field(3, b"") + field(10, 7)),
        ("channel 0", PLAIN_ID + field(3, b"0") + field(10, 7)),
        ("content of length 0", PLAIN_ID + field(10, 7) + field(20, b"")),
        ("content with U+0000", PLAIN_ID + field(20, b"\0")),
        ("U+FEFF at the start is kept", field(2, "\ufeffid".encode()) + field(10, 7)),
        ("text is not normalised", field(2, "e\u0301".encode()) + field(10, 7)),
        ("highest code point", field(2, "\U0010ffff".encode()) + field(10, 7)),
    ]


def _accepted_histories() -> list[tuple[str, bytes]]:
    """Section 1.3, for the causal history."""
    long = field(1, b"i" * 1024) + field(2, b"h" * 256)
    histories = {
        "strict entries": [FULL_ENTRY, ENTRY],
        "the same entry twice": [ENTRY, ENTRY],
        "values longer than 127 bytes": [long],
        "fields of an entry in another order": [field(3, b"bob") + ENTRY],
        "empty hint and sender": [ENTRY + field(2, b"") + field(3, b"")],
        "an entry with overlong tags": [field(1, b"abc", 5) + field(2, b"h", 2)],
        "an entry with overlong lengths": [field(1, b"abc", 1, 5) + field(3, b"bob", 1, 2)],
        "a hint that is no UTF-8": [ENTRY + field(2, b"\xff\xfe")],
        "a hint with U+0000": [ENTRY + field(2, b"\0")],
        "a single empty element": [b""],
        "empty elements among entries": [b"", ENTRY, b"", FULL_ENTRY],
        "empty elements among plain IDs": [b"", b"plain", b""],
        "a plain ID alone": [b"plain"],
        "a plain ID that is no text of ASCII": ["идент".encode(), b"b"],
        "plain IDs, one begins with 0x0A": [b"\nline", b"plain"],
        "an entry among plain IDs": [ENTRY, b"plain"],
        "a full entry among plain IDs": [FULL_ENTRY, b"plain"],
        "plain IDs that all begin with 0x0A": [b"\nline", b"\n\xd0\xb8"],
        "a plain ID that is a fitting entry": [b"\n\x03abc"],
        "a hint alone is a plain ID": [field(2, b"hi")],
        "a sender alone is a plain ID": [field(3, b"bo")],
        "a hint alone and an entry": [field(2, b"hi"), ENTRY],
        "an empty ID alone": [field(1, b"")],
        "an empty ID and a hint": [field(1, b"") + field(2, b"h")],
        "an unknown field of bytes": [ENTRY + field(4, b"new")],
        "an unknown field with a varint": [ENTRY + field(4, 1)],
        "an unknown field with 8 bytes": [ENTRY + tag(4, 1) + b"\0" * 8],
        "an unknown field in front": [field(4, b"n") + ENTRY],
        "an unknown field in front, not UTF-8": [field(4, b"\xff") + ENTRY, ENTRY],
        "the ID twice": [ENTRY + field(1, b"again")],
        "the ID twice, empty at last": [ENTRY + field(1, b"")],
        "the ID twice, empty at first": [field(1, b"") + ENTRY],
        "the hint twice": [ENTRY + field(2, b"old") + field(2, b"new")],
        "the hint twice, empty at last": [ENTRY + field(2, b"old") + field(2, b"")],
        "the ID twice, behind a hint": [field(2, b"h") + ENTRY + field(1, b"again")],
        "the hint twice, in front of the ID": [field(2, b"h") * 2 + ENTRY],
        "the sender twice, in front of the ID": [field(3, b"s") * 2 + ENTRY, FULL_ENTRY],
        "the sender twice": [ENTRY + field(3, b"old") + field(3, b"new")],
        "the sender twice, bad UTF-8 first": [BAD_SENDER + field(3, b"new")],
        "the hint with a varint": [ENTRY + field(2, 5)],
        "the ID with a varint, too": [ENTRY + field(1, 5)],
        "an empty group": [ENTRY + group(4)],
        "an empty group beside an entry": [FULL_ENTRY, ENTRY + group(4)],
        "an entry in a group": [ENTRY + group(4, field(1, b"no") + field(3, b"no"))],
        "a group with the number of the ID": [ENTRY + group(1, field(1, b"no"))],
        "a group in front is a plain ID": [group(4) + ENTRY],
        "a group in front, not UTF-8": [group(4, field(2, b"\xff")) + ENTRY, ENTRY],
        "a group alone": [group(4)],
        "100 groups open": [ENTRY + group(4, depth=100), ENTRY],
        "101 groups open": [ENTRY + group(4, depth=101), FULL_ENTRY],
        "a group that does not end": [ENTRY + tag(4, GROUP), FULL_ENTRY],
        "a group end alone": [ENTRY + tag(4, GROUP_END), FULL_ENTRY],
        "field number 0": [ENTRY + field(0, 5), FULL_ENTRY],
        "field number 0 in a group": [ENTRY + group(4, field(0, 5)), FULL_ENTRY],
        "wire type 7": [ENTRY + b"\x27", FULL_ENTRY],
        "a tag of 6 bytes": [ENTRY + field(4, 1, tag_size=6), FULL_ENTRY],
        "an ID with a tag of 2 bytes in front": [field(1, b"abc", 2) + field(4, b"n"), ENTRY],
        "an ID with a length of 6 bytes": [field(1, b"abc", 1, 6), ENTRY],
        "an entry that is cut": [b"\n\x05abc", ENTRY],
        "no UTF-8 and no entry": [b"\xff\xff", ENTRY],
        "no element can be read": [b"\xff\xff"],
        "an ID that is no UTF-8, behind a hint": [field(2, b"h") + field(1, b"\xff")],
        "a sender that is no UTF-8, behind no ID": [ENTRY, field(3, b"\xff")],
        "later entries, one without an ID": [ENTRY + field(4, 1), field(1, b"") + field(4, 1)],
    }
    return [
        (f"history: {name}", _spec(_history(*elements))) for name, elements in histories.items()
    ]


def _accepted_repair_requests() -> list[tuple[str, bytes]]:
    """Section 1.3, for repair requests: a plain string is not one."""
    requests = {
        "strict entries": [FULL_ENTRY, ENTRY],
        "empty elements": [b"", ENTRY],
        "a plain ID alone is dropped": [b"plain"],
        "a plain ID beside an entry is dropped": [b"plain", ENTRY],
        "a plain ID with U+0000 is dropped": [b"a\0b", ENTRY],
        "an entry of a later version": [ENTRY + field(4, 1)],
        "an entry with a group": [ENTRY + group(4)],
        "a hint alone is dropped": [field(2, b"hi")],
        "an entry that is cut is dropped": [b"\n\x05abc"],
        "a bad sender behind no ID is dropped": [field(3, b"\xff")],
    }
    return [
        *((f"repair: {name}", _spec(_history(*e, number=13))) for name, e in requests.items()),
        ("repair: nim", _nim(_history(FULL_ENTRY, b"plain", number=13))),
        ("repair: does not make a history plain", _spec(_history(ENTRY), field(13, b"plain"))),
    ]


def _accepted_timestamps() -> list[tuple[str, bytes]]:
    """Section 1.4."""
    on_wire = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53 + 1, 2**63 - 1]
    on_wire += [2**64 - 2**31, 2**64 - 2**31 + 1, 2**64 - 1]
    return [
        (f"timestamp {number} on the wire, {name}", make(lamport=number))
        for number in on_wire
        for name, make in (("v2", _spec), ("nim", _nim))
    ]


def _refused_frames() -> list[tuple[str, str, bytes]]:
    return [
        *(("malformed_frame", *vector) for vector in _malformed()),
        *(("invalid_utf8", *vector) for vector in _not_utf8()),
        *_refused_by_value(),
        *_refused_twice_over(),
    ]


def _malformed() -> list[tuple[str, bytes]]:
    spec, nim = _spec(), _nim()
    huge = varint(2**32 + 1)
    return [
        ("a single byte", b"\xff"),
        ("cut in a tag", spec + b"\xd0"),
        ("cut before a varint", spec + tag(10, 0)),
        ("cut in a varint", spec + tag(10, 0) + b"\x80"),
        ("cut before a length", spec + tag(1, BYTES)),
        ("cut in a length", spec + tag(1, BYTES) + b"\x80"),
        ("cut in a value", spec[:-1]),
        ("cut in 8 bytes", spec + tag(99, 1) + bytes(7)),
        ("cut in 4 bytes", spec + tag(99, 5) + bytes(3)),
        ("nim, cut in a value", nim[:-1]),
        ("field number 0", spec + field(0, 5)),
        ("field number 0 with bytes", spec + field(0, b"")),
        ("field number 0 with an overlong tag", spec + field(0, 5, tag_size=3)),
        ("group with number 0", spec + group(0)),
        ("wire type 6", spec + b"\x76"),
        ("wire type 7", spec + b"\x77"),
        ("tag of 6 bytes", spec + field(10, 7, tag_size=6)),
        ("tag of 10 bytes", spec + field(10, 7, tag_size=10)),
        ("tag of 2^32", spec + varint(2**32) + b"\x01"),
        ("tag of 2^32 and a known field", spec + varint(2**32 + (10 << 3)) + b"\x01"),
        ("tag of 2^35-1", spec + b"\xff\xff\xff\xff\x7f\x01"),
        ("length of 6 bytes", spec + field(1, b"alice", value_size=6)),
        ("length of 2^31", spec + tag(1, BYTES) + varint(2**31) + b"x"),
        ("length of 2^32+1", spec + tag(1, BYTES) + huge + b"x"),
        ("length of -1", spec + tag(1, BYTES) + b"\xff" * 9 + b"\x01" + b"x"),
        ("varint of 11 bytes", spec + field(10, 7, value_size=11)),
        ("varint of 11 bytes in an unknown field", spec + field(99, 7, value_size=11)),
        ("group that does not end", spec + tag(14, GROUP)),
        ("group that ends with another number", spec + tag(14, GROUP) + tag(15, GROUP_END)),
        ("group that ends with number 0", spec + tag(14, GROUP) + tag(0, GROUP_END)),
        (
            "groups that cross",
            spec + tag(14, GROUP) + tag(15, GROUP) + tag(14, GROUP_END) + tag(15, GROUP_END),
        ),
        ("group end alone", spec + tag(14, GROUP_END)),
        ("group end alone, with number 0", spec + tag(0, GROUP_END)),
        ("group that holds a cut value", spec + group(14, tag(1, BYTES) + b"\x05x")),
        ("group that holds wire type 7", spec + group(14, b"\x0f")),
        ("group that holds a tag of 6 bytes", spec + group(14, field(8, 1, tag_size=6))),
        ("group that holds a varint of 11 bytes", spec + group(14, field(8, 1, 1, 11))),
        ("group with an end of 6 bytes", spec + tag(14, GROUP) + tag(14, GROUP_END, 6)),
        ("101 groups open", spec + group(14, depth=101)),
        ("malformed behind a message without ID", field(10, 7) + b"\xff"),
        ("malformed behind bad UTF-8", field(2, b"\xff") + b"\xff"),
    ]


def _not_utf8() -> list[tuple[str, bytes]]:
    return [
        *((f"message ID: {why}", field(2, bad) + field(10, 7)) for why, bad in BAD_UTF8.items()),
        *((f"ID in a history: {why}", _spec(_history(field(1, bad)))) for why, bad in BAD_UTF8.items()),
        ("channel", _spec(field(3, b"\xff"))),
        ("sender in field 1", _spec(field(1, b"\xff"))),
        ("sender in field 1, with one in field 7", _spec(field(1, b"\xff"), field(7, b"a"))),
        ("sender in field 7", _spec(field(7, b"\xff"))),
        ("sender in a history", _spec(_history(BAD_SENDER))),
        ("sender in a history of two", _spec(_history(BAD_SENDER, ENTRY))),
        ("sender in a history, in front of the ID", _spec(_history(field(3, b"\xff") + ENTRY))),
        ("sender in a later version's entry", _spec(_history(BAD_SENDER + field(4, 1)))),
        ("ID in a later version's entry", _spec(_history(field(1, b"\xff") + field(4, 1)))),
        ("sender in a history with a bad element", _spec(_history(BAD_SENDER, b"\xff"))),
        ("nim: message ID", field(1, b"\xff") + field(2, 7)),
        ("nim: channel", _nim() + field(4, b"\xff")),
        ("nim: sender", _nim(field(7, b"\xff"))),
        ("nim: ID in a history", _nim(_history(field(1, b"\xff"), number=3))),
        ("ID in a repair request", _spec(_history(field(1, b"\xff"), number=13))),
        ("sender in a repair request", _spec(_history(BAD_SENDER, number=13))),
        ("sender in a repair request with a plain ID", _spec(_history(BAD_SENDER, b"p", number=13))),
        ("nim: sender in a repair request", _nim(_history(BAD_SENDER, number=13))),
    ]  # fmt: skip


def _refused_by_value() -> list[tuple[str, str, bytes]]:
    nul_entry, nul_sender = field(1, b"a\0"), ENTRY + field(3, b"\0")
    nul = {
        "message ID": _spec(field(2, b"a\0b")),
        "channel": _spec(field(3, b"\0")),
        "sender in field 1": _spec(field(1, b"\0")),
        "sender in field 7": _spec(field(7, b"\0")),
        "nim: message ID": _nim(field(1, b"\0")),
        "nim: channel": _nim() + field(4, b"\0"),
        "nim: sender": _nim(field(7, b"\0")),
        "ID in a history": _spec(_history(nul_entry)),
        "sender in a history": _spec(_history(nul_sender)),
        "plain ID": _spec(_history(b"a\0b")),
        "hint of length 0 alone, which is a plain ID": _spec(_history(field(2, b""))),
        "ID in a later version's entry": _spec(_history(nul_entry + field(4, 1))),
        "ID in a repair request": _spec(_history(nul_entry, number=13)),
        "sender in a repair request": _spec(_history(nul_sender, number=13)),
    }
    missing = {
        "empty frame": b"",
        "empty message ID": field(2, b"") + field(10, 7),
        "message ID twice, empty at last": _spec() + field(2, b""),
        "no message ID": field(10, 7) + field(20, b"x"),
        "message ID as 4 bytes": tag(2, 5) + b"abcd" + field(10, 7),
        "message ID as 8 bytes": tag(2, 1) + b"abcdefgh" + field(10, 7),
        "message ID as a group": group(2) + field(10, 7),
        "message ID in a group": group(14, field(2, b"id")) + field(10, 7),
        "nim without a timestamp": field(1, b"id") + field(5, b"x"),
        "nim without a message ID": field(2, 7) + field(5, b"x"),
        "nim, empty message ID": field(1, b"") + field(2, 7),
        "nim, message ID as a varint": field(1, 7) + field(2, 7),
    }
    neither = {
        "message ID alone": PLAIN_ID,
        "empty content": PLAIN_ID + field(20, b""),
        "timestamp as bytes": PLAIN_ID + field(10, b"\x07"),
        "timestamp in a group": PLAIN_ID + group(14, field(10, 7)),
        "content twice, empty at last": PLAIN_ID + field(20, b"x") + field(20, b""),
        "content in nim's field": PLAIN_ID + field(5, b"x"),
    }
    out_of_range = [2**63, 2**63 + 1, 2**64 - 2**32, 2**64 - 2**31 - 1]
    return [
        *(("nul_character", name, frame) for name, frame in nul.items()),
        *(("missing_message_id", name, frame) for name, frame in missing.items()),
        *(("no_content_no_lamport", name, frame) for name, frame in neither.items()),
        *(
            ("lamport_out_of_range", f"{number} on the wire, {name}", make(lamport=number))
            for number in out_of_range
            for name, make in (("v2", _spec), ("nim", _nim))
        ),
    ]


def _refused_twice_over() -> list[tuple[str, str, bytes]]:
    """Frames that two lines of section 1.5 describe: the first one gives the code."""
    nul_entry, bad_entry = _history(field(1, b"\0")), _history(BAD_SENDER)
    bad_repair = _history(BAD_SENDER, number=13)
    return [
        ("missing_message_id", "no numbering, and bad UTF-8", field(3, b"\xff") + bad_entry),
        ("invalid_utf8", "bad UTF-8, and nim without ID", field(2, 7) + field(7, b"\xff")),
        (
            "invalid_utf8",
            "bad UTF-8 in a repair request, and nim without ID",
            field(2, 7) + bad_repair,
        ),
        ("invalid_utf8", "bad UTF-8 in a history, and U+0000", _spec(field(1, b"\0"), bad_entry)),
        ("invalid_utf8", "bad UTF-8 in a repair request alone", PLAIN_ID + bad_repair),
        ("invalid_utf8", "bad UTF-8, and out of range", _spec(bad_repair, lamport=2**63)),
        ("missing_message_id", "nim without ID, and U+0000", field(2, 7) + field(7, b"\0")),
        ("missing_message_id", "nim without ID, and out of range", field(2, 2**63)),
        ("nul_character", "U+0000, and nothing else", field(2, b"\0")),
        ("nul_character", "U+0000, and out of range", _spec(field(1, b"\0"), lamport=2**63)),
        ("no_content_no_lamport", "neither, and U+0000 in a history", PLAIN_ID + nul_entry),
        (
            "lamport_out_of_range",
            "out of range, and U+0000 in a history",
            _spec(nul_entry, lamport=2**63),
        ),
        (
            "lamport_out_of_range",
            "nim, out of range, and U+0000 in a repair request",
            _nim(_history(field(1, b"\0"), number=13), lamport=2**63),
        ),
    ]


def _entry_vector(name: str, frame: bytes) -> dict[str, Any]:
    message, dialect = decode(frame)
    return {
        "name": name,
        "dialect": dialect.label,
        "frame_hex": frame.hex(),
        "message": to_json(message),
        "layout_hex": entry_layout(message).hex(),
        "digest": entry_digest(message).hex(),
        "frame_hash": frame_hash(frame).hex(),
    }


def _refusal_vector(code: str, name: str, frame: bytes) -> dict[str, str]:
    try:
        decode(frame)
    except MessageError as error:
        if error.code == code:
            return {"name": name, "frame_hex": frame.hex(), "code": code}
        raise AssertionError(f"{name}: {error.code} instead of {code}") from error
    raise AssertionError(f"{name}: accepted")


def _claim_vector(digest: bytes, hint: bytes) -> dict[str, str]:
    return {
        "digest": digest.hex(),
        "hint_hex": hint.hex(),
        "claim_id": claim_id(digest, hint).hex(),
    }


if __name__ == "__main__":
    DOCUMENTED.write_text(document(), encoding="utf-8")
