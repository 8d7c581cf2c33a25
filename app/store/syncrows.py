"""Session records: what sessions did, while they run and afterwards, for all processes over a database.

A record is the session's JSON document. A row without a process is a request: the process that holds
the peer's lease takes it up under its ID. A record that its process has not touched for `ABANDONED_S`,
by the clock of the database, has ended with that process.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Text,
    bindparam,
    delete,
    func,
    literal_column,
    select,
    update,
)

from app.store.database import Database, Query, Row, SqlDialect, Transaction, highest
from app.store.peerrows import clock_ms
from app.store.schema import syncs

ABANDONED_S = 30.0  # a running session touches its record at least every five seconds

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SyncRow:
    """A session: `process` runs it, empty for a request. `finished_at_ms` is None while it runs."""

    sync_id: str
    peer_id: str
    process: str
    finished_at_ms: int | None
    document: Document


class SyncRows:
    """The session records of one open store. `write` and its kind are for the writer's thread."""

    def __init__(self, database: Database, remembered_max: int) -> None:
        self.is_shared = database.is_shared
        self._database = database
        self._sql = database.sql
        self._remembered_max = remembered_max

    async def recent(self) -> list[SyncRow]:
        """All records, newest first."""
        return _sync_rows(await self._database.rows(_recent(self._sql)))

    async def get(self, sync_id: str) -> SyncRow | None:
        """One record."""
        found = _sync_rows(await self._database.few(_one(self._sql), wanted=sync_id))
        return found[0] if found else None

    async def under_way(self) -> list[SyncRow]:
        """Records of running and requested sessions, oldest first."""
        return _sync_rows(await self._database.rows(_under_way(self._sql)))

    def write(self, transaction: Transaction, rows: Sequence[SyncRow]) -> None:
        """Write records; the oldest finished ones beyond the maximum go.

        A record that has ended does not change: of two processes the one that ends it first decides.
        """
        sql = self._sql
        for row in rows:
            document = json.dumps(row.document, separators=(",", ":")).encode()
            values = {
                "to_process": row.process,
                "to_finished_at_ms": row.finished_at_ms,
                "to_document": document,
            }
            query = _change(sql, self.is_shared)
            if transaction.rows(query, wanted=row.sync_id, **values) or transaction.rows(
                _one(sql), wanted=row.sync_id
            ):
                continue
            [(last_no, count, now_ms)] = transaction.rows(_totals(sql, self.is_shared))
            if count >= self._remembered_max:
                beyond = count - self._remembered_max + 1
                transaction.execute(_forget(sql), beyond=beyond)
            new = (
                last_no + 1,
                row.sync_id,
                row.peer_id,
                row.process,
                row.finished_at_ms,
                now_ms,
                document,
            )
            transaction.many(sql.insert(syncs), [new])

    def end_abandoned(self, now_ms: int, abandoned_s: float = ABANDONED_S) -> list[str]:
        """End the records of processes that have ended; returns their IDs.

        On SQLite call this at the start: no other process can run a session.
        """
        ended = []
        with self._database.transaction() as transaction:
            query = _abandoned(self._sql, self.is_shared)
            ago = {"ago_ms": int(abandoned_s * 1_000)} if self.is_shared else {}
            for row in _sync_rows(transaction.rows(query, **ago)):
                values = {
                    "to_process": row.process,
                    "to_finished_at_ms": now_ms,
                    "to_document": json.dumps(_abandoned_document(row, now_ms)).encode(),
                }
                change = _change(self._sql, self.is_shared)
                transaction.rows(change, wanted=row.sync_id, **values)
                ended.append(row.sync_id)
        return ended


def _abandoned_document(row: SyncRow, now_ms: int) -> Document:
    detail = (
        "the process that ran the session has ended"
        if row.process
        else "no process took the session up"
    )
    end = {"state": "finished", "finished_at_ms": now_ms, "outcome": "partial", "detail": detail}
    return row.document | end


def _sync_rows(rows: Sequence[Row]) -> list[SyncRow]:
    found = []
    for sync_id, peer_id, process, finished_at_ms, raw in rows:
        try:
            document = json.loads(bytes(raw))
        except ValueError:
            continue  # damaged
        if isinstance(document, dict):
            found.append(SyncRow(sync_id, peer_id, process, finished_at_ms, document))
    return found


# ---- statements

_READ = (
    syncs.c.sync_id,
    syncs.c.peer_id,
    syncs.c.process,
    syncs.c.finished_at_ms,
    syncs.c.document,
)
_WANTED: Any = bindparam("wanted", type_=Text())


def _now(is_shared: bool) -> ColumnElement[int]:
    """The time of the last touch: SQLite has one process, which needs none."""
    return clock_ms() if is_shared else literal_column("0", BigInteger)


@cache
def _recent(sql: SqlDialect) -> Query:
    return sql.query(select(*_READ).order_by(syncs.c.sync_no.desc()))


@cache
def _one(sql: SqlDialect) -> Query:
    return sql.query(select(*_READ).where(syncs.c.sync_id == _WANTED))


@cache
def _under_way(sql: SqlDialect) -> Query:
    running = select(*_READ).where(syncs.c.finished_at_ms.is_(None))
    return sql.query(running.order_by(syncs.c.sync_no))


@cache
def _abandoned(sql: SqlDialect, is_shared: bool) -> Query:
    running = select(*_READ).where(syncs.c.finished_at_ms.is_(None))
    if is_shared:
        running = running.where(
            syncs.c.seen_ms < clock_ms() - bindparam("ago_ms", type_=BigInteger())
        )
    return sql.query(running)


@cache
def _change(sql: SqlDialect, is_shared: bool) -> Query:
    changed = (
        update(syncs)
        .where(syncs.c.sync_id == _WANTED, syncs.c.finished_at_ms.is_(None))
        .values(
            process=bindparam("to_process", type_=Text()),
            finished_at_ms=bindparam("to_finished_at_ms", type_=BigInteger()),
            seen_ms=_now(is_shared),
            document=bindparam("to_document"),
        )
    )
    return sql.query(changed.returning(syncs.c.sync_no))


@cache
def _totals(sql: SqlDialect, is_shared: bool) -> Query:
    """(last number, number of records, the clock)."""
    count = select(func.count()).select_from(syncs).scalar_subquery()
    return sql.query(select(highest(syncs.c.sync_no), count, _now(is_shared)))


@cache
def _forget(sql: SqlDialect) -> Query:
    oldest = (
        select(syncs.c.sync_no)
        .where(syncs.c.finished_at_ms.is_not(None))
        .order_by(syncs.c.sync_no)
        .limit(bindparam("beyond", type_=BigInteger()))
    )
    return sql.query(delete(syncs).where(syncs.c.sync_no.in_(oldest)))
