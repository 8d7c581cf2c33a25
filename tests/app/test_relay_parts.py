"""The parts of relaying that need no network: what is remembered, what waits, what is split."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace

import pytest

from app.live.notifybus import PART_CHARS, Outgoing, Parts, hand_over
from app.live.relay import Presence, Seen
from app.server.limits import DEFAULT_LIMITS

SMALL = replace(DEFAULT_LIMITS, relay_queue_items_max=3, relay_queue_bytes_max=1_000)


class Heard:
    """A listener that keeps what it hears."""

    def __init__(self) -> None:
        self.frames: list[tuple[bytes, str]] = []
        self.paths: list[bytes] = []
        self.commits: list[Collection[str] | None] = []
        self.sources: list[str] = []
        self.presences: list[Presence] = []

    def on_notified_frame(self, frame: bytes, origin: str, via: bytes) -> None:
        self.frames.append((frame, origin))
        self.paths.append(via)

    def on_notified_commit(self, channels: Collection[str] | None, source: str) -> None:
        self.commits.append(channels)
        self.sources.append(source)

    def on_notified_presence(self, presence: Presence) -> None:
        self.presences.append(presence)


def test_a_hash_is_remembered_for_its_time_and_no_more_than_so_many() -> None:
    seen = Seen(3, 10.0)
    assert seen.add(b"a", 0.0)
    assert not seen.add(b"a", 10.0)  # a repetition does not prolong it
    assert seen.add(b"a", 10.1)
    assert [seen.add(each, 11.0) for each in (b"b", b"c", b"d")] == [True] * 3
    assert b"a" not in seen
    assert all(each in seen for each in (b"b", b"c", b"d"))


async def sent_by(outgoing: Outgoing) -> Heard:
    """What a listener hears of all that waits."""
    heard = Heard()
    while True:
        try:
            async with asyncio.timeout(0.01):
                notices = await outgoing.next(1 << 20)
        except TimeoutError:
            return heard
        assert all(hand_over(each, heard) for each in notices)


@pytest.mark.anyio
async def test_frames_and_their_origins_travel_unchanged_and_commits_together() -> None:
    outgoing = Outgoing(DEFAULT_LIMITS)
    outgoing.send_commit({"b"})
    outgoing.send_frame(b"", "")
    outgoing.send_frame(b"\0\xff", "f" * 32, bytes(range(256)))
    outgoing.send_commit({"a", "b"})
    heard = await sent_by(outgoing)
    assert heard.frames == [(b"", ""), (b"\0\xff", "f" * 32)]
    assert heard.paths == [b"", bytes(range(256))]
    assert heard.commits == [["a", "b"]]


@pytest.mark.anyio
async def test_where_too_much_waits_the_oldest_frames_are_dropped_and_counted() -> None:
    outgoing = Outgoing(SMALL)
    for number in range(5):
        outgoing.send_frame(bytes([number]), "")
    assert ((await sent_by(outgoing)).frames, outgoing.dropped_count) == (
        [(bytes([number]), "") for number in (2, 3, 4)],
        2,
    )
    outgoing.send_frame(b"a" * 900, "")
    outgoing.send_frame(b"b" * 900, "")
    assert [frame[:1] for frame, _ in (await sent_by(outgoing)).frames] == [b"b"]


def test_a_frame_of_any_size_is_joined_from_payloads_that_the_server_takes() -> None:
    ours, theirs = Parts(), Parts()
    for size in (0, 1, PART_CHARS // 4 * 3 - 1, PART_CHARS // 4 * 3, 20_000, 1 << 20):
        notice = b"f" + bytes(size)
        payloads = ours.split(notice)
        assert max(map(len, payloads)) < 8_000
        assert len(set(payloads)) == len(payloads)
        assert [theirs.join(each) for each in payloads] == [*[None] * (len(payloads) - 1), notice]
        assert [ours.join(each) for each in payloads] == [None] * len(payloads)  # our own


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"x",
        b"f",
        b"w",
        b"w\0\1",
        b"w\0\1x",
        b"w\0\1xf",
        b"c",
        b"c{}",
        b"c[1]",
        b'c["a", null]',
        b"c\xff",
        b'c"text"',
        b"p",
        b"pnull",
        b'p["a"]',
        b'p["a", [1]]',
        b'l["p", [], []]',
        b'l["p", [1], [], false]',
    ],
)
def test_garbage_on_the_bus_is_not_a_notice(garbage: bytes) -> None:
    heard = Heard()
    assert not hand_over(garbage, heard)
    assert (heard.frames, heard.commits) == ([], [])
