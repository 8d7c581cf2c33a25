"""The checks at the door: exact bounds, stable codes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.entries import Claim, ClaimSource, NewEntry
from app.errors import Code, Problem
from app.ingest.prepare import Publication, Relayed, WakuEnvelope, prepare
from app.server.limits import DEFAULT_LIMITS as LIMITS
from sdstore.sds.codec import encode
from sdstore.sds.model import HistoryEntry, Message, entry_digest, frame_hash, waku_message_hash

GOOD = Message("id", "channel", "sender", 1, content=b"content")


def published(message: Message) -> NewEntry | Relayed:
    return prepare(Publication(encode(message)), LIMITS)


def refusal(publication: Publication) -> Code:
    with pytest.raises(Problem) as refused:
        prepare(publication, LIMITS)
    return refused.value.code


def with_history(entries: int) -> Message:
    return replace(GOOD, causal_history=(HistoryEntry("x"),) * entries)


def with_repairs(entries: int) -> Message:
    return replace(GOOD, repair_request=(HistoryEntry("x"),) * entries)


def with_history_entry(**fields: object) -> Message:
    entry = HistoryEntry(**{"message_id": "x", **fields})  # type: ignore[arg-type]
    return replace(GOOD, causal_history=(entry,))


BOUNDS: list[tuple[Callable[[int], Message], int, Code]] = [
    (lambda n: replace(GOOD, message_id="i" * n), 1024, Code.MESSAGE_ID_TOO_LONG),
    (
        lambda n: replace(GOOD, message_id="é" * (n // 2) + "i" * (n % 2)),
        1024,
        Code.MESSAGE_ID_TOO_LONG,
    ),
    (lambda n: replace(GOOD, channel_id="c" * n), 256, Code.CHANNEL_ID_TOO_LONG),
    (lambda n: replace(GOOD, sender_id="s" * n), 1024, Code.SENDER_ID_TOO_LONG),
    (with_history, 256, Code.HISTORY_TOO_LONG),
    (with_repairs, 256, Code.HISTORY_TOO_LONG),
    (lambda n: with_history_entry(message_id="i" * n), 1024, Code.MESSAGE_ID_TOO_LONG),
    (lambda n: with_history_entry(sender_id="s" * n), 1024, Code.SENDER_ID_TOO_LONG),
    (lambda n: with_history_entry(retrieval_hint=b"h" * n), 256, Code.HINT_TOO_LONG),
    (lambda n: replace(GOOD, bloom_filter=b"b" * n), 65_536, Code.BLOOM_FILTER_TOO_LARGE),
]


@pytest.mark.parametrize(("make", "most", "code"), BOUNDS)
def test_a_bound_is_kept_to_the_byte(make: Callable[[int], Message], most: int, code: Code) -> None:
    assert isinstance(published(make(most)), NewEntry)
    assert refusal(Publication(encode(make(most + 1)))) is code


def test_a_frame_of_exactly_the_bound_is_taken() -> None:
    overhead = len(encode(replace(GOOD, content=bytes(2**20)))) - 2**20
    fits = encode(replace(GOOD, content=bytes(LIMITS.frame_bytes_max - overhead)))
    assert len(fits) == LIMITS.frame_bytes_max
    assert isinstance(prepare(Publication(fits), LIMITS), NewEntry)
    larger = encode(replace(GOOD, content=bytes(LIMITS.frame_bytes_max - overhead + 1)))
    assert refusal(Publication(larger)) is Code.FRAME_TOO_LARGE


@pytest.mark.parametrize(
    ("hints", "code"),
    [
        ((b"",), Code.HINT_TOO_LONG),
        ((b"h" * 257,), Code.HINT_TOO_LONG),
        (tuple(b"%d" % n for n in range(17)), Code.TOO_MANY_HINTS),
    ],
)
def test_hints_of_a_publisher_are_bounded(hints: tuple[bytes, ...], code: Code) -> None:
    frame = encode(GOOD)
    assert refusal(Publication(frame, hints)) is code
    assert isinstance(prepare(Publication(frame, (b"h" * 256,) * 16), LIMITS), NewEntry)


def test_an_entry_carries_its_identity_and_its_claims_best_source_first() -> None:
    frame = encode(GOOD)
    envelope = WakuEnvelope("/waku/2/rs/0/1", "/app/1/chat/proto", b"meta", 1_763_000_000)
    entry = prepare(Publication(frame, (b"hint",), envelope), LIMITS)
    assert isinstance(entry, NewEntry)
    computed = waku_message_hash(
        "/waku/2/rs/0/1", frame, "/app/1/chat/proto", b"meta", 1_763_000_000
    )
    assert entry.claims == (
        Claim(computed, ClaimSource.COMPUTED),
        Claim(b"hint", ClaimSource.PUBLISHER),
    )
    assert entry.frame == frame
    assert entry.digest == entry_digest(GOOD)
    assert entry.frame_hash == frame_hash(frame)


@pytest.mark.parametrize(
    "message",
    [Message("id", "channel", lamport_timestamp=3), Message("id", "channel", content=b"x")],
    ids=["sync", "ephemeral"],
)
def test_sync_and_ephemeral_messages_are_passed_on(message: Message) -> None:
    relayed = published(message)
    assert isinstance(relayed, Relayed)
    assert relayed.message == message


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_an_entry_a_message_to_pass_on_or_a_refusal(frame: bytes) -> None:
    try:
        item = prepare(Publication(frame), LIMITS)
    except Problem as problem:
        status = problem.status
    else:
        status = 200 if item.frame == frame else 500
    assert status in {200, 422}
