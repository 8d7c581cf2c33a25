"""After a cold start every root is right, however many are asked for at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from pathlib import Path

import httpx
import pytest
from blake3 import blake3

from app import roots
from app.entries import NewEntry
from app.http.application import application_of
from app.ingest.prepare import Publication, prepare
from app.recon.index import NodeIndex
from app.server.limits import DEFAULT_LIMITS
from app.server.node import INDEX_FILE, Node
from app.server.settings import Settings
from recon.elements import U32
from recon.index import Postings, _segment
from recon.store import Snapshot
from tests.support.publications import content_frame
from tests.support.snapshots import fill_store

CHANNELS_COUNT, ENTRIES_COUNT = 40, 200
NAMES = [f"channel-{number}" for number in range(CHANNELS_COUNT)]

Roots = dict[str, tuple[int, str]]
"""Count and root by channel."""


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 channels of 200 entries, interleaved, and no index file."""
    folder = tmp_path_factory.mktemp("cold")
    settings = Settings(data_dir=folder)
    messages = (Publication(frame_of(n)) for n in range(1, CHANNELS_COUNT * ENTRIES_COUNT + 1))
    fill_store(settings.database_url, messages, CHANNELS_COUNT * ENTRIES_COUNT)
    return folder


@pytest.fixture(scope="module")
def expected() -> Roots:
    """The contents of the channels, computed from the frames alone."""
    digests: dict[str, list[bytes]] = {name: [] for name in NAMES}
    for number in range(1, CHANNELS_COUNT * ENTRIES_COUNT + 1):
        entry = prepare(Publication(frame_of(number)), DEFAULT_LIMITS)
        assert isinstance(entry, NewEntry)
        digests[entry.message.channel_id].append(entry.digest)
    return {
        name: (len(found), blake3(b"".join(sorted(found))).hexdigest())
        for name, found in digests.items()
    }


def frame_of(number: int) -> bytes:
    return content_frame(number, channel_id=NAMES[number % CHANNELS_COUNT])


async def roots_of(node: Node) -> Roots:
    """A node's answers to concurrent requests for all roots, over HTTP."""
    transport = httpx.ASGITransport(application_of(node), client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        answers = await asyncio.gather(*(http.get(f"/v1/channels/{name}") for name in NAMES))
    found = [answer.json() for answer in answers]
    return {each["channel_id"]: (each["count"], each["root"]) for each in found}


async def roots_after_a_cold_start(data_dir: Path) -> Roots:
    """The roots of a node that starts without its index file."""
    (data_dir / INDEX_FILE).unlink(missing_ok=True)
    async with Node.open(Settings(data_dir=data_dir)) as node:
        return await roots_of(node)


def assert_right(found: Roots, expected: Roots) -> None:
    wrong = {name: found[name][0] for name in NAMES if found[name] != expected[name]}
    assert not wrong, f"{len(wrong)} of {CHANNELS_COUNT} roots are wrong; their counts: {wrong}"


def test_forty_roots_asked_for_at_once_after_a_cold_start_are_right(
    data_dir: Path, expected: Roots
) -> None:
    for _ in range(8):
        assert_right(asyncio.run(roots_after_a_cold_start(data_dir)), expected)


def test_rows_chosen_in_threads_from_segments_that_grow_on_reading_would_be_noticed(
    data_dir: Path, expected: Roots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: without the order of `NodeIndex.root` and the rule of `recon.index`."""

    def rows_of(self: Postings, snapshot: Snapshot, groups: Collection[int], stop: int) -> U32:
        extend(self, snapshot)
        return right_rows_of(self, snapshot, groups, stop)

    def in_place(self: Postings, snapshot: Snapshot) -> None:
        segments = self._segments
        time.sleep(0.001)  # other threads have their turns, as they may anywhere
        covered = segments[-1].stop if segments else 0
        if covered < snapshot.size:
            new = _segment(snapshot, covered)
            self._segments = (*self._segments, new)

    async def root(self: NodeIndex, channel_id: str, _entries_count: int) -> tuple[int, bytes]:
        number = self._channels.numbers[channel_id]
        snapshot, rows = await asyncio.to_thread(self.elements.rows_of, (2 * number,))
        return len(rows), roots.root(snapshot.ids_of(rows))

    right_rows_of, extend = Postings.rows_of, in_place
    monkeypatch.setattr(Postings, "rows_of", rows_of)
    monkeypatch.setattr(Postings, "extend", lambda *_: None)
    monkeypatch.setattr(NodeIndex, "root", root)
    assert any(asyncio.run(roots_after_a_cold_start(data_dir)) != expected for _ in range(30))


@pytest.mark.slow
def test_a_thousand_rounds_of_forty_concurrent_roots_after_a_cold_start_are_right(
    data_dir: Path, expected: Roots
) -> None:
    async def rounds() -> None:
        async with Node.open(Settings(data_dir=data_dir)) as node:
            for _ in range(1_000):
                # Repeat the start; the rest of the node can stay open.
                node.index = NodeIndex(node.store, node.limits)
                await node.index.start(data_dir / "no such file")
                assert_right(await roots_of(node), expected)

    asyncio.run(rounds())
