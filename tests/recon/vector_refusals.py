"""Messages that must be refused: a good one with one field changed, and the code of the fault."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message

from recon.elements import END, START, Bound, Range, RangeColumns
from recon.limits import COUNT_MAX
from recon.responder import respond
from sdstore.wire.recon_pb2 import (
    NONCE_EXPIRED,
    Answers,
    Fetch,
    Interest,
    ReconRequest,
    ReconResponse,
)
from tests.recon.plain_columns import pack_bounds, pack_counts, pack_varint
from tests.recon.vector_sets import HEADER, view_of
from tests.recon.vector_talks import FEW, Talk, request_about

Row = dict[str, Any]
_MIDDLE = Bound(1 << 63, 0x8000 << 48)
_RANGES = RangeColumns.of(Range(START, _MIDDLE), Range(_MIDDLE, END))
_LONG = b"\x80" * 10 + b"\x01"
_SHIFTED, _NO_HEADS = b"\x3f", b"\0"
_FETCH = Fetch(runs=b"\x07", counts=b"\x02", short_ids=bytes(6))


def refused_interests() -> list[Row]:
    """Bytes that are not a canonical interest."""
    not_canonical = "interest_not_canonical"
    cases = (
        ("not sorted", Interest(channels=["b", "a"]).SerializeToString(), not_canonical),
        ("a name twice", Interest(channels=["a", "a"]).SerializeToString(), not_canonical),
        (
            "a name that a prefix covers",
            Interest(channels=["ab"], prefixes=["a"]).SerializeToString(),
            not_canonical,
        ),
        ("names beside all", Interest(all=True, channels=["a"]).SerializeToString(), not_canonical),
        ("the empty prefix", Interest(prefixes=[""]).SerializeToString(), not_canonical),
        ("a default that is there", b"\x08\x00", not_canonical),
        ("a field of no meaning", b"\x30\x01", not_canonical),
        ("no protobuf", b"\xff", "interest_malformed"),
    )
    return [{"why": why, "bytes": raw.hex(), "code": code} for why, raw, code in cases]


def refused_requests() -> list[Row]:
    """Requests that a responder refuses."""
    return [
        _row(_request(), field, value, why, code) for field, value, why, code in _wrong_requests()
    ]


def _request() -> ReconRequest:
    """Compares two ranges that touch, and fetches everything."""
    request = request_about(FEW, _RANGES, [False, False])
    request.fetch.CopyFrom(_FETCH)
    return request


def _wrong_requests() -> Iterator[tuple[str, Any, str, str]]:
    malformed = "malformed"
    yield "ranges.parts", 1, "fewer than two parts", malformed
    yield "ranges.parts", 65, "more than 64 parts", malformed
    yield "ranges.phase", 129, "above 128", malformed
    yield "ranges.runs", b"\x80", "a number without its end", malformed
    yield "ranges.runs", _LONG, "a number of 11 bytes", malformed
    yield "ranges.runs", b"\x03", "a run of no range", "too_many_ranges"
    yield "ranges.runs", pack_varint(65_537 << 2 | 3), "65,537 ranges", "too_many_ranges"
    yield "ranges.runs", b"", "bounds without runs", malformed
    yield "ranges.bounds", b"", "no bound where one is due", malformed
    yield "ranges.bounds", b"\x00\x05\x00\x00", "a byte too many", malformed
    yield "ranges.bounds", b"\x40\x01\x00", "a shift of 64", malformed
    yield "ranges.bounds", _SHIFTED + b"\x02" + _NO_HEADS, "2 shifted by 63", malformed
    yield "ranges.bounds", b"\x00\x05\x02", "heads neither 0 nor 1", malformed
    yield "ranges.bounds", b"\x00\x05\x01\x03\x00", "a head of 8 bytes cut off", malformed
    yield "ranges.bounds", b"\x00\x05\x01\x04", "head classes with spare bits", malformed
    yield "ranges.bounds", b"\x00\x00\x00", "an empty range: START again", "ranges_disordered"
    yield "ranges.counts", b"", "no counts", malformed
    yield "ranges.counts", pack_counts([2, 58, 1]), "a count too many", malformed
    yield "ranges.counts", b"\x04\x05", "a count below 0", malformed
    yield "ranges.counts", pack_counts([2, COUNT_MAX + 1]), "a count above 2^40", malformed
    yield "ranges.hashes", bytes(11), "hashes of 11 bytes for two", malformed
    yield "ranges.asks", b"\x00\x00", "two bytes of asks for two ranges", malformed
    yield "response_bytes_max", 4095, "a frame below 4,096", "frame_too_small"
    yield "fetch.counts", b"", "no counts", malformed
    yield "fetch.counts", pack_counts([2]), "two short ids announced, one there", malformed
    yield "fetch.counts", pack_counts([65_537]), "65,537 short ids", malformed
    yield "fetch.short_ids", bytes(5), "a short id of 5 bytes", malformed


def refused_responses(talk: Talk) -> list[Row]:
    """Answers to the first request of a session that an initiator refuses."""
    first = talk["exchanges"][0]
    request = ReconRequest.FromString(bytes.fromhex(first["request"]))
    rows = []
    for parts in _wrong_responses():
        response = respond(view_of(talk["responder"]), request)
        rows.append(_row(response, *parts))
    return rows


def _wrong_responses() -> Iterator[tuple[str, Any, str, str]]:
    malformed = "malformed"
    yield "answers.answered", 0, "nothing answered", "no_progress"
    yield "answers.answered", 1000, "more answers than ranges", "no_progress"
    yield "answers.kinds", b"", "counts for answers that are all EQUAL", malformed
    yield "answers.kinds", b"\x01", "too short", malformed
    yield "answers.kinds", b"\xff" * 64, "too long", malformed
    yield "answers.counts", b"", "no counts", malformed
    yield "answers.part_counts", b"\x01" * 40, "splits into one part", "split"
    yield "answers.part_counts", b"\x11" * 40, "splits into 17 parts, 16 were asked", "split"
    yield "answers.bounds", b"", "no bounds for splits", malformed
    yield "answers.hashes", b"", "no hashes for splits", malformed
    yield "answers.short_ids", bytes(6), "a short id without a list", malformed
    count = Answers(answered=1, kinds=b"\x03", counts=pack_counts([5]))
    yield "answers", count, "COUNT although the initiator holds some", malformed
    yield "answers", _split(8, [4, 5]), "parts that do not add up", "split"
    yield "answers", _split(8, [8, 0]), "an empty part", "split"
    yield "answers", _split(8, [4, 4], step=0), "a bound at the lower end", "split"
    yield "answers", _split(8, [4, 4], step=2**64 - 1), "a bound above the range", "split"
    yield "status", 6, "a status that does not exist", "status"
    yield "status", NONCE_EXPIRED, "no nonce to go on with", "nonce"
    yield "responder_nonce", HEADER.responder_nonce, "the same nonce again", "nonce"


def _split(count: int, parts: list[int], step: int = 1 << 62) -> Answers:
    """The first range, from START, in parts of their own."""
    return Answers(
        answered=1,
        kinds=b"\x01",
        counts=pack_counts([count]),
        part_counts=pack_varint(len(parts)) + pack_counts(parts),
        bounds=pack_bounds([step], [0]),
        hashes=bytes(6 * len(parts)),
    )


def _row(message: Message, field: str, value: Any, why: str, code: str) -> Row:
    *path, name = field.split(".")
    holder: Any = message
    for each in path:
        holder = getattr(holder, each)
    if isinstance(value, Answers):
        holder.answers.CopyFrom(value)
    else:
        setattr(holder, name, value)
    if name == "responder_nonce":
        holder.status = NONCE_EXPIRED
    assert isinstance(message, ReconRequest | ReconResponse)
    return {"field": field, "why": why, "bytes": message.SerializeToString().hex(), "code": code}
