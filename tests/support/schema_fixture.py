"""Small databases of released schemas: `python -m tests.support.schema_fixture` makes the current one.

A folder in tests/fixtures/schemas for each revision, with the same messages in a SQLite file and in a
PostgreSQL dump, and the store's answers at that time. Folders of released revisions are never made
again: every later version must open them and give the same answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
import subprocess
import tempfile
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import psycopg

from app.entries import MetId
from app.ingest.prepare import Publication, WakuEnvelope
from app.server.limits import DEFAULT_LIMITS
from app.store.schema import SCHEMA_REVISION
from app.store.store import Store
from bench.postgres_server import postgres_binaries, running_postgres
from sdstore.sds.codec import encode
from sdstore.sds.model import Dialect, HistoryEntry, Message
from tests.support.stores import BYTES_MAX, PostgresStores, prepared

FIXTURES = Path(__file__).parents[1] / "fixtures" / "schemas"


def publications() -> list[Publication]:
    """Every dialect, variants, repeats, hints of every source, gaps, frames that share a filter."""
    random = Random(1)
    bloom_filter = bytearray(random.randbytes(6_000))
    made = []
    for number in range(40):
        bloom_filter[number] ^= 1
        told = (HistoryEntry(f"m{number - 1}", b"hint %d" % number), HistoryEntry("gone"))
        message = Message(
            f"m{number % 35}",
            ["", "é", "/app/1/chat/proto"][number % 3],
            "sender",
            lamport_timestamp=number // 3 - 2,
            causal_history=told,
            bloom_filter=bytes(bloom_filter) if number % 4 == 0 else b"",
            content=b"content %d" % (number % 38),
        )
        dialect = Dialect.NIM if number % 5 == 0 else Dialect.V2
        envelope = WakuEnvelope("/waku/2", "/app", b"", number) if number % 7 == 0 else None
        hints = (b"published", b"own %d" % number) if number % 6 == 0 else ()
        made.append(Publication(encode(message, dialect), hints, envelope))
    return made


def fill(store: Store) -> None:
    """Write everything, in two groups."""
    everything = publications()
    for part in (everything[:20], everything[10:]):
        entries, _ = prepared(part)
        store.writer.write(entries, [MetId("é", "m-met")])


async def answers(store: Store) -> dict[str, Any]:
    """The store's answers about all messages, as JSON."""
    feed = await store.channels.feed(0, 1_000, BYTES_MAX)
    digests = [entry.digest for entry in feed.entries]
    claims = await store.claims.of(digests)
    told: dict[str, Any] = {
        "entries": [
            [
                entry.seq,
                entry.channel_id,
                entry.message_id,
                entry.lamport_timestamp,
                entry.digest.hex(),
                entry.frame_hash.hex(),
                entry.frame.hex() if len(entry.frame) < 1_000 else len(entry.frame),
                sorted(
                    [claim.hint.hex(), int(claim.source)] for claim in claims.get(entry.digest, ())
                ),
            ]
            for entry in feed.entries
        ],
        "watermark": list(await store.arrivals.watermark()),
    }
    for channel in await store.channels.after(None, 100):
        gaps = await store.gaps.page(channel.channel_id, None, 100)
        page = await store.channels.page(channel.channel_id, limit=1_000, bytes_max=BYTES_MAX)
        told[f"channel {channel.channel_id}"] = {
            "count": [
                channel.channel_no,
                channel.count,
                channel.lamport_first,
                channel.lamport_last,
            ],
            "log": [entry.seq for entry in page.entries],
            "gaps": [[gap.message_id, [hint.hex() for hint in gap.hints]] for gap in gaps.gaps],
        }
    for hint in (b"published", b"hint 5", b"own 6"):
        found = await store.claims.page(hint, None, 100)
        told[f"hint {hint.decode()}"] = [entry.seq for entry in found.entries]
    return told


async def _make(url: str) -> dict[str, Any]:
    store = await Store.open(url, DEFAULT_LIMITS, now_ms=lambda: 1_763_000_000_000)
    store.begin_writing()
    fill(store)
    told = await answers(store)
    await store.close()
    return told


def _make_sqlite(folder: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "store.db"
        told = asyncio.run(_make(f"sqlite:///{path}"))
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("VACUUM")
        shutil.copyfile(path, folder / "store.db")
    return told


def _make_postgres(folder: Path) -> dict[str, Any]:
    with running_postgres() as server, tempfile.TemporaryDirectory() as scratch:
        url = PostgresStores(server).new_url()
        told = asyncio.run(_make(url))
        command = [postgres_binaries(Path(scratch)) / "pg_dump", "--inserts", "--no-owner", url]
        dump = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (folder / "postgres.sql").write_text("".join(_portable(dump)), encoding="utf-8")
    return told


def _portable(dump: str) -> list[str]:
    """Without psql's commands, comments, and settings that older servers do not know."""
    left_out = ("\\", "--", "SET ", "SELECT pg_catalog.set_config")
    lines = dump.splitlines(keepends=True)
    return [line for line in lines if line.strip() and not line.startswith(left_out)]


def restore_postgres(dump: Path, url: str) -> None:
    """Load a dump into an empty database."""
    with psycopg.connect(url) as connection:
        connection.execute(dump.read_text(encoding="utf-8").encode())


def main() -> None:
    """Make the fixture of the current revision."""
    folder = FIXTURES / SCHEMA_REVISION
    folder.mkdir(parents=True, exist_ok=True)
    told = _make_sqlite(folder)
    assert _make_postgres(folder) == told
    document = json.dumps(told, indent=1, ensure_ascii=False)
    (folder / "answers.json").write_text(document + os.linesep, encoding="utf-8")


if __name__ == "__main__":
    main()
