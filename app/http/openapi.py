"""The OpenAPI document: words for bodies and replies, and what FastAPI does not know of a route.

FastAPI describes each route from its declaration (`app.http.routing`). Added here: the query form of
a path with an ID, and problem documents as the only errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from google.protobuf.message import Message
from starlette.routing import BaseRoute

from app.http.forms import Form, TwoFormBody

Document = dict[str, Any]
Replies = Mapping[int | str, Document]

QUERY_FORM_PARAMETERS = ("message_id", "channel_id")
"""Path parameters that a caller may pass in the query instead."""

TEXT: Document = {"type": "string"}
OBJECT: Document = {"type": "object"}
BINARY: Document = {"type": "string", "format": "binary"}
HEX_PATTERN = {"pattern": "^([0-9a-fA-F]{2})*$"}

_PROBLEM: Document = {
    "type": "object",
    "title": "Problem",
    "required": ["type", "title", "status", "detail", "code"],
    "properties": {
        "type": TEXT,
        "title": TEXT,
        "status": {"type": "integer"},
        "detail": TEXT,
        "code": {"type": "string", "description": "stable; docs/errors.md lists them"},
    },
}
_MESSAGE_JSON = (
    "proto3 JSON of sds.Message: bytes are base64 (content, bloom filter, the retrieval hints of a "
    "history); hints and hashes outside of it are hexadecimal"
)
MESSAGE: Document = {
    "type": "object",
    "required": ["message"],
    "properties": {
        "message": {"type": "object", "description": _MESSAGE_JSON},
        "meta": {"type": "object", "description": "ignored where a message is published"},
    },
}
OUTCOME: Document = {
    "type": "object",
    "required": ["message_id", "channel_id", "digest", "outcome"],
    "properties": {
        "message_id": {"type": ["string", "null"]},
        "channel_id": {"type": ["string", "null"]},
        "digest": {"type": ["string", "null"]},
        "outcome": {"enum": ["stored", "duplicate", "relayed", "refused"]},
        "problem": _PROBLEM,
    },
}
OUTCOMES: Document = {
    "type": "object",
    "required": ["outcomes"],
    "properties": {"outcomes": {"type": "array", "items": OUTCOME}},
}


def content(
    json: Document | None = None,
    protobuf: type[Message] | str | None = None,
    others: dict[Form, Document] | None = None,
) -> Document:
    """The `content` of a body or a reply: a schema by media type."""
    schemas = {} if json is None else {Form.JSON: json}
    if protobuf is not None:
        name = protobuf if isinstance(protobuf, str) else protobuf.DESCRIPTOR.name
        schemas[Form.PROTOBUF] = {**BINARY, "description": name}
    schemas |= others or {}
    return {form.value.decode(): {"schema": schema} for form, schema in schemas.items()}


def reply(
    description: str,
    json: Document | None = None,
    protobuf: type[Message] | str | None = None,
    others: dict[Form, Document] | None = None,
) -> Document:
    """One reply of a route, by its form; without any, a reply without a described body."""
    described = content(json, protobuf, others)
    return {"description": description} | ({"content": described} if described else {})


EVENTS: Replies = {200: reply("Server-sent events", others={Form.EVENTS: TEXT})}


def body(described: Document) -> Document:
    """A required body with such content."""
    return {"required": True, "content": described}


def two_form_body(two: TwoFormBody[Any, Any]) -> Document:
    """A required body that has two forms."""
    return body(content(two.json.model_json_schema(), two.protobuf))


def describe(app: FastAPI, routes: Sequence[BaseRoute]) -> Document:
    """The document of all routes, also of those that FastAPI does not serve."""
    document: Document = get_openapi(title=app.title, version=app.version, routes=routes)
    paths: Document = document["paths"]
    for template in list(paths):
        for method, operation in list(paths[template].items()):
            _refuse_with_problems(operation)
            _drop_null(operation)
            _add_query_form(paths, template, method, operation)
    document["paths"] = dict(sorted(paths.items()))
    schemas: Document = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Problem"] = _PROBLEM
    return document


def _refuse_with_problems(operation: Document) -> None:
    responses: Document = operation["responses"]
    responses.pop("422", None)
    responses["default"] = {
        "description": "A problem document (RFC 9457) with a stable code",
        "content": {
            "application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}
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


def _add_query_form(paths: Document, template: str, method: str, operation: Document) -> None:
    name = next((p for p in QUERY_FORM_PARAMETERS if f"{{{p}}}" in template), None)
    if name is None:
        return
    path_item = paths.setdefault(template.replace(f"/{{{name}}}", ""), {})
    parameter = {"name": name, "in": "query", "schema": {"type": "string"}}
    if method in path_item:
        parameter["description"] = f"answers as {template} does"
        path_item[method].setdefault("parameters", []).append(parameter)
        return
    query_form = deepcopy(operation)
    query_form["operationId"] += " (query form)"
    others = [p for p in query_form["parameters"] if p["name"] != name or p["in"] != "path"]
    query_form["parameters"] = [{**parameter, "required": True}, *others]
    path_item[method] = query_form
