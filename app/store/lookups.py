"""Look-ups of entries: by message ID, by digest, and many IDs and hints at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any

from sqlalchemy import ColumnElement, Select, bindparam, exists, select

from app.entries import Entry, Outline
from app.server.limits import Limits
from app.store.claims import HintClaims
from app.store.database import (
    Arguments,
    Database,
    Keyed,
    ManyQuery,
    Query,
    Row,
    SqlDialect,
    chunks,
    constant,
)
from app.store.entryrows import (
    FRAME_COLUMNS,
    ID_ARGUMENTS,
    IN_CHANNELS,
    SERVED_FIRST,
    EntryRow,
    FrameReader,
    Keys,
    content_gone,
    entries_by_seq,
    entry_rows,
    prefixes,
    select_entries,
    select_entries_with_frames,
    with_id,
)
from app.store.schema import ByteText, channels, frames, messages, published_claims
from recon.agreement import Interest

LookupKey = str | bytes
"""A message ID, or a hint."""
Match = tuple[LookupKey, int, bytes]
"""(key, sequence number, digest)."""
Answer = tuple[LookupKey, Entry | bytes]
Lost = tuple[LookupKey, bytes]

KEYS_PER_STEP = 256
"""Keys looked up before the size of the reply is checked again."""

_TEXT_MAX = 256
"""Bytes of a channel ID, so at least as many as it has code points (`channel_id_bytes_max`)."""

ROW_BYTES = 512
"""Bytes of a row of a reply beside its key and its frame: hashes in hex, names, punctuation."""


@dataclass(frozen=True, slots=True)
class Found:
    """The entry served by ID, and the digests of all matches, the served one first (capped)."""

    entry: Entry
    variants: tuple[bytes, ...]

    @property
    def variants_count(self) -> int:
        """The number of listed matches."""
        return len(self.variants)


@dataclass(frozen=True, slots=True)
class LookupResult:
    """Answers to many keys (IDs as str, hints as bytes).

    A key with several matches has several rows in `found`. `not_examined` keys did not fit the reply.
    `left_out` are matches whose content is lost. `retired`: the missing keys that have only retired matches.
    """

    found: list[Answer]
    missing: list[LookupKey]
    not_examined: list[LookupKey]
    left_out: list[Lost]
    retired: set[LookupKey]


@dataclass(slots=True)
class Meta:
    """The `meta` of an entry beside its own columns.

    `hints`: published and computed ones, first learned first. `variants`: digests of the other entries
    under the same channel and ID, in the order in which they would be served (capped).
    """

    hints: list[bytes] = field(default_factory=list)
    variants: list[bytes] = field(default_factory=list)

    @property
    def shown_bytes(self) -> int:
        """Bytes in an answer: hexadecimal in quotes."""
        return sum(2 * len(each) + 3 for each in (*self.hints, *self.variants))


class Lookups:
    """Look-ups of one open store. Callers bound limits and numbers of keys."""

    def __init__(
        self,
        database: Database,
        frame_reader: FrameReader,
        keys: Keys,
        claims: HintClaims,
        limits: Limits,
    ) -> None:
        self._database = database
        self._sql = database.sql
        self._frames = frame_reader
        self._keys = keys
        self._claims = claims
        self._variants_max = limits.variants_listed_max

    # ---- by message ID

    async def find(self, message_id: str, channel_id: str | None) -> Found | None:
        """The entry served under an ID: one whose ID verifies, otherwise the first seen.

        Raises `Problem` CONTENT_LOST.
        """
        key = self._keys.of_text(message_id)
        if channel_id is None:
            rows = await self._database.single(_find(self._sql), (key, message_id))
        else:
            query = _find_in_channel(self._sql)
            rows = await self._database.single(query, (key, message_id, channel_id))
        if not rows:
            return None
        first, *others = entry_rows(rows)
        entry = await self._frames.entry(first)
        if not others:
            return Found(entry, (entry.digest,))
        matches = await self._id_matches([message_id], channel_id)
        return Found(entry, tuple(digest for _, _, digest in matches))

    async def find_within(self, message_id: str, part: Interest) -> Found | None:
        """As `find`, as if the store held these channels only. Raises `Problem` CONTENT_LOST."""
        key = self._keys.of_text(message_id)
        listed: list[Row] = [(key, message_id, name) for name in part.channels]
        begun: list[Row] = [(key, message_id, each, _end_of(each)) for each in part.prefixes]
        rows = [
            *await self._database.each(_served_in_channel(self._sql, self._variants_max), listed),
            *await self._database.each(_served_below(self._sql, self._variants_max), begun),
        ]
        if not rows:
            return None
        served = sorted(row[1:] for row in rows)
        found = await self.find(message_id, served[0][3])
        variants = tuple(digest for _, _, digest, _ in served[: self._variants_max])
        return None if found is None else Found(found.entry, variants)

    async def _id_matches(self, ids: Sequence[str], channel_id: str | None) -> list[Match]:
        keyed: list[Row] = [(self._keys.of_text(each), each) for each in ids]
        query = _matches(self._sql, self._variants_max)
        if channel_id is not None:
            query = _matches_in_channel(self._sql, self._variants_max)
            keyed = [(*row, channel_id) for row in keyed]
        rows = await self._database.each(query, keyed)
        return [(ids[number], seq, digest) for number, seq, digest in rows]

    async def digests_of(self, message_id: str, channel_id: str | None) -> list[bytes]:
        """The digests of all entries under an ID, in all channels or in one."""
        key = self._keys.of_text(message_id)
        rows = await self._database.rows(_all_with_id(self._sql), id_key=key, message_id=message_id)
        return [digest for digest, name in rows if channel_id in (None, name)]

    # ---- by digest

    async def entry(self, digest: bytes) -> Entry | None:
        """The entry with a digest. Raises `Problem` CONTENT_LOST, RETIRED."""
        rows = await self.rows([digest])
        entries = await self._frames.entries(rows)
        if rows and not entries:
            raise content_gone(rows[0])
        return entries[0] if entries else None

    async def by_digest(self, digests: Sequence[bytes]) -> list[Entry]:
        """The known entries that can be read, in the order asked."""
        return await self._frames.entries(await self.rows(digests))

    async def outlines(self, digests: Sequence[bytes]) -> dict[bytes, Outline]:
        """Channel, ID and Lamport timestamp of the known entries, lost or not. Reads no frame."""
        wanted = set(digests)
        found = await self._database.among(_rows_by_digest(self._sql), prefixes(wanted))
        return {
            row.digest: Outline(row.channel_id, row.message_id, row.lamport)
            for row in entry_rows(found)
            if row.digest in wanted
        }

    async def frame_sizes(self, digests: Sequence[bytes]) -> dict[bytes, int]:
        """Bytes of the frames of the known entries."""
        return {row.digest: row.frame_bytes for row in await self.rows(digests)}

    async def rows(self, digests: Sequence[bytes]) -> list[EntryRow]:
        """The rows of the known entries, in the order asked."""
        found = await self._database.among(_entries_by_digest(self._sql), prefixes(digests))
        rows = {row.digest: row for row in entry_rows(found)}
        return [rows[digest] for digest in dict.fromkeys(digests) if digest in rows]

    # ---- many keys

    async def lookup(
        self,
        ids: Sequence[str],
        hints: Sequence[bytes],
        channel_id: str | None,
        *,
        presence_only: bool,
        bytes_max: int,
    ) -> LookupResult:
        """The matches of each key, until the rows of the answer pass `bytes_max`."""
        result = LookupResult([], [], [], [], set())
        room = bytes_max
        asked: list[LookupKey] = [*dict.fromkeys(ids), *dict.fromkeys(hints)]
        for step in chunks(asked, KEYS_PER_STEP):
            if room <= 0:
                result.not_examined.extend(step)
                continue
            matches, cut = await self._matches_of(step, channel_id)
            rows = {} if presence_only else await self._rows_of(matches)
            sizes = [_row_bytes(key, rows.get(seq)) for key, seq, _ in matches]
            count = _fitting_count(matches, sizes, room, is_first=not result.found)
            taken = matches[:count]
            if presence_only:
                found, lost = await self._present(taken)
            else:
                found, lost = await self._loaded(taken, rows)
            if lost and self._frames.has_retired:
                gone = await self._frames.retired_among([digest for _, digest in lost])
                result.retired.update(key for key, digest in lost if digest in gone)
                lost = [each for each in lost if each[1] not in gone]
            not_fitting = cut.union(key for key, _, _ in matches[count:])
            answered = {key for key, _ in found} | {key for key, _ in lost}
            result.found.extend(found)
            result.left_out.extend(lost)
            for key in step:
                if key not in answered:
                    (result.not_examined if key in not_fitting else result.missing).append(key)
            room = room - sum(sizes) if count == len(matches) else 0
        result.retired.intersection_update(result.missing)
        return result

    async def _matches_of(
        self, step: Sequence[LookupKey], channel_id: str | None
    ) -> tuple[list[Match], set[LookupKey]]:
        """Matches, and the hints with claims that were not examined."""
        ids = [key for key in step if isinstance(key, str)]
        hints = [key for key in step if isinstance(key, bytes)]
        found = await self._id_matches(ids, channel_id) if ids else []
        if not hints:
            return found, set()
        by_hint = await self._claims.matches(hints, channel_id)
        return found + by_hint.found, {*by_hint.cut}

    async def _rows_of(self, matches: Sequence[Match]) -> dict[int, EntryRow]:
        seqs = list({seq for _, seq, _ in matches})
        rows = await self._database.among(entries_by_seq(self._sql), seqs)
        return {row.seq: row for row in entry_rows(rows)}

    async def _present(self, matches: Sequence[Match]) -> tuple[list[Answer], list[Lost]]:
        """The digests of matches, those of lost and retired content apart."""
        gone = self._frames.lost
        if matches and self._frames.has_retired:
            retired = await self._frames.retired_among([digest for _, _, digest in matches])
            gone = gone.union(seq for _, seq, digest in matches if digest in retired)
        found: list[Answer] = [(key, digest) for key, seq, digest in matches if seq not in gone]
        return found, [(key, digest) for key, seq, digest in matches if seq in gone]

    async def _loaded(
        self, matches: Sequence[Match], rows: Mapping[int, EntryRow]
    ) -> tuple[list[Answer], list[Lost]]:
        """The entries of matches; those that cannot be read are left out: other nodes may have them."""
        wanted = [rows[seq] for seq in dict.fromkeys(seq for _, seq, _ in matches)]
        entries = {entry.seq: entry for entry in await self._frames.entries(wanted)}
        found: list[Answer] = [(key, entries[seq]) for key, seq, _ in matches if seq in entries]
        return found, [(key, digest) for key, seq, digest in matches if seq not in entries]

    # ---- hints and variants

    async def meta_of(self, entries: Sequence[Entry]) -> list[Meta]:
        """Hints and variants of each of these entries."""
        rows = await self._database.among(_meta(self._sql), [each.seq for each in entries])
        found: dict[int, Meta] = {}
        sharing: set[int] = set()
        for seq, shares_id, hint, _ in sorted(rows, key=lambda row: row[3] or 0):
            meta = found.setdefault(seq, Meta())
            if hint is not None:
                meta.hints.append(hint)
            if shares_id:
                sharing.add(seq)
        if sharing:
            await self._add_variants([each for each in entries if each.seq in sharing], found)
        return [found[each.seq] for each in entries]

    async def _add_variants(self, entries: Sequence[Entry], found: dict[int, Meta]) -> None:
        ids = list(dict.fromkeys((each.message_id, each.channel_id) for each in entries))
        asked = [(self._keys.of_text(message_id), message_id, name) for message_id, name in ids]
        digests: dict[tuple[str, str], list[bytes]] = {each: [] for each in ids}
        query = _matches_in_channel(self._sql, self._variants_max)
        for which, _, digest in await self._database.each(query, asked):
            digests[ids[which]].append(digest)
        for each in entries:
            same_id = digests[each.message_id, each.channel_id]
            found[each.seq].variants = [digest for digest in same_id if digest != each.digest]


def _row_bytes(key: LookupKey, row: EntryRow | None) -> int:
    return ROW_BYTES + len(key) + (0 if row is None else row.frame_bytes)


def _fitting_count(
    matches: Sequence[Match], sizes: Sequence[int], room: int, *, is_first: bool
) -> int:
    """The number of matches that fit; splits those of one key only if they are a whole reply."""
    fitting = whole = sum(1 for size in accumulate(sizes) if size <= room)
    while 0 < whole < len(matches) and matches[whole - 1][0] == matches[whole][0]:
        whole -= 1
    if is_first and not whole:
        return min(len(matches), max(1, fitting))
    return whole


# ---- statements

_IN_CHANNEL_ARGUMENTS: Arguments = {**ID_ARGUMENTS, "channel_id": ByteText}


def _with_id_in_channel(key: Keyed) -> ColumnElement[bool]:
    return with_id(key) & (channels.c.channel_id == key["channel_id"])


@cache
def _find(sql: SqlDialect) -> ManyQuery:
    return sql.each(ID_ARGUMENTS, lambda key: _select_served(with_id(key)))


@cache
def _find_in_channel(sql: SqlDialect) -> ManyQuery:
    return sql.each(_IN_CHANNEL_ARGUMENTS, lambda key: _select_served(_with_id_in_channel(key)))


def _select_served(condition: ColumnElement[bool]) -> Select[Any]:
    # Two rows: the served entry, and whether there are others to list.
    served = select_entries().add_columns(*FRAME_COLUMNS).where(condition)
    # The outer join finds an entry whose frame is gone, so that its second copy is tried.
    served = served.outerjoin(frames, frames.c.seq == messages.c.seq)
    return served.order_by(*SERVED_FIRST).limit(constant(2))


@cache
def _served_in_channel(sql: SqlDialect, variants_max: int) -> ManyQuery:
    """(unverified, seq, digest, channel) of the entries under an ID in a channel."""
    return sql.each(
        _IN_CHANNEL_ARGUMENTS, lambda key: _select_found(_with_id_in_channel(key), variants_max)
    )


@cache
def _served_below(sql: SqlDialect, variants_max: int) -> ManyQuery:
    """(unverified, seq, digest, channel) of the entries under an ID in the channels of a range."""
    return sql.each(
        {**ID_ARGUMENTS, "begin": ByteText, "end": ByteText},
        lambda key: _select_found(
            with_id(key)
            & (channels.c.channel_id >= key["begin"])
            & (channels.c.channel_id < key["end"]),
            variants_max,
        ),
    )


def _select_found(condition: ColumnElement[bool], variants_max: int) -> Select[Any]:
    columns = (messages.c.unverified, messages.c.seq, messages.c.digest, channels.c.channel_id)
    found = select(*columns).join_from(messages, channels, IN_CHANNELS)
    return found.where(condition).order_by(*SERVED_FIRST).limit(constant(variants_max))


def _end_of(prefix: str) -> str:
    """The first text that is greater than all texts with this prefix."""
    kept = prefix.rstrip("\U0010ffff")
    if not kept:
        return "\U0010ffff" * _TEXT_MAX
    # There is no UTF-8 for the code points of surrogates.
    following = ord(kept[-1]) + 1
    return kept[:-1] + chr(0xE000 if following == 0xD800 else following)


@cache
def _matches(sql: SqlDialect, variants_max: int) -> ManyQuery:
    """(seq, digest) of the entries under an ID."""
    return sql.each(ID_ARGUMENTS, lambda key: _select_matches(with_id(key), variants_max))


@cache
def _matches_in_channel(sql: SqlDialect, variants_max: int) -> ManyQuery:
    """(seq, digest) of the entries under an ID in a channel."""
    return sql.each(
        _IN_CHANNEL_ARGUMENTS,
        lambda key: _select_matches(_with_id_in_channel(key), variants_max),
    )


def _select_matches(condition: ColumnElement[bool], variants_max: int) -> Select[Any]:
    found = select_entries().with_only_columns(messages.c.seq, messages.c.digest).where(condition)
    return found.order_by(*SERVED_FIRST).limit(constant(variants_max))


@cache
def _all_with_id(sql: SqlDialect) -> Query:
    """(digest, channel) of all entries under an ID."""
    key: Any = {name: bindparam(name, type_=kind) for name, kind in ID_ARGUMENTS.items()}
    found = select(messages.c.digest, channels.c.channel_id).join_from(
        messages, channels, IN_CHANNELS
    )
    return sql.query(found.where(with_id(key)).order_by(*SERVED_FIRST))


@cache
def _entries_by_digest(sql: SqlDialect) -> ManyQuery:
    """`EntryRow`s with small frames, by digest prefix."""
    return sql.among(
        messages.c.digest_prefix, lambda among: select_entries_with_frames().where(among)
    )


@cache
def _rows_by_digest(sql: SqlDialect) -> ManyQuery:
    """`EntryRow`s without frames, by digest prefix."""
    return sql.among(messages.c.digest_prefix, lambda among: select_entries().where(among))


@cache
def _meta(sql: SqlDialect) -> ManyQuery:
    """(seq, whether others have its ID, hint, claim number): a row for each claim, at least one."""
    other, claims = messages.alias("other"), published_claims
    # By key alone, which the index holds: the variants themselves are looked up in full.
    shares_id = exists().where(
        other.c.id_key == messages.c.id_key,
        other.c.channel_no == messages.c.channel_no,
        other.c.seq != messages.c.seq,
    )
    found = select(messages.c.seq, shares_id, claims.c.hint, claims.c.claim_no)
    found = found.select_from(messages.outerjoin(claims, claims.c.seq == messages.c.seq))
    return sql.among(messages.c.seq, found.where)
