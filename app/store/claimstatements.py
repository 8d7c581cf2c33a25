"""What is asked about claims: by hint, by entry, by element; published ones and those of histories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    FromClause,
    Integer,
    LargeBinary,
    Select,
    bindparam,
    select,
    true,
    tuple_,
)

from app.limits import Limits
from app.store.database import Arguments, Keyed, ManyQuery, Query, SqlDialect, constant
from app.store.entryselects import IN_CHANNELS
from app.store.schema import ByteText, channels, history_claims, messages, published_claims


def published_by_hint(
    sql: SqlDialect,
    limits: Limits,
    entries: Callable[[FromClause], Select[Any]],
    *,
    in_channel: bool,
) -> ManyQuery:
    """Entries and the source of the claim, for (hint key, hint) behind (source, sequence number).

    `in_channel`: those of one channel, whose number stands before the source.
    """
    claims = published_claims
    claimed = claims.join(messages, claims.c.seq == messages.c.seq)
    found = entries(claimed.join(channels, IN_CHANNELS)).add_columns(claims.c.source)
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
            .limit(constant(limits.hint_candidates_max))
        ),
    )


def history_by_hint(sql: SqlDialect, limits: Limits, *, in_channel: bool) -> ManyQuery:
    """(claim number, channel number, ID key, message ID) for (hint key, hint, channel number,
    claim number) from there on, in order of channel and claim.

    `in_channel`: those of that channel only.
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
            .limit(constant(limits.hint_candidates_max))
        ),
    )


def channel_of_history_claim(sql: SqlDialect) -> Query:
    """The channel number of a history claim."""
    history = history_claims
    number: Any = bindparam("claim_no", type_=BigInteger())
    return sql.query(select(history.c.channel_no).where(history.c.claim_no == number))


def history_hints(sql: SqlDialect, limits: Limits) -> ManyQuery:
    """The hints that histories give for (ID key, channel number, message ID), first told first."""
    arguments: Arguments = {
        "id_key": BigInteger(),
        "channel_no": Integer(),
        "message_id": ByteText,
    }
    return sql.each(
        arguments,
        lambda key: _history_of(key).limit(constant(limits.hint_claims_per_entry_max)),
    )


def claims_by_seq(sql: SqlDialect) -> ManyQuery:
    """(seq, source, hint, claim number) of the published claims on entries."""
    claims = published_claims
    found = select(claims.c.seq, claims.c.source, claims.c.hint, claims.c.claim_no)
    return sql.among(claims.c.seq, found.where)


def claims_by_digest(sql: SqlDialect, limits: Limits) -> ManyQuery:
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
            .limit(constant(limits.hint_claims_per_entry_max))
        ),
    )


def claims_by_element(sql: SqlDialect) -> ManyQuery:
    """(element, digest, hint) of published claims, by the first bytes of their elements."""
    claims = published_claims
    found = select(claims.c.element_id, messages.c.digest, claims.c.hint)
    found = found.join_from(claims, messages, claims.c.seq == messages.c.seq)
    return sql.among(claims.c.element_prefix, found.where)


def _history_of(key: Keyed) -> Select[Any]:
    told = select(history_claims.c.hint).where(
        history_claims.c.id_key == key["id_key"],
        history_claims.c.channel_no == key["channel_no"],
        history_claims.c.message_id == key["message_id"],
    )
    return told.order_by(history_claims.c.claim_no)
