"""Entries, outcomes and problems in both forms of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

import orjson

from app.entries import Claim, Entry, Outcome
from app.errors import Problem
from app.http.call import Headers, Reply
from app.http.forms import Form
from sdstore.sds.codec import decode
from sdstore.sds.jsonform import to_json
from sdstore.wire import store_pb2 as wire

VARY = (b"vary", b"accept")
NO_CACHE = (b"cache-control", b"no-cache")
JSON_HEADERS: Headers = [(b"content-type", Form.JSON.value), VARY]
PROTOBUF_HEADERS: Headers = [(b"content-type", Form.PROTOBUF.value), VARY]


def json_reply(document: object, status: int = 200, headers: Headers = []) -> Reply:  # noqa: B006
    """A JSON answer; `headers` are added to the usual ones."""
    return Reply(status, [*JSON_HEADERS, *headers], orjson.dumps(document))


def protobuf_reply(body: bytes, status: int = 200, headers: Headers = []) -> Reply:  # noqa: B006
    """A protobuf answer; `headers` are added to the usual ones."""
    return Reply(status, [*PROTOBUF_HEADERS, *headers], body)


def message_json(
    entry: Entry, variants: Sequence[bytes] | None = None, hints: Sequence[bytes] | None = None
) -> dict[str, Any]:
    """The JSON form of a stored message; members that may still change only where they are given."""
    meta: dict[str, Any] = {
        "digest": entry.digest.hex(),
        "frame_hash": entry.frame_hash.hex(),
        "dialect": entry.dialect.label,
        "received_at": rfc3339(entry.received_at_ms),
        "seq": entry.seq,
    }
    if variants is not None:
        meta["variants"] = [digest.hex() for digest in variants]
    if hints is not None:
        meta["hints"] = [hint.hex() for hint in hints]
    message, _ = decode(entry.frame)
    return {"message": to_json(message), "meta": meta}


def message_protobuf(
    entry: Entry, variants: Sequence[bytes] = (), hints: Sequence[bytes] = ()
) -> wire.StoredMessage:
    """The protobuf form of a stored message inside a list."""
    return wire.StoredMessage(
        frame=entry.frame,
        digest=entry.digest,
        frame_hash=entry.frame_hash,
        dialect=entry.dialect.label,
        received_at_ms=entry.received_at_ms,
        seq=entry.seq,
        variants=variants,
        retrieval_hints=hints,
    )


def outcome_json(outcome: Outcome | Problem) -> dict[str, Any]:
    """One publication's outcome; a refused one carries its problem document."""
    if isinstance(outcome, Problem):
        return {
            "message_id": None,
            "channel_id": None,
            "digest": None,
            "outcome": "refused",
            "problem": outcome.document(),
        }
    return {
        "message_id": outcome.message_id,
        "channel_id": outcome.channel_id,
        "digest": None if outcome.digest is None else outcome.digest.hex(),
        "outcome": outcome.kind.value,
    }


def outcome_protobuf(outcome: Outcome | Problem) -> wire.PublishOutcome:
    """One publication's outcome in protobuf."""
    if isinstance(outcome, Problem):
        return wire.PublishOutcome(outcome="refused", problem=problem_protobuf(outcome))
    return wire.PublishOutcome(
        outcome=outcome.kind.value,
        message_id=outcome.message_id,
        channel_id=outcome.channel_id,
        digest=outcome.digest,
    )


def problem_protobuf(problem: Problem) -> wire.Problem:
    """A problem inside a protobuf answer."""
    return wire.Problem(
        code=problem.code, status=problem.status, title=problem.title, detail=problem.detail
    )


def rfc3339(epoch_ms: int) -> str:
    """A time in UTC with milliseconds, such as 2026-01-31T12:00:00.000Z."""
    seconds, ms = divmod(epoch_ms, 1_000)
    return f"{_to_the_second(seconds)}.{ms:03}Z"


@lru_cache(maxsize=1_024)
def _to_the_second(epoch_s: int) -> str:
    # Messages of one page came in the same few seconds.
    return datetime.fromtimestamp(epoch_s, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def published_hints(claims: Sequence[Claim]) -> list[bytes]:
    """The hints of an entry's claims."""
    return [claim.hint for claim in claims]
