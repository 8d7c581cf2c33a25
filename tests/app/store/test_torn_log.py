"""A write-ahead log that a power cut tore: the store opens with every commit that the log still has."""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from app.ingest.prepare import Publication
from app.server.limits import DEFAULT_LIMITS
from app.store.store import Store
from tests.support.ingest import open_ingest
from tests.support.publications import content_frame
from tests.support.stores import SqliteStores

pytestmark = pytest.mark.anyio

GROUPS = 24
FAST_IMAGES, FAST_S = 500, 10.0
SOAK_IMAGES = 20_000
READS_EACH = 25  # one image in so many is also read by a store, and written to


@dataclass(frozen=True)
class Written:
    """A database as of its start, its whole log, and where in the log each commit ends."""

    main: Path
    log: bytes
    ends: list[int]
    counts: list[int]
    digests: list[bytes]

    def commits_in(self, log: bytes) -> int:
        """The number of commits that this log has in full."""
        return sum(log[:end] == self.log[:end] for end in self.ends)


async def written(url: str, folder: Path, random: Random) -> Written:
    """Publish in groups of many sizes, some of them large, while no checkpoint moves the log."""
    path = Path(url.removeprefix("sqlite:///"))
    log, main = Path(f"{path}-wal"), folder / "main.db"
    ends, counts, digests = [], [], []
    async with open_ingest(url) as ingest:
        raw = sqlite3.connect(path)
        raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        raw.close()
        shutil.copyfile(path, main)
        for number in range(GROUPS):
            items = [
                Publication(content_frame(number * 100 + n), (b"%d" % n,))
                for n in range(random.choice((1, 1, 3, 20)))
            ]
            outcomes = await ingest.door.publish_many(items)
            digests += [each.digest for each in outcomes]
            ends.append(len(bytes_of(log)))
            counts.append(len(digests))
        assert bytes_of(path) == bytes_of(main)
        return Written(main, bytes_of(log), ends, counts, digests)


def bytes_of(file: Path) -> bytes:
    return file.read_bytes()


def lay(whole: Written, path: Path, log: bytes) -> None:
    """Put a database with this log at `path`."""
    for each in path.parent.glob(f"{path.name}*"):
        each.unlink()
    shutil.copyfile(whole.main, path)
    Path(f"{path}-wal").write_bytes(log)


def images(whole: Written, random: Random) -> Iterator[bytes]:
    """Logs as they can be on a disk after a power cut."""
    while True:
        size = random.randrange(1, len(whole.log))
        damaged = bytearray(whole.log)
        match random.choice(("cut", "zeros", "garbage", "hole", "stale")):
            case "cut":
                yield whole.log[:size]
            case "zeros":  # the length reached the disk, the bytes did not (or were zeros)
                yield whole.log[:size] + bytes(len(whole.log) - size)
            case "garbage":
                yield whole.log[:size] + random.randbytes(9_000)
            case "hole":  # a sector in the middle did not reach the disk
                size -= size % 512
                lost = bytes(damaged[size : size + 512])
                damaged[size : size + 512] = random.randbytes(len(lost))
                yield bytes(damaged)
            case "stale":  # the rest is what an earlier round of the log left there
                stale = whole.log[size // 2 : size // 2 + 99_000]
                yield whole.log[:size] + stale


async def check(whole: Written, folder: Path, random: Random, count: int, seconds: float) -> int:
    """Open images until `count` or the time is reached; the number of images."""
    until = time.monotonic() + seconds
    path = folder / "image.db"
    for number, log in zip(range(count), images(whole, random), strict=False):
        if time.monotonic() > until:
            return number
        lay(whole, path, log)
        commits = whole.commits_in(log)
        stored = whole.counts[commits - 1] if commits else 0
        raw = sqlite3.connect(path)
        found = raw.execute("SELECT digest FROM messages ORDER BY seq").fetchall()
        assert [each for (each,) in found] == whole.digests[:stored]
        assert raw.execute("PRAGMA quick_check").fetchall() == [("ok",)]
        raw.close()
        if number % READS_EACH == 0:
            await write_to(path, whole.digests[:stored])
    return count


async def write_to(path: Path, digests: list[bytes]) -> None:
    """A store over this image has exactly these entries, and goes on."""
    async with open_ingest(f"sqlite:///{path}") as ingest:
        entries = await ingest.store.entries.by_digest(digests)
        assert [each.digest for each in entries] == digests
        (outcome,) = await ingest.door.publish_many([Publication(content_frame(10**6))])
        assert (await ingest.store.arrivals.arrived()).entries.number > len(digests)
    store = await Store.open(f"sqlite:///{path}", DEFAULT_LIMITS)
    assert [each.digest for each in await store.entries.by_digest([outcome.digest])]
    await store.close()


async def run(folder: Path, count: int, seconds: float) -> int:
    seed = int(os.environ.get("SDSTORE_SEED", time.time_ns() % 2**32))
    print(f"SDSTORE_SEED={seed}")
    random = Random(seed)
    whole = await written(SqliteStores(folder).new_url(), folder, random)
    assert len(set(whole.ends)) == GROUPS
    return await check(whole, folder, random, count, seconds)


async def test_a_store_over_a_torn_log_has_exactly_the_commits_that_the_log_has(
    tmp_path: Path,
) -> None:
    assert await run(tmp_path, FAST_IMAGES, FAST_S) >= 20


@pytest.mark.soak
async def test_stores_over_20_000_torn_logs_have_exactly_their_commits(
    tmp_path: Path,
) -> None:
    seconds = 60 * float(os.environ.get("SOAK_MINUTES", "60"))
    count = await run(tmp_path, SOAK_IMAGES, seconds)
    assert count == SOAK_IMAGES, f"{count} in the time; raise SOAK_MINUTES"
