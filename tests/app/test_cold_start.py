"""After a cold start every root is right, however many are asked for at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from blake3 import blake3

from app.entries import NewEntry
from app.http.application import application_of
from app.ingest.prepare import Publication, prepare
from app.server.limits import DEFAULT_LIMITS
from app.server.node import INDEX_FILE, Node
from app.server.settings import Settings
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
