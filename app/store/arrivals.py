"""Arrival order: elements as they were committed, and the chains that recognise a database's history.

Entries and published claims are numbered by counters of their own, and each row stores a running sum
over all rows numbered up to it. The sum is keyed with a secret of the database, so that nobody who
publishes can choose it, and covers number and element, so that order counts. A `Token` is a number
and the sum there. Two databases agree on a token exactly if they share their history up to its number,
except with a probability of 2^-64. So a reader with a token notices a database that was rolled back or
diverged.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Integer,
    Select,
    bindparam,
    func,
    literal_column,
    select,
)

from app.entries import START, Token, Watermark, group_of_claims, group_of_entries
from app.store.database import (
    Database,
    ManyQuery,
    Query,
    Row,
    SqlDialect,
    constant,
)
from app.store.schema import messages, published_claims, retired_content, watermark
from recon.elements import order_of_lamport
from recon.marks import Arrived

DIGEST_BYTES = 32

_KEY_CONTEXT = "sdstore arrival chain v1"
_BLOCK_BYTES = 16
_WORD = np.dtype("<u8")
_NUMBER_MAX = 2**63 - 1
FEW_ROWS_MAX = 256  # rows of the newest pages, which are in memory: 0.2 ms
_ORDER_OFFSET = np.uint64(order_of_lamport(0))
_WORD_MASK = 2**64 - 1

ROWS_PER_LOOK_UP = 16
"""Rows of other channels that are read rather than looking one channel up."""

ROWS_PER_STEP = 4_096
"""Rows of all channels read before others are served: 10 ms."""

CHANNELS_PER_READ = 1_000
"""Channels looked up at once: some milliseconds."""

ROWS_PER_CHANNEL = 128
"""Rows of one channel in one look-up."""

ROWS_ONE_BY_ONE = 4
"""Fewer rows cost less one by one: numpy takes 20 µs for however few."""


# ---- chains


class ArrivalChain:
    """Computes the sums of one database. Use one instance per thread."""

    def __init__(self, secret: bytes) -> None:
        key = blake3(secret, derive_key_context=_KEY_CONTEXT).digest(length=_BLOCK_BYTES)
        # ECB is the block function itself here, the building block of a CBC-MAC.
        self._encrypt = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update  # noqa: S305
        # CBC goes on from the last block it returned, which `_term` takes out again.
        self._chain = Cipher(algorithms.AES(key), modes.CBC(bytes(_BLOCK_BYTES))).encryptor().update
        self._last_block = 0

    def sums(self, before: int, numbers: Sequence[int], elements: Sequence[bytes]) -> list[int]:
        """The sums of consecutive rows (elements of 32 bytes) after the sum `before`, signed.

        A row adds the first 64 bits of AES-128 CBC-MAC over its number and its element, three blocks.
        """
        count = len(numbers)
        if count <= ROWS_ONE_BY_ONE:
            terms_of_few = map(self._term, numbers, elements)
            return [_signed(each) for each in accumulate(terms_of_few, initial=before)][1:]
        words = np.frombuffer(b"".join(elements), dtype=_WORD).reshape(count, 4)
        blocks = np.zeros((count, 2), dtype=_WORD)
        blocks[:, 0] = numbers
        for half in (words[:, :2], words[:, 2:]):
            blocks = self._encrypted(blocks) ^ half
        terms = self._encrypted(blocks)[:, 0]
        # Arrays of unsigned numbers wrap around in silence.
        sums = np.cumsum(terms) + np.array([before], dtype=np.int64).view(_WORD)
        found: list[int] = sums.view(np.int64).tolist()
        return found

    def _term(self, number: int, element: bytes) -> int:
        first = (number ^ self._last_block).to_bytes(_BLOCK_BYTES, "little")
        self._last_block = int.from_bytes(self._chain(first + element)[-_BLOCK_BYTES:], "little")
        return self._last_block & _WORD_MASK

    def _encrypted(self, blocks: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return np.frombuffer(self._encrypt(blocks.tobytes()), dtype=_WORD).reshape(-1, 2)


def _signed(value: int) -> int:
    """The low 64 bits of `value` as BIGINT columns hold them."""
    return ((value + 2**63) & _WORD_MASK) - 2**63


def watermark_of(row: Sequence[int]) -> Watermark:
    """The watermark in a row of (sequence number, sum, claim number, sum)."""
    seq, entry_sum, claim_no, claim_sum = row
    return Watermark(Token(seq, entry_sum), Token(claim_no, claim_sum))


def goes_on_from(read: Watermark, there: Watermark) -> bool:
    """Whether a database's history up to `read` is the one that was read.

    `there`: the database's counters, with its sums at the numbers of `read`.
    """
    return (
        read.entries.number <= there.entries.number
        and read.claims.number <= there.claims.number
        and (read.entries.sum, read.claims.sum) == (there.entries.sum, there.claims.sum)
    )


def last_of(before: Token, numbers: Sequence[int], sums: Sequence[int]) -> Token:
    """The chain's place after rows with these numbers and sums; `before` without rows."""
    return Token(numbers[-1], sums[-1]) if numbers else before


# ---- elements


@dataclass(frozen=True, slots=True)
class ElementColumns:
    """Elements in the order of their commits: orders u64[n], ids u8[n, 32], groups u32[n].

    Entries of channel number c are group 2c, its published claims group 2c + 1. The sums are those of the
    arrival chains at `seq` and `claim_no`; None without rows of that kind.
    """

    orders: NDArray[np.uint64]
    ids: NDArray[np.uint8]
    groups: NDArray[np.uint32]
    seq: int
    claim_no: int
    entry_sum: int | None
    claim_sum: int | None

    def read_up_to(self, before: Watermark) -> Watermark:
        """The places of a reader who had read up to `before` and then these."""
        entries, claims = before
        if self.entry_sum is not None:
            entries = Token(self.seq, self.entry_sum)
        if self.claim_sum is not None:
            claims = Token(self.claim_no, self.claim_sum)
        return Watermark(entries, claims)

    @property
    def next(self) -> tuple[int, int]:
        """The arguments of the next read."""
        return self.seq, self.claim_no


class _Columns(NamedTuple):
    """Rows of one kind as columns; `last` is the place of the last one."""

    orders: NDArray[np.uint64]
    ids: NDArray[np.uint8]
    groups: NDArray[np.uint32]
    last: Token | None


RetiredElements = tuple[NDArray[np.uint64], NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]
"""orders[n], ids[n, 32], the sequence numbers of the entries, and when they were retired (ms)."""


class Arrivals:
    """The arrival order of one open store."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._sql = database.sql

    async def elements_after(
        self,
        seq: int,
        claim_no: int,
        limit: int,
        *,
        entries_end: int = _NUMBER_MAX,
        claims_end: int = _NUMBER_MAX,
    ) -> ElementColumns:
        """Entries after `seq`, and once they end here claims after `claim_no`; up to `limit` of each.

        Empty columns at the end. `claims_end`: the last claim to read. If the caller learned it before, no
        claim comes without its entry, however fast both arrive meanwhile. `entries_end`: about where the
        entries end.
        """
        query = _entry_elements(self._sql)
        rows = await self._reading(seq, entries_end)(query, after=seq, limit=limit)
        entries, claims = _columns(rows, group_of_entries), _columns((), group_of_claims)
        if len(rows) < limit and claim_no < claims_end:
            query = _claim_elements(self._sql)
            read = self._reading(claim_no, claims_end)
            rows = await read(query, after=claim_no, up_to=claims_end, limit=limit)
            claims = _columns(rows, group_of_claims)
        return ElementColumns(
            np.concatenate([entries.orders, claims.orders]),
            np.concatenate([entries.ids, claims.ids]),
            np.concatenate([entries.groups, claims.groups]),
            entries.last.number if entries.last else seq,
            claims.last.number if claims.last else claim_no,
            entries.last.sum if entries.last else None,
            claims.last.sum if claims.last else None,
        )

    async def entries_between(
        self, after: int, up_to: int, channel_nos: Sequence[int] | None, limit: int
    ) -> list[Row]:
        """Rows (number, channel number, Lamport timestamp, digest) of entries that arrived in between.

        In some channels (None: all of them), in no order; `limit` rows at most. The cost follows
        the number of entries in these channels, or in all channels if those are fewer.
        """
        return await self._between(_entries_between, after, up_to, channel_nos, limit)

    async def claims_between(
        self, after: int, up_to: int, channel_nos: Sequence[int] | None, limit: int
    ) -> list[Row]:
        """As `entries_between`, for published claims: (number, channel, Lamport timestamp, claim ID)."""
        return await self._between(_claims_between, after, up_to, channel_nos, limit)

    async def _between(
        self,
        queries: Callable[[SqlDialect], tuple[Query, ManyQuery]],
        after: int,
        up_to: int,
        channel_nos: Sequence[int] | None,
        limit: int,
    ) -> list[Row]:
        found: list[Row] = []
        of_all, of_channels = queries(self._database.sql)
        # A look-up in the index of a channel costs as much as reading some rows of other channels.
        if channel_nos is None or up_to - after <= min(ROWS_PER_LOOK_UP * len(channel_nos), limit):
            wanted = None if channel_nos is None else set(channel_nos)
            while after < up_to and len(found) < limit:
                rows = await self._reading(after, up_to)(of_all, after=after, up_to=up_to)
                found += [row for row in rows if wanted is None or row[1] in wanted]
                after = rows[-1][0] if len(rows) == ROWS_PER_STEP else up_to
                await asyncio.sleep(0)
            return found[:limit]
        asked = [(channel_no, after, up_to) for channel_no in channel_nos]
        while asked and after < up_to and len(found) < limit:
            part, asked = asked[:CHANNELS_PER_READ], asked[CHANNELS_PER_READ:]
            rows = await self._database.each(of_channels, part)
            found += [row[1:] for row in rows]
            counts = Counter(which for which, *_ in rows)
            last = {which: number for which, number, *_ in rows}
            asked += [
                (part[which][0], last[which], up_to)
                for which, count in counts.items()
                if count == ROWS_PER_CHANNEL
            ]
            await asyncio.sleep(0)
        return found[:limit]

    def _reading(self, after: int, end: int) -> Callable[..., Awaitable[list[Row]]]:
        """How to read the rows with these numbers: the newest few are a page or two."""
        return self._database.few if end - after <= FEW_ROWS_MAX else self._database.rows

    async def received_at_ms(self, seq: int) -> int | None:
        """When an entry was first seen; None if it is gone."""
        rows = await self._database.few(_received_at(self._sql), seq_of=seq)
        return int(rows[0][0]) if rows else None

    async def received_at(self, seqs: Sequence[int]) -> list[tuple[int, int]]:
        """When entries were first seen, each with its number, in no order; those that are gone are left out."""
        rows = await self._database.among(_received_at_many(self._sql), list(seqs))
        return [(int(at_ms), int(seq)) for at_ms, seq in rows]

    async def watermark(self) -> tuple[int, int]:
        """The sequence and claim numbers up to which everything is committed."""
        entries, claims = await self.arrived()
        return entries.number, claims.number

    async def arrived(self) -> Watermark:
        """The places of the arrival chains up to which everything is committed."""
        return await self._places(Watermark(Token(_NUMBER_MAX, 0), Token(_NUMBER_MAX, 0)))

    async def holds(self, entries: Token, claims: Token = START) -> bool:
        """Whether this database's history up to these places is the one they were read from.

        False if it was rolled back since, or is another one.
        """
        is_same, _ = await self.follows(Watermark(entries, claims))
        return is_same

    async def follows(self, read: Watermark) -> tuple[bool, tuple[int, int]]:
        """(as `holds`, the numbers up to which everything is committed)."""
        there = await self._places(read)
        return goes_on_from(read, there), (there.entries.number, there.claims.number)

    async def places(self, at: tuple[int, int]) -> Watermark | None:
        """The places of the arrival chains at these numbers; None if they are still to come."""
        entry, claim = at
        there = await self._places(Watermark(Token(entry, 0), Token(claim, 0)))
        if there.entries.number < entry or there.claims.number < claim:
            return None
        return Watermark(Token(entry, there.entries.sum), Token(claim, there.claims.sum))

    async def _places(self, at: Watermark) -> Watermark:
        """The counters, with the sums of the chains at the numbers of `at`."""
        [row] = await self._database.few(
            places_at(self._sql), seq_at=at.entries.number, claim_no_at=at.claims.number
        )
        return watermark_of(row)

    async def retired_elements(self, after_ms: int) -> RetiredElements | None:
        """The elements that were retired after a time, entries and the claims on them; None if there are none."""
        rows = await self._database.rows(_retired_since(self._sql), after=after_ms)
        rows += await self._database.rows(_retired_claims_since(self._sql), after=after_ms)
        if not rows:
            return None
        lamports, ids, seqs, times_ms = zip(*rows, strict=True)
        orders = np.array(lamports, np.int64).view(np.uint64) + _ORDER_OFFSET
        columns = np.frombuffer(b"".join(ids), np.uint8).reshape(-1, DIGEST_BYTES)
        return orders, columns, np.array(seqs, np.int64), np.array(times_ms, np.int64)


def _columns(
    rows: Sequence[Row], group_of: Callable[[NDArray[np.uint32]], NDArray[np.uint32]]
) -> _Columns:
    """Rows of (number, channel number, Lamport timestamp, 32 bytes, sum) as columns."""
    numbers, channel_numbers, lamports, ids, sums = zip(*rows, strict=True) if rows else ((),) * 5
    return _Columns(
        np.array(lamports, dtype=np.int64).view(np.uint64) + _ORDER_OFFSET,
        np.frombuffer(b"".join(ids), dtype=np.uint8).reshape(-1, DIGEST_BYTES),
        group_of(np.array(channel_numbers, dtype=np.uint32)),
        Token(numbers[-1], sums[-1]) if numbers else None,
    )


def arrived_rows(entries: Sequence[Row], claims: Sequence[Row]) -> Arrived:
    """Rows of `Arrivals.entries_between` and `Arrivals.claims_between` as columns."""
    rows = [*entries, *claims]
    numbers, _, lamports, ids = zip(*rows, strict=True) if rows else ((),) * 4
    return Arrived(
        np.array(lamports, dtype=np.int64).view(np.uint64) + _ORDER_OFFSET,
        np.frombuffer(b"".join(ids), dtype=np.uint8).reshape(-1, DIGEST_BYTES),
        np.array(numbers, dtype=np.int64),
        np.arange(len(rows)) >= len(entries),
    )


# ---- statements


@cache
def _entry_elements(sql: SqlDialect) -> Query:
    """The rows of `_columns`, after an entry's number."""
    elements = select(
        messages.c.seq,
        messages.c.channel_no,
        messages.c.lamport,
        messages.c.digest,
        messages.c.arrival_sum,
    )
    after: Any = bindparam("after", type_=BigInteger())
    elements = elements.where(messages.c.seq > after).order_by(messages.c.seq)
    return sql.query(elements.limit(bindparam("limit", type_=Integer())))


@cache
def _claim_elements(sql: SqlDialect) -> Query:
    """The rows of `_columns`, after a claim's number, up to another."""
    claims = published_claims
    claimed = select(
        claims.c.claim_no,
        messages.c.channel_no,
        messages.c.lamport,
        claims.c.element_id,
        claims.c.arrival_sum,
    ).join_from(claims, messages, claims.c.seq == messages.c.seq)
    after: Any = bindparam("after", type_=BigInteger())
    up_to: Any = bindparam("up_to", type_=BigInteger())
    claimed = claimed.where(claims.c.claim_no > after, claims.c.claim_no <= up_to)
    claimed = claimed.order_by(claims.c.claim_no)
    return sql.query(claimed.limit(bindparam("limit", type_=Integer())))


@cache
def _entries_between(sql: SqlDialect) -> tuple[Query, ManyQuery]:
    """The rows of `Arrivals.entries_between`: of all channels, and of each of some."""
    elements = select(messages.c.seq, messages.c.channel_no, messages.c.lamport, messages.c.digest)
    return _between(sql, elements, messages.c.seq, messages.c.channel_no)


@cache
def _claims_between(sql: SqlDialect) -> tuple[Query, ManyQuery]:
    """The rows of `Arrivals.claims_between`: of all channels, and of each of some."""
    claims = published_claims
    claimed = select(
        claims.c.claim_no, claims.c.channel_no, messages.c.lamport, claims.c.element_id
    ).join_from(claims, messages, claims.c.seq == messages.c.seq)
    return _between(sql, claimed, claims.c.claim_no, claims.c.channel_no)


def _between(
    sql: SqlDialect,
    elements: Select[Any],
    number: Column[int],
    channel_no: Column[int],
) -> tuple[Query, ManyQuery]:
    after: Any = bindparam("after", type_=BigInteger())
    up_to: Any = bindparam("up_to", type_=BigInteger())
    of_all = elements.where(number > after, number <= up_to).order_by(number)
    of_channels = sql.each(
        {"channel_no": Integer(), "after": BigInteger(), "up_to": BigInteger()},
        lambda key: (
            elements.where(
                channel_no == key["channel_no"], number > key["after"], number <= key["up_to"]
            )
            .order_by(number)
            .limit(constant(ROWS_PER_CHANNEL))
        ),
    )
    return sql.query(of_all.limit(constant(ROWS_PER_STEP))), of_channels


@cache
def _received_at(sql: SqlDialect) -> Query:
    wanted: Any = bindparam("seq_of", type_=BigInteger())
    return sql.query(select(messages.c.received_at_ms).where(messages.c.seq == wanted))


@cache
def _received_at_many(sql: SqlDialect) -> ManyQuery:
    found = select(messages.c.received_at_ms, messages.c.seq)
    return sql.among(messages.c.seq, found.where)


@cache
def places_at(sql: SqlDialect) -> Query:
    """A row of `watermark_of`: the counters, each with the sum at the argument `<number>_at`."""
    claims = published_claims
    return sql.query(
        select(
            watermark.c.seq,
            _sum_at(messages.c.seq, messages.c.arrival_sum),
            watermark.c.claim_no,
            _sum_at(claims.c.claim_no, claims.c.arrival_sum),
        )
    )


def _sum_at(number: Column[int], arrival_sum: Column[int]) -> ColumnElement[int]:
    """The sum of the last row up to the argument `<number>_at`, 0 without rows."""
    up_to = select(arrival_sum).where(number <= bindparam(f"{number.name}_at", type_=BigInteger()))
    last = up_to.order_by(number.desc()).limit(constant(1))
    return func.coalesce(last.scalar_subquery(), literal_column("0"))


@cache
def _retired_since(sql: SqlDialect) -> Query:
    """(Lamport timestamp, digest, seq, time) of entries that were retired after a time."""
    m, r = messages.c, retired_content.c
    found = select(m.lamport, m.digest, m.seq, r.retired_at_ms)
    found = found.join_from(retired_content, messages, r.seq == m.seq)
    return sql.query(found.where(r.retired_at_ms > bindparam("after", type_=BigInteger())))


@cache
def _retired_claims_since(sql: SqlDialect) -> Query:
    """(Lamport timestamp, element ID, seq, time) of the claims on them."""
    m, r, c = messages.c, retired_content.c, published_claims.c
    found = select(m.lamport, c.element_id, m.seq, r.retired_at_ms)
    found = found.join_from(retired_content, messages, r.seq == m.seq)
    found = found.join(published_claims, c.seq == m.seq)
    return sql.query(found.where(r.retired_at_ms > bindparam("after", type_=BigInteger())))
