"""Reading messages: by ID, by digest, and many at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import orjson
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, FailFast, Field, TypeAdapter

from app.entries import Entry
from app.errors import Code, Problem
from app.hexadecimal import hex_bytes, hint_bytes
from app.http.auth import Scope
from app.http.call import Call, Headers, Reply
from app.http.forms import Form, answer_form, body_form
from app.http.pages import fitted
from app.http.parsing import read_json, read_protobuf
from app.http.render import (
    JSON_HEADERS,
    NO_CACHE,
    json_reply,
    message_json,
    message_protobuf,
    protobuf_reply,
    published_hints,
)
from app.store.records import Found, LookupResult
from sdstore.wire import store_pb2 as wire

IMMUTABLE = (b"cache-control", b"max-age=31536000, immutable")


class LookupBody(BaseModel):
    """The JSON form of a look-up."""

    model_config = ConfigDict(extra="forbid", strict=True)

    message_ids: Annotated[list[str], FailFast()] = Field(default_factory=list)
    retrieval_hints: Annotated[list[str], FailFast()] = Field(
        default_factory=list,
        description="in hexadecimal (inside a message in JSON hints are base64)",
    )
    channel_id: str | None = None
    presence_only: bool = False


LOOKUP_FIELDS = 2
"""Of a look-up, beside its keys."""

_LOOKUP_BODY = TypeAdapter(LookupBody)


async def get_message(call: Call) -> Reply:
    """`GET /v1/messages/{message_id}`: the variant this store serves under the ID."""
    form = answer_form(call.headers.get(b"accept"))
    digest = call.text("digest")
    try:
        found = await find_readable(call, call.params["message_id"], call.channel_id)
    except Problem as problem:
        # That of another variant, which was asked for by its digest, may be whole.
        if problem.code is not Code.CONTENT_LOST or digest is None:
            raise
        return await _get_variant(call, form, digest, None)
    if digest is not None:
        return await _get_variant(call, form, digest, found.variants)
    if form is Form.PROTOBUF:
        return _frame_reply(call, found.entry, found.variants_count, NO_CACHE)
    return await _entry_json_reply(call, found.entry, found.variants)


async def find_readable(call: Call, message_id: str, channel_id: str | None) -> Found:
    """What is served under an ID, of the channels that the caller may read; `not_found`.

    A `channel_id` that was given is one of them: the shell has seen to it.
    """
    store, channels = call.node.store, call.caller.channels
    if channel_id is None and channels is not None:
        found = await store.find_among(message_id, channels)
    else:
        found = await store.find(message_id, channel_id)
    if found is None:
        raise _not_found()
    return found


async def get_entry(call: Call) -> Reply:
    """`GET /v1/entries/{digest}`: the one entry that bears the digest, cacheable for ever."""
    form = answer_form(call.headers.get(b"accept"))
    entry = await _by_digest(call, call.params["digest"])
    if form is Form.PROTOBUF:
        return _frame_reply(call, entry, None, IMMUTABLE)
    # Variants and hints may still come, so they are not part of what is cached for ever.
    return _tagged(call, message_json(entry), IMMUTABLE)


async def lookup(call: Call) -> Reply:
    """`POST /v1/messages/lookup`: which of these IDs and hints are here, and what they lead to."""
    form = answer_form(call.headers.get(b"accept"))
    wanted = await _wanted(call)
    limits = call.node.limits
    if len(wanted.message_ids) + len(wanted.retrieval_hints) > limits.lookup_keys_max:
        raise Problem(Code.TOO_MANY_ITEMS, f"up to {limits.lookup_keys_max} IDs and hints")
    if any("\0" in text for text in (*wanted.message_ids, wanted.channel_id)):
        raise Problem(Code.NUL_CHARACTER, "no ID holds U+0000")
    if wanted.HasField("channel_id"):
        call.caller.require(Scope.READ, wanted.channel_id)
    elif call.caller.channels is not None:
        raise Problem(Code.FORBIDDEN, "these credentials need a channel_id in every look-up")

    async def read(bytes_max: int) -> Reply:
        result = await call.node.store.lookup(
            wanted.message_ids,
            wanted.retrieval_hints,
            wanted.channel_id if wanted.HasField("channel_id") else None,
            presence_only=wanted.presence_only,
            bytes_max=bytes_max,
        )
        if form is Form.PROTOBUF:
            return protobuf_reply(_lookup_protobuf(result).SerializeToString())
        return json_reply(_lookup_json(result))

    return await fitted(call, read)


async def _get_variant(
    call: Call, form: Form, digest: str, variants: Sequence[bytes] | None
) -> Reply:
    """The variant with a digest; `variants` None where the content of the first one is lost."""
    entry = await _by_digest(call, digest)
    channel_id = call.channel_id
    if entry.message_id != call.params["message_id"] or channel_id not in (None, entry.channel_id):
        raise _not_found()
    if variants is None:
        found = await call.node.store.lookup(
            [entry.message_id],
            [],
            entry.channel_id,
            presence_only=True,
            bytes_max=call.node.limits.reply_bytes_max,
        )
        whole = [digest for _, digest in found.found if isinstance(digest, bytes)]
        variants = [*(digest for _, digest in found.left_out), *whole]
    if form is Form.PROTOBUF:
        return _frame_reply(call, entry, len(variants), NO_CACHE)
    return await _entry_json_reply(call, entry, variants)


async def _by_digest(call: Call, digest_hex: str) -> Entry:
    digest = hex_bytes(digest_hex, "the digest")
    store = call.node.store
    try:
        entry = await store.entry(digest) if len(digest) == 32 else None
    except Problem as problem:
        if problem.code is Code.CONTENT_LOST and call.caller.channels is not None:
            known = await store.left_out([digest])
            if not any(call.caller.covers(each.channel_id) for each in known):
                raise _not_found() from None
        raise
    if entry is None or not call.caller.covers(entry.channel_id):
        raise _not_found()
    return entry


def _frame_reply(
    call: Call, entry: Entry, variants_count: int | None, cache_control: tuple[bytes, bytes]
) -> Reply:
    etag = b'"' + entry.frame_hash.hex().encode() + b'"'
    headers = [
        (b"etag", etag),
        cache_control,
        (b"sds-digest", entry.digest.hex().encode()),
        (b"sds-dialect", entry.dialect.label.encode()),
    ]
    if variants_count is not None:
        headers.append((b"sds-variants", b"%d" % variants_count))
    if _is_current(call, etag):
        return protobuf_reply(b"", 304, headers)
    return protobuf_reply(entry.frame, 200, headers)


async def _entry_json_reply(call: Call, entry: Entry, variants: Sequence[bytes]) -> Reply:
    claims = await call.node.store.hints_of([entry.digest])
    hints = published_hints(claims.get(entry.digest, ()))
    others = [digest for digest in variants if digest != entry.digest]
    return _tagged(call, message_json(entry, others, hints), NO_CACHE)


def _tagged(call: Call, document: object, cache_control: tuple[bytes, bytes]) -> Reply:
    body = orjson.dumps(document)
    etag = b'"' + blake3(body).hexdigest(16).encode() + b'"'
    headers: Headers = [(b"etag", etag), cache_control]
    if _is_current(call, etag):
        return Reply(304, [*JSON_HEADERS, *headers])
    return Reply(200, [*JSON_HEADERS, *headers], body)


def _is_current(call: Call, etag: bytes) -> bool:
    known = call.headers.get(b"if-none-match")
    # RFC 9110 section 13.1.2: the weak comparison; "*" matches whatever there is.
    return known is not None and (known.strip() == b"*" or etag in known)


def _lookup_json(result: LookupResult) -> dict[str, Any]:
    return {
        "found": [_match_json(key, match) for key, match in result.found],
        "missing": list(map(_key_json, result.missing)),
        "not_examined": list(map(_key_json, result.not_examined)),
        "left_out": [_match_json(key, digest) for key, digest in result.left_out],
    }


def _match_json(key: str | bytes, match: Entry | bytes) -> dict[str, Any]:
    if isinstance(match, bytes):
        return {"key": _key_json(key), "digest": match.hex()}
    return {"key": _key_json(key), "digest": match.digest.hex(), **message_json(match)}


def _key_json(key: str | bytes) -> dict[str, str]:
    return {"message_id": key} if isinstance(key, str) else {"retrieval_hint": key.hex()}


def _lookup_protobuf(result: LookupResult) -> wire.LookupReply:
    return wire.LookupReply(
        found=[_match_protobuf(key, match) for key, match in result.found],
        missing=map(_key_protobuf, result.missing),
        not_examined=map(_key_protobuf, result.not_examined),
        left_out=[_match_protobuf(key, digest) for key, digest in result.left_out],
    )


def _match_protobuf(key: str | bytes, match: Entry | bytes) -> wire.LookupMatch:
    if isinstance(match, bytes):
        return wire.LookupMatch(key=_key_protobuf(key), digest=match)
    return wire.LookupMatch(
        key=_key_protobuf(key), digest=match.digest, message=message_protobuf(match)
    )


def _key_protobuf(key: str | bytes) -> wire.LookupKey:
    if isinstance(key, str):
        return wire.LookupKey(message_id=key)
    return wire.LookupKey(retrieval_hint=key)


async def _wanted(call: Call) -> wire.LookupRequest:
    if body_form(call.headers.get(b"content-type"), Form.JSON, Form.PROTOBUF) is Form.PROTOBUF:
        fields_max = call.node.limits.lookup_keys_max + LOOKUP_FIELDS
        return await read_protobuf(wire.LookupRequest, call.body, fields_max)
    body = read_json(_LOOKUP_BODY, call.body)
    return wire.LookupRequest(
        message_ids=body.message_ids,
        retrieval_hints=[hint_bytes(hint, "a retrieval hint") for hint in body.retrieval_hints],
        channel_id=body.channel_id,
        presence_only=body.presence_only,
    )


def _not_found() -> Problem:
    return Problem(Code.NOT_FOUND, "no such message is here")
