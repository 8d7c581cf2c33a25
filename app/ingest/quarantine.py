"""The quarantine: messages that the policy keeps apart until an operator decides.

It is a SQLite file of its own in the data directory, which all workers of a node share. So messages that
may be spam never enter the database, its backups or its snapshots. Nodes that share a PostgreSQL database
each have their own.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO

from app.entries import Claim, ClaimSource, NewEntry
from app.errors import Code, Problem
from app.ingest.prepare import Publication, prepare
from app.server.limits import Limits

FILE = "quarantine.db"
VERSION = 3
BUSY_S = 2.0
"""Wait for another process that writes, which takes milliseconds."""
DECISION_S = 5.0
"""Wait for another decision of an operator, which takes as long as the store to write one message."""
DECISION_LOOK_S = 0.02

_SCHEMA = """
CREATE TABLE IF NOT EXISTS held (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    digest BLOB NOT NULL UNIQUE,
    frame BLOB NOT NULL,
    claims TEXT NOT NULL,
    message_id TEXT NOT NULL,
    channel_id TEXT NOT NULL,
    way TEXT NOT NULL,
    reason TEXT NOT NULL,
    held_at_ms INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS dropped (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    digest BLOB NOT NULL UNIQUE
);
DROP TABLE IF EXISTS told;
CREATE TABLE told (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    digest BLOB NOT NULL UNIQUE,
    message_id TEXT NOT NULL,
    channel_id TEXT NOT NULL,
    who TEXT NOT NULL
);
CREATE INDEX told_by_id ON told (message_id);
CREATE INDEX told_by_whom ON told (who, number);
"""
_STATES = """
SELECT message_id, channel_id, EXISTS (SELECT 1 FROM held WHERE held.digest = told.digest) FROM told
WHERE message_id IN (SELECT value FROM json_each(?))
"""
"""`told` contains held and refused messages whose IDs verify; readers learn about these."""
_COLUMNS = "number, digest, length(frame), message_id, channel_id, way, reason, held_at_ms"


class Fate(StrEnum):
    """What the quarantine knows of a message."""

    HELD = "held"
    DROPPED = "dropped"


class Absence(StrEnum):
    """Why a message is not in the store, as its readers are told."""

    WITHHELD = "withheld"
    """An operator decides on it."""
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Held:
    """A message in the quarantine; `number` rises with each."""

    number: int
    digest: bytes
    frame_bytes: int
    message_id: str
    channel_id: str
    way: str
    reason: str
    held_at_ms: int


class Quarantine:
    """The file. Each call opens it, so any thread and any process can. Calls block for milliseconds.

    Raises Problem: `store_unavailable` if the file cannot be used.
    """

    def __init__(self, path: Path, limits: Limits) -> None:
        self._path = path
        self._limits = limits

    @asynccontextmanager
    async def deciding(self) -> AsyncIterator[None]:
        """One decision at a time, over all workers: each message is either released or dropped, once.

        Raises Problem: `overloaded` while another decision takes long.
        """
        try:
            lock = self._path.with_suffix(".lock").open("ab")
        except OSError as error:
            detail = f"the quarantine {self._path} cannot be locked: {error.strerror}"
            raise Problem(Code.STORE_UNAVAILABLE, detail) from None
        with lock:
            until_s = time.monotonic() + DECISION_S
            while not _has_locked(lock):
                if time.monotonic() > until_s:
                    raise Problem(
                        Code.OVERLOADED,
                        "another decision about the quarantine is in progress; try again in 5 s",
                        headers={"Retry-After": "5"},
                    )
                await asyncio.sleep(DECISION_LOOK_S)
            yield

    def fates(self, digests: Sequence[bytes]) -> Mapping[bytes, Fate]:
        """Those of the messages with these digests that were held or dropped."""
        if not self._path.exists():
            return {}
        known: dict[bytes, Fate] = {}
        with self._opened() as database:
            for table, fate in (("held", Fate.HELD), ("dropped", Fate.DROPPED)):
                query = f"SELECT 1 FROM {table} WHERE digest = ?"  # noqa: S608 - of two constants
                for digest in digests:
                    if database.execute(query, (digest,)).fetchone():
                        known[digest] = fate
        return known

    def hold(self, entries: Sequence[tuple[NewEntry, str, str]], who: str = "") -> list[bool]:
        """Keep messages of a caller with their ways and reasons; whether each had room. Nothing is displaced."""
        limits = self._limits
        kept = []
        with self._opened() as database:
            count, size = database.execute(
                "SELECT count(*), coalesce(sum(length(frame)), 0) FROM held"
            ).fetchone()
            for entry, way, reason in entries:
                count, size = count + 1, size + len(entry.frame)
                if count > limits.quarantine_items_max or size > limits.quarantine_bytes_max:
                    count, size = count - 1, size - len(entry.frame)
                    kept.append(False)
                    continue
                claims = [[each.hint.hex(), int(each.source)] for each in entry.claims]
                message = entry.message
                row = (
                    *(entry.digest, entry.frame, json.dumps(claims), message.message_id),
                    *(message.channel_id, way, reason, time.time_ns() // 1_000_000),
                )
                database.execute(
                    "INSERT OR IGNORE INTO held (digest, frame, claims, message_id, channel_id, way, "
                    "reason, held_at_ms) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    row,
                )
                kept.append(True)
            self._tell(database, [entry for entry, _, _ in entries], who)
        return kept

    def refuse(self, entries: Sequence[NewEntry], who: str = "") -> None:
        """Remember that the policy refused these messages of a caller, to tell their readers."""
        with self._opened() as database:
            self._tell(database, entries, who)

    def absences(self, message_ids: Sequence[str]) -> list[tuple[str, str, Absence]]:
        """(message ID, channel ID, why) of those of these messages that were held or refused."""
        if not self._path.exists():
            return []
        with self._opened() as database:
            rows = database.execute(_STATES, (json.dumps(message_ids),)).fetchall()
        return [
            (message_id, channel_id, Absence.WITHHELD if is_held else Absence.REFUSED)
            for message_id, channel_id, is_held in rows
        ]

    def _tell(self, database: sqlite3.Connection, entries: Sequence[NewEntry], who: str) -> None:
        """Only messages whose IDs verify: otherwise anybody could make readers skip others' messages.

        The oldest refused ones of the caller are forgotten, and those of all; of a held one readers are told
        until an operator decides.
        """
        rows = [
            (entry.digest, entry.message.message_id, entry.message.channel_id, who)
            for entry in entries
            if entry.id_verifies
        ]
        database.executemany(
            "INSERT OR IGNORE INTO told (digest, message_id, channel_id, who) VALUES (?, ?, ?, ?)",
            rows,
        )
        [until] = database.execute(
            "SELECT coalesce((SELECT number FROM told WHERE who = ? ORDER BY number DESC "
            "LIMIT 1 OFFSET ?), 0)",
            (who, self._limits.quarantine_told_of_one_max),
        ).fetchone()
        database.execute(
            "DELETE FROM told WHERE who = ? AND number <= ? "
            "AND digest NOT IN (SELECT digest FROM held)",
            (who, until),
        )
        [count] = database.execute(
            "SELECT (SELECT count(*) FROM told) - (SELECT count(*) FROM held)"
        ).fetchone()
        database.execute(
            "DELETE FROM told WHERE number IN (SELECT number FROM told WHERE digest NOT IN "
            "(SELECT digest FROM held) ORDER BY number LIMIT ?)",
            (max(count - self._limits.quarantine_told_max, 0),),
        )

    def page(self, after: int, limit: int) -> list[Held]:
        """Messages in the quarantine, oldest first, after a number."""
        if not self._path.exists():
            return []
        query = f"SELECT {_COLUMNS} FROM held WHERE number > ? ORDER BY number LIMIT ?"  # noqa: S608
        with self._opened() as database:
            return [Held(*row) for row in database.execute(query, (after, limit))]

    def entry(self, digest: bytes) -> NewEntry:
        """A message as it came, to write. Raises Problem: `not_found`, and those of the door."""
        row = None
        if self._path.exists():
            with self._opened() as database:
                query = "SELECT frame, claims FROM held WHERE digest = ?"
                row = database.execute(query, (digest,)).fetchone()
        if row is None:
            raise _not_held(digest)
        prepared = prepare(Publication(row[0]), self._limits)
        if not isinstance(prepared, NewEntry) or prepared.digest != digest:
            raise Problem(Code.STORE_UNAVAILABLE, f"{self._path} is damaged")
        claims = [Claim(bytes.fromhex(hint), ClaimSource(no)) for hint, no in json.loads(row[1])]
        return prepared._replace(claims=tuple(claims))

    def forget(self, digest: bytes) -> None:
        """Remove a message that was released."""
        with self._opened() as database:
            database.execute("DELETE FROM held WHERE digest = ?", (digest,))
            database.execute("DELETE FROM told WHERE digest = ?", (digest,))

    def erase(self, digests: Sequence[bytes]) -> None:
        """Remove messages that are retired, if they are here, from the file."""
        if not self._path.exists():
            return
        with self._opened() as database:
            database.execute("PRAGMA secure_delete = ON")
            database.executemany("DELETE FROM held WHERE digest = ?", [(each,) for each in digests])
            database.executemany("DELETE FROM told WHERE digest = ?", [(each,) for each in digests])

    def drop(self, digest: bytes) -> None:
        """Delete a message, and remember it as refused. Raises Problem: `not_found`."""
        if not self._path.exists():
            raise _not_held(digest)
        with self._opened() as database:
            removed = database.execute("DELETE FROM held WHERE digest = ?", (digest,))
            if not removed.rowcount:
                raise _not_held(digest)
            number = database.execute(
                "INSERT OR IGNORE INTO dropped (digest) VALUES (?)", (digest,)
            ).lastrowid
            until = (number or 0) - self._limits.quarantine_dropped_max
            database.execute("DELETE FROM dropped WHERE number <= ?", (until,))

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """The file in a transaction."""
        try:
            with closing(sqlite3.connect(self._path, timeout=BUSY_S)) as database:
                [version] = database.execute("PRAGMA user_version").fetchone()
                if version not in range(VERSION + 1):
                    raise Problem(
                        Code.STORE_UNAVAILABLE, f"{self._path} is of another version ({version})"
                    )
                if version != VERSION:
                    database.executescript(f"{_SCHEMA} PRAGMA user_version = {VERSION};")
                with database:
                    yield database
        except (sqlite3.Error, ValueError) as error:
            detail = f"the quarantine {self._path} cannot be used: {error}"
            raise Problem(Code.STORE_UNAVAILABLE, detail) from None


def _has_locked(file: IO[bytes]) -> bool:
    """Whether this open file has the lock, which ends when it is closed."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _not_held(digest: bytes) -> Problem:
    return Problem(Code.NOT_FOUND, f"no message {digest.hex()[:64]} is in the quarantine")
