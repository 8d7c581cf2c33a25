"""A store that was loaded at once answers as one that took the same messages at the door."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings

from app.entries import OutcomeKind
from app.errors import Code, Problem
from app.ingest.prepare import Publication
from app.limits import DEFAULT_LIMITS
from app.store.faults import StoreBusyError
from app.store.store import Store
from pipeline import bulkdraft, bulkload
from pipeline.bulkdraft import CPUS, Item
from pipeline.bulkload import Loaded, forget_load, load_empty_store
from sdstore.sds.codec import encode
from sdstore.sds.model import HistoryEntry, Message
from tests.support.publications import CHANNELS, HINTS, MESSAGE_IDS, content_frame, groups
from tests.support.stores import BYTES_MAX, prepared

pytestmark = pytest.mark.anyio

LOAD = """
import sys
from pathlib import Path
from tests.pipeline.test_bulk_load import in_small_steps, load_many, sleep_instead
if __name__ == "__main__":
    in_small_steps()
    if sys.argv[2] == "sleeps once indexed":
        sleep_instead()
    load_many(Path(sys.argv[1]))
"""
MANY = 40_000
CHANNELS_COUNT = 10


def in_small_steps() -> None:
    """Let loads commit, hand over to workers and forget what is settled after few messages."""
    bulkdraft.COMMIT_ITEMS = 4_096
    bulkdraft.SETTLED_MAX = 16_384
    bulkload.BATCHES_BEFORE_WORKERS = 1


def sleep_instead() -> None:
    """Let a load sleep once its indexes are made."""
    bulkload._write_rest = lambda *_: time.sleep(60)  # type: ignore[assignment]


@pytest.fixture(scope="module", autouse=True)
def small_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        # Notes the values; the end of the block brings them back.
        patched.setattr(bulkdraft, "COMMIT_ITEMS", bulkdraft.COMMIT_ITEMS)
        patched.setattr(bulkdraft, "SETTLED_MAX", bulkdraft.SETTLED_MAX)
        patched.setattr(bulkload, "BATCHES_BEFORE_WORKERS", bulkload.BATCHES_BEFORE_WORKERS)
        in_small_steps()
        yield


def numbered(frames: Iterable[bytes]) -> Callable[[int], Iterator[Item]]:
    """The frames as items from 1 on."""
    return lambda after: ((n, f, ()) for n, f in enumerate(frames, 1) if n > after)


def many_after(seq: int) -> Iterator[Item]:
    """Small messages of a few channels, each telling of the one before and of a lost one; refused ones."""
    for number in range(seq + 1, MANY + 1):
        history = (
            HistoryEntry(f"message-{number - CHANNELS_COUNT:06}"),
            HistoryEntry(f"gone-{number % 7}"),
        )
        channel = f"channel-{number % CHANNELS_COUNT}"
        frame = content_frame(number, history=history, channel_id=channel)
        yield number, b"\xff" if number % 1_000 == 0 else frame, ()


def load_many(path: Path, *, workers: int = CPUS) -> tuple[Loaded, list[int]]:
    """The result of a load of `many_after`, and the numbers after which it requested items."""
    asked: list[int] = []

    def items_after(seq: int) -> Iterator[Item]:
        asked.append(seq)
        return many_after(seq)

    loaded = load_empty_store(path, items_after, DEFAULT_LIMITS, name="many", workers=workers)
    return loaded, asked


def names_in(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


async def answers(store: Store) -> list[object]:
    """A store's answers, without sequence numbers and the order of claims."""
    told: list[object] = []
    for channel in await store.channels.after(None, 100):
        name = channel.channel_id
        told.append((name, channel.count, channel.lamport_first, channel.lamport_last))
        page = await store.channels.page(name, limit=1000, bytes_max=BYTES_MAX)
        told.append([(entry.digest, entry.lamport_timestamp) for entry in page.entries])
        gaps = await store.gaps.page(name, None, 1000)
        told.append([(gap.message_id, set(gap.hints)) for gap in gaps.gaps])
        for hint in HINTS:
            candidates = await store.claims.page(hint, name, 1000)
            told.append((hint, {entry.digest for entry in candidates.entries}))
    for name in CHANNELS:
        for message_id in MESSAGE_IDS:
            found = await store.entries.find(message_id, name)
            told.append(None if found is None else (found.entry.digest, found.variants))
    feed = (await store.channels.feed(0, 1000, BYTES_MAX)).entries
    told.append([entry.frame for entry in feed])
    digests = [entry.digest for entry in feed]
    claims = (await store.claims.of(sorted(digests))).items()
    told.append(sorted((digest, {(c.hint, c.source) for c in its}) for digest, its in claims))
    return told


@given(groups)
@settings(max_examples=15, deadline=None)
def test_a_loaded_store_answers_like_one_that_was_published_to(
    sent: list[list[Publication]],
) -> None:
    items = [(item.frame, item.hints) for group in sent for item in group]

    async def scenario(folder: Path) -> None:
        loaded = load_empty_store(
            folder / "loaded.db",
            lambda _: ((number, *item) for number, item in enumerate(items, 1)),
            DEFAULT_LIMITS,
            workers=0,
        )
        published = await Store.open(f"sqlite:///{folder}/published.db", DEFAULT_LIMITS)
        published.begin_writing()
        entries, met = prepared([Publication(*item) for item in items])
        results = published.writer.write(entries, met)
        store = await Store.open(f"sqlite:///{folder}/loaded.db", DEFAULT_LIMITS)
        assert await answers(store) == await answers(published)
        assert loaded.counts[OutcomeKind.STORED] == sum(result.is_new for result in results)
        assert loaded.counts.total() + loaded.refused.total() == len(items)
        store.begin_writing()
        again = store.writer.write(entries, met)
        assert not any(result.is_new for result in again)
        await store.close()
        await published.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(scenario(Path(folder)))


async def test_worker_processes_change_nothing_but_the_speed(tmp_path: Path) -> None:
    history = (HistoryEntry("message-000007"), HistoryEntry("gone", b"hint"))
    frames = [content_frame(number, history=history) for number in range(7_000)]
    items = numbered([*frames, b"\xff", *frames[:100]])
    path = tmp_path / "store.db"
    loaded = load_empty_store(path, items, DEFAULT_LIMITS, workers=2)
    assert loaded.counts == Counter({OutcomeKind.STORED: 7_000, OutcomeKind.DUPLICATE: 100})
    assert loaded.refused == {Code.MALFORMED_FRAME: 1}
    store = await Store.open(f"sqlite:///{path}", DEFAULT_LIMITS)
    assert await store.arrivals.watermark() == (7_000, 0)
    gaps = await store.gaps.page("channel", None, 10)
    assert [(gap.message_id, gap.hints) for gap in gaps.gaps] == [("gone", (b"hint",))]
    feed = await store.channels.feed(0, 10_000, BYTES_MAX)
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
        load_empty_store(path, numbered(frames), DEFAULT_LIMITS, workers=0)
        store = await Store.open(f"sqlite:///{path}", DEFAULT_LIMITS)
        feed = await store.channels.feed(0, 10, BYTES_MAX)
        assert [(entry.seq, entry.frame) for entry in feed.entries] == [
            (1, frames[0]),
            (2, frames[1]),
        ]
        found = await store.entries.find("x", "channel")
        assert found is not None
        assert found.entry.frame == frames[0]
        assert [channel.count for channel in await store.channels.after(None, 10)] == [2]
        await store.close()


async def test_only_an_empty_store_that_nobody_writes_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.store.sqlite.WRITER_LOCK_WAIT_S", 0.05)
    path = tmp_path / "store.db"
    store = await Store.open(f"sqlite:///{path}", DEFAULT_LIMITS)
    store.begin_writing()
    with pytest.raises(StoreBusyError):
        load_empty_store(path, numbered([]), DEFAULT_LIMITS, workers=0)
    store.writer.write(prepared([Publication(content_frame(1))])[0])
    await store.close()
    with pytest.raises(Problem, match="empty"):
        load_empty_store(path, numbered([]), DEFAULT_LIMITS, workers=0)


async def test_a_load_that_is_killed_has_not_happened_and_goes_on_where_it_was(
    tmp_path: Path,
) -> None:
    path = tmp_path / "store.db"
    kill_while_it_loads(path, lambda: committed(path) > 0)
    held = committed(path)
    assert 0 < held < MANY
    store = await Store.open(f"sqlite:///{path}", DEFAULT_LIMITS)
    assert await store.arrivals.watermark() == (0, 0)
    await store.close()
    loaded, asked = load_many(path)
    assert asked == [held]
    assert_whole(path, loaded)
    load_many(tmp_path / "at_once.db")
    assert dump(path) == dump(tmp_path / "at_once.db")


async def test_a_load_that_is_killed_after_its_indexes_were_made_ends_all_the_same(
    tmp_path: Path,
) -> None:
    path = tmp_path / "store.db"
    kill_while_it_loads(path, lambda: progress(path, "is_indexed"), "sleeps once indexed")
    loaded, asked = load_many(path)
    assert asked == []
    assert_whole(path, loaded)


@pytest.mark.parametrize("name", [None, "other"])
async def test_a_load_goes_on_with_its_own_source_only(tmp_path: Path, name: str | None) -> None:
    path = tmp_path / "store.db"
    interrupt(path)
    loaded = load_empty_store(
        path, numbered([content_frame(1)]), DEFAULT_LIMITS, name=name, workers=0
    )
    assert (loaded.counts.total(), loaded.refused.total()) == (1, 0)
    assert names_in(tmp_path) == ["store.db", "store.db-writer"]


async def test_a_draft_of_another_store_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    interrupt(path)
    path.unlink()
    loaded, asked = load_many(path, workers=0)
    assert asked == [0]
    assert_whole(path, loaded)


async def test_without_a_name_nothing_is_left_of_a_load_that_fails(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with pytest.raises(RuntimeError):
        load_empty_store(path, failing_after, DEFAULT_LIMITS, workers=0)
    assert names_in(tmp_path) == ["store.db", "store.db-writer"]


async def test_a_stopped_load_can_be_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    interrupt(path)
    forget_load(path)
    assert names_in(tmp_path) == ["store.db", "store.db-writer"]


def failing_after(seq: int) -> Iterator[Item]:
    yield from islice(many_after(seq), 10_000)
    raise RuntimeError("the source is gone")


def interrupt(path: Path) -> None:
    """Leave a draft in which something is committed."""
    with pytest.raises(RuntimeError):
        load_empty_store(path, failing_after, DEFAULT_LIMITS, name="many", workers=0)
    assert committed(path) > 0


def kill_while_it_loads(path: Path, is_time: Callable[[], object], how: str = "") -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LOAD, str(path), how],
        cwd=Path(__file__).parents[2],
        start_new_session=True,
    ) as process:
        while not is_time():
            assert process.poll() is None
            time.sleep(0.01)
        # The workers with it: they would wait for items that nobody sends.
        os.killpg(process.pid, signal.SIGKILL)


def progress(path: Path, column: str) -> int:
    """The progress in a draft, read from outside; 0 while there is none."""
    try:
        spool = path.with_name(f"{path.name}.loading-spool")
        with closing(sqlite3.connect(f"file:{spool}?mode=ro", uri=True)) as connection:
            [[value]] = connection.execute(f"SELECT {column} FROM progress")
            return int(value)
    except (sqlite3.Error, ValueError):
        return 0


def committed(path: Path) -> int:
    return progress(path, "place")


def assert_whole(path: Path, loaded: Loaded) -> None:
    refused_count = MANY // 1_000
    assert loaded.refused == {Code.MALFORMED_FRAME: refused_count}
    assert loaded.counts == Counter({OutcomeKind.STORED: MANY - refused_count})
    assert names_in(path.parent) == [path.name, f"{path.name}-writer"]


def dump(path: Path) -> list[object]:
    """The data that all loads of the same items have in common, with any secrets and times."""
    with closing(sqlite3.connect(path)) as connection:
        return [
            connection.execute(query).fetchall()
            for query in (
                "SELECT seq, channel_no, lamport, message_id, digest FROM messages ORDER BY seq",
                "SELECT * FROM channels ORDER BY channel_no",
                "SELECT channel_no, message_id FROM missing_references ORDER BY 1, 2",
                "SELECT seq, data FROM frames ORDER BY seq",
                "SELECT name FROM sqlite_master ORDER BY name",
                "PRAGMA integrity_check",
            )
        ]
