"""The OpenAPI document: what FastAPI says, the thin routes, query forms and problems added."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from app.http.framework import SCOPE_KEY
from app.http.operations import OPERATIONS, PROBLEM_SCHEMA
from app.http.routes import QUERY_FORM_PARAMETERS, Route

Document = dict[str, Any]


def describe(app: FastAPI, thin_routes: Iterable[Route]) -> None:
    """Make `app.openapi()` describe every route of the node."""
    routes = list(thin_routes)

    def openapi() -> Document:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, routes)
        return app.openapi_schema

    # The way FastAPI documents for extending its document.
    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI, thin_routes: list[Route]) -> Document:
    document: Document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    paths: Document = document["paths"]
    for route in thin_routes:
        operation = _thin_operation(route)
        paths.setdefault(route.template, {})[route.method.lower()] = operation
    for template in list(paths):
        for method, operation in list(paths[template].items()):
            _refuse_with_problems(operation)
            _add_query_form(paths, template, method, operation)
    document["paths"] = dict(sorted(paths.items()))
    schemas: Document = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Problem"] = PROBLEM_SCHEMA
    return document


def _thin_operation(route: Route) -> Document:
    operation: Document = deepcopy(OPERATIONS[route.method, route.template])
    names = [part[1:-1] for part in route.template.split("/") if part.startswith("{")]
    operation["parameters"] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ] + operation.get("parameters", [])
    operation["operationId"] = f"{route.method} {route.template}"
    operation[SCOPE_KEY] = route.scope.value
    return operation


def _refuse_with_problems(operation: Document) -> None:
    responses: Document = operation["responses"]
    responses.pop("422", None)
    responses["default"] = {
        "description": "A problem document (RFC 9457) with a stable code",
        "content": {
            "application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}
        },
    }


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
