"""Publishing: one message or a batch, as frames or as JSON, through the one door."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from io import BytesIO
from time import perf_counter
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Header
from pydantic import WithJsonSchema

from app.access.callers import Caller, Scope
from app.entries import Outcome, OutcomeKind
from app.errors import Code, Problem
from app.hexadecimal import hint_bytes
from app.http.admission import NodeRoute, admitted
from app.http.call import Call, Form, Reply, body_form, json_reply, protobuf_reply, read_protobuf
from app.http.openapi import (
    HEX_LIST_PATTERN,
    TEXT,
    PublishedMessage,
    PublishOutcome,
    PublishOutcomes,
    body,
    content,
    documented,
    reply,
)
from app.ingest.prepare import Publication, WakuEnvelope, read_json_item
from app.server.limits import Limits
from app.server.sharing import Turns
from sdstore.wire import store_pb2 as wire

router = APIRouter(tags=["messages"], route_class=NodeRoute)

BLANK_LINES_FACTOR = 2
"""Line ends per item of an NDJSON batch: blank lines between items are allowed."""

STEP_S = 0.002
"""Work on a batch before other callers of the event loop get their turn."""

_Item = TypeVar("_Item")
_Made = TypeVar("_Made")
_STATUS = {OutcomeKind.STORED: 201, OutcomeKind.DUPLICATE: 200, OutcomeKind.RELAYED: 202}


@router.post(
    "/v1/messages",
    **documented(
        {
            201: reply("Stored", PublishOutcome, wire.PublishOutcome),
            200: reply("Already there", PublishOutcome, wire.PublishOutcome),
            202: reply(
                "Relayed, not stored (sync, ephemeral)", PublishOutcome, wire.PublishOutcome
            ),
        },
        body(content(PublishedMessage, "the frame")),
    ),
)
async def publish_one(
    call: Annotated[Call, admitted(Scope.PUBLISH)],
    retrieval_hint: Annotated[
        list[str] | None,
        Header(
            alias="Retrieval-Hint",
            description="in hexadecimal (not in base64, as inside a message), separated by commas",
        ),
        # The lines of a header are one value: a generated client sends it as text.
        WithJsonSchema({"type": "string", "pattern": HEX_LIST_PATTERN}),
    ] = None,
) -> Reply:
    """Publish one message: the frame, or the message as JSON."""
    form = call.form
    if not call.body:
        raise Problem(Code.EMPTY_BODY, "the body is the frame, or the message as JSON")
    publication = _one_publication(call, retrieval_hint or ())
    outcome = await call.node.ingest.door.publish(publication, call.caller)
    status = _STATUS[outcome.kind]
    digest = outcome.digest
    headers = [call.location(f"/v1/entries/{digest.hex()}")] if digest else []
    if form is Form.PROTOBUF:
        return protobuf_reply(_outcome_protobuf(outcome), status, headers)
    return json_reply(_outcome_json(outcome), status, headers)


@router.post(
    "/v1/messages/batch",
    **documented(
        {200: reply("Outcomes", PublishOutcomes, wire.PublishOutcomes)},
        body(
            content(
                None, wire.PublishBatch, {Form.NDJSON: {**TEXT, "description": "a message a line"}}
            )
        ),
    ),
)
async def publish_batch(
    call: Annotated[
        Call,
        admitted(
            Scope.PUBLISH, turns=Turns.BATCHES, body_bytes_max=lambda limits: limits.body_bytes_max
        ),
    ],
) -> Reply:
    """Publish many messages; one outcome each, in order. A refused item does not affect the others."""
    form = call.form
    if body_form(call.headers.get(b"content-type"), Form.PROTOBUF, Form.NDJSON) is Form.NDJSON:
        items = await _ndjson_items(call)
    else:
        items = await _protobuf_items(call)
    call.body = b""
    return await outcomes_reply(form, await _through_the_door(call, items))


async def outcomes_reply(form: Form, outcomes: Sequence[Outcome | Problem]) -> Reply:
    """The outcomes of a batch."""
    if form is Form.PROTOBUF:
        return protobuf_reply(
            wire.PublishOutcomes(outcomes=await _in_steps(_outcome_protobuf, outcomes))
        )
    return json_reply({"outcomes": await _in_steps(_outcome_json, outcomes)})


async def _through_the_door(
    call: Call, items: list[Publication | Problem]
) -> list[Outcome | Problem]:
    publications = [item for item in items if isinstance(item, Publication)]
    # The turn ends when the batch only waits for the disk.
    release = None if call.turn is None else call.turn.release
    outcomes = iter(await call.node.ingest.door.publish_many(publications, release, call.caller))
    return [item if isinstance(item, Problem) else next(outcomes) for item in items]


def _one_publication(call: Call, lines: Sequence[str]) -> Publication:
    # Several lines of the header are one list (RFC 9110 section 5.2).
    given = (hint for line in lines for hint in line.split(","))
    hints = tuple(hint_bytes(hint.strip(), "Retrieval-Hint") for hint in given)
    if body_form(call.headers.get(b"content-type"), Form.PROTOBUF, Form.JSON) is Form.PROTOBUF:
        return _covered(call.caller, Publication(call.body, hints))
    item = _json_publication(call.node.limits, call.body)
    return _covered(call.caller, item._replace(hints=hints + item.hints))


async def _protobuf_items(call: Call) -> list[Publication | Problem]:
    batch = await read_protobuf(wire.PublishBatch, call.body, call.node.limits.batch_fields_max)
    # Free the body: the parsed batch is a copy of it, and each frame taken from that is another.
    call.body = b""
    _check_count(call, len(batch.items))
    return await _in_steps(partial(_attempt, _from_item, call.caller), batch.items)


async def _ndjson_items(call: Call) -> list[Publication | Problem]:
    # Count first: a body of line ends alone would become a list of millions.
    if call.body.count(b"\n") > BLANK_LINES_FACTOR * call.node.limits.batch_items_max:
        raise _too_many(call)
    _check_count(call, sum(1 for _ in _lines(call.body)))
    read = partial(_line_publication, call.node.limits)
    return await _in_steps(partial(_attempt, read, call.caller), _lines(call.body))


def _lines(body: bytes) -> Iterator[bytes]:
    """The lines that are not empty, one at a time: a list of them would be a second copy of the body."""
    return (line.rstrip(b"\n") for line in BytesIO(body) if not line.isspace())


def _line_publication(limits: Limits, line: bytes) -> Publication:
    # A line is bounded like the body of a request of its own.
    if len(line) > (bytes_max := limits.small_body_bytes_max):
        raise Problem(
            Code.BODY_TOO_LARGE, f"a line has {len(line)} bytes; the maximum is {bytes_max}"
        )
    return _json_publication(limits, line)


def _json_publication(limits: Limits, document: bytes) -> Publication:
    # A parser makes an object of every two bytes "[]": 0.2 s for the 2 MiB of a line.
    if len(document) > (most := limits.json_brackets_max):
        count = document.count(b"[") + document.count(b"{")
        if count > most:
            why = f"the message in JSON has {count} characters [ and {{; the maximum is {most}"
            raise Problem(Code.TOO_MANY_ITEMS, why)
    return read_json_item(document)


async def _in_steps(make: Callable[[_Item], _Made], items: Iterable[_Item]) -> list[_Made]:
    """`make` of each item; other callers of the event loop get their turn now and then."""
    made: list[_Made] = []
    step_ends_s = perf_counter() + STEP_S
    for item in items:
        made.append(make(item))
        if perf_counter() > step_ends_s:
            await asyncio.sleep(0)
            step_ends_s = perf_counter() + STEP_S
    return made


def _check_count(call: Call, items_count: int) -> None:
    if not items_count:
        raise Problem(Code.EMPTY_BODY, "the batch has no items")
    if items_count > call.node.limits.batch_items_max:
        raise _too_many(call)


def _too_many(call: Call) -> Problem:
    items_max = call.node.limits.batch_items_max
    return Problem(
        Code.TOO_MANY_ITEMS, f"a batch has at most {items_max} items; send several batches"
    )


def _attempt(
    read: Callable[[_Item], Publication], caller: Caller, item: _Item
) -> Publication | Problem:
    try:
        return _covered(caller, read(item))
    except Problem as problem:
        return problem.detached()


def _from_item(item: wire.PublishItem) -> Publication:
    envelope = None
    if item.HasField("waku"):
        waku = item.waku
        envelope = WakuEnvelope(waku.pubsub_topic, waku.content_topic, waku.meta, waku.timestamp_ns)
    hints = tuple(item.retrieval_hints)
    return Publication(item.frame, hints, envelope, item.without_quarantine)


def _covered(caller: Caller, publication: Publication) -> Publication:
    caller.require_channel_of_frame(publication.frame)
    return publication


def _outcome_json(outcome: Outcome | Problem) -> dict[str, Any]:
    """The outcome of one publication; that of a refused one contains the problem document."""
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
        **({"hints_dropped": outcome.hints_dropped} if outcome.hints_dropped else {}),
    }


def _outcome_protobuf(outcome: Outcome | Problem) -> wire.PublishOutcome:
    """The outcome of one publication in protobuf."""
    if isinstance(outcome, Problem):
        problem = wire.Problem(
            code=outcome.code, status=outcome.status, title=outcome.title, detail=outcome.detail
        )
        return wire.PublishOutcome(outcome="refused", problem=problem)
    return wire.PublishOutcome(
        outcome=outcome.kind.value,
        message_id=outcome.message_id,
        channel_id=outcome.channel_id,
        digest=outcome.digest,
        hints_dropped=outcome.hints_dropped,
    )
