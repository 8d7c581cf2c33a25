"""Acknowledged messages survive killed processes and full disks."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from app.errors import Code, Problem
from app.ingest.prepare import Publication
from app.server.limits import DEFAULT_LIMITS
from app.store.entryrows import ContentState
from app.store.groupwriter import Retiring
from app.store.sqlite import SqliteDatabase
from app.store.store import Store
from tests.support.ingest import Ingest, open_ingest
from tests.support.publications import content_frame
from tests.support.stores import Stores

pytestmark = pytest.mark.anyio

ROUNDS = 5
SOAK_ROUNDS = 1_000
PUBLISH_UNTIL_KILLED = Path(__file__).with_name("publish_until_killed.py")
WAL_FRAME_BYTES = 4096 + 24


async def test_every_acknowledged_message_survives_kill_9(stores: Stores) -> None:
    assert await survives_kills(stores, ROUNDS, seconds=60) == ROUNDS


@pytest.mark.soak
async def test_every_acknowledged_message_survives_a_thousand_kills(stores: Stores) -> None:
    seconds = 60 * float(os.environ.get("SOAK_MINUTES", "60"))
    rounds = await survives_kills(stores, SOAK_ROUNDS, seconds)
    assert rounds == SOAK_ROUNDS, f"{rounds} in the time; raise SOAK_MINUTES"


async def survives_kills(stores: Stores, rounds: int, seconds: float) -> int:
    """Kill a publisher until `rounds` or the time is reached; the number of kills."""
    url = stores.new_url()
    acknowledged: list[bytes] = []
    until, number = time.monotonic() + seconds, 0
    while number < rounds and time.monotonic() < until:
        acknowledged += await asyncio.to_thread(kill_while_publishing, url, number)
        number += 1
    store = await Store.open(url, DEFAULT_LIMITS)
    for start in range(0, len(acknowledged), 1_000):
        part = acknowledged[start : start + 1_000]
        assert [entry.digest for entry in await store.entries.by_digest(part)] == part
    assert len(acknowledged) > 100
    await store.close()
    return number


def kill_while_publishing(url: str, number: int) -> list[bytes]:
    """Digests acknowledged before the process was killed."""
    with subprocess.Popen(
        [sys.executable, str(PUBLISH_UNTIL_KILLED), url, str(number)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        time.sleep(random.uniform(0.02, 0.4))
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.readlines()
    # The last line may be torn by the kill.
    return [bytes.fromhex(line.decode()) for line in lines if len(line) == 65]


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """No file of this process can grow beyond `size` bytes: what a full disk looks like."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def publish_batch(ingest: Ingest, number: int) -> list[Code | None]:
    items = [Publication(content_frame(number * 100 + n), (b"%d" % n,)) for n in range(20)]
    outcomes = await ingest.door.publish_many(items)
    return [each.code if isinstance(each, Problem) else None for each in outcomes]


async def test_wherever_a_write_to_the_log_fails_nothing_is_lost_and_it_recovers(
    tmp_path: Path,
) -> None:
    path = tmp_path / "store.db"
    async with open_ingest(f"sqlite:///{path}") as ingest:
        await publish_batch(ingest, 0)
        log_bytes = size_of(Path(f"{path}-wal"))
        for failing_write in count():
            with files_end_at(log_bytes + failing_write * WAL_FRAME_BYTES // 2):
                codes = await publish_batch(ingest, 1)
            assert await ingest.store.entries.find("message-000000", "channel") is not None
            if codes == [None] * 20:
                break
            assert codes == [Code.DISK_FULL] * 20
            assert await ingest.store.entries.find("message-000100", "channel") is None
        assert failing_write > 10
        await check_everything_acknowledged(ingest, [0, 1])
        assert await publish_batch(ingest, 2) == [None] * 20
    assert_intact(path)


async def retire(ingest: Ingest, digests: list[bytes]) -> Code | None:
    found = Retiring(digests, "a test")
    try:
        await ingest.committer.call(lambda: ingest.store.writer.retire(found))
    except Problem as problem:
        return problem.code
    return None


async def test_wherever_a_write_fails_while_entries_are_retired_none_is_half_gone(
    tmp_path: Path,
) -> None:
    path = tmp_path / "store.db"
    async with open_ingest(f"sqlite:///{path}") as ingest:
        await publish_batch(ingest, 0)
        store = ingest.store
        ids = [f"message-{number:06}" for number in range(20)]
        digests = [each for name in ids for each in await store.entries.digests_of(name, "channel")]
        log_bytes = size_of(Path(f"{path}-wal"))
        for failing_write in count():
            with files_end_at(log_bytes + failing_write * WAL_FRAME_BYTES // 2):
                code = await retire(ingest, digests)
            if code is None:
                break
            assert code is Code.DISK_FULL
            page = await store.channels.feed(0, 100, 1 << 20)
            assert [len(page.entries), len(page.left_out)] == [20, 0]
            assert await store.frames.retired_count() == 0
        assert failing_write > 10
        page = await store.channels.feed(0, 100, 1 << 20)
        assert {each.state for each in page.left_out} == {ContentState.RETIRED}
        assert [len(page.entries), await store.frames.retired_count()] == [0, 20]
        assert await publish_batch(ingest, 2) == [None] * 20
    assert_intact(path)


async def test_a_checkpoint_that_fails_takes_no_acknowledgement_back(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    acknowledged = []
    async with open_ingest(f"sqlite:///{path}") as ingest:
        database = ingest.store._database
        assert isinstance(database, SqliteDatabase)
        assert database._writer is not None
        database._writer.execute("PRAGMA wal_autocheckpoint = 2")
        for batch in range(30):
            with files_end_at(path.stat().st_size + (batch % 10) * WAL_FRAME_BYTES // 2):
                codes = await publish_batch(ingest, batch)
            assert codes in ([None] * 20, [Code.DISK_FULL] * 20)
            if codes[0] is None:
                acknowledged.append(batch)
        assert len(acknowledged) > 0
        await check_everything_acknowledged(ingest, acknowledged)
        assert await publish_batch(ingest, 30) == [None] * 20
    assert_intact(path)


async def test_the_writer_outlives_a_database_that_is_emptied_and_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.ingest.door.TRY_AGAIN_S", 0.02)
    path = tmp_path / "store.db"
    async with open_ingest(f"sqlite:///{path}") as ingest:
        assert await publish_batch(ingest, 0) == [None] * 20
        for away, back in (
            ("ALTER TABLE watermark RENAME TO away", "ALTER TABLE away RENAME TO watermark"),
            (
                "CREATE TABLE away AS SELECT * FROM watermark; DELETE FROM watermark",
                "INSERT INTO watermark SELECT * FROM away; DROP TABLE away",
            ),
        ):
            change(path, away)
            ingest.committer.fault = Problem(Code.STORE_UNAVAILABLE, "the connection is gone")
            assert None not in await publish_batch(ingest, 1)
            await asyncio.sleep(0.2)
            assert ingest.committer.fault.code is Code.STORE_UNAVAILABLE
            change(path, back)
            again = asyncio.create_task(publish_batch(ingest, 1))
            done, _ = await asyncio.wait({again}, timeout=60)
            assert done, "no answer: the writer is gone"
            assert again.result() == [None] * 20
            assert ingest.committer.fault is None


async def test_whatever_fails_in_the_writer_its_callers_get_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_ingest(f"sqlite:///{tmp_path / 'store.db'}") as ingest:
        with monkeypatch.context() as broken:
            broken.setattr(ingest.committer, "_write_or_retry", lambda _group: 1 / 0)
            publishing = asyncio.create_task(publish_batch(ingest, 0))
            done, _ = await asyncio.wait({publishing}, timeout=60)
            assert done, "no answer: the writer is gone"
            assert isinstance(publishing.exception(), Problem) or None not in publishing.result()
        assert await publish_batch(ingest, 0) == [None] * 20


def change(path: Path, script: str) -> None:
    """Change the database from outside."""
    connection = sqlite3.connect(path)
    connection.executescript(script)
    connection.close()


async def check_everything_acknowledged(ingest: Ingest, batches: list[int]) -> None:
    feed = await ingest.store.channels.feed(0, 1000, 10**9)
    expected = {f"message-{batch * 100 + n:06}" for batch in batches for n in range(20)}
    assert {entry.message_id for entry in feed.entries} == expected


def assert_intact(path: Path) -> None:
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()


def size_of(path: Path) -> int:
    return path.stat().st_size
