"""Gaps: messages that causal histories name and the store lacks. How they are written, and read.

A sync message may be the only witness of a lost last message, so what it names and the store lacks is listed
as well. It costs nothing to send, so these names are bounded by channel.

Histories also give hints for the messages they name; the writer stores those as history claims. Histories
repeat themselves (js-waku's repeat 199 of 200 entries from one message to the next), so the writer
remembers what it settled lately, and each repetition costs one dictionary look-up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, Integer, bindparam, delete, func, select

from app.entries import MetId
from app.server.limits import Limits
from app.store.channelpages import Channels
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
from app.store.entryrows import ID_ARGUMENTS, Position, with_id
from app.store.keys import Keys
from app.store.schema import ByteText, history_claims, messages, met_ids, missing_references

if TYPE_CHECKING:
    from app.store.groupwriter import Group

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
