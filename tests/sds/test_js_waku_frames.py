"""Frames, filters and message IDs, between this library and js-waku running beside it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sdstore.sds import Dialect, HistoryEntry, Kind, Message, decode, encode, verifies
from tests.support.js_waku import JsWaku, js_waku

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
