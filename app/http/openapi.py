"""The OpenAPI document: words for bodies and replies, and what FastAPI does not know of a route.

FastAPI describes parameters from the handlers. `documented` gives it the bodies and replies, which have two
forms. Added here: the scope of a route, the query form of a path with an ID, and problem documents as the only
errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from google.protobuf.message import Message
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from app.access.callers import Scope
from app.http.admission import admission_of
from app.http.forms import Form, TwoFormBody
from app.http.models import ProblemJson
from app.http.routing import ID_PARAMETERS, NodeRoute

Document = dict[str, Any]
Replies = Mapping[int | str, Document]

TEXT: Document = {"type": "string"}
BINARY: Document = {"type": "string", "format": "binary"}
HEX_PATTERN = {"pattern": "^([0-9a-fA-F]{2})*$"}

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
            # On the node's own machine, and in channels that are open to strangers, no token is needed.
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
