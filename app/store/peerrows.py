"""The peers of this node: their state, their memory, and which process syncs with each.

Several processes, on several hosts, can share one PostgreSQL database. A **lease** makes one of them
at a time responsible for a peer: the peer's row names the holder, a fence and when the lease expires by
the clock of the database; no other clock counts. A process renews its leases long before they expire,
and takes those that have expired. Each change of the holder raises the fence. Every write of a peer
first locks its row and compares the fence, so a process that was paused beyond its lease writes nothing
(docs/decisions/0029). SQLite has one writing process, which holds every lease.

The memory of a peer (`sdstore.sync.memory.PeerMemory`) is JSON that zlib compresses and gives a checksum.
Damaged bytes, and those of a version with other fields, are an empty memory: the next session compares
everything.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    ColumnElement,
    Text,
    Update,
    all_,
    and_,
    any_,
    bindparam,
    case,
    cast,
    extract,
    false,
    func,
    literal_column,
    or_,
    select,
    update,
)

from app.store.database import Database, Query, Row, SqlDialect, Transaction, highest
from app.store.schema import peers
from sdstore.sync.memory import PeerMemory

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
