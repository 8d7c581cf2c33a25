"""Hint claims: the entries that a retrieval hint can lead to, and the hints of an entry.

Anyone can make any claim, so each look-up examines a bounded number of claims and returns the place to
resume; a look-up within a channel counts only claims of that channel. Candidates are ranked by the source
of the claim. Ranks 0 and 1 are claims published with an entry. Rank 2 are claims of histories about a channel
and message ID, which lead to every entry with that ID.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import itemgetter
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Integer,
    LargeBinary,
    bindparam,
    select,
    true,
    tuple_,
)

from app.entries import Claim, ClaimSource, Entry
from app.server.limits import Limits
from app.store.channelpages import Channels
from app.store.database import (
    Arguments,
    Database,
    Keyed,
    ManyQuery,
    Query,
    SqlDialect,
    constant,
)
from app.store.entryrows import (
    IN_CHANNELS,
    PREFIX_BYTES,
    EntryRow,
    FrameReader,
    Keys,
    LeftOut,
    Position,
    entries_numbered,
    fitting_count,
    left_out,
    prefixes,
    select_entries,
    select_entries_with_frames,
)
from app.store.schema import ByteText, channels, history_claims, messages, published_claims

HISTORY = int(ClaimSource.HISTORY)
_START = (-1, 0, 0)
_LAST_SEQ = 2**63 - 1


@dataclass(frozen=True, slots=True)
class HintPage:
    """Ranked candidates. Under claim spam a page can be short or empty without being the last."""

    entries: list[Entry]
    next: Position | None
    left_out: tuple[LeftOut, ...] = ()


class HintMatches(NamedTuple):
    """`found`: (hint, sequence number, digest); `cut`: hints with claims that were not examined."""

    found: list[tuple[str | bytes, int, bytes]]
    cut: set[bytes]


class _HistoryClaim(NamedTuple):
    """A claim of a history, on one of the hints of a look-up."""

    which: int
    claim_no: int
    channel_no: int
    id_key: int
    message_id: str


@dataclass(slots=True)
class _Candidates:
    """Positions and rows of a hint's candidate entries.

    `resume` is set if not all were examined; `cut_in` is the look-up of histories that was cut.
    """

    found: list[tuple[Position, EntryRow]] = field(default_factory=list)
    resume: Position | None = None
    cut_in: int | None = None


class HintClaims:
    """The hint claims of one open store."""

    def __init__(
        self,
        database: Database,
        frame_reader: FrameReader,
        keys: Keys,
        channels: Channels,
        limits: Limits,
    ) -> None:
        self._database = database
        self._sql = database.sql
        self._frames = frame_reader
        self._keys = keys
        self._channels = channels
        self._limits = limits

    # ---- entries of a hint

    async def page(
        self,
        hint: bytes,
        channel_id: str | None,
        limit: int,
        after: Position | None = None,
        *,
        channel_nos: Sequence[int] | None = None,
    ) -> HintPage:
        """The entries that a hint can lead to: by rank, then first seen first.

        `channel_nos`, ascending: as if the store held no other channels than these.
        """
        if channel_nos is None or channel_id is not None:
            channel_nos = await self._numbers_of(channel_id)
        (candidates,) = await self._gather([hint], channel_nos, after, with_frames=True)
        found = candidates.found
        rows = [row for _, row in found]
        count = min(limit, fitting_count(rows, self._limits.reply_bytes_max))
        resume = found[count - 1][0] if count < len(found) else candidates.resume
        read = await self._frames.read(rows[:count])
        return HintPage(read.entries, resume, left_out(rows[:count], read))

    async def matches(self, hints: Sequence[bytes], channel_id: str | None) -> HintMatches:
        """The best candidates of each hint."""
        most = self._limits.variants_listed_max
        channel_nos = await self._numbers_of(channel_id)
        gathered = await self._gather(hints, channel_nos, None, with_frames=False)
        matches: list[tuple[str | bytes, int, bytes]] = [
            (hint, row.seq, row.digest)
            for hint, candidates in zip(hints, gathered, strict=True)
            for _, row in candidates.found[:most]
        ]
        pairs = zip(hints, gathered, strict=True)
        return HintMatches(matches, {hint for hint, its in pairs if its.resume is not None})

    async def _numbers_of(self, channel_id: str | None) -> Sequence[int] | None:
        """The number of a channel, none if it is not here; None for None: every channel."""
        if channel_id is None:
            return None
        channel = await self._channels.named(channel_id)
        return () if channel is None else (channel.channel_no,)

    async def _gather(
        self,
        hints: Sequence[bytes],
        channel_nos: Sequence[int] | None,
        after: Position | None,
        *,
        with_frames: bool,
    ) -> list[_Candidates]:
        gathered = [_Candidates() for _ in hints]
        rank, number, seq = (int(part) for part in after or _START)
        keyed = [(self._keys.of_bytes(hint), hint) for hint in hints]
        if rank < HISTORY:
            await self._add_published(gathered, keyed, channel_nos, (rank, number), with_frames)
            number = seq = 0
        await self._add_history(gathered, keyed, channel_nos, (number, seq))
        return gathered

    def _share(self, channel_nos: Sequence[int] | None) -> int:
        """Claims examined in each of these channels: a power of two, for few different statements.

        Two at least: a look-up of histories begins with the claim that the last one ended with.
        """
        most = self._limits.hint_candidates_max
        if channel_nos is None or len(channel_nos) < 2:
            return most
        return 1 << (max(2, most // len(channel_nos)).bit_length() - 1)

    async def _add_published(
        self,
        gathered: list[_Candidates],
        keyed: Sequence[tuple[int, bytes]],
        channel_nos: Sequence[int] | None,
        after: tuple[int, int],
        with_frames: bool,
    ) -> None:
        parts = [()] if channel_nos is None else [(each,) for each in channel_nos]
        asked = [(*key, *part, *after) for key in keyed for part in parts]
        share = self._share(channel_nos)
        query = _published_by_hint(self._sql, share, channel_nos is not None, with_frames)
        rows = await self._database.each(query, asked)
        examined = Counter(row[0] for row in rows)
        # The last place that was examined in each part that may have more.
        ends: dict[int, Position] = {}
        for which, *columns, source in rows:
            row = EntryRow(*columns)
            position = source, row.seq, 0
            gathered[which // len(parts)].found.append((position, row))
            if examined[which] == share:
                ends[which] = position
        for candidates, mine in zip(gathered, _parts_of(ends, len(parts), len(keyed)), strict=True):
            candidates.found.sort(key=itemgetter(0))
            if mine:
                candidates.resume = resume = min(mine)
                candidates.found = [each for each in candidates.found if each[0] <= resume]

    async def _add_history(
        self,
        gathered: list[_Candidates],
        keyed: Sequence[tuple[int, bytes]],
        channel_nos: Sequence[int] | None,
        after: tuple[int, int],
    ) -> None:
        first = await self._channel_of(after[0])
        parts = [(first, after[0])]
        if channel_nos is not None:
            parts = [(each, after[0] * (each == first)) for each in channel_nos if each >= first]
        if not parts:
            return
        share = self._share(channel_nos)
        query = _history_by_hint(self._sql, share, channel_nos is not None)
        asked = [(*key, *part) for key in keyed for part in parts]
        rows = await self._database.each(query, asked)
        counts = Counter(which for which, *_ in rows)
        claims: list[_HistoryClaim] = []
        for which, *columns in rows:
            # Nothing behind a channel that may have more.
            candidates = gathered[which // len(parts)]
            if candidates.resume is not None and candidates.cut_in != which:
                continue
            claim = _HistoryClaim(which // len(parts), *columns)
            claims.append(claim)
            if counts[which] == share:
                candidates.resume = (HISTORY, claim.claim_no, _LAST_SEQ)
                candidates.cut_in = which
        if not claims:
            return
        entries = await self._entries_of(claims)
        published = await self._published([row.seq for _, row in entries])
        for claim, row in entries:
            hint = keyed[claim.which][1]
            is_new = claim.claim_no != after[0] or row.seq > after[1]
            if is_new and (row.seq, hint) not in published:
                position = (HISTORY, claim.claim_no, row.seq)
                gathered[claim.which].found.append((position, row))

    async def _channel_of(self, claim_no: int) -> int:
        """The channel of a history claim; claims are read in the order of channels and numbers."""
        query = _channel_of_history_claim(self._sql)
        rows = await self._database.rows(query, claim_no=claim_no) if claim_no else []
        return int(rows[0][0]) if rows else 0

    async def _entries_of(
        self, claims: Sequence[_HistoryClaim]
    ) -> list[tuple[_HistoryClaim, EntryRow]]:
        """The entries that history claims mean, in the order of the claims, then of the entries."""
        asked = [(claim.id_key, claim.message_id, claim.channel_no) for claim in claims]
        query = entries_numbered(self._sql, self._limits.variants_listed_max)
        rows = await self._database.each(query, asked)
        return [(claims[which], EntryRow(*columns)) for which, *columns in sorted(rows)]

    async def _published(self, seqs: Sequence[int]) -> set[tuple[int, bytes]]:
        rows = await self._database.among(claims_by_seq(self._sql), list(set(seqs)))
        return {(seq, hint) for seq, _, hint, *_ in rows}

    # ---- hints of entries

    async def of(
        self, digests: Sequence[bytes], claims_end: int | None = None
    ) -> dict[bytes, list[Claim]]:
        """Published and computed claims of entries, first learned first, without entries that have none.

        `claims_end`: the number of the last claim that counts; None: all.
        """
        if len(digests) == 1 and claims_end is None:
            found = await self._of_one(digests[0])
            return {digests[0]: found} if found else {}
        rows = await self._database.among(_seqs_by_digest(self._sql), prefixes(digests))
        wanted = set(digests)
        seqs = {seq: digest for digest, seq in rows if digest in wanted}
        return await self._by_seq(seqs, claims_end)

    async def of_entries(
        self, entries: Sequence[Entry], claims_end: int | None = None
    ) -> dict[bytes, list[Claim]]:
        """As `of`, for entries that were read: by their numbers, without a look-up of their digests."""
        return await self._by_seq({entry.seq: entry.digest for entry in entries}, claims_end)

    async def _by_seq(
        self, digest_of: dict[int, bytes], claims_end: int | None
    ) -> dict[bytes, list[Claim]]:
        claims: dict[bytes, list[Claim]] = {}
        rows = await self._database.among(claims_by_seq(self._sql), list(digest_of))
        for seq, source, hint, number, _ in sorted(rows, key=lambda row: int(row[3])):
            if hint and (claims_end is None or number <= claims_end):
                claims.setdefault(digest_of[seq], []).append(Claim(hint, ClaimSource(source)))
        return claims

    async def _of_one(self, digest: bytes) -> list[Claim]:
        asked = (digest[:PREFIX_BYTES], digest)
        query = _claims_by_digest(self._sql, self._limits.hint_claims_with_peers_max)
        rows = await self._database.single(query, asked)
        return [Claim(hint, ClaimSource(source)) for source, hint in rows if hint]

    async def by_element(self, ids: Sequence[bytes]) -> dict[bytes, tuple[bytes, bytes]]:
        """(digest, hint) of the known claim elements. The hint on a retired entry is empty."""
        rows = await self._database.among(_claims_by_element(self._sql), prefixes(ids))
        wanted = set(ids)
        return {element: (digest, hint) for element, digest, hint in rows if element in wanted}


def _parts_of(ends: dict[int, Position], parts: int, hints: int) -> list[list[Position]]:
    """The places of the look-ups of each hint, which has so many `parts`."""
    found: list[list[Position]] = [[] for _ in range(hints)]
    for which, position in ends.items():
        found[which // parts].append(position)
    return found


# ---- statements


@cache
def _published_by_hint(
    sql: SqlDialect,
    candidates_max: int,
    in_channel: bool,
    with_frames: bool,
) -> ManyQuery:
    """The columns of `EntryRow` and the claim's source, by hint, after (source, sequence number).

    `in_channel`: within one channel, whose number comes before the source in the arguments.
    """
    claims = published_claims
    claimed = claims.join(messages, claims.c.seq == messages.c.seq).join(channels, IN_CHANNELS)
    entries = select_entries_with_frames(claimed) if with_frames else select_entries(claimed)
    found = entries.add_columns(claims.c.source)
    arguments: Arguments = {
        "hint_key": BigInteger(),
        "hint": LargeBinary(),
        **({"channel_no": Integer()} if in_channel else {}),
        "rank": BigInteger(),
        "number": BigInteger(),
    }
    return sql.each(
        arguments,
        lambda key: (
            found.where(
                claims.c.hint_key == key["hint_key"],
                claims.c.hint == key["hint"],
                claims.c.channel_no == key["channel_no"] if in_channel else true(),
                tuple_(claims.c.source, claims.c.seq) > tuple_(key["rank"], key["number"]),
            )
            .order_by(claims.c.source, claims.c.seq)
            .limit(constant(candidates_max))
        ),
    )


@cache
def _history_by_hint(sql: SqlDialect, candidates_max: int, in_channel: bool) -> ManyQuery:
    """`_HistoryClaim`s by hint, from (channel number, claim number) on, in that order.

    `in_channel`: of that channel only.
    """
    history = history_claims
    told = select(history.c.claim_no, history.c.channel_no, history.c.id_key, history.c.message_id)

    def behind(key: Keyed) -> ColumnElement[bool]:
        if in_channel:
            return (history.c.channel_no == key["channel_no"]) & (
                history.c.claim_no >= key["number"]
            )
        place = tuple_(history.c.channel_no, history.c.claim_no)
        return place >= tuple_(key["channel_no"], key["number"])

    return sql.each(
        {
            "hint_key": BigInteger(),
            "hint": LargeBinary(),
            "channel_no": Integer(),
            "number": BigInteger(),
        },
        lambda key: (
            told.where(
                history.c.hint_key == key["hint_key"],
                history.c.hint == key["hint"],
                behind(key),
            )
            .order_by(history.c.channel_no, history.c.claim_no)
            .limit(constant(candidates_max))
        ),
    )


@cache
def _channel_of_history_claim(sql: SqlDialect) -> Query:
    history = history_claims
    number: Any = bindparam("claim_no", type_=BigInteger())
    return sql.query(select(history.c.channel_no).where(history.c.claim_no == number))


@cache
def history_hints(sql: SqlDialect, claims_max: int) -> ManyQuery:
    """The hints that histories give for (ID key, channel number, message ID), first claimed first."""
    history = history_claims
    arguments: Arguments = {
        "id_key": BigInteger(),
        "channel_no": Integer(),
        "message_id": ByteText,
    }
    return sql.each(
        arguments,
        lambda key: (
            select(history.c.hint)
            .where(
                history.c.id_key == key["id_key"],
                history.c.channel_no == key["channel_no"],
                history.c.message_id == key["message_id"],
            )
            .order_by(history.c.claim_no)
            .limit(constant(claims_max))
        ),
    )


@cache
def claims_by_seq(sql: SqlDialect) -> ManyQuery:
    """(seq, source, hint, claim number, element) of the published claims on entries."""
    claims = published_claims.c
    found = select(claims.seq, claims.source, claims.hint, claims.claim_no, claims.element_id)
    return sql.among(claims.seq, found.where)


@cache
def _seqs_by_digest(sql: SqlDialect) -> ManyQuery:
    """(digest, seq) of entries, by digest prefix."""
    return sql.among(messages.c.digest_prefix, select(messages.c.digest, messages.c.seq).where)


@cache
def _claims_by_digest(sql: SqlDialect, claims_max: int) -> ManyQuery:
    """(source, hint) of the published claims on an entry, first learned first."""
    claims = published_claims
    found = select(claims.c.source, claims.c.hint)
    found = found.join_from(messages, claims, claims.c.seq == messages.c.seq)
    return sql.each(
        {"prefix": LargeBinary(), "digest": LargeBinary()},
        lambda key: (
            found.where(
                messages.c.digest_prefix == key["prefix"], messages.c.digest == key["digest"]
            )
            .order_by(claims.c.claim_no)
            .limit(constant(claims_max))
        ),
    )


@cache
def _claims_by_element(sql: SqlDialect) -> ManyQuery:
    """(element, digest, hint) of published claims, by the prefix of their elements."""
    claims = published_claims
    found = select(claims.c.element_id, messages.c.digest, claims.c.hint)
    found = found.join_from(claims, messages, claims.c.seq == messages.c.seq)
    return sql.among(claims.c.element_prefix, found.where)
