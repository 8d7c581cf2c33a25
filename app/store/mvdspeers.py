"""The MVDS peers of this node: epoch, place in each channel, and records (docs/mvds.md).

An exchange reads the state of one peer, works on it in memory, and writes what changed in one
transaction. The epoch guards it: of two exchanges that began with the same state, one is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, Integer, Table, bindparam, delete, func, select

from app.entries import Entry
from app.errors import Code, Problem
from app.server.limits import Limits
from app.store.database import Database, Query, Row, SqlDialect, Transaction, highest
from app.store.entryrows import FrameReader, entries_by_seq, entry_rows, fitting_count
from app.store.schema import ByteText, messages, mvds_peers, mvds_positions, mvds_records
from sdstore.mvds import Record, RecordType

_TYPES = frozenset(RecordType)


class Source(NamedTuple):
    """The entry behind an OFFER or a MESSAGE; zeros for a REQUEST."""

    channel_no: int = 0
    seq: int = 0


@dataclass(frozen=True, slots=True)
class PeerState:
    """What the database holds of a peer; `positions` are sequence numbers by channel number."""

    caller: str
    peer_id: str
    epoch: int = 0
    positions: Mapping[int, int] = field(default_factory=dict)
    records: Sequence[tuple[Record, Source]] = ()


class MvdsPeers:
    """The peers of one open store."""

    def __init__(self, database: Database, frame_reader: FrameReader, limits: Limits) -> None:
        self._database = database
        self._sql = database.sql
        self._frames = frame_reader
        self._limits = limits

    async def read(self, caller: str, peer_id: str) -> PeerState:
        """The state of a peer; an empty one if it is new. `caller` and `peer_id` name it together."""
        found = await self._database.rows(_peer(self._sql), caller=caller, peer_id=peer_id)
        if not found:
            return PeerState(caller, peer_id)
        [(peer_no, epoch)] = found
        positions = await self._database.rows(_positions(self._sql), peer_no=peer_no)
        rows = await self._database.rows(_records(self._sql), peer_no=peer_no)
        return PeerState(
            caller,
            peer_id,
            epoch,
            dict(positions),
            [
                (
                    Record(RecordType(kind), bytes(message_id), send_count, send_epoch),
                    Source(channel_no, seq),
                )
                for message_id, kind, send_count, send_epoch, channel_no, seq in rows
                if kind in _TYPES  # a damaged row is left alone
            ],
        )

    def write(
        self,
        before: PeerState,
        positions: Mapping[int, int],
        changed: Mapping[bytes, tuple[Record, Source] | None],
    ) -> None:
        """Write the end of an exchange: its epoch, all positions, and the changed records.

        None removes a record. Room for a new peer makes the caller with the most peers, by the one of
        them that has been silent for longest.
        Writer's thread only. Raises `Problem` `sync_busy` if another exchange of the peer was
        written since `before` was read, and as `Store.writer.write`.
        """
        sql = self._sql
        with self._database.transaction() as transaction:
            found = transaction.rows(_peer(sql), caller=before.caller, peer_id=before.peer_id)
            if (found[0][1] if found else 0) != before.epoch:
                raise Problem(Code.SYNC_BUSY, "another exchange of this peer ended in between")
            [(last_no, last_exchange_no, count)] = transaction.rows(_totals(sql))
            if found:
                peer_no = found[0][0]
                transaction.many(sql.delete_each(mvds_peers, "peer_no"), [(peer_no,)])
            else:
                peer_no = last_no + 1
                if count >= self._limits.mvds_peers_max:
                    self._forget_oldest(transaction)
            peer = (peer_no, before.epoch + 1, last_exchange_no + 1, before.caller, before.peer_id)
            transaction.many(sql.insert(mvds_peers), [peer])
            transaction.execute(_delete_of(sql, mvds_positions), peer_no=peer_no)
            places = [(peer_no, *place) for place in positions.items()]
            transaction.many(sql.insert(mvds_positions), places)
            gone = [(peer_no, message_id) for message_id in changed]
            transaction.many(sql.delete_each(mvds_records, "peer_no", "message_id"), gone)
            rows = [_row(peer_no, *each) for each in changed.values() if each is not None]
            transaction.many(sql.insert(mvds_records), rows)

    def _forget_oldest(self, transaction: Transaction) -> None:
        [(peer_no,)] = transaction.rows(_oldest(self._sql))
        for table in (mvds_records, mvds_positions, mvds_peers):
            transaction.execute(_delete_of(self._sql, table), peer_no=peer_no)

    async def window_start(self, channel_no: int) -> int:
        """The sequence number after which the newest entries of a channel begin, those of a window."""
        query = _before_window(self._sql)
        size = self._limits.mvds_records_per_peer_max
        rows = await self._database.rows(query, channel_no=channel_no, size=size)
        return int(rows[0][0]) if rows else 0

    async def entries(self, seqs: Sequence[int], bytes_max: int) -> tuple[list[int], list[Entry]]:
        """The first of these entries whose frames fit into `bytes_max`, at least one.

        Returns the sequence numbers that were examined, and the entries that can be read.
        """
        found = await self._database.among(entries_by_seq(self._sql), seqs)
        by_seq = {row.seq: row for row in entry_rows(found)}
        rows = [by_seq[seq] for seq in seqs if seq in by_seq]
        fitting = rows[: fitting_count(rows, bytes_max)]
        beyond = {row.seq for row in rows[len(fitting) :]}
        return [seq for seq in seqs if seq not in beyond], await self._frames.entries(fitting)


def _row(peer_no: int, record: Record, source: Source) -> Row:
    return (
        peer_no,
        record.message_id,
        int(record.type),
        record.send_count,
        record.send_epoch,
        *source,
    )


# ---- statements

_PEER_NO: Any = bindparam("peer_no", type_=BigInteger())


@cache
def _peer(sql: SqlDialect) -> Query:
    named = select(mvds_peers.c.peer_no, mvds_peers.c.epoch).where(
        mvds_peers.c.caller == bindparam("caller", type_=ByteText),
        mvds_peers.c.peer_id == bindparam("peer_id", type_=ByteText),
    )
    return sql.query(named)


@cache
def _positions(sql: SqlDialect) -> Query:
    columns = mvds_positions.c
    return sql.query(select(columns.channel_no, columns.seq).where(columns.peer_no == _PEER_NO))


@cache
def _records(sql: SqlDialect) -> Query:
    """In the order in which they are due, older entries first."""
    columns = mvds_records.c
    read = select(
        columns.message_id,
        columns.type,
        columns.send_count,
        columns.send_epoch,
        columns.channel_no,
        columns.seq,
    )
    mine = read.where(columns.peer_no == _PEER_NO)
    return sql.query(mine.order_by(columns.send_epoch, columns.seq, columns.message_id))


@cache
def _totals(sql: SqlDialect) -> Query:
    """(last number, last exchange, number of peers)."""
    count = select(func.count()).select_from(mvds_peers).scalar_subquery()
    return sql.query(
        select(highest(mvds_peers.c.peer_no), highest(mvds_peers.c.exchange_no), count)
    )


@cache
def _oldest(sql: SqlDialect) -> Query:
    callers = select(mvds_peers.c.caller).group_by(mvds_peers.c.caller)
    first = callers.order_by(func.count().desc(), mvds_peers.c.caller).limit(1).scalar_subquery()
    of_it = select(mvds_peers.c.peer_no).where(mvds_peers.c.caller == first)
    return sql.query(of_it.order_by(mvds_peers.c.exchange_no).limit(1))


@cache
def _delete_of(sql: SqlDialect, table: Table) -> Query:
    return sql.query(delete(table).where(table.c.peer_no == _PEER_NO))


@cache
def _before_window(sql: SqlDialect) -> Query:
    of_channel = messages.c.channel_no == bindparam("channel_no", type_=Integer())
    skipped: Any = bindparam("size", type_=Integer())
    newest = select(messages.c.seq).where(of_channel).order_by(messages.c.seq.desc())
    return sql.query(newest.offset(skipped).limit(1))
