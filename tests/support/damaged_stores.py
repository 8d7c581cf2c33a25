"""Stores with rows in every table, damage to their pages, and whether `check --deep` finds it.

`python -m tests.support.damaged_stores FIRST COUNT` hunts for damage that the check misses: one store and
a thousand damages for each seed from FIRST on, COUNT damages in all. It prints each miss with the path
of the damaged file.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import shutil
import sqlite3
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.entries import MetId
from app.ingest.prepare import Publication
from app.mvds import message_of
from app.server.limits import DEFAULT_LIMITS
from app.store.entryrows import FrameUnpacker, PackedFrame, Unpacked
from app.store.peerrows import PeerRow, Source, SyncRow
from app.store.schema import migrate
from app.store.store import Store
from sdstore.mvds import Record, RecordType
from sdstore.sds.codec import encode
from sdstore.sds.model import HistoryEntry, Message
from tests.support.cli import Result, cli
from tests.support.stores import entry_of

CHANNELS = ("", "/app/1/chat/proto", "é", "filters")
MISSING_PART, HINTED_PART = 0.03, 0.1
FILTER_BYTES = 5_000

UNPROVED = {
    "messages": {"received_at_ms"},
    "lost_content": {"found_at_ms"},
    "store_meta": {"value"},
    # Higher numbers can be right, because rows can be deleted.
    "watermark": {"seq", "claim_no"},
    "mvds_peers": {"epoch", "exchange_no"},
}
"""Columns that nothing else in the database repeats or proves: docs/store.md says so."""

UNPROVED_TABLES = {"mvds_positions", "mvds_records", "peers", "syncs"}
"""Tables whose rows nothing counts; that they name rows which exist has a test of its own."""

UNPROVED_OF_LOST = {"frame_bytes", "dialect", "frame_hash"}
"""Columns of `messages` that only a frame proves."""


# ---- stores


@dataclass(frozen=True, slots=True)
class Whole:
    """A store to damage copies of. `older` is the file after half of the writes.

    `findings` is what the check finds in it: nothing, or lost content.
    """

    path: Path
    older: Path
    findings: list[str]


def write_store(folder: Path, seed: int, messages_count: int = 1_000, *, lost: int = 0) -> Whole:
    """A store with rows in every table; equal seeds make equal rows, with equal secrets.

    The content of `lost` messages is lost.
    """
    whole = Whole(folder / f"whole-{seed}.db", folder / f"older-{seed}.db", [])
    world = random.Random(seed)
    migrate(f"sqlite:///{whole.path}")
    with closing(sqlite3.connect(whole.path)) as connection, connection:
        for name, value in (
            ("database_id", world.randbytes(8).hex().encode()),
            ("key_secret", world.randbytes(16)),
        ):
            connection.execute("REPLACE INTO store_meta VALUES (?, ?)", [name, value])
    publications = conversation(world, messages_count)
    asyncio.run(_write(whole.path, world, publications[: len(publications) // 2], lost=0))
    _as_one_file(whole.path)
    shutil.copyfile(whole.path, whole.older)
    asyncio.run(_write(whole.path, world, publications[len(publications) // 2 :], lost=lost))
    with closing(sqlite3.connect(whole.path)) as connection:
        # Leaves free pages.
        connection.execute("CREATE TABLE gone AS SELECT * FROM frames LIMIT 300")
        connection.execute("DROP TABLE gone")
    _as_one_file(whole.path)
    whole.findings.extend(deep_check(whole.path).json["damages"])
    assert len(whole.findings) == lost, whole.findings
    _as_one_file(whole.path)
    return whole


def conversation(world: random.Random, count: int) -> list[Publication]:
    """Messages whose histories name others, some of them never published, and give hints for some."""
    heads: dict[str, list[HistoryEntry]] = {channel: [] for channel in CHANNELS}
    bloom_filter = bytearray(world.randbytes(FILTER_BYTES))
    publications: list[Publication] = []
    for number in range(count):
        channel = world.choice(CHANNELS)
        content = world.randbytes(world.randrange(1, 200))
        bloom_filter[world.randrange(FILTER_BYTES)] ^= 1
        message = Message(
            message_id=hashlib.sha256(content).hexdigest(),
            channel_id=channel,
            sender_id=world.choice(("alice", "bob")),
            lamport_timestamp=3 * number + world.randrange(9),
            causal_history=tuple(heads[channel][-3:]),
            bloom_filter=bytes(bloom_filter) if channel == "filters" else b"",
            content=content,
        )
        hint = world.randbytes(32) if world.random() < HINTED_PART else b""
        heads[channel] = [*heads[channel][-4:], HistoryEntry(message.message_id, hint)]
        if world.random() >= MISSING_PART:
            hints = (world.randbytes(32),) if world.random() < HINTED_PART else ()
            publications.append(Publication(encode(message), hints))
    return publications


async def _write(
    path: Path, world: random.Random, publications: list[Publication], *, lost: int
) -> None:
    store = await Store.open(f"sqlite:///{path}", DEFAULT_LIMITS, now_ms=lambda: 1_767_225_600_000)
    store.begin_writing()
    try:
        met = [MetId(world.choice(CHANNELS), f"sync {n}") for n in range(20)]
        entries = [entry_of(each.frame, *each.hints) for each in publications]
        for start in range(0, len(entries), 100):
            written = store.writer.write(entries[start : start + 100], met)
        # A reference is mended with another frame: a former reference stays.
        rows = [
            (e, r)
            for e, r in zip(entries[start:], written, strict=True)
            if len(e.frame) > FILTER_BYTES
        ]
        mended, row = rows[-1]
        _delete_frame(path, row.seq)
        other = replace(mended.message, bloom_filter=world.randbytes(FILTER_BYTES))
        store.writer.write([entry_of(encode(other, mended.dialect))])
        await _exchange(store, world)
        store.peers.add([PeerRow(peer_id="0" * 16, url="http://127.0.0.1:1", origin="added")])
        with store.transaction() as transaction:
            sync = SyncRow(world.randbytes(8).hex(), "0" * 16, "process", 1, {})
            store.syncs.write(transaction, [sync])
        gone = [r.seq for _, r in rows[:-1]][:lost]
        assert len(gone) == lost
        for seq in gone:
            _delete_frame(path, seq)
        store.writer.recheck(gone)
    finally:
        await store.close()


def _delete_frame(path: Path, seq: int) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM frames WHERE seq = ?", [seq])


async def _exchange(store: Store, world: random.Random) -> None:
    """Positions and records of two MVDS peers."""
    for name in ("ada", "bob"):
        before = await store.mvds.read("caller", name)
        channels = await store.channels.after(None, len(CHANNELS))
        positions = {each.channel_no: world.randrange(each.count) for each in channels}
        changed: dict[bytes, tuple[Record, Source] | None] = {}
        for channel in channels:
            page = await store.channels.page(channel.channel_id, limit=10, bytes_max=10**6)
            for entry in page.entries:
                message_id = message_of(entry).message_id
                kind = world.choice((RecordType.OFFER, RecordType.MESSAGE))
                record = Record(kind, message_id, world.randrange(3), world.randrange(9))
                changed[message_id] = record, Source(channel.channel_no, entry.seq)
        requested = world.randbytes(32)
        changed[requested] = Record(RecordType.REQUEST, requested, 1, 4), Source()
        store.mvds.write(before, positions, changed)


def _as_one_file(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")


# ---- damage


def page_bytes(path: Path) -> int:
    """The size of a database's pages."""
    return int.from_bytes(path.read_bytes()[16:18], "big")


def overwrite(path: Path, page: int, change: Callable[[bytearray], None]) -> None:
    """Change the bytes of a page (counted from 1) in the file."""
    size = page_bytes(path)
    data = bytearray(path.read_bytes())
    content = data[(page - 1) * size : page * size]
    change(content)
    data[(page - 1) * size : page * size] = content
    path.write_bytes(data)


def damage(path: Path, older: Path, world: random.Random) -> str:
    """Damage one page, as disks do; returns the damage in words.

    A bit flips, a stretch or the page is noise or zeros, another page is in its place, or the last writes
    of the page are lost.
    """
    size = page_bytes(path)
    data, before = path.read_bytes(), older.read_bytes()
    pages = len(data) // size
    with closing(sqlite3.connect(path)) as connection:
        roots = [root for (root,) in connection.execute("SELECT rootpage FROM sqlite_schema")]
    # Small tables hold few of the pages, and are found with the same effort.
    page = world.choice(roots) if world.random() < 0.5 else world.randrange(1, pages + 1)
    kind = world.choice(["bit", "bit", "stretch", "noise", "zeros", "elsewhere", "lost write"])

    def change(content: bytearray) -> None:
        if kind == "bit":
            content[world.randrange(size)] ^= 1 << world.randrange(8)
        elif kind == "stretch":
            start = world.randrange(size)
            content[start : start + 64] = world.randbytes(len(content[start : start + 64]))
        elif kind == "noise":
            content[:] = world.randbytes(size)
        elif kind == "elsewhere":
            other = world.randrange(pages) * size
            content[:] = data[other : other + size]
        elif kind == "lost write" and page * size <= len(before):
            content[:] = before[(page - 1) * size : page * size]
        else:
            content[:] = bytes(size)

    overwrite(path, page, change)
    return f"{kind} in page {page}"


def deep_check(path: Path) -> Result:
    """`sdstore check --deep --json` of a file."""
    return cli("check", "--deep", "--json", "--database", f"sqlite:///{path}")


def miss_of(whole: Whole, folder: Path, seed: int) -> str | None:
    """Damage a copy in `folder`, check it, and describe what the check misses: None if nothing.

    A damage that changes no row needs no finding. The damaged file stays in the folder until the next
    call.
    """
    path = folder / "damaged.db"
    for each in folder.glob("damaged.db*"):
        each.unlink()
    shutil.copyfile(whole.path, path)
    what = f"store {whole.path.name}, seed {seed}: {damage(path, whole.older, random.Random(seed))}"
    kept = path.with_name(f"damaged.db-{seed}")
    shutil.copyfile(path, kept)
    what += f" (see {kept})"
    try:
        result = deep_check(path)
    except Exception:  # noqa: BLE001 - to say which damage it was
        return f"{what}: {traceback.format_exc()}"
    if result.code not in (0, 1) or "Traceback" in result.err:
        return f"{what}: exit code {result.code}: {result.err}"
    report = result.json
    if report["sound"] != (result.code == 0) or report["sound"] != (report["damages"] == []):
        return f"{what}: exit code {result.code}, but {report}"
    if report["damages"] != whole.findings:
        kept.unlink()
        return None
    if differences := list(_differences(whole.path, path)):
        return f"{what}: the check does not find that\n" + "\n".join(differences)
    kept.unlink()
    return None


def _differences(whole: Path, damaged: Path) -> Iterator[str]:
    """Rows that differ, the first few of each table."""
    expected, found = content_of(whole), content_of(damaged)
    for table in sorted(expected.keys() | found.keys()):
        rows, changed = expected.get(table, []), found.get(table, [])
        if rows != changed:
            yield f"  table {table}: {len(rows)} rows, now {len(changed)}"
            for sign, these, those in (("-", rows, changed), ("+", changed, rows)):
                yield from [f"    {sign} {each!r:.500}" for each in these if each not in those][:3]


def content_of(path: Path) -> dict[str, list[Any]]:
    """All rows of all tables without the unproved columns; frames as messages give them.

    zstd ignores some bits of the stored form.
    """
    with closing(sqlite3.connect(path)) as connection:
        schema = connection.execute(
            "SELECT name FROM sqlite_schema WHERE type = 'table'"
        ).fetchall()
        lost = set(connection.execute("SELECT seq FROM lost_content"))
        found: dict[str, list[Any]] = {}
        for (table,) in schema:
            if table in UNPROVED_TABLES | {"frames", "filter_references"}:
                continue
            unproved = UNPROVED.get(table, set())
            if lost and table == "messages":
                unproved = unproved | UNPROVED_OF_LOST
            names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            columns = ", ".join(each for each in names if each not in unproved)
            found[table] = connection.execute(
                f"SELECT {columns} FROM {table} ORDER BY 1"
            ).fetchall()
        found["frames"] = sorted(_frames_of(connection).items())
    return found


def _frames_of(connection: sqlite3.Connection) -> dict[int, bytes]:
    """The frames that can be read, by sequence number."""
    rows = connection.execute(
        "SELECT seq, frame_bytes, frame_hash, digest, codec, reference_no, data"
        " FROM messages LEFT JOIN frames USING (seq)"
    )
    unpacking = FrameUnpacker().unpack([PackedFrame(*row) for row in rows])
    of_number = "SELECT reference_no, data FROM filter_references WHERE reference_no = ?"
    try:
        numbers = next(unpacking)
        while True:
            found = [row for each in numbers for row in connection.execute(of_number, [each])]
            numbers = unpacking.send(found)
    except StopIteration as end:
        unpacked: Unpacked = end.value
        return unpacked.without_filter | unpacked.whole


def hunt(first: int, count: int) -> int:
    """Damage `count` copies; returns the number of misses."""
    folder = Path(tempfile.mkdtemp(prefix="damaged-stores-"))
    misses = 0
    for number in range(count):
        if number % 1_000 == 0:
            seed = first + number // 1_000
            whole = write_store(folder, seed, lost=3 * (seed % 2))
        if (miss := miss_of(whole, folder, first * 1_000_000 + number)) is not None:
            misses += 1
            print(miss, flush=True)
    print(f"{count} damages from seed {first} on: {misses} missed; files in {folder}")
    if not misses:
        shutil.rmtree(folder)
    return misses


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(hunt(int(sys.argv[1]), int(sys.argv[2])) > 0)
