"""What the reading side runs, in Core, compiled once for one database."""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Integer,
    LargeBinary,
    Select,
    Table,
    bindparam,
    exists,
    func,
    literal_column,
    select,
    true,
    tuple_,
)

from app.limits import Limits
from app.store.claimstatements import (
    channel_of_history_claim,
    claims_by_digest,
    claims_by_element,
    claims_by_seq,
    history_by_hint,
    history_hints,
    published_by_hint,
)
from app.store.database import Arguments, Keyed, ManyQuery, Query, SqlDialect, constant
from app.store.entryselects import (
    FRAME_COLUMNS,
    IN_CHANNELS,
    entries,
    entries_with_frames,
    with_id,
)
from app.store.schema import (
    FORMER_REFERENCE,
    ByteText,
    channels,
    frame_references,
    frames,
    lost_content,
    messages,
    met_ids,
    missing_references,
    published_claims,
    refused_digests,
    watermark,
)

_SERVED_FIRST = (messages.c.unverified, messages.c.seq)
_ID_ARGUMENTS: Arguments = {"id_key": BigInteger(), "message_id": ByteText}
_LOG_ORDER = (
    messages.c.lamport,
    messages.c.message_id,
    messages.c.digest_prefix,
    messages.c.digest,
)


class ReadStatements:
    """Compiled reading statements."""

    def __init__(self, sql: SqlDialect, limits: Limits) -> None:
        self._sql = sql
        self._variants_max = limits.variants_listed_max
        self._compile_entries()
        self._compile_channels()
        self._compile_claims(limits)
        self._compile_elements()
        self._compile_lost()
        self.refused = refused_among(sql)

    def _compile_entries(self) -> None:
        sql = self._sql
        in_channel: Arguments = {**_ID_ARGUMENTS, "channel_id": ByteText}
        self.find = sql.each(_ID_ARGUMENTS, lambda key: self._find(with_id(key)))
        self.find_in_channel = sql.each(
            in_channel, lambda key: self._find(with_id(key) & _in_channel(key))
        )
        self.served_in_channel = sql.each(
            in_channel, lambda key: self._served(with_id(key) & _in_channel(key))
        )
        self.matches = sql.each(_ID_ARGUMENTS, lambda key: self._matches(with_id(key)))
        self.matches_in_channel = sql.each(
            in_channel, lambda key: self._matches(with_id(key) & _in_channel(key))
        )
        self.entries_numbered = sql.each(
            {**_ID_ARGUMENTS, "channel_no": Integer()},
            lambda key: (
                entries()
                .where(with_id(key), messages.c.channel_no == key["channel_no"])
                .order_by(*_SERVED_FIRST)
                .limit(constant(self._variants_max))
            ),
        )
        self.entries_by_seq = sql.among(messages.c.seq, lambda among: entries().where(among))
        self.entries_by_digest = sql.among(
            messages.c.digest_prefix, lambda among: entries_with_frames().where(among)
        )
        self.rows_by_digest = sql.among(
            messages.c.digest_prefix, lambda among: entries().where(among)
        )
        digests = select(messages.c.digest, messages.c.seq)
        self.seqs_by_digest = sql.among(messages.c.digest_prefix, digests.where)
        self.frames = stored_frames(sql, frames)
        self.references = stored_frames(sql, frame_references)
        self.references_in_doubt = sql.query(_references_in_doubt())

    def _find(self, condition: ColumnElement[bool]) -> Select[Any]:
        # Two rows: the one that is served, and whether there are others to be listed.
        served = entries().add_columns(*FRAME_COLUMNS).where(condition)
        # An entry whose frame is gone is found all the same, and its second copy looked for.
        served = served.outerjoin(frames, frames.c.seq == messages.c.seq)
        return served.order_by(*_SERVED_FIRST).limit(constant(2))

    def _served(self, condition: ColumnElement[bool]) -> Select[Any]:
        found = select(messages.c.unverified, messages.c.seq, messages.c.digest)
        found = found.join_from(messages, channels, IN_CHANNELS).where(condition)
        return found.order_by(*_SERVED_FIRST).limit(constant(self._variants_max))

    def _matches(self, condition: ColumnElement[bool]) -> Select[Any]:
        found = entries().with_only_columns(messages.c.seq, messages.c.digest).where(condition)
        return found.order_by(*_SERVED_FIRST).limit(constant(self._variants_max))

    def _compile_channels(self) -> None:
        sql, limit = self._sql, bindparam("limit", type_=Integer())
        listed = select(
            channels.c.channel_id,
            channels.c.channel_no,
            channels.c.count,
            channels.c.lamport_first,
            channels.c.lamport_last,
        )
        self.channel = sql.query(listed.where(channels.c.channel_id == bindparam("channel_id")))
        by_name = listed.where(channels.c.channel_id >= bindparam("first"))
        self.channels = sql.query(by_name.order_by(channels.c.channel_id).limit(limit))
        numbered = listed.where(channels.c.channel_no > bindparam("after"))
        self.channels_numbered = sql.query(numbered.order_by(channels.c.channel_no).limit(limit))
        missing = select(missing_references.c.message_id).where(
            missing_references.c.channel_no == bindparam("channel_no"),
            missing_references.c.message_id > bindparam("after"),
        )
        self.gaps = sql.query(missing.order_by(missing_references.c.message_id).limit(limit))
        self.is_met = met_named(sql)

    def _compile_claims(self, limits: Limits) -> None:
        sql = self._sql
        # By whether one channel is asked for.
        self.published_by_hint = {
            is_one: published_by_hint(sql, limits, entries, in_channel=is_one)
            for is_one in (False, True)
        }
        self.published_with_frames = {
            is_one: published_by_hint(sql, limits, entries_with_frames, in_channel=is_one)
            for is_one in (False, True)
        }
        self.history_by_hint = {
            is_one: history_by_hint(sql, limits, in_channel=is_one) for is_one in (False, True)
        }
        self.channel_of_history_claim = channel_of_history_claim(sql)
        self.history_hints = history_hints(sql, limits)
        self.claims_by_seq = claims_by_seq(sql)
        self.claims_by_digest = claims_by_digest(sql, limits)
        self.claims_by_element = claims_by_element(sql)
        self.meta = sql.among(messages.c.seq, _meta().where)

    def _compile_elements(self) -> None:
        sql, limit = self._sql, bindparam("limit", type_=Integer())
        after: Any = bindparam("after", type_=BigInteger())
        elements = select(
            messages.c.seq,
            messages.c.channel_no,
            messages.c.lamport,
            messages.c.digest,
            messages.c.arrival_sum,
        )
        elements = elements.where(messages.c.seq > after).order_by(messages.c.seq)
        self.entry_elements = sql.query(elements.limit(limit))
        claims = published_claims
        claimed = select(
            claims.c.claim_no,
            messages.c.channel_no,
            messages.c.lamport,
            claims.c.element_id,
            claims.c.arrival_sum,
        ).join_from(claims, messages, claims.c.seq == messages.c.seq)
        claimed = claimed.where(claims.c.claim_no > after).order_by(claims.c.claim_no)
        self.claim_elements = sql.query(claimed.limit(limit))
        self.sums_at = sums_at(sql)
        feed = entries_with_frames().where(messages.c.seq > after).order_by(messages.c.seq)
        self.feed = sql.query(feed.limit(limit))

    def _compile_lost(self) -> None:
        sql, lost = self._sql, lost_content.c.seq
        self.lost_count = sql.query(select(func.count()).select_from(lost_content))
        known = select(
            lost,
            messages.c.arrival_sum,
            channels.c.channel_id,
            messages.c.message_id,
            messages.c.digest,
        )
        known = known.join_from(messages, lost_content, lost == messages.c.seq)
        known = known.join(channels, channels.c.channel_no == messages.c.channel_no)
        self.lost_by_digest = sql.among(messages.c.digest_prefix, known.where)
        self.lost_elements = lost_elements(sql)

    @cache  # noqa: B019 - instances are cached themselves
    def log_page(self, *, descending: bool, low_is_position: bool, high_is_position: bool) -> Query:
        """A page in log order; each end is a Lamport timestamp (inclusive) or a position (not)."""
        page = entries_with_frames().where(messages.c.channel_no == _numbered("channel_id"))
        if low_is_position:
            page = page.where(tuple_(*_LOG_ORDER) > _position("low"))
        else:
            page = page.where(messages.c.lamport >= bindparam("low", type_=BigInteger()))
        if high_is_position:
            page = page.where(tuple_(*_LOG_ORDER) < _position("high"))
        else:
            page = page.where(messages.c.lamport <= bindparam("high", type_=BigInteger()))
        order = [column.desc() for column in _LOG_ORDER] if descending else _LOG_ORDER
        return self._sql.query(page.order_by(*order).limit(bindparam("limit", type_=Integer())))

    @cache  # noqa: B019 - instances are cached themselves
    def arrival_page(self, *, descending: bool) -> Query:
        """A page of a channel in arrival order, between two sequence numbers (exclusive)."""
        page = entries_with_frames().where(
            messages.c.channel_no == _numbered("channel_id"),
            messages.c.seq > bindparam("low", type_=BigInteger()),
            messages.c.seq < bindparam("high", type_=BigInteger()),
            messages.c.lamport >= bindparam("lamport_from", type_=BigInteger()),
            messages.c.lamport <= bindparam("lamport_to", type_=BigInteger()),
        )
        order = messages.c.seq.desc() if descending else messages.c.seq.asc()
        return self._sql.query(page.order_by(order).limit(bindparam("limit", type_=Integer())))


def _numbered(argument: str) -> ColumnElement[int]:
    """The number of the channel that an argument names."""
    listed = channels.alias()
    number = select(listed.c.channel_no).where(listed.c.channel_id == bindparam(argument))
    return number.scalar_subquery()


def _in_channel(key: Keyed) -> ColumnElement[bool]:
    return channels.c.channel_id == key["channel_id"]


@cache
def read_statements(sql: SqlDialect, limits: Limits) -> ReadStatements:
    """Compiled once for a process: it takes some 30 ms."""
    return ReadStatements(sql, limits)


def _meta() -> Select[Any]:
    """(seq, whether others bear its ID, hint, claim number): a row for each claim, or one."""
    other, claims = messages.alias("other"), published_claims
    # By key alone, which the index holds: the variants themselves are looked up in full.
    shares_id = exists().where(
        other.c.id_key == messages.c.id_key,
        other.c.channel_no == messages.c.channel_no,
        other.c.seq != messages.c.seq,
    )
    found = select(messages.c.seq, shares_id, claims.c.hint, claims.c.claim_no)
    return found.select_from(messages.outerjoin(claims, claims.c.seq == messages.c.seq))


def stored_frames(sql: SqlDialect, table: Table) -> ManyQuery:
    """(seq, codec, reference number, data) of many frames, of either copy."""
    columns = table.c
    return sql.among(
        columns.seq,
        select(columns.seq, columns.codec, columns.reference_no, columns.data).where,
    )


def lost_elements(sql: SqlDialect) -> Query:
    """(seq, channel number, Lamport timestamp, digest) of lost entries after a sequence number."""
    lost = lost_content.c.seq
    elements = select(lost, messages.c.channel_no, messages.c.lamport, messages.c.digest)
    elements = elements.join_from(lost_content, messages, lost == messages.c.seq)
    elements = elements.where(lost > bindparam("after", type_=BigInteger())).order_by(lost)
    return sql.query(elements.limit(bindparam("limit", type_=Integer())))


def sums_at(sql: SqlDialect) -> Query:
    """The watermark, each number with the sum of its chain at the argument `<number>_at`."""
    claims = published_claims
    return sql.query(
        select(
            watermark.c.seq,
            _sum_at(messages.c.seq, messages.c.arrival_sum),
            watermark.c.claim_no,
            _sum_at(claims.c.claim_no, claims.c.arrival_sum),
        )
    )


def held_frames(sql: SqlDialect) -> ManyQuery:
    """The columns of `app.store.frames.PackedFrame` of entries, of their first copies."""
    held = select(messages.c.seq, messages.c.frame_bytes, messages.c.frame_hash, *FRAME_COLUMNS)
    held = held.select_from(messages.outerjoin(frames, frames.c.seq == messages.c.seq))
    return sql.among(messages.c.seq, held.where)


def _references_in_doubt() -> Select[Any]:
    """Numbers of references that do not lie in both tables in the same form.

    Former references do not: their first copies are other frames.
    """
    columns, copies = frames.c, frame_references.c
    # Either copy can be the one that is gone.
    named = select(columns.reference_no.label("seq")).where(columns.reference_no.is_not(None))
    used = named.union(select(copies.seq)).subquery()
    joined = used.outerjoin(frames, columns.seq == used.c.seq)
    joined = joined.outerjoin(frame_references, copies.seq == used.c.seq)
    is_same = (
        (columns.data == copies.data)
        & (columns.codec == copies.codec)
        & columns.reference_no.is_not_distinct_from(copies.reference_no)
    ) | (copies.channel_no == FORMER_REFERENCE)
    doubtful = select(used.c.seq).select_from(joined).where(is_same.is_not(true()))
    return doubtful.order_by(used.c.seq).limit(bindparam("limit", type_=Integer()))


def met_named(sql: SqlDialect) -> ManyQuery:
    """Which of many (`Keys.of_met`, channel ID, message ID) were met as sync messages."""
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


def refused_among(sql: SqlDialect) -> ManyQuery:
    """Which of many digests are refused here."""
    refused = refused_digests.c.digest
    return sql.among(refused, select(refused).where)


def highest(column: ColumnElement[Any]) -> ColumnElement[int]:
    """The highest number of a table, 0 while it is empty."""
    return select(func.coalesce(func.max(column), literal_column("0"))).scalar_subquery()


def _sum_at(number: Column[int], arrival_sum: Column[int]) -> ColumnElement[int]:
    """The sum of the arrival chain of the last row up to the argument `<number>_at`, 0 for none."""
    up_to = select(arrival_sum).where(number <= bindparam(f"{number.name}_at", type_=BigInteger()))
    last = up_to.order_by(number.desc()).limit(constant(1))
    return func.coalesce(last.scalar_subquery(), literal_column("0"))


def _position(end: str) -> ColumnElement[Any]:
    return tuple_(
        bindparam(f"{end}_lamport", type_=BigInteger()),
        bindparam(f"{end}_id", type_=ByteText),
        bindparam(f"{end}_prefix", type_=LargeBinary()),
        bindparam(f"{end}_digest", type_=LargeBinary()),
    )
