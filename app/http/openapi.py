"""The OpenAPI document: the JSON of replies as types, and what FastAPI does not know of a route.

Handlers write the JSON of replies themselves, because validating what the node has just made would only cost time.
`tests/app/http/test_models.py` reads replies of every route by these models and forbids other members.

FastAPI describes parameters from the handlers. `documented` gives it the bodies and replies, which have two
forms. Added here: the scope of a route, the query form of a path with an ID, and problem documents as the only
errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from google.protobuf.message import Message
from pydantic import BaseModel, Field
from pydantic.config import JsonDict
from pydantic.json_schema import models_json_schema

from app.access.callers import Scope
from app.http.admission import ID_PARAMETERS, NodeRoute, admission_of
from app.http.call import Form, TwoFormBody
from app.server.settings import RetentionRule

# ---- the JSON of replies

_BASE64: JsonDict = {"format": "byte"}
_State = Literal["missing", "withheld", "refused", "met_as_sync"]


class HistoryEntryJson(BaseModel):
    """A cause that a message names."""

    message_id: str = ""
    retrieval_hint: str | None = Field(None, json_schema_extra=_BASE64)
    sender_id: str | None = None


class MessageJson(BaseModel):
    """Proto3 JSON of `sds.Message`: bytes are in base64, 64-bit numbers are strings."""

    message_id: str = ""
    channel_id: str = ""
    sender_id: str = ""
    lamport_timestamp: str | None = None
    causal_history: list[HistoryEntryJson] = []
    bloom_filter: str | None = Field(None, json_schema_extra=_BASE64)
    repair_request: list[HistoryEntryJson] = []
    content: str | None = Field(None, json_schema_extra=_BASE64)


class MetaJson(BaseModel):
    """What the store adds to a message. Hashes and hints are hexadecimal."""

    digest: str
    frame_hash: str | None = Field(None, description="absent if the filter was left out")
    dialect: str | None = Field(None, description="absent, as all but `seq`, with `meta=short`")
    received_at: str | None = None
    seq: int = Field(description="position in this store's arrival order")
    filter_lost: bool | None = Field(None, description="the store lost the bloom filter")
    filter_left_out: bool | None = Field(
        None, description="not the frame as received: `filter=none`"
    )
    variants: list[str] | None = Field(None, description="digests of other entries with this ID")
    hints: list[str] | None = Field(None, description="hints that publishers gave")


class StoredMessage(BaseModel):
    """A message and what the store knows of it."""

    message: MessageJson
    meta: MetaJson


class PublishedMessage(BaseModel):
    """A message to publish. `meta` is ignored, so what a GET returns can be published elsewhere."""

    message: MessageJson
    meta: dict[str, Any] | None = None


class ProblemJson(BaseModel):
    """A problem document (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    code: str = Field(description="stable; docs/errors.md lists them")


class PublishOutcome(BaseModel):
    """What became of one publication."""

    message_id: str | None
    channel_id: str | None
    digest: str | None
    outcome: Literal["stored", "duplicate", "relayed", "refused"]
    hints_dropped: int | None = Field(None, description="hints beyond the bound of one entry")
    problem: ProblemJson | None = None


class PublishOutcomes(BaseModel):
    """The outcomes of a batch, in order."""

    outcomes: list[PublishOutcome]


class MessagePage(BaseModel):
    """A page of messages."""

    messages: list[StoredMessage]
    next: str | None = Field(description="pass it as `after`; null: nothing follows")
    left_out: list[str] = Field(description="digests of messages whose content is lost")


class ChannelJson(BaseModel):
    """A channel."""

    channel_id: str
    count: int
    lamport_first: str
    lamport_last: str


class ChannelWithRoot(ChannelJson):
    """A channel with its root: BLAKE3 over the sorted digests."""

    root: str


class ChannelPage(BaseModel):
    """A page of channels."""

    channels: list[ChannelJson]
    next: str | None


class GapJson(BaseModel):
    """A message that histories name and the store lacks."""

    message_id: str
    hints: list[str]
    met_as_sync: bool
    state: _State
    named_by: Literal["history", "sync"]


class GapPage(BaseModel):
    """A page of gaps."""

    gaps: list[GapJson]
    next: str | None


class LookupKey(BaseModel):
    """An ID or a hint of a look-up; `state`: what is known of a missing message."""

    message_id: str | None = None
    retrieval_hint: str | None = None
    state: _State | Literal["retired"] | None = None


class LookupMatch(BaseModel):
    """A match, with the message unless only presence was asked for."""

    key: LookupKey
    digest: str
    message: MessageJson | None = None
    meta: MetaJson | None = None


class LookupReply(BaseModel):
    """What a look-up found."""

    found: list[LookupMatch]
    missing: list[LookupKey]
    not_examined: list[LookupKey]
    left_out: list[LookupMatch]


class AncestorsPage(BaseModel):
    """A part of a causal closure, in causal order."""

    messages: list[StoredMessage]
    missing: list[str]
    next: str | None
    left_out: list[str]
    met_as_sync: list[str]
    withheld: list[str]
    refused: list[str]


class OrderItem(BaseModel):
    """A place in the order of a channel."""

    message_id: str
    sender_id: str | None
    digest: str
    confirmed: bool
    message: MessageJson | None = None
    meta: MetaJson | None = None


class OrderBreach(BaseModel):
    """A breach of the order's preconditions."""

    kind: str
    sender_id: str
    message_id: str
    other_message_id: str
    detail: str


class OrderIndexer(BaseModel):
    """What the node has of one indexer: shows which one confirmation waits for.

    `message_count` is 0 for one that has not written. `unseen_count`: messages of other indexers that its last one,
    `last_message_id`, has not seen.
    """

    model_config = {"extra": "allow"}


class OrderWaitsFor(BaseModel):
    """What confirmation of the tail waits for: messages by `count` of `sender_ids` that show that they have seen
    `message_id`, and that a majority has."""

    message_id: str
    count: int
    sender_ids: list[str]


class OrderPage(BaseModel):
    """A page of the order of a channel."""

    items: list[OrderItem]
    confirmed_count: int
    tail_count: int
    waiting_count: int = Field(
        description="messages that are not ordered because causes are missing"
    )
    missing: list[str] = Field(description="up to 100 of those causes that have not arrived")
    breaches: list[OrderBreach] = Field(description="up to 100 preconditions that do not hold")
    senderless_count: int = Field(description="messages without a sender, which never vote")
    complete: bool = Field(
        description="the node has read the whole channel; else `items` are confirmed ones only"
    )
    next: str | None = Field(description="pass it as `after`; null: nothing follows")
    next_confirmed: str | None = Field(description="the cursor after the last confirmed item")
    left_out: list[str] = Field(
        description="digests of up to 100 messages whose content is lost: causes that are missing"
    )
    indexers: list[OrderIndexer]
    waits_for: OrderWaitsFor | None = Field(
        description="null: there is no tail, or a breach ends confirmation"
    )


class InterestJson(BaseModel):
    """What a node wants of its peers."""

    all: bool
    channels: list[str]
    prefixes: list[str]
    lamport_from: str | None
    lamport_to: str | None
    origin: str
    set_at_ms: int | None


class Outside(BaseModel):
    """What an interest does not cover any more."""

    channels: int
    entries: int
    detail: str | None = None


class ChangedInterest(InterestJson):
    """An interest after a change."""

    outside: Outside


class PeerJson(BaseModel):
    """A peer."""

    id: str
    url: str
    origin: str
    state: str
    since_ms: int
    code: str
    reason: str
    failures: int
    last_sync_id: str | None
    next_sync_at_ms: int | None
    in_sync_at_ms: int | None


class PeerStatus(PeerJson):
    """A peer with its last report and the record of divergence.

    `missing_there`: entries of the mutual interest that arrived here after the last proof, without those that the
    peer sent; counted now. `missing_there_is_exact` is false if there are more than 10,000, or nothing was proved yet;
    then the number is at least that, or as the last session left it. `missing_here`: elements that the last session
    found at the peer and did not get. `set_aside_here`, `set_aside_there`: elements that one side refuses or cannot
    give. `oldest_difference_at_ms`, `oldest_difference_age_s`: when the oldest of these was first seen here.
    `proved_at_ms`: when both sides were last proved equal.
    """

    last_report: dict[str, Any] | None
    divergence: dict[str, Any]


class PeerList(BaseModel):
    """All peers."""

    peers: list[PeerJson]


class SegmentJson(BaseModel):
    """A part of the range bar."""

    state: str
    share: float


class ProgressJson(BaseModel):
    """The progress of a session."""

    model_config = {"extra": "allow"}

    in_sync_percent: float
    segments: list[SegmentJson]


class SyncJson(BaseModel):
    """A session with another store."""

    id: str
    peer_url: str
    peer_id: str | None
    channels: list[str]
    dry_run: bool
    state: Literal["running", "finished"]
    started_by: str
    process: str
    started_at_ms: int
    finished_at_ms: int | None
    outcome: str | None
    progress: ProgressJson
    entries_per_s: float
    bytes_per_s: float
    eta_s: float | None
    report: dict[str, Any] | None


class SyncList(BaseModel):
    """Sessions, newest first."""

    syncs: list[SyncJson]


class SenderJson(BaseModel):
    """A sender that a token is bound to, and in which channels."""

    sender: str
    channels: str


class TokenJson(BaseModel):
    """An access token, without its secret."""

    id: str
    name: str
    scopes: list[str]
    channels: list[str] | None
    channel_prefixes: list[str] | None
    created_at_ms: int
    expires_at_ms: int | None
    senders: list[SenderJson]
    vouches: bool


class NewToken(TokenJson):
    """A token that was just made; `token` is the text that a caller sends."""

    token: str


class TokenList(BaseModel):
    """All access tokens."""

    tokens: list[TokenJson]


class HeldJson(BaseModel):
    """A message in the quarantine."""

    digest: str
    message_id: str
    channel_id: str
    frame_bytes: int
    way: str
    reason: str
    held_at: str


class HeldPage(BaseModel):
    """A page of the quarantine."""

    messages: list[HeldJson]
    next: int | None


class HeldMessage(BaseModel):
    """A message in the quarantine with its content."""

    digest: str
    message: MessageJson


class Released(BaseModel):
    """What became of a released message."""

    digest: str
    outcome: str


class RetiredEntries(BaseModel):
    """Entries retired now, those to be stored without content on arrival, and those retired before."""

    retired: int
    ahead: int
    already: int
    erasure: str = Field(description="done, pending or rewrite_needed: see docs/operations.md")


class RetentionRules(BaseModel):
    """The rules of retention, the first that covers a channel holds."""

    rules: list[RetentionRule]


class RetentionDue(BaseModel):
    """What a rule, by its place from 0, would retire of a channel, and the bound that it is beyond."""

    rule: int
    channel_id: str
    bound: str = Field(description="max_age_s, max_count or max_bytes")
    entries: int
    bytes: int
    oldest_at: str
    newest_at: str


class RetentionDryRun(BaseModel):
    """What rules would retire; `next`: go on with it in `after`, null at the end."""

    channels: list[RetentionDue]
    next: int | None


class RetiredState(BaseModel):
    """The number of retired entries here, and whether their content is out of the database's files."""

    retired: int
    erasure: str


class Reloaded(BaseModel):
    """The settings that were taken over, and those that need a restart."""

    changed: list[str]
    needs_restart: list[str]


class Alive(BaseModel):
    """The process answers."""

    status: Literal["alive"]


class Ready(BaseModel):
    """The node serves messages."""

    status: Literal["ready"]
    failing_tasks: list[str] | None = None
    refuses_messages: str | None = None


class Info(BaseModel):
    """The node about itself."""

    version: str
    node_id: str
    protocols: dict[str, list[int]]
    digest: dict[str, Any]
    session: dict[str, Any]
    limits: dict[str, Any]
    content: dict[str, Any] | None = None


# ---- the document

Document = dict[str, Any]
Replies = Mapping[int | str, Document]

TEXT: Document = {"type": "string"}
BINARY: Document = {"type": "string", "format": "binary"}
HEX_PATTERN = {"pattern": "^([0-9a-fA-F]{2})*$"}
HEX_LIST_PATTERN = "^([0-9a-fA-F]{2})*( *, *([0-9a-fA-F]{2})*)*$"

_named: dict[str, type[BaseModel]] = {}
"""The models that the document refers to."""


def _schema(model: type[BaseModel]) -> Document:
    """A reference to a model."""
    _named[model.__name__] = model
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def documented(replies: Replies, body: Document | None = None) -> Document:
    """Options of a route: its replies, of which the first is the usual one, and a body that its handler reads."""
    return {
        "status_code": int(next(iter(replies))),
        "responses": dict(replies),
        "openapi_extra": {} if body is None else {"requestBody": body},
    }


def content(
    json: type[BaseModel] | None = None,
    protobuf: type[Message] | str | None = None,
    others: dict[Form, Document] | None = None,
) -> Document:
    """The `content` of a body or a reply: a schema by media type."""
    schemas = {} if json is None else {Form.JSON: _schema(json)}
    if protobuf is not None:
        name = protobuf if isinstance(protobuf, str) else protobuf.DESCRIPTOR.name
        schemas[Form.PROTOBUF] = {**BINARY, "description": name}
    schemas |= others or {}
    return {form.value.decode(): {"schema": schema} for form, schema in schemas.items()}


def reply(
    description: str,
    json: type[BaseModel] | None = None,
    protobuf: type[Message] | str | None = None,
    others: dict[Form, Document] | None = None,
) -> Document:
    """One reply of a route, by its form; without any, a reply without a described body."""
    described = content(json, protobuf, others)
    return {"description": description} | ({"content": described} if described else {})


EVENTS: Replies = {200: reply("Server-sent events", others={Form.EVENTS: TEXT})}


def body(described: Document, *, is_required: bool = True) -> Document:
    """A body with such content."""
    return {"required": is_required, "content": described}


def two_form_body(two: TwoFormBody[Any, Any]) -> Document:
    """A required body that has two forms."""
    return body(content(two.json, two.protobuf))


def describe(app: FastAPI, routes: Sequence[NodeRoute]) -> Document:
    """The document of all routes."""
    document: Document = get_openapi(title=app.title, version=app.version, routes=routes)
    paths: Document = document["paths"]
    for route in routes:
        operation = paths[route.path_format][route.method.lower()]
        admission = admission_of(route)
        operation["operationId"] = route.name  # generated clients name their methods by it
        operation["x-sdstore-scope"] = admission.scope.value
        if admission.scope is not Scope.OPEN:
            # On the node's own machine, and in channels that are open to anonymous callers, no token is needed.
            operation["security"] = [{}, {"token": []}]
        if admission.turns is not None:
            operation["x-sdstore-takes-turns"] = admission.turns.value
        _refuse_with_problems(operation)
        _drop_null(operation)
        _add_query_form(paths, route, operation)
    document["paths"] = dict(sorted(paths.items()))
    schemas: Document = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    models = [(model, "validation") for model in (*_named.values(), ProblemJson)]
    _, named = models_json_schema(
        models,  # type: ignore[arg-type]
        ref_template="#/components/schemas/{model}",
    )
    schemas |= named["$defs"]
    document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    return document


def _refuse_with_problems(operation: Document) -> None:
    responses: Document = operation["responses"]
    responses.pop("422", None)
    responses["default"] = {
        "description": "A problem document (RFC 9457) with a stable code",
        "content": {
            "application/problem+json": {"schema": {"$ref": "#/components/schemas/ProblemJson"}}
        },
    }


def _drop_null(operation: Document) -> None:
    """FastAPI describes an optional parameter as its type or null, which no query can hold."""
    for parameter in operation.get("parameters", ()):
        schema = parameter["schema"]
        match schema.get("anyOf"):
            case [value, {"type": "null"}]:
                del schema["anyOf"]
                schema |= value


def _add_query_form(paths: Document, route: NodeRoute, operation: Document) -> None:
    template = route.path_format
    name = next((each for each in ID_PARAMETERS if f"/{{{each}}}" in template), None)
    if name is None or route.method != "GET":
        return
    path_item = paths.setdefault(template.replace(f"/{{{name}}}", ""), {})
    parameter = {"name": name, "in": "query", "schema": {"type": "string"}}
    if "get" in path_item:
        parameter["description"] = f"answers as {template} does"
        path_item["get"].setdefault("parameters", []).append(parameter)
        usual = path_item["get"]["responses"]["200"]["content"][Form.JSON.value.decode()]
        other = operation["responses"]["200"]["content"][Form.JSON.value.decode()]
        usual["schema"] = {"anyOf": [usual["schema"], other["schema"]]}
        return
    query_form = deepcopy(operation)
    query_form["operationId"] += "_by_query"
    others = [p for p in query_form["parameters"] if p["name"] != name or p["in"] != "path"]
    query_form["parameters"] = [{**parameter, "required": True}, *others]
    path_item["get"] = query_form
