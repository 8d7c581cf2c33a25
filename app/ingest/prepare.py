"""Prepare a publication: read it from JSON, check, decode and identify it. Pure functions."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from app.entries import Claim, ClaimSource, NewEntry
from app.errors import Code, Problem, problem_of_message
from app.hexadecimal import hint_bytes
from app.server.limits import Limits
from sdstore.sds.codec import decode, encode, from_json
from sdstore.sds.model import (
    Dialect,
    HistoryEntry,
    Kind,
    Message,
    MessageError,
    entry_digest,
    frame_hash,
    verifies,
    waku_message_hash,
)

UTF8_BYTES_PER_CHARACTER = 4  # at most

_ITEM_KEYS = frozenset({"message", "meta", "retrieval_hints", "waku"})
_WAKU_KEYS = frozenset({"pubsub_topic", "content_topic", "meta", "timestamp_ns"})
_INT64 = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True)
class WakuEnvelope:
    """The fields of a Waku message around its payload, the frame. `timestamp_ns` is an int64."""

    pubsub_topic: str
    content_topic: str
    meta: bytes
    timestamp_ns: int


class Publication(NamedTuple):
    """A frame, its publisher's hints, and the envelope it came in.

    `without_quarantine`: it is refused if the policy would keep it apart. `is_from_peer`: it comes with all
    hints that another store has for it, which are valid (`acceptable_hints`).
    """

    frame: bytes
    hints: tuple[bytes, ...] = ()
    envelope: WakuEnvelope | None = None
    without_quarantine: bool = False
    is_from_peer: bool = False


@dataclass(frozen=True, slots=True)
class Relayed:
    """A sync or ephemeral message: passed on to live readers, not stored."""

    frame: bytes
    message: Message
    dialect: Dialect


def prepare(item: Publication, limits: Limits) -> NewEntry | Relayed:
    """The entry to write, or the message to relay. Raises `Problem`."""
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
        item.without_quarantine,
        item.is_from_peer,
    )


# ---- limits of a message


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
    # A history can have thousands of entries: encode only those that could be too long.
    id_chars = limits.message_id_bytes_max // UTF8_BYTES_PER_CHARACTER
    sender_chars = limits.sender_id_bytes_max // UTF8_BYTES_PER_CHARACTER
    hint_bytes_max = limits.hint_bytes_max
    for entry in entries:
        if (
            len(entry.message_id) > id_chars
            or len(entry.sender_id) > sender_chars
            or len(entry.retrieval_hint) > hint_bytes_max
        ):
            _check_text(entry.message_id, limits.message_id_bytes_max, Code.MESSAGE_ID_TOO_LONG)
            _check_text(entry.sender_id, limits.sender_id_bytes_max, Code.SENDER_ID_TOO_LONG)
            _check_size(len(entry.retrieval_hint), hint_bytes_max, "bytes", Code.HINT_TOO_LONG)


def _check_text(text: str, bytes_max: int, code: Code) -> None:
    # Most texts are short enough for any characters and need no encoding.
    if len(text) * UTF8_BYTES_PER_CHARACTER > bytes_max:
        _check_size(len(text.encode()), bytes_max, "bytes", code)


def _check_size(size: int, size_max: int, unit: str, code: Code) -> None:
    if size > size_max:
        raise Problem(code, f"{size} {unit}, at most {size_max}")


# ---- hints


def _claims(item: Publication, limits: Limits) -> tuple[Claim, ...]:
    if not item.hints and item.envelope is None:
        return ()
    if len(item.hints) > limits.hints_per_publish_max and not item.is_from_peer:
        raise Problem(
            Code.TOO_MANY_HINTS, f"{len(item.hints)} hints, at most {limits.hints_per_publish_max}"
        )
    published = tuple([published_claim(hint, limits) for hint in item.hints])
    if item.envelope is None:
        return published
    envelope = item.envelope
    computed = waku_message_hash(
        envelope.pubsub_topic,
        item.frame,
        envelope.content_topic,
        envelope.meta,
        envelope.timestamp_ns,
    )
    return (Claim(computed, ClaimSource.COMPUTED), *published)


def published_claim(hint: bytes, limits: Limits) -> Claim:
    """The claim that a published hint makes. Raises `Problem`."""
    if not 0 < len(hint) <= limits.hint_bytes_max:
        raise Problem(
            Code.HINT_TOO_LONG, f"{len(hint)} bytes; a hint has 1 to {limits.hint_bytes_max}"
        )
    return Claim(hint, ClaimSource.PUBLISHER)


def acceptable_hints(hints: Iterable[bytes], limits: Limits) -> tuple[bytes, ...]:
    """The valid hints: an invalid hint that a peer adds must not cost the message."""
    good = [hint for hint in hints if 0 < len(hint) <= limits.hint_bytes_max]
    return tuple(good[: limits.hint_claims_with_peers_max])


# ---- JSON


def read_json_item(document: bytes) -> Publication:
    """The message of a JSON document, with its hints and its envelope; ignores `meta`.

    The document is the body of a request, or a line of NDJSON. Raises `Problem` with the codes of the
    message itself, `invalid_json_message`, `invalid_hex`, and `invalid_body` for a document that is
    not JSON.
    """
    try:
        item = orjson.loads(document)
    except orjson.JSONDecodeError as error:
        raise Problem(Code.INVALID_BODY, f"not JSON: {error}") from None
    _check_members(item, _ITEM_KEYS, "an item")
    try:
        frame = encode(from_json(item.get("message")))
    except MessageError as error:
        raise problem_of_message(error) from None
    return Publication(frame, _hints(item.get("retrieval_hints")), _envelope(item.get("waku")))


def _hints(values: Any) -> tuple[bytes, ...]:
    if values is None:
        return ()
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise Problem(
            Code.INVALID_JSON_MESSAGE, "retrieval_hints must be a list of hexadecimal strings"
        )
    return tuple([hint_bytes(value, "a retrieval hint") for value in values])


def _envelope(waku: Any) -> WakuEnvelope | None:
    if waku is None:
        return None
    _check_members(waku, _WAKU_KEYS, "waku")
    try:
        envelope = WakuEnvelope(
            str(waku["pubsub_topic"]),
            str(waku["content_topic"]),
            b64decode(waku.get("meta") or "", validate=True),
            int(waku["timestamp_ns"]),
        )
    except (KeyError, TypeError, ValueError):
        raise Problem(
            Code.INVALID_JSON_MESSAGE,
            "waku needs pubsub_topic, content_topic and timestamp_ns; meta in base64 is optional",
        ) from None
    if envelope.timestamp_ns not in _INT64:
        raise Problem(Code.INVALID_JSON_MESSAGE, "timestamp_ns of waku is not an int64")
    return envelope


def _check_members(item: Any, keys: frozenset[str], what: str) -> None:
    if not isinstance(item, dict):
        raise Problem(Code.INVALID_JSON_MESSAGE, f"{what} must be an object")
    if unknown := item.keys() - keys:
        detail = f"{what} has no member {min(unknown)[:80]!r}; it has {', '.join(sorted(keys))}"
        raise Problem(Code.INVALID_JSON_MESSAGE, detail)
