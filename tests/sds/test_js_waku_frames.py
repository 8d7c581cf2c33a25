"""Frames, filters and message IDs, between this library and js-waku running beside it."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from sdstore.sds import Dialect, HistoryEntry, Kind, Message, decode, encode, verifies
from sdstore.sds.bloom import BloomFilter, hash_pair, read_filter
from tests.support.js_waku import JsPeer, JsWaku, js_waku

START_MS = 1_763_000_000_000
CHANNEL = "/app/1/überall/proto"


@pytest.fixture(scope="module")
def js() -> Iterator[JsWaku]:
    with js_waku() as running:
        running.clock(START_MS)
        yield running


def conversation(js: JsWaku) -> list[bytes]:
    """Frames of every kind, with histories, hints, filters and repair requests."""
    alice = js.open(CHANNEL, "älice", causalHistorySize=2, repairConfig={"tMin": 1, "tMax": 2})
    bob = js.open(CHANNEL, "bob", causalHistorySize=2, repairConfig={"tMin": 1, "tMax": 2})
    frames = [alice.ephemeral(b"typing")]
    for number in range(6):
        js.clock(START_MS + 1_000 * number)
        _, frame, hint = alice.send(f"message {number}".encode())
        frames.append(frame)
        if number != 3:
            bob.receive(frame, hint)
        frames.append(bob.send(f"answer {number}".encode())[1])
    synced = bob.sync()
    assert synced is not None
    js.clock(START_MS)
    return [*frames, synced]


def test_every_frame_of_js_waku_decodes_and_encodes_to_the_same_bytes(js: JsWaku) -> None:
    frames = conversation(js)
    decoded = [decode(frame) for frame in frames]
    assert [encode(message, dialect) for message, dialect in decoded] == frames
    assert {dialect for _, dialect in decoded} == {Dialect.V2}
    messages = [message for message, _ in decoded]
    assert {message.kind for message in messages} == set(Kind)
    assert any(message.repair_request for message in messages)
    assert any(entry.retrieval_hint for message in messages for entry in message.causal_history)
    # js-waku's IDs are hashes of the content; a sync message has none and its ID is random.
    assert {verifies(message) for message in messages if message.content} == {True}


def test_js_waku_passes_on_a_message_of_ours_as_the_same_bytes(js: JsWaku) -> None:
    """A repair is a rebroadcast of what js-waku decoded."""
    frame = encode(
        Message(
            "any-id",
            CHANNEL,
            "carol",
            START_MS,
            (),
            js.bloom(["x"]),
            (HistoryEntry("wanted", b"\x01", "dave"),),
            b"content",
        )
    )
    bob = js.open(CHANNEL, "bob")
    assert bob.receive(frame, b"hint") == "any-id"
    assert bob.delivered == ["any-id"]
    request = Message(
        "sync-1", CHANNEL, "erin", START_MS, repair_request=(HistoryEntry("any-id", b"", "carol"),)
    )
    assert bob.receive(encode(request)) == "sync-1"
    js.clock(START_MS + 120_000)
    assert bob.sweep().repairs == [frame]
    js.clock(START_MS)


@pytest.mark.parametrize("count", [0, 1, 500, 12_000])
def test_filters_have_the_bytes_of_js_waku(js: JsWaku, count: int) -> None:
    random = Random(count)
    ids = [random.randbytes(32).hex() for _ in range(count)]
    ours = BloomFilter(capacity=10_000)
    for message_id in ids:
        ours.add(message_id)
    rebuilt = BloomFilter()
    rebuilt.add("forgotten")
    rebuilt.rebuild(ids)
    assert ours.to_bytes() == rebuilt.to_bytes() == js.bloom(ids)
    assert len(rebuilt) == count


def test_filters_of_free_strings_have_the_bytes_of_js_waku(js: JsWaku) -> None:
    random = Random(7)
    alphabets = ("ab", "ABCÄß", "€ł漢字", "😀🜨a", "\u00ff\u0100\uffff")
    ids = [
        "".join(random.choices(random.choice(alphabets), k=random.randrange(1, 40)))
        for _ in range(400)
    ]
    ours = BloomFilter()
    for message_id in ids:
        ours.add(message_id)
    written = js.bloom(ids)
    assert ours.to_bytes() == written
    received = read_filter(written)
    assert received is not None
    assert all(received.contains(hash_pair(message_id)) for message_id in ids)
    others = [random.randbytes(8).hex() for _ in range(400)]
    assert not any(received.contains(hash_pair(message_id)) for message_id in others)


def delivered(peer: JsPeer, message: Message) -> bool:
    return peer.receive(encode(message)) is not None and peer.delivered == [message.message_id]


def test_js_waku_takes_a_message_without_a_filter_and_loses_one_with_a_short_filter(
    js: JsWaku,
) -> None:
    """A filter of another size is lost on js-waku, and the message with it: use its parameters."""
    message = Message("m", CHANNEL, "carol", START_MS, content=b"x")
    assert delivered(js.open(CHANNEL, "bob"), message)
    small = BloomFilter(capacity=1_000).to_bytes()
    bob = js.open(CHANNEL, "bob")
    with_small = Message("m", CHANNEL, "carol", START_MS, (), small, (), b"x")
    assert not delivered(bob, with_small)
    assert "RangeError" in bob.ids_of("sds:error-task")[0]
    # The message was announced as received, and a later copy of it without the filter is delivered.
    assert bob.ids_of("sds:in:message-received") == ["m"]
    assert delivered(bob, message)


def test_js_waku_ignores_messages_without_a_sender_only_if_it_has_no_name_itself(
    js: JsWaku,
) -> None:
    message = Message("m", CHANNEL, "", START_MS, content=b"x")
    assert delivered(js.open(CHANNEL, "bob"), message)
    assert not delivered(js.open(CHANNEL, ""), message)
