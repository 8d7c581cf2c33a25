"""Rows about others: the node's peers, the sessions with them, and its MVDS peers.

**Peers.** Several processes, on several hosts, can share one PostgreSQL database. A **lease** makes one of them
at a time responsible for a peer: the peer's row names the holder, a fence and when the lease expires by
the clock of the database; no other clock counts. A process renews its leases long before they expire,
and takes those that have expired. Each change of the holder raises the fence. Every write of a peer
first locks its row and compares the fence, so a process that was paused beyond its lease writes nothing
(docs/decisions/0029). SQLite has one writing process, which holds every lease.

The memory of a peer (`sdstore.sync.memory.PeerMemory`) is JSON that zlib compresses and gives a checksum.
Damaged bytes, and those of a version with other fields, are an empty memory: the next session compares
everything.

**Sessions**: what they did, while they run and afterwards, for all processes over a database. A record is the
session's JSON document. A row without a process is a request: the process that holds the peer's lease takes it
up under its ID. A record that its process has not touched for `ABANDONED_S`, by the clock of the database, has
ended with that process.

**MVDS peers** (docs/mvds.md): epoch, place in each channel, and records. An exchange reads the state of one
peer, works on it in memory, and writes what changed in one transaction. The epoch guards it: of two exchanges
that began with the same state, one is written.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    ColumnElement,
    Integer,
    Table,
    Text,
    Update,
    all_,
    and_,
    any_,
    bindparam,
    case,
    cast,
    delete,
    extract,
    false,
    func,
    literal_column,
    or_,
    select,
    update,
)

from app.entries import Entry
from app.errors import Code, Problem
from app.server.limits import Limits
from app.store.database import Database, Query, Row, SqlDialect, Transaction, highest
from app.store.entryrows import FrameReader, entries_by_seq, entry_rows, fitting_count
from app.store.schema import (
    ByteText,
    messages,
    mvds_peers,
    mvds_positions,
    mvds_records,
    peers,
    syncs,
)
from sdstore.mvds import Record, RecordType
from sdstore.sync.memory import PeerMemory

# ---- peers

LEASE_S = 6.0  # a dead process is replaced within ten seconds, the grace included
GRACE_S = 2.0  # for which a free peer is left to the process whose share it is; twice the time between looks
FORGET_S = 7 * 86_400.0  # a host that is away for so long begins anew with its peers
TEXT_MAX = 2_000  # characters of a peer's reason: a line of a table, not a log
MEMORY_BYTES_MAX = 8 * 1024 * 1024  # one interest with all that a baseline counts in and out
_PLAIN_BYTES_MAX = 8 * MEMORY_BYTES_MAX  # the JSON: hex is twice the bytes, and names are repeated


# ---- memory


def encode_memory(memory: PeerMemory) -> bytes:
    """At most `MEMORY_BYTES_MAX` bytes; only the newest interest, or nothing, if all is more."""
    asides, baselines = memory.asides[-1:], memory.baselines[-1:]
    smaller = replace(memory, asides=asides, baselines=baselines, lost_asked=())
    for each in (memory, smaller):
        plain = json.dumps(each.document(), separators=(",", ":")).encode()
        if len(plain) <= _PLAIN_BYTES_MAX:
            packed = zlib.compress(plain, 1)
            if len(packed) <= MEMORY_BYTES_MAX:
                return packed
    return b""


def decode_memory(raw: bytes | None) -> PeerMemory:
    """The memory; an empty one for no bytes, for damaged ones, and for those of another version's fields."""
    unpacker = zlib.decompressobj()
    try:
        plain = unpacker.decompress(raw or b"", _PLAIN_BYTES_MAX)
        if unpacker.eof:  # its checksum is right
            return PeerMemory.of(json.loads(plain))
    except (zlib.error, ValueError, TypeError, KeyError, AttributeError):
        pass
    return PeerMemory()


# ---- rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRow:
    """A peer as the database keeps it, without its memory. Times are milliseconds since the Unix epoch.

    `in_sync_at_ms`: the end of the last good session. `proved_at_ms`: when both sides were last proved
    equal. `missing_here`, `missing_there`: what the last session found and did not move; None if unknown.
    `apart_since_ms`: when a session first left something missing here. `token` and `last_sync_id` are
    empty if there is none.
    """

    peer_id: str
    url: str
    origin: str
    token: str = ""
    state: str = "new"
    since_ms: int = 0
    code: str = ""
    reason: str = ""
    failures: int = 0
    next_sync_at_ms: int | None = None
    in_sync_at_ms: int | None = None
    proved_at_ms: int | None = None
    missing_here: int | None = None
    missing_there: int | None = None
    apart_since_ms: int | None = None
    last_sync_id: str = ""


_FIXED = ("peer_id", "url", "origin", "token")
CHANGING = tuple(f.name for f in fields(PeerRow) if f.name not in _FIXED)
"""The names of what sessions change."""

_READ = tuple(f.name for f in fields(PeerRow))


class Lease(NamedTuple):
    """Who syncs with a peer: the process, its fence, and whether the lease is still good."""

    holder: str
    fence: int
    is_live: bool


class PeerRows:
    """The peers of one open store. Methods that are not coroutines are for the writer's thread."""

    def __init__(self, database: Database) -> None:
        self.is_shared = database.is_shared
        self._database = database
        self._sql = database.sql

    async def read(self) -> list[tuple[PeerRow, Lease]]:
        """All peers, oldest first."""
        rows = await self._database.rows(_all(self._sql, self.is_shared))
        return [(_peer_row(row), Lease(row[-3], row[-2], bool(row[-1]))) for row in rows]

    async def memory(self, peer_id: str) -> PeerMemory:
        """The memory of a peer; an empty one for an unknown peer."""
        rows = await self._database.few(_memory(self._sql), of_peer=peer_id)
        return decode_memory(rows[0][0] if rows else None)

    def add(self, added: Sequence[PeerRow]) -> None:
        """Add peers that are not there yet; one of settings can become an added one.

        Raises `Problem` as `Store.writer.write`.
        """
        with self._database.transaction() as transaction:
            [(last_no, now_ms)] = transaction.rows(_last_no(self._sql, self.is_shared))
            known: dict[str, str] = dict(transaction.rows(_tokens(self._sql)))
            new = [each for each in added if each.peer_id not in known]
            again = [
                (each.origin, each.token or known[each.peer_id], each.peer_id)
                for each in added
                if each.peer_id in known and each.origin != "settings"
            ]
            transaction.many(self._sql.update_each(peers, "peer_id", "origin", "token"), again)
            rows = [
                (last_no + n, *_clean(each), None, "", 0, now_ms) for n, each in enumerate(new, 1)
            ]
            transaction.many(self._sql.insert(peers), rows)

    def remove(self, peer_id: str) -> None:
        """Remove a peer with its memory. Raises as `add`."""
        with self._database.transaction() as transaction:
            transaction.many(self._sql.delete_each(peers, "peer_id"), [(peer_id,)])

    def set_token(self, peer_id: str, token: str, origin: str) -> None:
        """Replace the access token of a peer. Raises as `add`."""
        query = self._sql.update_each(peers, "peer_id", "origin", "token")
        with self._database.transaction() as transaction:
            transaction.many(query, [(origin, token, peer_id)])

    def forget_settings(self, kept: Collection[str]) -> None:
        """Remove the peers of former settings: those that are not in `kept`, and that no process of other
        settings has held for `FORGET_S`."""
        with self._database.transaction() as transaction:
            gone = transaction.rows(_of_settings(self._sql, self.is_shared))
            rows = [row for row in gone if row[0] not in kept]
            transaction.many(self._sql.delete_each(peers, "peer_id"), rows)

    # ---- leases

    async def hold(
        self,
        process: str,
        settings_peers: Collection[str],
        lease_s: float = LEASE_S,
        left: Collection[str] = (),
    ) -> dict[str, int]:
        """Renew the leases of a process, and take those that have expired: fences by peer.

        Those in `left` only when they expired `GRACE_S` ago. Of the peers of settings only those in
        `settings_peers`: other hosts have the tokens of the others. One statement, without the writer's
        lock. A row that is being written is left out this time.
        """
        if not self.is_shared:
            return {row[0]: 0 for row in await self._database.rows(_ids(self._sql))}
        query = _hold(self._sql, tuple(sorted(settings_peers)))
        rows = await self._database.rows(
            query, me=process, lease_ms=int(lease_s * 1_000), left=sorted(left)
        )
        return dict(rows)

    async def release(self, process: str, released: Collection[str] | None = None) -> None:
        """End leases of a process, all or those of some peers, so that others take them at once."""
        if self.is_shared:
            await self._database.rows(
                _release(self._sql), me=process, all=released is None, some=sorted(released or ())
            )

    def standing(
        self, transaction: Transaction, process: str, fences: Mapping[str, int]
    ) -> set[str]:
        """The peers among `fences` whose leases still hold; nobody can take them in this transaction."""
        if not self.is_shared:
            return {row[0] for row in transaction.rows(_ids(self._sql))} & fences.keys()
        rows = transaction.rows(_standing(self._sql), me=process)
        return {peer_id for peer_id, fence in rows if fences.get(peer_id) == fence}

    def write(
        self, transaction: Transaction, changed: Sequence[tuple[PeerRow, bytes | None]]
    ) -> None:
        """Write what sessions change of peers in `standing`; with their encoded memories, or None to keep them."""
        plain, whole = CHANGING, (*CHANGING, "memory")
        columns = [each.name for each in peers.columns]
        for names, rows in (
            (plain, [(row, memory) for row, memory in changed if memory is None]),
            (whole, [(row, memory) for row, memory in changed if memory is not None]),
        ):
            ordered = [each for each in columns if each in names]
            query = self._sql.update_each(peers, "peer_id", *ordered)
            transaction.many(
                query,
                [
                    (*[_value(row, name, memory) for name in ordered], row.peer_id)
                    for row, memory in rows
                ],
            )


def _value(row: PeerRow, name: str, memory: bytes | None) -> Any:
    if name == "memory":
        return memory
    value = getattr(row, name)
    return clean_text(value) if isinstance(value, str) else value


def clean_text(text: str) -> str:
    """Text that both databases store: without U+0000 and halves of surrogate pairs, and bounded."""
    return text[:TEXT_MAX].replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def _clean(row: PeerRow) -> Row:
    """The values of a new row; URLs and tokens are ASCII and bounded already."""
    return astuple(replace(row, reason=clean_text(row.reason)))


def _peer_row(row: Row) -> PeerRow:
    return PeerRow(**dict(zip(_READ, row, strict=False)))


# ---- statements

_ME: Any = bindparam("me", type_=Text())


def clock_ms() -> ColumnElement[int]:
    """The clock of a PostgreSQL database at this moment, not at the start of the transaction."""
    now_s: ColumnElement[Any] = extract("epoch", func.clock_timestamp())
    return cast(now_s * literal_column("1000"), BigInteger)


def _ids_bound(name: str) -> Any:
    return bindparam(name, type_=ARRAY(Text()))


@cache
def _all(sql: SqlDialect, is_shared: bool) -> Query:
    read = [peers.c[name] for name in _READ]
    is_live = peers.c.expires_ms > clock_ms() if is_shared else false()
    lease = (peers.c.holder, peers.c.fence, is_live)
    return sql.query(select(*read, *lease).order_by(peers.c.peer_no))


@cache
def _memory(sql: SqlDialect) -> Query:
    return sql.query(
        select(peers.c.memory).where(peers.c.peer_id == bindparam("of_peer", type_=Text()))
    )


@cache
def _ids(sql: SqlDialect) -> Query:
    return sql.query(select(peers.c.peer_id))


@cache
def _tokens(sql: SqlDialect) -> Query:
    return sql.query(select(peers.c.peer_id, peers.c.token))


@cache
def _last_no(sql: SqlDialect, is_shared: bool) -> Query:
    """(last number, the clock): a new peer is free from now on."""
    now_ms = clock_ms() if is_shared else literal_column("0", BigInteger)
    return sql.query(select(highest(peers.c.peer_no), now_ms))


@cache
def _of_settings(sql: SqlDialect, is_shared: bool) -> Query:
    found = select(peers.c.peer_id).where(peers.c.origin == "settings")
    forgotten_ms = clock_ms() - literal_column(str(int(FORGET_S * 1_000)))
    return sql.query(found.where(peers.c.expires_ms <= forgotten_ms) if is_shared else found)


@cache
def _hold(sql: SqlDialect, settings_peers: tuple[str, ...]) -> Query:
    is_mine = and_(peers.c.holder == _ME, peers.c.expires_ms > clock_ms())
    may_hold = or_(
        peers.c.origin != "settings", *[peers.c.peer_id == each for each in settings_peers]
    )
    is_free = or_(
        and_(peers.c.expires_ms <= clock_ms(), peers.c.peer_id != all_(_ids_bound("left"))),
        peers.c.expires_ms <= clock_ms() - literal_column(str(int(GRACE_S * 1_000))),
    )
    # In one order and without waiting, so that two processes cannot wait for each other.
    free = (
        select(peers.c.peer_no)
        .where(may_hold, or_(peers.c.holder == _ME, is_free))
        .order_by(peers.c.peer_no)
        .with_for_update(skip_locked=True)
    )
    statement: Update = (
        update(peers)
        .where(peers.c.peer_no.in_(free))
        .values(
            fence=case((is_mine, peers.c.fence), else_=peers.c.fence + literal_column("1")),
            holder=_ME,
            expires_ms=clock_ms() + bindparam("lease_ms", type_=BigInteger()),
        )
    )
    return sql.query(statement.returning(peers.c.peer_id, peers.c.fence))


@cache
def _release(sql: SqlDialect) -> Query:
    is_meant = or_(bindparam("all", type_=Boolean()), peers.c.peer_id == any_(_ids_bound("some")))
    # Without a holder: the next renewal of this process's leases must not take them back.
    ended = (
        update(peers)
        .where(peers.c.holder == _ME, is_meant)
        .values(holder=literal_column("''"), expires_ms=clock_ms())
    )
    return sql.query(ended.returning(peers.c.peer_id))


@cache
def _standing(sql: SqlDialect) -> Query:
    held = select(peers.c.peer_id, peers.c.fence).where(
        peers.c.holder == _ME, peers.c.expires_ms > clock_ms()
    )
    return sql.query(held.order_by(peers.c.peer_no).with_for_update())


# ---- sessions

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
            [(last_no, count, now_ms)] = transaction.rows(_session_totals(sql, self.is_shared))
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

_SYNC_COLUMNS = (
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
    return sql.query(select(*_SYNC_COLUMNS).order_by(syncs.c.sync_no.desc()))


@cache
def _one(sql: SqlDialect) -> Query:
    return sql.query(select(*_SYNC_COLUMNS).where(syncs.c.sync_id == _WANTED))


@cache
def _under_way(sql: SqlDialect) -> Query:
    running = select(*_SYNC_COLUMNS).where(syncs.c.finished_at_ms.is_(None))
    return sql.query(running.order_by(syncs.c.sync_no))


@cache
def _abandoned(sql: SqlDialect, is_shared: bool) -> Query:
    running = select(*_SYNC_COLUMNS).where(syncs.c.finished_at_ms.is_(None))
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
def _session_totals(sql: SqlDialect, is_shared: bool) -> Query:
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


# ---- MVDS peers

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
            [(last_no, last_exchange_no, count)] = transaction.rows(_mvds_totals(sql))
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
def _mvds_totals(sql: SqlDialect) -> Query:
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
