"""Beside each js-waku participant of a random conversation, ours gets the same frames at the same times.

Whenever both have the same log, both must write the same frame, byte for byte. In between logs differ,
because js-waku delivers at its sweeps only, and before a cause that waits itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from sdstore.sds import Acknowledged, Broadcast, Deliver, Kind, MemoryLog, Participant, decode
from tests.sds.test_js_waku_scenarios import LIKE_JS_WAKU
from tests.support.js_waku import JsPeer, JsWaku, js_waku

START_MS = 1_763_000_000_000
CHANNEL = "/app/1/shadow/proto"
STEPS = 160


class Shadowed:
    """A js-waku participant and ours, with equal inputs."""

    def __init__(self, js: JsWaku, name: str) -> None:
        self.theirs: JsPeer = js.open(CHANNEL, name, causalHistorySize=2)
        self.log = MemoryLog()
        self.ours = Participant(CHANNEL, name, options=LIKE_JS_WAKU, log=self.log)
        self.ours.tick(START_MS - 1)  # both clocks begin here
        self.delivered: list[str] = []
        self.acknowledged: set[str] = set()
        self.compared = 0

    @property
    def has_equal_logs(self) -> bool:
        newest = self.log.newest(len(self.log), 2**63 - 1)
        return self.theirs.state().log == [each.entry.message_id for each in newest]

    def send(self, text: str, now_ms: int) -> tuple[bytes, bytes]:
        are_equal = self.has_equal_logs
        _, frame, hint = self.theirs.send(text.encode())
        effects = self.ours.send(text.encode(), now_ms, hint)
        (ours,) = (each for each in effects if isinstance(each, Broadcast))
        if are_equal:
            assert ours.frame == frame
            self.compared += 1
        else:
            # The message is the same entry to others if it refers to the same messages; send theirs.
            assert ours.message_id == decode(frame)[0].message_id
        return frame, hint

    def sync(self, now_ms: int) -> bytes | None:
        are_equal = self.has_equal_logs
        frame = self.theirs.sync()
        effects = self.ours.tick(now_ms)
        ours = [e.frame for e in effects if isinstance(e, Broadcast) and e.kind is Kind.SYNC]
        assert (frame is None) == (not self.theirs.state().log)
        if are_equal and frame is not None:  # ours also sends one while messages wait
            theirs, mine = decode(frame)[0], decode(ours[0])[0]
            assert replace(mine, message_id=theirs.message_id) == theirs
            self.compared += 1
        return frame

    def receive(self, frame: bytes, hint: bytes | None, now_ms: int) -> None:
        self.theirs.receive(frame, hint)
        for effect in self.ours.receive(frame, now_ms, hint):
            if isinstance(effect, Deliver):
                self.delivered.append(effect.message.message_id)
            elif isinstance(effect, Acknowledged):
                self.acknowledged.add(effect.message_id)

    def catch_up(self, sent: list[tuple[bytes, bytes | None]], now_ms: int) -> None:
        """Everything arrives; js-waku delivers at its sweeps."""
        for frame, hint in sent:
            self.receive(frame, hint, now_ms)
        for _ in sent:
            self.theirs.sweep()


def converse(js: JsWaku, seed: int) -> list[Shadowed]:
    """Loss, duplicates and reordering among three; then everything arrives, in any order."""
    random = Random(seed)
    peers = [Shadowed(js, name) for name in ("alice", "bob", "çelik")]
    sent: list[tuple[bytes, bytes | None]] = []
    # Less than 30 s in all: js-waku asks for a repair only once, and we ask again.
    for number in range(STEPS):
        now_ms = START_MS + 150 * number + random.randrange(100)
        js.clock(now_ms)
        peer = random.choice(peers)
        choice = random.random()
        if choice < 0.25:
            sent.append(peer.send(f"{seed} {number}", now_ms))
        elif choice < 0.3:
            if (frame := peer.sync(now_ms)) is not None:
                sent.append((frame, None))
        elif choice < 0.4:
            peer.theirs.sweep()
        elif sent:
            frame, hint = random.choice(sent[-12:])
            peer.receive(frame, hint, now_ms)
    now_ms = START_MS + 150 * STEPS
    js.clock(now_ms)
    for peer in peers:
        peer.catch_up(random.sample(sent, len(sent)), now_ms)
    return peers


@pytest.fixture(scope="module")
def js() -> Iterator[JsWaku]:
    with js_waku() as running:
        running.clock(START_MS - 1)
        yield running


@pytest.mark.parametrize("seed", range(3))
def test_equal_logs_give_equal_frames_and_every_conversation_ends_with_equal_logs(
    js: JsWaku, seed: int
) -> None:
    js.clock(START_MS - 1)
    peers = converse(js, seed)
    assert sum(peer.compared for peer in peers) >= 10
    logs = [peer.theirs.state().log for peer in peers]
    for peer in peers:
        assert peer.has_equal_logs
        assert len(peer.delivered) == len(set(peer.delivered))
        assert set(peer.delivered) == set(peer.theirs.delivered)
        # js-waku counts every copy of a filter, so it acknowledges sooner.
        assert peer.acknowledged <= set(peer.theirs.ids_of("sds:out:message-acknowledged"))
    assert logs[0] == logs[1] == logs[2]
