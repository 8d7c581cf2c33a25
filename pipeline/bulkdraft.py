"""The draft: the file that a bulk load fills and that then replaces the empty SQLite store.

Rows go into tables without indexes. Items to write later wait in a second file, the spool. Each commit
covers both files and the load's progress. A killed load with a name resumes from its last commit; a load
without a name starts again.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.errors import Code, Problem
from app.store import schema
from app.store.arrivals import ArrivalChain
from app.store.database import Row
from app.store.entryrows import PREFIX_BYTES
from app.store.keys import Keys
from app.store.sqlite import SQLITE, insert_many, replace_file
from pipeline.bulkrows import DIGEST_COLUMN, MadeRows
from sdstore.sds.model import LAMPORT_MAX, LAMPORT_MIN
from sdstore.wire.store_pb2 import PublishItem

SETTLED_MAX = 262_144
"""References and names in the cache: most histories name recent messages."""

COMMIT_ITEMS = 65_536
"""Items between commits: a killed load repeats two seconds of work."""

CACHE_KIB = 16 * 1024
"""Rows are appended and keys are sorted in runs, so more memory does not help."""

CPUS = os.cpu_count() or 1

Item = tuple[int, bytes, tuple[bytes, ...]]
"""(place in the source, frame, retrieval hints)."""


@dataclass(slots=True)
class LoadProgress:
    """The progress of a load: the place of the last item and the number of items; `refused` counts by code.

    `arrival_sum` is the sum of the arrival chain. It includes later copies, which `finish` drops, so no
    other history has the same sums.
    """

    place: int = 0
    items_count: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    is_indexed: bool = False
    arrival_sum: int = 0


class Draft:
    """The draft of the empty store at `store`, open for loading; belongs to one thread."""

    def __init__(self, store: Path, name: str | None, now_ms: int) -> None:
        self.path = draft_of(store)
        self.spool_path = _spool_of(self.path)
        if name is None or not self._goes_on(store, name):
            remove_draft(store)
            self._begin(store, name)
        self._now_ms = now_ms
        self._store = store
        self._connection = sqlite3.connect(self.path, isolation_level=None)
        self._connection.execute("ATTACH ? AS spool", [str(self.spool_path)])
        for pragma in (
            # SQLite commits two files atomically only in this journal mode and with synchronous writes.
            "main.journal_mode = DELETE",
            "spool.journal_mode = DELETE",
            "main.synchronous = NORMAL",
            "spool.synchronous = NORMAL",
            f"cache_size = -{CACHE_KIB}",
            f"threads = {CPUS}",
        ):
            self._connection.execute(f"PRAGMA {pragma}")
        self._insert_messages = SQLITE.insert(schema.messages)
        self._insert_frames = SQLITE.insert(schema.frames)
        self._numbers: dict[str, int] = dict(
            self._connection.execute("SELECT channel_id, channel_no FROM spool.names")
        )
        self._settled: dict[tuple[int, str, bytes], None] = {}
        self._chain = ArrivalChain(self.keys.secret)
        self.progress = self._read_progress()
        self._committed_count = self.progress.items_count
        self._connection.execute("BEGIN")

    @property
    def keys(self) -> Keys:
        """The secrets of the store."""
        [[secret]] = self._connection.execute(
            "SELECT value FROM store_meta WHERE name = 'key_secret'"
        )
        return Keys(secret)

    def close(self) -> None:
        """Close the files, without a commit."""
        self._connection.close()

    # ---- filling

    def fill(self, items: Sequence[Item], made: MadeRows) -> None:
        """Insert the rows made of the next `items`; commits periodically."""
        entries = [(row[0], row[DIGEST_COLUMN]) for row in made.rows]
        entries += [(position, digest) for position, digest in made.unusual if digest is not None]
        entries.sort()
        first_seq = self.progress.items_count + 1
        seqs = [first_seq + position for position, _ in entries]
        before = self.progress.arrival_sum
        sums = self._chain.sums(before, seqs, [digest for _, digest in entries])
        sum_at = dict(zip(seqs, sums, strict=True))
        self._insert(made.rows, sum_at)
        self._spool(items, made.unusual, sum_at)
        self.progress.arrival_sum = sums[-1] if sums else before
        self._advance(items, made.refused)

    def _insert(self, rows: Sequence[Row], sum_at: Mapping[int, int]) -> None:
        """Rows of the next items, as `MadeRows` has them."""
        first_seq = self.progress.items_count + 1
        messages: list[Row] = []
        frames: list[Row] = []
        told: list[Row] = []
        for position, channel_id, id_key, lamport, size, dialect, unverified, *rest in rows:
            message_id, digest, frame_hash, codec, data, history = rest
            seq = first_seq + position
            number = self._number(channel_id)
            self._settled[number, message_id, b""] = None
            numbers = (seq, id_key, lamport, self._now_ms, number, size, dialect, unverified)
            prefix = digest[:PREFIX_BYTES]
            messages.append((*numbers, message_id, prefix, digest, frame_hash, sum_at[seq]))
            frames.append((seq, codec, None, data))
            told += [(number, *each) for each in history if (number, *each) not in self._settled]
            if history:
                self._settled.update(((number, *each), None) for each in history)
        insert_many(self._connection, self._insert_messages, messages)
        insert_many(self._connection, self._insert_frames, frames)
        self._connection.executemany("INSERT INTO spool.told VALUES (?, ?, ?)", told)
        if len(self._settled) > SETTLED_MAX:
            self._settled.clear()

    def _spool(
        self,
        items: Sequence[Item],
        unusual: Iterable[tuple[int, bytes | None]],
        sum_at: Mapping[int, int],
    ) -> None:
        """(position, digest) of those of the next items that are written the usual way."""
        rows = []
        for position, digest in unusual:
            _, frame, hints = items[position]
            seq = self.progress.items_count + 1 + position
            raw = PublishItem(frame=frame, retrieval_hints=hints).SerializeToString()
            rows.append((seq, digest, sum_at.get(seq), raw))
        self._connection.executemany("INSERT INTO spool.items VALUES (?, ?, ?, ?)", rows)

    def _advance(self, items: Sequence[Item], refused: Iterable[str]) -> None:
        """Record that the next `items`, except the refused ones, are in; commits periodically."""
        self.progress.place = items[-1][0]
        self.progress.items_count += len(items)
        self.progress.refused.update(refused)
        if self.progress.items_count - self._committed_count >= COMMIT_ITEMS:
            self._commit()
            self._committed_count = self.progress.items_count
            self._connection.execute("BEGIN")

    def finish(self) -> None:
        """Build the indexes, drop later copies and count channels in one commit. Idempotent."""
        connection = self._connection
        if not self.progress.is_indexed:
            for statement in _index_statements(self._store):
                connection.execute(statement)
            connection.execute(_FIND_COPIES)
            connection.execute(_FIND_COPIES_OF_SPOOLED)
            connection.execute("DELETE FROM frames WHERE seq IN (SELECT seq FROM copies)")
            connection.execute("DELETE FROM messages WHERE seq IN (SELECT seq FROM copies)")
            connection.execute(_COUNT_CHANNELS, (LAMPORT_MAX, LAMPORT_MIN))
            self.progress.is_indexed = True
        self._commit()

    def _number(self, channel_id: str) -> int:
        number = self._numbers.get(channel_id)
        if number is None:
            number = self._numbers[channel_id] = len(self._numbers) + 1
            self._connection.execute("INSERT INTO spool.names VALUES (?, ?)", (number, channel_id))
        return number

    def _commit(self) -> None:
        made = self.progress
        self._connection.execute(
            "UPDATE spool.progress SET"
            " place = ?, items_count = ?, refused = ?, is_indexed = ?, arrival_sum = ?",
            (
                made.place,
                made.items_count,
                json.dumps(made.refused),
                made.is_indexed,
                made.arrival_sum,
            ),
        )
        self._connection.execute("COMMIT")

    def _read_progress(self) -> LoadProgress:
        [row] = self._connection.execute(
            "SELECT place, items_count, refused, is_indexed, arrival_sum FROM spool.progress"
        )
        place, items_count, refused, is_indexed, arrival_sum = row
        counts = Counter(json.loads(refused))
        return LoadProgress(place, items_count, counts, bool(is_indexed), arrival_sum)

    # ---- starting

    def _goes_on(self, store: Path, name: str) -> bool:
        """Whether a load of this name was started for this store."""
        if not (self.path.is_file() and self.spool_path.is_file()):
            return False
        try:
            with closing(sqlite3.connect(self.spool_path)) as spool:
                found = spool.execute("SELECT name FROM progress").fetchall()
            return found == [(name,)] and _identity(self.path) == _identity(store)
        except sqlite3.Error:  # killed while it began
            return False

    def _begin(self, store: Path, name: str | None) -> None:
        with closing(sqlite3.connect(store)) as source, closing(sqlite3.connect(self.path)) as own:
            if any(source.execute(_IS_EMPTY).fetchone()):
                raise Problem(Code.STORE_UNAVAILABLE, "bulk loading needs an empty store")
            source.backup(own)
            own.execute("PRAGMA journal_mode = DELETE")
            for each in _indexes(own):
                own.execute(f"DROP INDEX {each}")
        with closing(sqlite3.connect(self.spool_path)) as spool, spool:
            for statement in _SPOOL:
                spool.execute(statement)
            spool.execute("INSERT INTO progress VALUES (?, 0, 0, '{}', FALSE, 0)", [name])


def draft_of(store: Path) -> Path:
    """The draft's file for the store at `store`."""
    return store.with_name(f"{store.name}.loading")


def remove_draft(store: Path) -> None:
    """Remove the files of a load."""
    draft = draft_of(store)
    for each in (draft, _spool_of(draft)):
        for suffix in ("", "-journal", "-wal", "-shm", "-writer"):
            each.with_name(f"{each.name}{suffix}").unlink(missing_ok=True)


def replace_store(store: Path) -> None:
    """Replace the store with its draft. Raises `Problem` if the store has a reader."""
    replace_file(store, draft_of(store))
    remove_draft(store)


def _spool_of(draft: Path) -> Path:
    return draft.with_name(f"{draft.name}-spool")


def _indexes(connection: sqlite3.Connection) -> dict[str, str]:
    """The statements that make the indexes of the messages, by name."""
    return dict(
        connection.execute(
            "SELECT name, sql FROM sqlite_master"
            " WHERE type = 'index' AND tbl_name = 'messages' AND sql IS NOT NULL"
        )
    )


def _index_statements(store: Path) -> list[str]:
    with closing(sqlite3.connect(store)) as connection:
        return list(_indexes(connection).values())


def _identity(store: Path) -> list[Any]:
    """Rows that differ between stores, and between schemas of one store."""
    with closing(sqlite3.connect(store)) as connection:
        meta = connection.execute("SELECT name, value FROM store_meta ORDER BY name").fetchall()
        return [*meta, *connection.execute("SELECT version_num FROM alembic_version").fetchall()]


_SPOOL = (
    "CREATE TABLE told (channel_no INTEGER, message_id TEXT, hint BLOB)",
    "CREATE TABLE items (seq INTEGER PRIMARY KEY, digest BLOB, arrival_sum INTEGER, item BLOB)",
    "CREATE TABLE names (channel_no INTEGER PRIMARY KEY, channel_id TEXT)",
    "CREATE TABLE progress (name TEXT, place INTEGER, items_count INTEGER, refused TEXT, is_indexed BOOLEAN, arrival_sum INTEGER)",
)

_IS_EMPTY = """
SELECT EXISTS (SELECT 1 FROM messages), EXISTS (SELECT 1 FROM met_ids),
EXISTS (SELECT 1 FROM refused_digests), EXISTS (SELECT 1 FROM watermark WHERE seq + claim_no > 0)
"""

_FIND_COPIES = """
CREATE TEMP TABLE copies AS
SELECT later.seq FROM messages AS later
JOIN (SELECT digest_prefix FROM messages GROUP BY digest_prefix HAVING count(*) > 1)
USING (digest_prefix)
WHERE EXISTS (
    SELECT 1 FROM messages AS first
    WHERE first.digest_prefix = later.digest_prefix AND first.digest = later.digest
    AND first.seq < later.seq
)
"""

_FIND_COPIES_OF_SPOOLED = """
INSERT INTO copies
SELECT later.seq FROM spool.items AS first CROSS JOIN messages AS later
WHERE later.digest_prefix = substr(first.digest, 1, 8) AND later.digest = first.digest
AND later.seq > first.seq
"""

# A channel may have lost its only row to an earlier copy in the spool, which sets its bounds then.
_COUNT_CHANNELS = """
INSERT INTO channels
SELECT channel_no, channel_id, count(seq), coalesce(min(lamport), ?), coalesce(max(lamport), ?)
FROM spool.names LEFT JOIN messages USING (channel_no) GROUP BY channel_no
"""
