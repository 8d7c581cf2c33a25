"""The thin routes in the words of OpenAPI, one entry each; FastAPI describes the others itself."""

from __future__ import annotations

from typing import Any

from app.http.messages import LookupBody

Document = dict[str, Any]

_TEXT: Document = {"type": "string"}
_HEX: Document = {"type": "string", "pattern": "^([0-9a-fA-F]{2})*$"}
_BINARY: Document = {"type": "string", "format": "binary"}
_OBJECT: Document = {"type": "object"}

PROBLEM_SCHEMA: Document = {
    "type": "object",
    "title": "Problem",
    "required": ["type", "title", "status", "detail", "code"],
    "properties": {
        "type": _TEXT,
        "title": _TEXT,
        "status": {"type": "integer"},
        "detail": _TEXT,
        "code": {"type": "string", "description": "stable; docs/errors.md lists them"},
    },
}
_MESSAGE_JSON = (
    "proto3 JSON of sds.Message: bytes are base64 (content, bloom filter, the retrieval hints of a "
    "history); hints and hashes outside of it are hexadecimal"
)
_MESSAGE: Document = {
    "type": "object",
    "required": ["message"],
    "properties": {
        "message": {"type": "object", "description": _MESSAGE_JSON},
        "meta": {"type": "object", "description": "ignored where a message is published"},
    },
}
_OUTCOME: Document = {
    "type": "object",
    "required": ["message_id", "channel_id", "digest", "outcome"],
    "properties": {
        "message_id": {"type": ["string", "null"]},
        "channel_id": {"type": ["string", "null"]},
        "digest": {"type": ["string", "null"]},
        "outcome": {"enum": ["stored", "duplicate", "relayed", "refused"]},
        "problem": PROBLEM_SCHEMA,
    },
}


def _content(json: Document, protobuf: str) -> Document:
    return {
        "application/json": {"schema": json},
        "application/x-protobuf": {"schema": {**_BINARY, "description": protobuf}},
    }


def _answer(description: str, content: Document | None = None) -> Document:
    return {"description": description} | ({"content": content} if content else {})


def _body(content: Document) -> Document:
    return {"required": True, "content": content}


def _query(name: str, description: str, schema: Document = _TEXT) -> Document:
    return {"name": name, "in": "query", "description": description, "schema": schema}


_OUTCOME_CONTENT = _content(_OUTCOME, "PublishOutcome")

OPERATIONS: dict[tuple[str, str], Document] = {
    ("POST", "/v1/messages"): {
        "tags": ["messages"],
        "summary": "Publish one message",
        "parameters": [
            {
                "name": "Retrieval-Hint",
                "in": "header",
                "description": "in hexadecimal (not in base64, as inside a message), repeatable",
                "schema": _HEX,
            }
        ],
        "requestBody": _body(_content(_MESSAGE, "the frame")),
        "responses": {
            "201": _answer("Stored", _OUTCOME_CONTENT),
            "200": _answer("Already there", _OUTCOME_CONTENT),
            "202": _answer("Relayed, not stored (sync, ephemeral)", _OUTCOME_CONTENT),
        },
    },
    ("POST", "/v1/messages/batch"): {
        "tags": ["messages"],
        "summary": "Publish many messages; one outcome each, in order",
        "requestBody": _body(
            {
                "application/x-protobuf": {"schema": {**_BINARY, "description": "PublishBatch"}},
                "application/x-ndjson": {"schema": {**_TEXT, "description": "a message a line"}},
            }
        ),
        "responses": {
            "200": _answer(
                "Outcomes",
                _content(
                    {
                        "type": "object",
                        "required": ["outcomes"],
                        "properties": {"outcomes": {"type": "array", "items": _OUTCOME}},
                    },
                    "PublishOutcomes",
                ),
            )
        },
    },
    ("GET", "/v1/messages/{message_id}"): {
        "tags": ["messages"],
        "summary": "A message by its ID",
        "parameters": [
            _query("channel_id", "only in this channel"),
            _query("digest", "this variant", _HEX),
        ],
        "responses": {
            "200": _answer("The variant served, or the one asked for", _content(_MESSAGE, "frame")),
            "304": _answer("If-None-Match names it"),
        },
    },
    ("GET", "/v1/entries/{digest}"): {
        "tags": ["messages"],
        "summary": "A message by its digest, cacheable for ever",
        "responses": {
            "200": _answer("The entry", _content(_MESSAGE, "the frame")),
            "304": _answer("If-None-Match names it"),
        },
    },
    ("POST", "/v1/messages/lookup"): {
        "tags": ["messages"],
        "summary": "Which of these IDs and hints are here",
        "requestBody": _body(_content(LookupBody.model_json_schema(), "LookupRequest")),
        "responses": {"200": _answer("Found and missing", _content(_OBJECT, "LookupReply"))},
    },
    ("POST", "/v1/negentropy"): {
        "tags": ["reconciliation"],
        "summary": "One message of negentropy v1 about a channel (docs/negentropy.md)",
        "parameters": [
            {**_query("channel_id", "the channel"), "required": True},
            _query("from_lamport", "only entries from here on", {"type": "integer"}),
        ],
        "requestBody": _body({"application/octet-stream": {"schema": _BINARY}}),
        "responses": {
            "200": _answer("The answer", {"application/octet-stream": {"schema": _BINARY}})
        },
    },
    ("POST", "/v1/recon"): {
        "tags": ["reconciliation"],
        "summary": "One step of a reconciliation (docs/recon-protocol.md)",
        "requestBody": _body(
            {"application/x-protobuf": {"schema": {**_BINARY, "description": "ReconRequest"}}}
        ),
        "responses": {
            "200": _answer(
                "The responder's step",
                {"application/x-protobuf": {"schema": {**_BINARY, "description": "ReconResponse"}}},
            )
        },
    },
}
