"""Reading messages: by ID, by digest, by hint, many at once, and those that causally precede some."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from io import BytesIO
from itertools import accumulate
from typing import Annotated, Any, NamedTuple

import orjson
from blake3 import blake3
from fastapi import APIRouter, Query
from google.protobuf.proto import serialize_length_prefixed
from pydantic import BaseModel, ConfigDict, FailFast, Field

from app.access.callers import no_such_message
from app.entries import Entry
from app.errors import Code, Problem
from app.hexadecimal import hex_bytes, hint_bytes
from app.http.admission import NodeRoute, Reader, ReaderInTurn, get_by_id
from app.http.call import (
    JSON_HEADERS,
    NO_CACHE,
    VARY,
    WHOLE,
    Call,
    Form,
    Headers,
    Reply,
    Shape,
    Shaped,
    StreamedReply,
    TwoFormBody,
    json_reply,
    message_json,
    message_protobuf,
    protobuf_reply,
    published_hints,
)
from app.http.channels import (
    After,
    CursorKind,
    Cursors,
    PageLimit,
    fitted,
    next_link,
    page_reply,
    read_described,
)
from app.http.openapi import (
    BINARY,
    HEX_PATTERN,
    AncestorsPage,
    LookupReply,
    MessagePage,
    Replies,
    StoredMessage,
    documented,
    reply,
    two_form_body,
)
from app.ingest.quarantine import Absence
from app.server.limits import DEFAULT_LIMITS
from app.server.sharing import Turns
from app.store.entryrows import ContentState
from app.store.histories import AncestorPage
from app.store.lookups import LookupResult
from sdstore.wire import store_pb2 as wire

router = APIRouter(tags=["messages"], route_class=NodeRoute)

IMMUTABLE = (b"cache-control", b"max-age=31536000, immutable")
ENTRIES_PER_PART = 64
PART_BYTES = 1 << 20
"""Bytes of frames in one part of a stream of entries, unless one frame alone has more."""

LOOKUP_FIELDS = 2
"""Fields of a look-up beside its keys."""

MET_AS_SYNC = "met_as_sync"
"""The state of a missing ID that a sync message had."""

RETIRED = "retired"
"""The state of an ID whose messages here are all retired."""

States = Mapping[str, str]
"""What is known of the missing IDs of a look-up."""

NO_STATES: States = {}

Render = Callable[[bytes, Entry | ContentState | None], bytes]


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


class EntriesBody(BaseModel):
    """The JSON form of a request for entries."""

    model_config = ConfigDict(extra="forbid", strict=True)

    digests: Annotated[list[str], FailFast()] = Field(
        max_length=DEFAULT_LIMITS.entries_max, description="in hexadecimal"
    )


LOOKUP_BODY = TwoFormBody(
    LookupBody, wire.LookupRequest, lambda limits: limits.lookup_keys_max + LOOKUP_FIELDS
)
ENTRIES_BODY = TwoFormBody(EntriesBody, wire.EntriesRequest, lambda limits: limits.entries_max)


@get_by_id(
    router,
    "/v1/messages/{message_id:segment}",
    **documented(
        {
            200: reply("The variant served, or the one asked for", StoredMessage, "the frame"),
            304: reply("If-None-Match names it"),
        }
    ),
)
async def get_message(
    call: Reader,
    message_id: str,
    channel_id: Annotated[str | None, Query(description="only in this channel")] = None,
    digest: Annotated[
        str | None, Query(description="this variant", json_schema_extra=HEX_PATTERN)
    ] = None,
) -> Reply:
    """A message by its ID: the variant that this store serves, or the one with a digest."""
    form = call.form
    try:
        found = await call.readable.find(message_id, channel_id)
    except Problem as problem:
        if problem.code is Code.NOT_FOUND:
            absences = await call.absences([message_id], channel_id)
            raise _not_here(absences.get(message_id)) from None
        # The content of the variant with that digest may be whole.
        if problem.code not in (Code.CONTENT_LOST, Code.RETIRED) or digest is None:
            raise
        return await _get_variant(call, message_id, channel_id, digest, None)
    if digest is not None:
        return await _get_variant(call, message_id, channel_id, digest, found.variants)
    if form is Form.PROTOBUF:
        return _frame_reply(call, found.entry, found.variants_count, NO_CACHE)
    return await _entry_json_reply(call, found.entry, found.variants)


def _not_here(why: Absence | None) -> Problem:
    match why:
        case Absence.WITHHELD:
            return Problem(
                Code.WITHHELD, "the message is in this node's quarantine until an operator decides"
            )
        case Absence.REFUSED:
            return Problem(
                Code.REFUSED,
                "this node's policy or operator refused the message; another store might have it",
            )
        case None:
            return no_such_message()


async def _get_variant(
    call: Call,
    message_id: str,
    channel_id: str | None,
    digest: str,
    variants: Sequence[bytes] | None,
) -> Reply:
    """The variant with a digest; `variants` is None if the content of the first one is gone."""
    entry = await call.readable.entry(hex_bytes(digest, "the digest"))
    if entry.message_id != message_id or channel_id not in (None, entry.channel_id):
        raise no_such_message()
    if variants is None:
        found = await call.node.store.entries.lookup(
            [entry.message_id],
            [],
            entry.channel_id,
            presence_only=True,
            bytes_max=call.node.limits.reply_bytes_max,
        )
        whole = [digest for _, digest in found.found if isinstance(digest, bytes)]
        variants = [*(digest for _, digest in found.left_out), *whole]
    if call.form is Form.PROTOBUF:
        return _frame_reply(call, entry, len(variants), NO_CACHE)
    return await _entry_json_reply(call, entry, variants)


@router.get(
    "/v1/entries/{digest:segment}",
    **documented(
        {200: reply("The entry", StoredMessage, "the frame"), 304: reply("If-None-Match names it")}
    ),
)
async def get_entry(call: Reader, digest: str) -> Reply:
    """A message by its digest, cacheable for ever."""
    form = call.form
    entry = await call.readable.entry(hex_bytes(digest, "the digest"))
    if form is Form.PROTOBUF:
        return _frame_reply(call, entry, None, IMMUTABLE)
    # Variants and hints may still come, so they are not part of an immutable reply.
    return _tagged(call, message_json(entry), IMMUTABLE)


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
    if entry.filter_is_lost:
        headers.append((b"sds-filter", b"lost"))
    if variants_count is not None:
        headers.append((b"sds-variants", b"%d" % variants_count))
    if _is_current(call, etag):
        return protobuf_reply(b"", 304, headers)
    return protobuf_reply(entry.frame, 200, headers)


async def _entry_json_reply(call: Call, entry: Entry, variants: Sequence[bytes]) -> Reply:
    claims = await call.node.store.claims.of([entry.digest])
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


@router.get(
    "/v1/hints/{hint:segment}",
    **documented({200: reply("A page of matches", MessagePage, wire.MessagePage)}),
)
async def get_hint(
    call: ReaderInTurn,
    hint: str,
    shape: Shaped,
    after: After = None,
    limit: PageLimit = DEFAULT_LIMITS.page_items_default,
    channel_id: str | None = None,
) -> Reply:
    """The entries that the hint, in hexadecimal, may mean: computed claims first, then publishers',
    then histories'. (Inside a message in JSON hints are base64.)"""
    store = call.node.store
    cursors = Cursors.of(store)
    position = await cursors.read_walk(CursorKind.HINT, store, after)
    wanted = hint_bytes(hint, "the hint")
    channel_nos = await call.channel_nos()
    page, described = await read_described(
        call,
        limit,
        lambda limit: store.claims.page(
            wanted, channel_id, limit, position, channel_nos=channel_nos
        ),
        shape,
    )
    token = None
    if page.next is not None:
        token = await cursors.write_walk(CursorKind.HINT, store, page.next)
    return page_reply(call, page, described, token, shape)


@router.post(
    "/v1/messages/lookup",
    **documented(
        {200: reply("Found and missing", LookupReply, wire.LookupReply)}, two_form_body(LOOKUP_BODY)
    ),
)
async def lookup(call: ReaderInTurn, shape: Shaped) -> Reply:
    """Which of these IDs and hints are stored, and the messages they lead to.

    `found` has a row for each match with its key. `missing` are keys without a match; an ID can have a `state`:
    `withheld`, `refused`, `retired`, or, in one channel, `met_as_sync`. `not_examined` are keys that did not fit, and hints
    with more claims than one page examines if none examined leads to a message: ask again for these. `left_out`
    are matches whose content is lost.
    """
    form = call.form
    wanted = await _wanted_keys(call)
    limits = call.node.limits
    if len(wanted.message_ids) + len(wanted.retrieval_hints) > limits.lookup_keys_max:
        raise Problem(
            Code.TOO_MANY_ITEMS, f"a look-up has at most {limits.lookup_keys_max} IDs and hints"
        )
    if any("\0" in text for text in (*wanted.message_ids, wanted.channel_id)):
        raise Problem(Code.NUL_CHARACTER, "an ID contains U+0000")
    channel_id = wanted.channel_id if wanted.HasField("channel_id") else None
    call.caller.require_channel_of_body(channel_id)

    async def read(bytes_max: int) -> Reply:
        result = await call.node.store.entries.lookup(
            wanted.message_ids,
            wanted.retrieval_hints,
            channel_id,
            presence_only=wanted.presence_only,
            bytes_max=bytes_max,
        )
        states = await _states(call, result, channel_id)
        if form is Form.PROTOBUF:
            return protobuf_reply(_lookup_protobuf(result, states, shape))
        return json_reply(_lookup_json(result, states, shape))

    return await fitted(call, read)


async def _states(call: Call, result: LookupResult, channel_id: str | None) -> States:
    """What is known of the missing IDs."""
    missing = [key for key in result.missing if isinstance(key, str)]
    states: dict[str, str] = {}
    if missing and channel_id is not None:
        met = await call.node.store.gaps.met(channel_id, missing)
        states.update(dict.fromkeys(met, MET_AS_SYNC))
    states.update(await call.absences(missing, channel_id))
    states.update({key: RETIRED for key in missing if key in result.retired})
    return states


async def _wanted_keys(call: Call) -> wire.LookupRequest:
    body = await LOOKUP_BODY.read(call)
    if isinstance(body, wire.LookupRequest):
        return body
    return wire.LookupRequest(
        message_ids=body.message_ids,
        retrieval_hints=[hint_bytes(hint, "a retrieval hint") for hint in body.retrieval_hints],
        channel_id=body.channel_id,
        presence_only=body.presence_only,
    )


def _lookup_json(result: LookupResult, states: States, shape: Shape) -> dict[str, Any]:
    return {
        "found": [_match_json(key, match, shape) for key, match in result.found],
        "missing": [_key_json(key, states) for key in result.missing],
        "not_examined": list(map(_key_json, result.not_examined)),
        "left_out": [_match_json(key, digest) for key, digest in result.left_out],
    }


def _match_json(key: str | bytes, match: Entry | bytes, shape: Shape = WHOLE) -> dict[str, Any]:
    if isinstance(match, bytes):
        return {"key": _key_json(key), "digest": match.hex()}
    return {"key": _key_json(key), "digest": match.digest.hex(), **message_json(match, shape=shape)}


def _key_json(key: str | bytes, states: States = NO_STATES) -> dict[str, str]:
    if isinstance(key, bytes):
        return {"retrieval_hint": key.hex()}
    return {"message_id": key} | ({"state": states[key]} if key in states else {})


def _lookup_protobuf(result: LookupResult, states: States, shape: Shape) -> wire.LookupReply:
    return wire.LookupReply(
        found=[_match_protobuf(key, match, shape) for key, match in result.found],
        missing=[_key_protobuf(key, states) for key in result.missing],
        not_examined=map(_key_protobuf, result.not_examined),
        left_out=[_match_protobuf(key, digest) for key, digest in result.left_out],
    )


def _match_protobuf(
    key: str | bytes, match: Entry | bytes, shape: Shape = WHOLE
) -> wire.LookupMatch:
    if isinstance(match, bytes):
        return wire.LookupMatch(key=_key_protobuf(key), digest=match)
    return wire.LookupMatch(
        key=_key_protobuf(key), digest=match.digest, message=message_protobuf(match, shape=shape)
    )


def _key_protobuf(key: str | bytes, states: States = NO_STATES) -> wire.LookupKey:
    if isinstance(key, str):
        return wire.LookupKey(message_id=key, state=states.get(key, ""))
    return wire.LookupKey(retrieval_hint=key)


@router.post(
    "/v1/entries",
    **documented(
        {
            200: reply(
                "One line, or one length-delimited EntryItem, per digest",
                others={
                    Form.NDJSON: {"type": "string"},
                    Form.PROTOBUF: {**BINARY, "description": "EntryItem, length-delimited"},
                },
            )
        },
        two_form_body(ENTRIES_BODY),
    ),
)
async def stream_entries(call: Reader) -> StreamedReply:
    """One line, or length-delimited `EntryItem`, per digest and in order: the entry, `missing`, `lost` or `retired`."""
    render, form = _json_line, Form.NDJSON
    if call.form is Form.PROTOBUF:
        render, form = _delimited, Form.PROTOBUF
    body = await ENTRIES_BODY.read(call)
    if isinstance(body, EntriesBody):
        digests = [hex_bytes(digest, "a digest") for digest in body.digests]
    else:
        digests = list(body.digests)
    if len(digests) > call.node.limits.entries_max:
        raise Problem(Code.TOO_MANY_ITEMS, f"up to {call.node.limits.entries_max} digests")
    return StreamedReply([(b"content-type", form.value), VARY], _parts(call, digests, render))


async def _parts(
    call: Call, digests: Sequence[bytes], render: Render
) -> AsyncGenerator[Sequence[bytes], None]:
    sharing = call.node.sharing
    done = 0
    while done < len(digests):
        # Asked for again only when the part before has been read: nothing is held meanwhile.
        with (
            await sharing.replies.take(call.address, PART_BYTES),
            await sharing.turns[Turns.READS].take(call.address, 1),
        ):
            part = await _next_part(call, digests[done : done + ENTRIES_PER_PART])
            done += len(part)
            rendered = [render(digest, found) for digest, found in part]
            del part
        yield rendered


async def _next_part(
    call: Call, digests: Sequence[bytes]
) -> list[tuple[bytes, Entry | ContentState | None]]:
    """The first of these digests, as many as fit into a part, with their entries."""
    # Of the entries that the caller may see, or a part would end where a hidden one is.
    sizes = await call.readable.frame_sizes(digests)
    sums = accumulate(sizes.get(digest, 0) for digest in digests)
    asked = digests[: max(1, sum(1 for bytes_count in sums if bytes_count <= PART_BYTES))]
    found = await call.readable.contents(asked)
    return [(digest, found.get(digest)) for digest in asked]


def _json_line(digest: bytes, found: Entry | ContentState | None) -> bytes:
    if isinstance(found, Entry):
        document = message_json(found)
    else:
        document = {"missing" if found is None else found.value: digest.hex()}
    return orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)


def _delimited(digest: bytes, found: Entry | ContentState | None) -> bytes:
    item = wire.EntryItem(missing=digest)
    if isinstance(found, Entry):
        item = wire.EntryItem(entry=message_protobuf(found))
    elif found is ContentState.LOST:
        item = wire.EntryItem(lost=digest)
    elif found is ContentState.RETIRED:
        item = wire.EntryItem(retired=digest)
    output = BytesIO()
    serialize_length_prefixed(item, output)
    return output.getvalue()


# ---- ancestors

_LIMIT_DEFAULT = DEFAULT_LIMITS.page_items_default
_URL_TOKEN_CHARACTERS_MAX = 4_000
REQUEST_FIELDS = 3
"""Fields of an `AncestorsRequest` beside heads and known IDs."""

_REPLIES: Replies = {
    200: reply("Part of the closure, in causal order", AncestorsPage, wire.AncestorsPage)
}


class AncestorsBody(BaseModel):
    """The JSON form of a request for ancestors."""

    model_config = ConfigDict(extra="forbid", strict=True)

    channel_id: str
    heads: Annotated[list[str], FailFast()] = Field(
        description="the walk starts here; they are not in the answer"
    )
    known: Annotated[list[str], FailFast()] = Field(
        default_factory=list, description="the walk does not pass these"
    )
    limit: int = Field(default=0, ge=0, le=DEFAULT_LIMITS.ancestors_max, description="0: default")
    after: str = Field(default="", description="the `next` of the page before this one")


class _Wanted(NamedTuple):
    channel_id: str
    heads: Sequence[str]
    known: Sequence[str]
    limit: int
    after: str | None


ANCESTORS_BODY = TwoFormBody(
    AncestorsBody,
    wire.AncestorsRequest,
    lambda limits: limits.ancestors_heads_max + limits.lookup_keys_max + REQUEST_FIELDS,
)


@get_by_id(router, "/v1/messages/{message_id:segment}/ancestors", **documented(_REPLIES))
async def ancestors_of_one(
    call: ReaderInTurn,
    message_id: str,
    channel_id: Annotated[str | None, Query(description="else that of the message served")] = None,
    limit: Annotated[int, Query(ge=1, le=DEFAULT_LIMITS.ancestors_max)] = _LIMIT_DEFAULT,
    after: After = None,
) -> Reply:
    """Everything before one message, the latest first; in each page every message after its causes."""
    found = await call.readable.find(message_id, channel_id)
    wanted = _Wanted(found.entry.channel_id, [message_id], [], limit, after)

    async def read(bytes_max: int) -> Reply:
        page, token = await _page(call, wanted, bytes_max)
        link = next_link(call, token if _fits_url(token) else None)
        return await _reply(call, wanted.channel_id, page, token, link)

    return await fitted(call, read)


@router.post("/v1/messages/ancestors", **documented(_REPLIES, two_form_body(ANCESTORS_BODY)))
async def ancestors(call: ReaderInTurn) -> Reply:
    """Everything before the heads, not passing through `known`, and the IDs that are missing here.

    Pages go back in time; within a page every message comes after its causes. A cycle is entered at its first
    message in log order. All variants under an ID count. `missing` lists IDs that are not stored, cannot be read,
    or did not fit into the cursor: the walk ends there; `met_as_sync`, `withheld` and `refused` list those of them
    for which that is known. Follow `next` until it is null. A message can come twice only where clocks
    contradict causes. A cursor that is too long for a URL has no `Link`: POST it.
    """
    wanted = await _wanted(call)
    call.caller.require_channel_of_body(wanted.channel_id)

    async def read(bytes_max: int) -> Reply:
        page, token = await _page(call, wanted, bytes_max)
        return await _reply(call, wanted.channel_id, page, token, [])

    return await fitted(call, read)


def _fits_url(token: str | None) -> bool:
    # A longer one goes on with POST, which takes it in the body.
    return token is not None and len(token) <= _URL_TOKEN_CHARACTERS_MAX


async def _wanted(call: Call) -> _Wanted:
    limits = call.node.limits
    request = await ANCESTORS_BODY.read(call)
    if len(request.heads) > limits.ancestors_heads_max:
        raise Problem(Code.TOO_MANY_ITEMS, f"up to {limits.ancestors_heads_max} heads")
    if len(request.known) > limits.lookup_keys_max:
        raise Problem(Code.TOO_MANY_ITEMS, f"up to {limits.lookup_keys_max} known IDs")
    if any("\0" in text for text in (*request.heads, *request.known, request.channel_id)):
        raise Problem(Code.NUL_CHARACTER, "an ID contains U+0000")
    if request.limit > limits.ancestors_max:
        raise Problem(Code.INVALID_BODY, f"limit must be at most {limits.ancestors_max}")
    limit = request.limit or _LIMIT_DEFAULT
    return _Wanted(request.channel_id, request.heads, request.known, limit, request.after or None)


async def _page(call: Call, wanted: _Wanted, bytes_max: int) -> tuple[AncestorPage, str | None]:
    store = call.node.store
    cursors = Cursors.of(store)
    page = await store.ancestors.page(
        wanted.channel_id,
        wanted.heads,
        wanted.known,
        limit=wanted.limit,
        bytes_max=bytes_max,
        after=await cursors.read_walk(CursorKind.ANCESTORS, store, wanted.after),
    )
    if page.next is None:
        return page, None
    return page, await cursors.write_walk(CursorKind.ANCESTORS, store, page.next)


async def _reply(
    call: Call, channel_id: str, page: AncestorPage, token: str | None, headers: Headers
) -> Reply:
    absences = await call.absences(page.missing, channel_id)
    withheld, refused = (
        [each for each in page.missing if absences.get(each) is why]
        for why in (Absence.WITHHELD, Absence.REFUSED)
    )
    if call.form is Form.PROTOBUF:
        message = wire.AncestorsPage(
            messages=map(message_protobuf, page.entries),
            missing=page.missing,
            next=token or "",
            left_out=page.left_out,
            met_as_sync=page.met_as_sync,
            withheld=withheld,
            refused=refused,
        )
        return protobuf_reply(message, 200, headers)
    messages = list(map(message_json, page.entries))
    document = {
        "messages": messages,
        "missing": page.missing,
        "next": token,
        "left_out": [digest.hex() for digest in page.left_out],
        "met_as_sync": page.met_as_sync,
        "withheld": withheld,
        "refused": refused,
    }
    return json_reply(document, 200, headers)
