"""A message as its publisher writes it in JSON: a body of HTTP, a line of NDJSON, of a file too."""

from __future__ import annotations

from base64 import b64decode
from typing import Any

import orjson

from app.errors import Code, Problem, problem_of_message
from app.hexadecimal import hint_bytes
from app.ingest.records import Publication, WakuEnvelope
from sdstore.sds.codec import MessageError, encode
from sdstore.sds.jsonform import from_json

_ITEM_KEYS = frozenset({"message", "meta", "retrieval_hints", "waku"})
_WAKU_KEYS = frozenset({"pubsub_topic", "content_topic", "meta", "timestamp_ns"})
_INT64 = range(-(2**63), 2**63)


def read_json_item(document: bytes) -> Publication:
    """The message with its hints and its envelope; `meta` is what a store says of it: ignored.

    Raises `Problem` with the codes of the message itself, `invalid_json_message`, `invalid_hex`, and
    `invalid_body` for what is no JSON.
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
        raise Problem(Code.INVALID_JSON_MESSAGE, "retrieval_hints is a list of hexadecimal strings")
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
            "waku has pubsub_topic, content_topic, timestamp_ns and perhaps meta in base64",
        ) from None
    if envelope.timestamp_ns not in _INT64:
        raise Problem(Code.INVALID_JSON_MESSAGE, "timestamp_ns of waku is not an int64")
    return envelope


def _check_members(item: Any, keys: frozenset[str], what: str) -> None:
    if not isinstance(item, dict):
        raise Problem(Code.INVALID_JSON_MESSAGE, f"{what} is an object")
    if unknown := item.keys() - keys:
        raise Problem(Code.INVALID_JSON_MESSAGE, f"{what} has no member {min(unknown)[:80]!r}")
