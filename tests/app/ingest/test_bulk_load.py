"""A store that was loaded at once answers as one that took the same messages at the door."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from app.entries import OutcomeKind
from app.errors import Code, Problem
from app.ingest.bulkload import load_empty_store
from app.ingest.records import Publication
from app.limits import DEFAULT_LIMITS
from app.store.faults import StoreBusyError
from app.store.store import Store
from sdstore.sds.codec import encode
from sdstore.sds.model import HistoryEntry, Message
from tests.support.publications import CHANNELS, HINTS, MESSAGE_IDS, content_frame, groups
from tests.support.stores import BYTES_MAX, prepared

pytestmark = pytest.mark.anyio

LOAD = """
import sys
from pathlib import Path
from app.ingest.bulkload import load_empty_store
from app.limits import DEFAULT_LIMITS
from tests.support.publications import content_frame
if __name__ == "__main__":
    frames = ((content_frame(number), ()) for number in range(400_000))
    print("loading", flush=True)
    load_empty_store(Path(sys.argv[1]), frames, DEFAULT_LIMITS, print)
"""


def never(number: int, problem: Problem) -> None:
    raise AssertionError((number, problem))


def names_in(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


async def answers(store: Store) -> list[object]:
    """What a store says, but for sequence numbers and the order of claims."""
    told: list[object] = []
    for channel in await store.channels(None, 100):
        name = channel.channel_id
        told.append((name, channel.count, channel.lamport_first, channel.lamport_last))
        page = await store.page(name, limit=1000, bytes_max=BYTES_MAX)
        told.append([(entry.digest, entry.lamport_timestamp) for entry in page.entries])
        gaps = await store.gaps(name, None, 1000)
        told.append([(gap.message_id, set(gap.hints)) for gap in gaps.gaps])
        for hint in HINTS:
            candidates = await store.hint(hint, name, 1000)
            told.append((hint, {entry.digest for entry in candidates.entries}))
    for name in CHANNELS:
        for message_id in MESSAGE_IDS:
            found = await store.find(message_id, name)
            told.append(None if found is None else (found.entry.digest, found.variants))
    feed = (await store.feed(0, 1000, BYTES_MAX)).entries
    told.append([entry.frame for entry in feed])
    digests = [entry.digest for entry in feed]
    claims = (await store.hints_of(sorted(digests))).items()
    told.append(sorted((digest, {(c.hint, c.source) for c in its}) for digest, its in claims))
    return told


@given(groups)
@settings(max_examples=15, deadline=None)
def test_a_loaded_store_answers_like_one_that_was_published_to(
    sent: list[list[Publication]],
) -> None:
    items = [(item.frame, item.hints) for group in sent for item in group]

    async def scenario(folder: Path) -> None:
        refused: list[int] = []
        loaded = load_empty_store(
            folder / "loaded.db",
            items,
            DEFAULT_LIMITS,
            lambda number, _: refused.append(number),
            workers=0,
        )
        published = await Store.open(f"sqlite:///{folder}/published.db", DEFAULT_LIMITS)
        published.begin_writing()
        entries, met = prepared([Publication(*item) for item in items])
        results = published.write_group(entries, met)
        store = await Store.open(f"sqlite:///{folder}/loaded.db", DEFAULT_LIMITS)
        assert await answers(store) == await answers(published)
        assert loaded.counts[OutcomeKind.STORED] == sum(result.is_new for result in results)
        assert loaded.counts.total() + loaded.refused_count == len(items)
        assert len(refused) == loaded.refused_count
        store.begin_writing()
        again = store.write_group(entries, met)
        assert not any(result.is_new for result in again)
        await store.close()
        await published.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(scenario(Path(folder)))


async def test_worker_processes_change_nothing_but_the_speed(tmp_path: Path) -> None:
    history = (HistoryEntry("message-000007"), HistoryEntry("gone", b"hint"))
    frames = [content_frame(number, history=history) for number in range(25_000)]
    items = [(frame, ()) for frame in [*frames, b"\xff", *frames[:100]]]
    refused: list[tuple[int, Code]] = []
    path = tmp_path / "store.db"
    loaded = load_empty_store(
        path, items, DEFAULT_LIMITS, lambda n, p: refused.append((n, p.code)), workers=2
    )
    assert loaded.counts == {OutcomeKind.STORED: 25_000, OutcomeKind.DUPLICATE: 100}
    assert refused == [(25_000, Code.MALFORMED_FRAME)]
    store = await Store.open(f"sqlite:///{path}", DEFAULT_LIMITS)
    assert await store.watermark() == (25_000, 0)
    gaps = await store.gaps("channel", None, 10)
    assert [(gap.message_id, gap.hints) for gap in gaps.gaps] == [("gone", (b"hint",))]
    feed = await store.feed(0, 30_000, BYTES_MAX)
    assert [entry.frame for entry in feed.entries] == frames
    await store.close()
    assert names_in(tmp_path) == ["store.db", "store.db-writer"]


async def test_the_first_message_under_an_id_is_served_whichever_way_it_was_loaded(
    tmp_path: Path,
) -> None:
    said = Message("x", "channel", lamport_timestamp=1, content=b"alice")
    alice_again = encode(said)
    alice = encode(replace(said, bloom_filter=bytes(18_000)))
    mallory = content_frame(2, message_id="x", content=b"mallory")
    for name, frames in (("a", [alice, mallory, alice_again]), ("b", [mallory, alice])):
        path = tmp_path / f"{name}.db"
        load_empty_store(path, [(f, ()) for f in frames], DEFAULT_LIMITS, never, workers=0)
        store = await Store.open(f"sqlite:///{path}", DEFAULT_LIMITS)
        feed = await store.feed(0, 10, BYTES_MAX)
        assert [(entry.seq, entry.frame) for entry in feed.entries] == [
            (1, frames[0]),
            (2, frames[1]),
        ]
        found = await store.find("x", "channel")
        assert found is not None
        assert found.entry.frame == frames[0]
        assert [channel.count for channel in await store.channels(None, 10)] == [2]
        await store.close()


async def test_only_an_empty_store_that_nobody_writes_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = await Store.open(f"sqlite:///{path}", DEFAULT_LIMITS)
    store.begin_writing()
    with pytest.raises(StoreBusyError):
        load_empty_store(path, [], DEFAULT_LIMITS, never, workers=0)
    store.write_group(prepared([Publication(content_frame(1))])[0])
    await store.close()
    with pytest.raises(Problem, match="empty"):
        load_empty_store(path, [], DEFAULT_LIMITS, never, workers=0)


async def test_a_load_that_is_killed_has_not_happened(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with subprocess.Popen(  # noqa: ASYNC220 - nothing else runs on this loop
        [sys.executable, "-c", LOAD, str(path)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"loading\n"
        draft = path.with_name("store.db.loading")
        while not draft.exists() or draft.stat().st_size < 1_000_000:
            time.sleep(0.01)  # noqa: ASYNC251
        process.send_signal(signal.SIGKILL)
    store = await Store.open(f"sqlite:///{path}", DEFAULT_LIMITS)
    assert await store.watermark() == (0, 0)
    await store.close()
    loaded = load_empty_store(path, [(content_frame(1), ())], DEFAULT_LIMITS, never, workers=0)
    assert loaded.counts == {OutcomeKind.STORED: 1, OutcomeKind.DUPLICATE: 0}
    assert not draft.exists()
