"""The migration that encodes frames again: in steps, beside readers, and on from where it was killed."""

from __future__ import annotations

import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from app.cli.checking import Findings, check_store
from app.entries import NewEntry
from app.server.limits import DEFAULT_LIMITS
from app.store.formerframes import FormerFrame, FormerFrames
from app.store.store import Store
from sdstore.sds.codec import encode
from sdstore.sds.model import HistoryEntry, Message
from tests.support.former_store import make_former
from tests.support.stores import entry_of

pytestmark = pytest.mark.anyio

COUNT = 4_000
MIGRATE = "import sys; from app.store.schema import migrate; migrate(sys.argv[1])"


def conversation(count: int) -> list[NewEntry]:
    """Small filters, so that many frames take little time, and every tenth frame without one."""
    drawn = random.Random(1)
    bits = bytearray(drawn.randbytes(1_500))
    entries: list[NewEntry] = []
    for number in range(count):
        bits[drawn.randrange(len(bits))] ^= 1 << drawn.randrange(8)
        message = Message(
            f"m{number}",
            f"channel {number % 3}",
            "sender",
            number,
            (HistoryEntry(f"m{number - 3}"),) if number > 3 else (),
            b"" if number % 10 == 9 else bytes(bits),
            content=drawn.randbytes(40),
        )
        entries.append(entry_of(encode(message)))
    return entries


async def former_store(path: Path, entries: list[NewEntry]) -> None:
    store = await Store.open(f"sqlite:///{path}", DEFAULT_LIMITS)
    store.begin_writing()
    for at in range(0, len(entries), 500):
        store.writer.write(entries[at : at + 500])
    await store.close()
    make_former(path)


def read_as_before(path: Path) -> list[bytes]:
    """All frames, as code of revision 0008 reads them, in one snapshot."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("BEGIN")

        def copies(table: str, seqs: object) -> list[tuple[int, int, int | None, bytes]]:
            [seq] = seqs  # type: ignore[misc]
            query = f"SELECT seq, codec, reference_no, data FROM {table} WHERE seq = ?"
            return connection.execute(query, (seq,)).fetchall()

        rows = connection.execute(
            "SELECT m.seq, m.frame_bytes, m.frame_hash, f.codec, f.reference_no, f.data"
            " FROM messages m LEFT JOIN frames f ON f.seq = m.seq ORDER BY m.seq"
        ).fetchall()
        found = FormerFrames(copies).read([FormerFrame(*row) for row in rows])
        return [found[seq] for seq in sorted(found)]


def place_of(path: Path) -> int:
    with closing(sqlite3.connect(path)) as connection:
        query = "SELECT value FROM store_meta WHERE name = 'reencoded_seq'"
        row = connection.execute(query).fetchone()
        return 0 if row is None else int.from_bytes(row[0], "big")


async def check_migrated(path: Path, entries: list[NewEntry]) -> None:
    store = await Store.open(f"sqlite:///{path}", DEFAULT_LIMITS)
    try:
        page = await store.channels.feed(0, 10_000, 1 << 30)
        assert [entry.frame for entry in page.entries] == [entry.frame for entry in entries]
        findings = Findings()
        await check_store(store, findings, deep=True, tick=lambda _: None)
        assert findings.damages == []
        store.begin_writing()
        assert not any(result.is_new for result in store.writer.write(entries[-500:]))
    finally:
        await store.close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA auto_vacuum").fetchone() == (2,)
        assert connection.execute("PRAGMA freelist_count").fetchone()[0] < 10
        assert connection.execute("SELECT count(*) FROM frames WHERE codec = 2").fetchone() == (0,)
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema")}
        assert not tables & {"frame_references", "frames_reencoded", "refused_digests"}
        assert connection.execute("SELECT count(*) FROM store_meta").fetchone() == (2,)
        size, last = connection.execute(
            "SELECT sum(length(data)), max(last_seq) FROM filter_references"
        ).fetchone()
        assert size < 0.1 * sum(len(entry.frame) for entry in entries)
        assert last == max(
            seq for (seq,) in connection.execute("SELECT seq FROM frames WHERE codec = 3")
        )


def _killed_after(path: Path, least: int, frames: list[bytes]) -> int:
    """Kill a migration that has passed a sequence number; returns where it was."""
    migrating = subprocess.Popen([sys.executable, "-c", MIGRATE, f"sqlite:///{path}"])
    end = time.monotonic() + 60
    while place_of(path) < least and time.monotonic() < end:
        time.sleep(0.002)
    migrating.send_signal(signal.SIGSTOP)
    assert read_as_before(path) == frames
    migrating.send_signal(signal.SIGKILL)
    migrating.wait()
    assert read_as_before(path) == frames
    return place_of(path)


async def test_a_migration_that_is_killed_goes_on_beside_a_reader(tmp_path: Path) -> None:
    path, entries = tmp_path / "store.db", conversation(COUNT)
    await former_store(path, entries)
    frames = [entry.frame for entry in entries]
    assert read_as_before(path) == frames
    places = [_killed_after(path, least, frames) for least in (500, 1_000)]
    assert 500 <= places[0] < places[1] < COUNT
    await check_migrated(path, entries)


async def test_a_frame_that_was_lost_before_the_migration_is_lost_after_it(tmp_path: Path) -> None:
    path, entries = tmp_path / "store.db", conversation(60)
    await former_store(path, entries)
    with closing(sqlite3.connect(path)) as connection, connection:
        # One of the two copies of a reference, and the only copy of another frame.
        connection.execute("UPDATE frames SET data = x'00' WHERE seq IN (1, 8)")
    store = await Store.open(f"sqlite:///{path}", DEFAULT_LIMITS)
    store.begin_writing()
    page = await store.channels.feed(0, 10_000, 1 << 30)
    assert [each.seq for each in page.left_out] == [8]
    assert store.writer.write([entries[7]])[0].is_mended
    await store.close()
    await check_migrated(path, entries)
