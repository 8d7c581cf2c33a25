"""What causal histories name: gaps, references that are not resolved, and ancestors.

**Gaps** are messages that causal histories name and the store lacks. A sync message may be the only witness of
a lost last message, so what it names and the store lacks is listed as well. It costs nothing to send, so these
names are bounded by channel.

Histories also give hints for the messages they name; the writer stores those as history claims. Histories
repeat themselves (js-waku's repeat 199 of 200 entries from one message to the next), so the writer
remembers what it settled lately, and each repetition costs one dictionary look-up.

**Ancestors** come causally before some messages of a channel. The walk goes from the heads back in time: of all
known causes, it takes the last one in log order next. Clocks grow from cause to effect, so the next page needs
only the place where this page ends and the causes that still wait. If clocks contradict the order of causes, a
page can repeat a message of an earlier one, once.

On a server each look-up costs a round trip, and a chain is a thousand look-ups deep. So the walk
reads the log ahead in windows that grow as long as they are useful, and looks up all IDs that a window
names at once. It looks up the rest when it gets there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import BigInteger, Integer, bindparam, delete, func, select

from app.entries import Entry, MetId
from app.errors import Code, Problem
from app.server.limits import Limits
from app.store.channelpages import ChannelInfo, Channels
from app.store.claims import history_hints
from app.store.database import (
    Database,
    ManyQuery,
    Query,
    Row,
    SqlDialect,
    Transaction,
    constant,
    highest,
)
from app.store.entryrows import (
    ID_ARGUMENTS,
    EntryRow,
    FrameReader,
    Keys,
    Position,
    entries_by_seq,
    entries_numbered,
    entry_rows,
    fitting_count,
    with_id,
)
from app.store.schema import ByteText, history_claims, messages, met_ids, missing_references
from sdstore.sds.codec import decode
from sdstore.sds.model import LAMPORT_MAX, LAMPORT_MIN

if TYPE_CHECKING:
    from app.store.groupwriter import Group


# ---- gaps

SETTLED_MAX = 65_536
"""References remembered as settled: the windows of some 300 busy channels, about 16 MiB."""

Reference = tuple[int, str, bytes]
"""(channel number, message ID, hint or nothing)."""
Name = tuple[int, str]
"""(channel number, message ID)."""


# ---- reading


@dataclass(frozen=True, slots=True)
class Gap:
    """A message that histories name and the store lacks, with the hints they give (capped).

    `met_as_sync`: the store has seen a sync message with this ID. Version 1 participants name theirs in
    later histories; but anybody can send one with any ID, so the gap stays. `is_named_by_sync`: only sync
    messages name it, not the history of a stored message.
    """

    message_id: str
    hints: tuple[bytes, ...]
    met_as_sync: bool = False
    is_named_by_sync: bool = False

    @property
    def shown_bytes(self) -> int:
        """Bytes in an answer: the ID, and hints in hexadecimal and quotes."""
        return len(self.message_id.encode()) + sum(2 * len(hint) + 3 for hint in self.hints)


@dataclass(frozen=True, slots=True)
class GapPage:
    """Gaps by message ID as UTF-8 bytes."""

    gaps: list[Gap]
    next: Position | None


class Gaps:
    """The gaps of one open store."""

    def __init__(self, database: Database, keys: Keys, channels: Channels, limits: Limits) -> None:
        self._database = database
        self._sql = database.sql
        self._keys = keys
        self._channels = channels
        self._limits = limits

    async def page(self, channel_id: str, after: Position | None, limit: int) -> GapPage:
        """Missing message IDs of a channel, each with the hints that histories give for it."""
        channel = await self._channels.named(channel_id)
        if channel is None:
            return GapPage([], None)
        number = channel.channel_no
        begin = "" if after is None else str(after[0])
        rows = await self._database.rows(
            _missing(self._sql), channel_no=number, after=begin, limit=limit + 1
        )
        missing = [message_id for message_id, _ in rows[:limit]]
        asked = [(self._keys.of_text(each), number, each) for each in missing]
        hints: list[list[bytes]] = [[] for _ in missing]
        told = history_hints(self._sql, self._limits.hint_claims_per_entry_max)
        for which, hint in await self._database.each(told, asked):
            hints[which].append(hint)
        met = await self.met(channel_id, missing)
        gaps = [
            Gap(each, tuple(found), met_as_sync=each in met, is_named_by_sync=named_no > 0)
            for (each, named_no), found in zip(rows[:limit], hints, strict=True)
        ]
        sizes = accumulate(gap.shown_bytes for gap in gaps)
        fitting = sum(1 for size in sizes if size <= self._limits.reply_bytes_max)
        gaps = gaps[: max(1, fitting)]
        return GapPage(gaps, (gaps[-1].message_id,) if len(gaps) < len(rows) else None)

    async def met(self, channel_id: str, message_ids: Sequence[str]) -> set[str]:
        """The known IDs of sync messages among these."""
        asked = [(self._keys.of_met(channel_id, each), channel_id, each) for each in message_ids]
        rows = await self._database.each(_met(self._sql), asked)
        return {message_ids[which] for which, _ in rows}

    async def unrecorded(self, channel_no: int, message_ids: Sequence[str]) -> list[str]:
        """Those of a channel's message IDs that the store neither has nor lists as missing.

        IDs that histories name are always one or the other. Call it in a snapshot.
        """
        asked = [(self._keys.of_text(each), each, channel_no) for each in message_ids]
        held = {row[0] for row in await self._database.each(names_held(self._sql), asked)}
        rest = [each for number, each in enumerate(message_ids) if number not in held]
        named = [(channel_no, each) for each in rest]
        listed = {row[0] for row in await self._database.each(_listed(self._sql), named)}
        return [each for number, each in enumerate(rest) if number not in listed]


# ---- writing


class ReferenceWriter:
    """Writes missing references, history claims and IDs of sync messages."""

    def __init__(self, sql: SqlDialect, keys: Keys, limits: Limits) -> None:
        self._sql = sql
        self._keys = keys
        self._limits = limits
        self._settled: dict[Reference, None] = {}
        self._held: dict[Name, None] = {}  # stored messages that sync messages name again and again

    def write(
        self, transaction: Transaction, group: Group, met: Sequence[MetId]
    ) -> dict[Reference, None]:
        """Returns the references that are settled once the group is committed."""
        arrived = {(r.channel_no, entry.message.message_id) for entry, r in group.written}
        self._write_met(transaction, met)
        if group.has_missing:
            transaction.many(
                self._sql.delete_each(missing_references, "channel_no", "message_id"), list(arrived)
            )
        settled = self._settled
        unsettled = {
            reference: None
            for entry, result in group.written
            for told in entry.message.causal_history
            if (reference := (result.channel_no, told.message_id, told.retrieval_hint))
            not in settled
        }
        self.settle(transaction, group, unsettled, arrived)
        self._write_named(transaction, group, met)
        return unsettled

    def settle(
        self,
        transaction: Transaction,
        group: Group,
        unsettled: dict[Reference, None],
        arrived: Collection[Name] = (),
    ) -> None:
        """Write what references say; `arrived` are the names that this group wrote itself."""
        names = dict.fromkeys((channel_no, message_id) for channel_no, message_id, _ in unsettled)
        self._write_missing(transaction, [name for name in names if name not in arrived])
        self._write_history_claims(transaction, group, unsettled)

    def remember(self, settled: dict[Reference, None]) -> None:
        """Call it after the commit: a reference that was rolled back is not settled."""
        if len(self._settled) + len(settled) > SETTLED_MAX:
            self._settled.clear()
        self._settled.update(settled)

    def forget(self) -> None:
        """Write every reference again: the database lost what was committed."""
        self._settled.clear()
        self._held.clear()

    def _write_missing(self, transaction: Transaction, names: Sequence[Name]) -> None:
        here = self._held_among(transaction, names)
        missing = [name for name in names if name not in here]
        # Replaces the row if only a sync message named it before.
        by_name = self._sql.delete_each(missing_references, "channel_no", "message_id")
        transaction.many(by_name, missing)
        rows = [(*name, 0) for name in missing]
        transaction.many(self._sql.insert(missing_references, or_ignore=True), rows)

    def _held_among(self, transaction: Transaction, names: Sequence[Name]) -> set[Name]:
        keyed = [
            (self._keys.of_text(message_id), message_id, channel_no)
            for channel_no, message_id in names
        ]
        return {names[row[0]] for row in transaction.each(names_held(self._sql), keyed)}

    def _write_named(self, transaction: Transaction, group: Group, met: Sequence[MetId]) -> None:
        """What sync messages name and the store lacks, in channels that it has messages of."""
        numbers = group.channel_numbers
        names = [
            *dict.fromkeys(
                name
                for each in met
                if each.channel_id in numbers
                for message_id in each.named
                if (name := (numbers[each.channel_id], message_id)) not in self._held
            )
        ]
        if not names:
            return
        here = self._held_among(transaction, names)
        if len(self._held) + len(here) > SETTLED_MAX:
            self._held.clear()
        self._held.update(dict.fromkeys(here))
        missing = [name for name in names if name not in here]
        most = self._limits.named_by_sync_max
        for channel_no in dict.fromkeys(channel_no for channel_no, _ in missing):
            [[last]] = transaction.rows(_last_named(self._sql), channel_no=channel_no)
            new = [name for name in missing if name[0] == channel_no]
            rows = [(*name, int(last) + n) for n, name in enumerate(new, 1)]
            transaction.many(self._sql.insert(missing_references, or_ignore=True), rows)
            transaction.execute(_forget_named(self._sql), channel_no=channel_no, most=most)

    def _write_history_claims(
        self, transaction: Transaction, group: Group, unsettled: Iterable[Reference]
    ) -> None:
        told = [reference for reference in unsettled if reference[2]]
        names = list(dict.fromkeys((channel_no, message_id) for channel_no, message_id, _ in told))
        keys = {name: self._keys.of_text(name[1]) for name in names}
        held: dict[Name, set[bytes]] = {name: set() for name in names}
        claims_max = self._limits.hint_claims_per_entry_max
        asked = [(keys[name], *name) for name in names]
        for number, hint in transaction.each(history_hints(self._sql, claims_max), asked):
            held[names[number]].add(hint)
        rows: list[Row] = []
        # In the order of the histories: claims on one hint are listed in the order of their numbers.
        for channel_no, message_id, hint in told:
            known = held[channel_no, message_id]
            if hint in known or len(known) >= claims_max:
                continue
            known.add(hint)
            group.last_history_no += 1
            key = keys[channel_no, message_id]
            hint_key = self._keys.of_bytes(hint)
            rows.append((group.last_history_no, hint_key, key, channel_no, message_id, hint))
        transaction.many(self._sql.insert(history_claims), rows)

    def _write_met(self, transaction: Transaction, met: Sequence[MetId]) -> None:
        """Those that were met longest ago are forgotten first."""
        if not met:
            return
        asked = [
            (self._keys.of_met(each.channel_id, each.message_id), each.channel_id, each.message_id)
            for each in {(each.channel_id, each.message_id): each for each in met}.values()
        ]
        known = {row[0] for row in transaction.each(_met(self._sql), asked)}
        new = [row for number, row in enumerate(asked) if number not in known]
        [[last]] = transaction.rows(_last_met(self._sql))
        rows = [(int(last) + n, *row) for n, row in enumerate(new, 1)]
        transaction.many(self._sql.insert(met_ids), rows)
        until = int(last) + len(new) - self._limits.met_ids_max
        transaction.execute(_forget_met(self._sql), until=until)


# ---- statements


@cache
def _missing(sql: SqlDialect) -> Query:
    missing = select(missing_references.c.message_id, missing_references.c.named_no).where(
        missing_references.c.channel_no == bindparam("channel_no"),
        missing_references.c.message_id > bindparam("after"),
    )
    limit = bindparam("limit", type_=Integer())
    return sql.query(missing.order_by(missing_references.c.message_id).limit(limit))


@cache
def names_held(sql: SqlDialect) -> ManyQuery:
    """The sequence number of one entry for each held one of many (ID key, message ID, channel number)."""
    return sql.each(
        {**ID_ARGUMENTS, "channel_no": Integer()},
        lambda key: (
            select(messages.c.seq)
            .where(with_id(key), messages.c.channel_no == key["channel_no"])
            .limit(constant(1))
        ),
    )


@cache
def _listed(sql: SqlDialect) -> ManyQuery:
    """The missing ones of many (channel number, message ID)."""
    return sql.each(
        {"channel_no": Integer(), "message_id": ByteText},
        lambda key: select(missing_references.c.channel_no).where(
            missing_references.c.channel_no == key["channel_no"],
            missing_references.c.message_id == key["message_id"],
        ),
    )


@cache
def _met(sql: SqlDialect) -> ManyQuery:
    """The known ones of many (`Keys.of_met`, channel ID, message ID)."""
    return sql.each(
        {"id_key": BigInteger(), "channel_id": ByteText, "message_id": ByteText},
        lambda key: (
            select(met_ids.c.met_no)
            .where(
                met_ids.c.id_key == key["id_key"],
                met_ids.c.channel_id == key["channel_id"],
                met_ids.c.message_id == key["message_id"],
            )
            .limit(constant(1))
        ),
    )


@cache
def _last_named(sql: SqlDialect) -> Query:
    named_no = missing_references.c.named_no
    in_channel = missing_references.c.channel_no == bindparam("channel_no", type_=Integer())
    last = select(func.max(named_no)).where(in_channel, named_no > constant(0))
    return sql.query(select(func.coalesce(last.scalar_subquery(), constant(0))))


@cache
def _forget_named(sql: SqlDialect) -> Query:
    """Those that sync messages named first, beyond the newest of a channel."""
    missing, newest = missing_references.c, missing_references.alias("newest")
    channel_no = bindparam("channel_no", type_=Integer())
    most: Any = bindparam("most", type_=Integer())
    last_kept_out = (
        select(newest.c.named_no)
        .where(newest.c.channel_no == channel_no, newest.c.named_no > constant(0))
        .order_by(newest.c.named_no.desc())
        .offset(most)
        .limit(constant(1))
        .scalar_subquery()
    )
    return sql.query(
        delete(missing_references).where(
            missing.channel_no == channel_no,
            missing.named_no > constant(0),
            missing.named_no <= last_kept_out,
        )
    )


@cache
def _last_met(sql: SqlDialect) -> Query:
    return sql.query(select(highest(met_ids.c.met_no)))


@cache
def _forget_met(sql: SqlDialect) -> Query:
    return sql.query(
        delete(met_ids).where(met_ids.c.met_no <= bindparam("until", type_=BigInteger()))
    )


# ---- ancestors

WINDOW_MIN, WINDOW_START, WINDOW_MAX = 1, 16, 256
"""Entries read ahead; the largest takes some 5 ms to decode, which other callers wait for."""

LogKey = tuple[int, bytes, bytes]
"""Lamport timestamp, message ID as UTF-8, digest: compares as the log order does."""

_SEQ_MAX = 2**63 - 1
_BEHIND_ALL: LogKey = (2**63 - 1, b"\xff", b"")


@dataclass(frozen=True, slots=True)
class AncestorPage:
    """Part of a causal closure, every message after its causes; `next` is None at the end.

    `missing`: IDs that the closure names, but whose messages are unknown, cannot be read, or did not fit
    into `next`: the causes of these are not followed. `left_out` has the digests of messages whose content
    is lost or retired; the causes of retired ones are known and followed. `met_as_sync`:
    those of them that are known IDs of sync messages.
    """

    entries: list[Entry]
    missing: list[str]
    next: Position | None
    left_out: tuple[bytes, ...] = ()
    met_as_sync: tuple[str, ...] = ()


class _Latest:
    """A waiting entry; the heap gives the last one in log order first."""

    __slots__ = ("key", "row")

    def __init__(self, row: EntryRow) -> None:
        self.key = row.lamport, row.message_id.encode(), row.digest
        self.row = row

    def __lt__(self, other: _Latest) -> bool:
        return self.key > other.key


class _Loaded(NamedTuple):
    entry: Entry | None  # None for a retired one, which is not in the page
    causes: tuple[str, ...]


@dataclass(slots=True)
class _Walk:
    """One page of a walk.

    `seen`: IDs that are done, among them heads and known ones. `until`: the earliest log position taken.
    `late`: entries taken although they come after it in the log. `absent`: unknown IDs. `missing`: known
    IDs whose causes this walk does not follow. `left_out`: digests of lost content.
    """

    channel: ChannelInfo
    heads: frozenset[str]
    seen: set[str]
    limits: Limits
    until: LogKey = _BEHIND_ALL
    late: set[int] = field(default_factory=set)
    waiting: list[_Latest] = field(default_factory=list)
    taken: list[tuple[Entry, tuple[str, ...]]] = field(default_factory=list)
    missing: set[str] = field(default_factory=set)
    absent: set[str] = field(default_factory=set)
    left_out: list[bytes] = field(default_factory=list)
    # Entries that were read ahead, and the rows that their IDs lead to.
    loaded: dict[int, _Loaded] = field(default_factory=dict)
    named: dict[str, list[EntryRow]] = field(default_factory=dict)
    window: int = WINDOW_START // 2
    used: int = WINDOW_START

    def follow(self, message_id: str) -> None:
        """Let the entries under an ID wait, unless an earlier page took them."""
        rows = self.named.pop(message_id, None)
        if not rows:
            self.absent.add(message_id)
            return
        for each in map(_Latest, rows):
            if each.key < self.until:
                heappush(self.waiting, each)
            elif each.row.seq not in self.late:
                self._follow_late(each)

    def _follow_late(self, each: _Latest) -> None:
        if len(self.late) >= self.limits.ancestors_frontier_max:
            self.missing.add(each.row.message_id)
            return
        self.late.add(each.row.seq)
        heappush(self.waiting, each)

    def take(self, each: _Latest, loaded: _Loaded) -> None:
        """Add an entry to the page, unless it is a head, and go on to its causes."""
        if each.row.message_id not in self.heads:
            if loaded.entry is None:
                self.left_out.append(each.row.digest)
            else:
                self.taken.append((loaded.entry, loaded.causes))
            self.until = min(self.until, each.key)
        for message_id in loaded.causes:
            if message_id not in self.seen:
                self.seen.add(message_id)
                self.follow(message_id)

    def is_spent(self) -> bool:
        """Whether the next message could name more IDs than the bounds allow."""
        limits = self.limits
        return (
            len(self.waiting) + limits.history_entries_max > limits.ancestors_frontier_max
            or len(self.seen) + limits.history_entries_max > limits.ancestors_visited_max
        )

    def next(self) -> Position | None:
        """The place of the next page. Waiting entries that do not fit into it become missing."""
        self.waiting.sort()
        most = self.limits.ancestors_frontier_max
        self.missing.update(each.row.message_id for each in self.waiting[most:])
        if not self.waiting:
            return None
        lamport, message_id, digest = self.until
        waiting = _packed(each.row.seq for each in self.waiting[:most])
        place = message_id.decode(errors="replace")
        return lamport, place, digest.hex(), waiting, _packed(self.late)


class Ancestors:
    """Causal closures, page by page."""

    def __init__(
        self,
        database: Database,
        frame_reader: FrameReader,
        keys: Keys,
        channels: Channels,
        gaps: Gaps,
        limits: Limits,
    ) -> None:
        self._database = database
        self._sql = database.sql
        self._frames = frame_reader
        self._keys = keys
        self._channels = channels
        self._gaps = gaps
        self._limits = limits

    async def page(
        self,
        channel_id: str,
        heads: Sequence[str],
        known: Sequence[str] = (),
        *,
        limit: int,
        bytes_max: int,
        after: Position | None = None,
    ) -> AncestorPage:
        """Everything before `heads`, not passing through `known`, the latest first.

        Within a page every message comes after its causes. An empty page is not always the last.
        """
        starts = frozenset(heads) - frozenset(known)
        channel = await self._channels.named(channel_id)
        if channel is None:
            missing = sorted(starts, key=str.encode)
            return AncestorPage([], missing, None, (), await self._met(channel_id, missing))
        walk = _Walk(channel, starts, {*heads, *known}, self._limits)
        if after is None:
            await self._look_up(walk, sorted(starts))
            for message_id in starts:
                walk.follow(message_id)
        else:
            await self._resume(walk, after)
        await self._take(walk, limit, bytes_max)
        after = walk.next()
        missing = sorted(walk.missing | walk.absent, key=str.encode)
        entries = _in_causal_order(walk.taken)
        met = await self._met(channel_id, missing)
        return AncestorPage(entries, missing, after, tuple(walk.left_out), met)

    async def _met(self, channel_id: str, missing: Sequence[str]) -> tuple[str, ...]:
        met = await self._gaps.met(channel_id, missing)
        return tuple(each for each in missing if each in met)

    async def _take(self, walk: _Walk, limit: int, bytes_max: int) -> None:
        room, is_first = bytes_max, True
        while walk.waiting and len(walk.taken) < limit:
            row = walk.waiting[0].row
            if not is_first and (row.frame_bytes > room or walk.is_spent()):
                return
            is_first = False
            if row.seq not in walk.loaded:
                await self._read_ahead(walk, row, bytes_max)
            latest = heappop(walk.waiting)
            room -= row.frame_bytes
            walk.used += 1
            loaded = walk.loaded.pop(row.seq, None)
            if loaded is None:
                # Its content is gone, and with it the names of its causes.
                walk.missing.add(row.message_id)
                walk.left_out.append(row.digest)
            else:
                walk.take(latest, loaded)

    # ---- reading

    async def _read_ahead(self, walk: _Walk, row: EntryRow, bytes_max: int) -> None:
        """Load an entry and those before it in the log, and look up all IDs that they name."""
        is_useful = 2 * walk.used >= walk.window
        walk.window = min(2 * walk.window, WINDOW_MAX) if is_useful else WINDOW_MIN
        walk.used = 0
        place = (row.lamport, row.message_id, row.digest.hex())
        lamports = (LAMPORT_MIN, LAMPORT_MAX)
        before = await self._channels.log_rows(
            walk.channel.channel_id, None, place, lamports, walk.window - 1, is_descending=True
        )
        rows = [row, *before]
        walk.loaded = {each.seq: walk.loaded[each.seq] for each in rows if each.seq in walk.loaded}
        new = [each for each in rows if each.seq not in walk.loaded]
        entries, tombstones = await self._frames.read(new[: fitting_count(new, bytes_max)])
        walk.loaded.update((entry.seq, _Loaded(entry, _causes_of(entry))) for entry in entries)
        walk.loaded.update(
            (seq, _Loaded(None, each.causes))
            for seq, each in tombstones.items()
            if each.causes is not None
        )
        causes = [message_id for each in walk.loaded.values() for message_id in each.causes]
        walk.named = {each: walk.named[each] for each in causes if each in walk.named}
        await self._look_up(walk, [each for each in causes if each not in walk.seen])

    async def _look_up(self, walk: _Walk, message_ids: Iterable[str]) -> None:
        """Find the rows under IDs."""
        unknown = [each for each in dict.fromkeys(message_ids) if each not in walk.named]
        number = walk.channel.channel_no
        asked = [(self._keys.of_text(each), each, number) for each in unknown]
        walk.named.update((each, []) for each in unknown)
        query = entries_numbered(self._sql, self._limits.variants_listed_max)
        for which, *columns in await self._database.each(query, asked):
            walk.named[unknown[which]].append(EntryRow(*columns))

    async def _resume(self, walk: _Walk, after: Position) -> None:
        lamport, message_id, digest, waiting, late = map(str, after)
        try:
            walk.until = int(lamport), message_id.encode(), bytes.fromhex(digest)
        except ValueError:
            raise _not_ours() from None
        walk.late = set(_unpacked(late))
        asked = _unpacked(waiting)[: self._limits.ancestors_frontier_max]
        rows = entry_rows(await self._database.among(entries_by_seq(self._sql), asked))
        # Anybody can write a cursor: it must not lead out of its channel.
        here = [row for row in rows if row.channel_id == walk.channel.channel_id]
        walk.waiting = list(map(_Latest, here))
        heapify(walk.waiting)
        walk.seen.update(row.message_id for row in here)


def _causes_of(entry: Entry) -> tuple[str, ...]:
    message, _ = decode(entry.frame)
    return tuple(dict.fromkeys(told.message_id for told in message.causal_history))


def _in_causal_order(taken: Sequence[tuple[Entry, tuple[str, ...]]]) -> list[Entry]:
    in_log_order = sorted(taken, key=lambda each: _log_key(each[0]))
    numbers: dict[str, list[int]] = {}
    for number, (entry, _) in enumerate(in_log_order):
        numbers.setdefault(entry.message_id, []).append(number)
    causes = [
        [number for message_id in named for number in numbers.get(message_id, ())]
        for _, named in in_log_order
    ]
    return [in_log_order[number][0] for number in causal_order(causes)]


def _log_key(entry: Entry) -> LogKey:
    return entry.lamport_timestamp, entry.message_id.encode(), entry.digest


def _packed(seqs: Iterable[int]) -> str:
    """Sequence numbers as differences: most fit into three digits."""
    ordered = sorted(seqs)
    return ".".join(f"{seq - before:x}" for before, seq in pairwise([0, *ordered]))


def _unpacked(text: str) -> list[int]:
    """The inverse of `_packed`. Raises `Problem` INVALID_CURSOR for other text."""
    try:
        seqs = list(accumulate(int(part, 16) for part in text.split(".") if part))
    except ValueError:
        seqs = [-1]
    if seqs and not 0 <= min(seqs) <= max(seqs) <= _SEQ_MAX:
        raise _not_ours()
    return seqs


def _not_ours() -> Problem:
    return Problem(Code.INVALID_CURSOR, "this token was not made by a store")


# ---- causal order


def causal_order(causes: Sequence[Sequence[int]]) -> list[int]:
    """The numbers 0 … n-1, each after its `causes`; of the candidates the lowest comes next.

    IDs are free strings, so causes can form cycles. A cycle is walked from its lowest number, and the
    reference that closes it is ignored. References outside cycles always count.
    """
    kept = _without_cycles(causes)
    effects: list[list[int]] = [[] for _ in causes]
    for number, its_causes in enumerate(kept):
        for cause in its_causes:
            effects[cause].append(number)
    open_causes = list(map(len, kept))
    ready = [number for number, count in enumerate(open_causes) if not count]
    ordered: list[int] = []
    while ready:
        cause = heappop(ready)
        ordered.append(cause)
        for number in effects[cause]:
            open_causes[number] -= 1
            if not open_causes[number]:
                heappush(ready, number)
    return ordered


def _without_cycles(causes: Sequence[Sequence[int]]) -> list[list[int]]:
    """The causes of each number, without those that close a cycle."""
    kept: list[list[int]] = [[] for _ in causes]
    is_walked = [False] * len(causes)
    for root in range(len(causes)):
        if is_walked[root]:
            continue
        is_walked[root] = True
        path: dict[int, Iterator[int]] = {root: iter(causes[root])}
        while path:
            number, rest = next(reversed(path.items()))
            cause = next(rest, None)
            if cause is None:
                del path[number]
            elif cause not in path:
                kept[number].append(cause)
                if not is_walked[cause]:
                    is_walked[cause] = True
                    path[cause] = iter(causes[cause])
    return kept
