"""Publishing: one message or a batch, as frames or as JSON, all through the one door."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from app.entries import Outcome, OutcomeKind
from app.errors import Code, Problem, problem_of_message
from app.hexadecimal import hint_bytes
from app.http.auth import Caller, Scope
from app.http.call import Call, Reply
from app.http.forms import Form, answer_form, body_form
from app.http.parsing import read_protobuf
from app.http.render import (
    json_reply,
    outcome_json,
    outcome_protobuf,
    protobuf_reply,
)
from app.ingest.door import Publication, WakuEnvelope
from app.ingest.jsonitem import read_json_item
from sdstore.sds.codec import MessageError, decode
from sdstore.wire import store_pb2 as wire

_Item = TypeVar("_Item")
_STATUS = {OutcomeKind.STORED: 201, OutcomeKind.DUPLICATE: 200, OutcomeKind.RELAYED: 202}


async def publish_one(call: Call) -> Reply:
    """`POST /v1/messages`: one frame, or one message as JSON."""
    form = answer_form(call.headers.get(b"accept"))
    if not call.body:
        raise Problem(Code.EMPTY_BODY, "the body is the frame, or the message as JSON")
    outcome = await call.node.door.publish(_one_publication(call))
    status = _STATUS[outcome.kind]
    headers = (
        [(b"location", b"/v1/entries/" + outcome.digest.hex().encode())] if outcome.digest else []
    )
    if form is Form.PROTOBUF:
        return protobuf_reply(outcome_protobuf(outcome).SerializeToString(), status, headers)
    return json_reply(outcome_json(outcome), status, headers)


async def publish_batch(call: Call) -> Reply:
    """`POST /v1/messages/batch`: one outcome per item, in order; a bad one spoils no other."""
    form = answer_form(call.headers.get(b"accept"))
    if body_form(call.headers.get(b"content-type"), Form.PROTOBUF, Form.NDJSON) is Form.NDJSON:
        items = _ndjson_items(call)
    else:
        items = _protobuf_items(call)
    outcomes = await _through_the_door(call, items)
    if form is Form.PROTOBUF:
        answer = wire.PublishOutcomes(outcomes=map(outcome_protobuf, outcomes))
        return protobuf_reply(answer.SerializeToString())
    return json_reply({"outcomes": list(map(outcome_json, outcomes))})


async def _through_the_door(
    call: Call, items: list[Publication | Problem]
) -> list[Outcome | Problem]:
    publications = [item for item in items if isinstance(item, Publication)]
    outcomes = iter(await call.node.door.publish_many(publications))
    return [item if isinstance(item, Problem) else next(outcomes) for item in items]


def _one_publication(call: Call) -> Publication:
    hints = tuple(_header_hints(call))
    if body_form(call.headers.get(b"content-type"), Form.PROTOBUF, Form.JSON) is Form.PROTOBUF:
        return _covered(call.caller, Publication(call.body, hints))
    item = read_json_item(call.body)
    return _covered(call.caller, item._replace(hints=hints + item.hints))


def _header_hints(call: Call) -> Iterator[bytes]:
    for name, value in call.raw_headers:
        if name == b"retrieval-hint":
            for hint in value.decode("latin-1").split(","):
                yield hint_bytes(hint.strip(), "Retrieval-Hint")


def _protobuf_items(call: Call) -> list[Publication | Problem]:
    batch = read_protobuf(wire.PublishBatch, call.body)
    _check_count(call, len(batch.items))
    return [_attempt(_from_item, call.caller, item) for item in batch.items]


def _ndjson_items(call: Call) -> list[Publication | Problem]:
    lines = [line for line in call.body.split(b"\n") if line.strip()]
    _check_count(call, len(lines))
    return [_attempt(read_json_item, call.caller, line) for line in lines]


def _check_count(call: Call, items_count: int) -> None:
    if not items_count:
        raise Problem(Code.EMPTY_BODY, "the batch holds no item")
    if items_count > call.node.limits.batch_items_max:
        raise Problem(
            Code.TOO_MANY_ITEMS, f"a batch holds up to {call.node.limits.batch_items_max} items"
        )


def _attempt(
    read: Callable[[_Item], Publication], caller: Caller, item: _Item
) -> Publication | Problem:
    try:
        return _covered(caller, read(item))
    except Problem as problem:
        return problem


def _from_item(item: wire.PublishItem) -> Publication:
    envelope = None
    if item.HasField("waku"):
        waku = item.waku
        envelope = WakuEnvelope(waku.pubsub_topic, waku.content_topic, waku.meta, waku.timestamp_ns)
    return Publication(item.frame, tuple(item.retrieval_hints), envelope)


def _covered(caller: Caller, publication: Publication) -> Publication:
    if caller.channels is not None:
        try:
            message, _ = decode(publication.frame)
        except MessageError as error:
            raise problem_of_message(error) from None
        caller.require(Scope.PUBLISH, message.channel_id)
    return publication
