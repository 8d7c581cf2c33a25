"""What the writer runs inside of its transactions, in Core, compiled once for one database."""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Integer,
    bindparam,
    case,
    delete,
    exists,
    func,
    literal_column,
    select,
    update,
)

from app.limits import Limits
from app.store.claimstatements import claims_by_seq, history_hints
from app.store.database import SqlDialect, constant
from app.store.entryselects import with_id
from app.store.schema import (
    FORMER_REFERENCE,
    ByteText,
    channels,
    frame_references,
    frames,
    history_claims,
    lost_content,
    messages,
    met_ids,
    missing_references,
    published_claims,
    refused_digests,
    watermark,
)
from app.store.statements import (
    held_frames,
    highest,
    lost_elements,
    met_named,
    refused_among,
    stored_frames,
    sums_at,
)

CHANNEL_REFERENCES_MAX = 4
"""References of one channel that the writer chooses from: one conversation and what comes late."""


class WriteStatements:
    """Compiled writing statements."""

    def __init__(self, sql: SqlDialect, limits: Limits) -> None:
        known = select(
            messages.c.digest, messages.c.seq, messages.c.channel_no, messages.c.received_at_ms
        )
        self.known = sql.among(messages.c.digest_prefix, known.where)
        self.numbers = sql.query(
            select(
                watermark.c.seq,
                _last_sum(messages.c.seq, messages.c.arrival_sum),
                watermark.c.claim_no,
                _last_sum(published_claims.c.claim_no, published_claims.c.arrival_sum),
                highest(history_claims.c.claim_no),
                highest(channels.c.channel_no),
                exists(select(missing_references.c.channel_no)),
                exists(select(lost_content.c.seq)),
            )
        )
        self.sums_at = sums_at(sql)
        moved: dict[str, Any] = {
            column: bindparam(f"new_{column}") for column in ("seq", "claim_no")
        }
        self.move_watermark = sql.query(update(watermark).values(moved))
        self.channel_numbers = sql.among(
            channels.c.channel_id,
            lambda among: select(channels.c.channel_id, channels.c.channel_no).where(among),
        )
        self.insert_messages = sql.insert(messages)
        self.insert_frames = sql.insert(frames)
        self._compile_frames(sql)
        self.count_channels = sql.upsert(channels, "channel_no", _merge_channel)
        self._compile_claims(sql, limits)
        self._compile_references(sql)
        self._compile_lost(sql)

    def _compile_frames(self, sql: SqlDialect) -> None:
        copies = frame_references
        self.insert_copies = sql.insert(copies)
        self.frames = stored_frames(sql, frames)
        self.references = stored_frames(sql, copies)
        usable = select(copies.c.seq).where(
            copies.c.channel_no != constant(FORMER_REFERENCE), ~_is_lost(copies.c.seq)
        )
        self.references_here = sql.among(copies.c.seq, usable.where)
        self.frames_here = sql.among(
            frames.c.seq, select(frames.c.seq).where(~_is_lost(frames.c.seq)).where
        )
        named = select(
            copies.c.channel_no,
            messages.c.lamport,
            copies.c.seq,
            messages.c.frame_bytes,
            messages.c.frame_hash,
            copies.c.codec,
            copies.c.reference_no,
            copies.c.data,
        ).join_from(copies, messages, copies.c.seq == messages.c.seq)
        self.references_named = sql.among(copies.c.seq, named.where)
        self.latest_references = sql.each(
            {"channel_no": Integer()},
            lambda key: (
                named.where(copies.c.channel_no == key["channel_no"])
                .order_by(copies.c.seq.desc())
                .limit(constant(CHANNEL_REFERENCES_MAX))
            ),
        )

    def _compile_lost(self, sql: SqlDialect) -> None:
        lost, copies = lost_content.c.seq, frame_references.c
        self.held = held_frames(sql)
        self.lost_here = sql.among(lost, select(lost).where)
        self.insert_lost = sql.insert(lost_content, or_ignore=True)
        self.delete_lost = sql.delete_each(lost_content, "seq")
        self.delete_frames = sql.delete_each(frames, "seq")
        self.delete_copies = sql.delete_each(frame_references, "seq")
        self.replace_hash = sql.update_each(messages, "seq", "frame_bytes", "dialect", "frame_hash")
        self.former_here = sql.among(
            copies.seq,
            select(copies.seq).where(copies.channel_no == constant(FORMER_REFERENCE)).where,
        )
        self.bases = sql.among(
            copies.channel_no,
            lambda among: (
                select(copies.reference_no)
                .where(among, copies.reference_no.is_not(None))
                .distinct()
            ),
        )
        self.lost_elements = lost_elements(sql)
        self.needed_references = sql.among(
            frames.c.seq,
            select(frames.c.seq, frames.c.reference_no)
            .where(frames.c.reference_no.is_not(None))
            .where,
        )

    def _compile_claims(self, sql: SqlDialect, limits: Limits) -> None:
        self.insert_published = sql.insert(published_claims)
        self.raise_source = sql.update_each(published_claims, "claim_no", "source")
        self.insert_history = sql.insert(history_claims)
        self.history_hints = history_hints(sql, limits)
        self.claims_by_seq = claims_by_seq(sql)

    def _compile_references(self, sql: SqlDialect) -> None:
        self.is_here = sql.each(
            {"id_key": BigInteger(), "message_id": ByteText, "channel_no": Integer()},
            lambda key: (
                select(messages.c.seq)
                .where(with_id(key), messages.c.channel_no == key["channel_no"])
                .limit(constant(1))
            ),
        )
        self.is_met = met_named(sql)
        self.insert_missing = sql.insert(missing_references, or_ignore=True)
        self.delete_missing = sql.delete_each(missing_references, "channel_no", "message_id")
        self.last_met = sql.query(select(highest(met_ids.c.met_no)))
        self.insert_met = sql.insert(met_ids)
        self.forget_met = sql.query(
            delete(met_ids).where(met_ids.c.met_no <= bindparam("until", type_=BigInteger()))
        )
        self.last_refused = sql.query(select(highest(refused_digests.c.refused_no)))
        self.refused = refused_among(sql)
        self.insert_refused = sql.insert(refused_digests)
        self.forget_refused = sql.query(
            delete(refused_digests).where(
                refused_digests.c.refused_no <= bindparam("until", type_=BigInteger())
            )
        )


@cache
def write_statements(sql: SqlDialect, limits: Limits) -> WriteStatements:
    """Compiled once for a process."""
    return WriteStatements(sql, limits)


def _is_lost(seq: ColumnElement[int]) -> ColumnElement[bool]:
    return exists().where(lost_content.c.seq == seq)


def _merge_channel(new: Any) -> dict[str, Any]:
    return {
        "count": channels.c.count + new.count,
        "lamport_first": _chosen(
            channels.c.lamport_first > new.lamport_first, new, "lamport_first"
        ),
        "lamport_last": _chosen(channels.c.lamport_last < new.lamport_last, new, "lamport_last"),
    }


def _last_sum(number: Column[int], arrival_sum: Column[int]) -> ColumnElement[int]:
    last = select(arrival_sum).order_by(number.desc()).limit(constant(1)).scalar_subquery()
    return func.coalesce(last, literal_column("0"))


def _chosen(condition: ColumnElement[bool], new: Any, column: str) -> ColumnElement[int]:
    return case((condition, new[column]), else_=channels.c[column])
