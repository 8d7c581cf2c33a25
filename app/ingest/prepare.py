"""From a publication to what is written: size, decoding, kind, limits, identity. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from app.entries import Claim, ClaimSource, NewEntry
from app.errors import Code, Problem, problem_of_message
from app.ingest.records import Publication, Relayed, WakuEnvelope
from app.limits import Limits
from sdstore.sds.codec import decode
from sdstore.sds.digest import entry_digest, frame_hash
from sdstore.sds.model import HistoryEntry, Kind, Message, MessageError
from sdstore.sds.schemes import verifies
from sdstore.sds.waku import waku_message_hash

UTF8_BYTES_PER_CHARACTER = 4  # at most


def prepare(item: Publication, limits: Limits) -> NewEntry | Relayed:
    """The entry to be written, or the message to be passed on. Raises `Problem`."""
    frame = item.frame
    if len(frame) > limits.frame_bytes_max:
        raise Problem(Code.FRAME_TOO_LARGE, f"{len(frame)} bytes, at most {limits.frame_bytes_max}")
    try:
        message, dialect = decode(frame)
    except MessageError as error:
        raise problem_of_message(error) from error
    _check_message(message, limits)
    if message.kind is not Kind.CONTENT:
        return Relayed(frame, message, dialect)
    return NewEntry(
        frame,
        frame_hash(frame),
        entry_digest(message),
        message,
        dialect,
        verifies(message),
        _claims(item, limits),
    )


def _check_message(message: Message, limits: Limits) -> None:
    history, repairs = message.causal_history, message.repair_request
    filter_bytes = len(message.bloom_filter)
    _check_text(message.message_id, limits.message_id_bytes_max, Code.MESSAGE_ID_TOO_LONG)
    _check_text(message.channel_id, limits.channel_id_bytes_max, Code.CHANNEL_ID_TOO_LONG)
    _check_text(message.sender_id, limits.sender_id_bytes_max, Code.SENDER_ID_TOO_LONG)
    _check_size(len(history), limits.history_entries_max, "entries", Code.HISTORY_TOO_LONG)
    _check_size(len(repairs), limits.history_entries_max, "entries", Code.HISTORY_TOO_LONG)
    filter_bytes_max = limits.bloom_filter_bytes_max
    _check_size(filter_bytes, filter_bytes_max, "bytes", Code.BLOOM_FILTER_TOO_LARGE)
    if history or repairs:
        _check_entries(history + repairs, limits)


def _check_entries(entries: Sequence[HistoryEntry], limits: Limits) -> None:
    # There may be thousands: only those that could be too long are looked at closely.
    id_chars = limits.message_id_bytes_max // UTF8_BYTES_PER_CHARACTER
    sender_chars = limits.sender_id_bytes_max // UTF8_BYTES_PER_CHARACTER
    hint_bytes = limits.hint_bytes_max
    for entry in entries:
        if (
            len(entry.message_id) > id_chars
            or len(entry.sender_id) > sender_chars
            or len(entry.retrieval_hint) > hint_bytes
        ):
            _check_entry(entry, limits)


def _check_entry(entry: HistoryEntry, limits: Limits) -> None:
    _check_text(entry.message_id, limits.message_id_bytes_max, Code.MESSAGE_ID_TOO_LONG)
    _check_text(entry.sender_id, limits.sender_id_bytes_max, Code.SENDER_ID_TOO_LONG)
    _check_size(len(entry.retrieval_hint), limits.hint_bytes_max, "bytes", Code.HINT_TOO_LONG)


def _check_text(text: str, bytes_max: int, code: Code) -> None:
    # Most texts need not be encoded to be measured.
    if len(text) * UTF8_BYTES_PER_CHARACTER > bytes_max:
        _check_size(len(text.encode()), bytes_max, "bytes", code)


def _check_size(size: int, size_max: int, unit: str, code: Code) -> None:
    if size > size_max:
        raise Problem(code, f"{size} {unit}, at most {size_max}")


def _claims(item: Publication, limits: Limits) -> tuple[Claim, ...]:
    if not item.hints and item.envelope is None:
        return ()
    if len(item.hints) > limits.hints_per_publish_max:
        raise Problem(
            Code.TOO_MANY_HINTS, f"{len(item.hints)} hints, at most {limits.hints_per_publish_max}"
        )
    published = tuple([published_claim(hint, limits) for hint in item.hints])
    if item.envelope is None:
        return published
    computed = _computed_hint(item.envelope, item.frame)
    return (Claim(computed, ClaimSource.COMPUTED), *published)


def published_claim(hint: bytes, limits: Limits) -> Claim:
    """The claim that a published hint makes. Raises `Problem`."""
    if not 0 < len(hint) <= limits.hint_bytes_max:
        raise Problem(
            Code.HINT_TOO_LONG, f"{len(hint)} bytes, 1 to {limits.hint_bytes_max} are possible"
        )
    return Claim(hint, ClaimSource.PUBLISHER)


def _computed_hint(envelope: WakuEnvelope, frame: bytes) -> bytes:
    return waku_message_hash(
        envelope.pubsub_topic,
        frame,
        envelope.content_topic,
        envelope.meta,
        envelope.timestamp_ns,
    )
