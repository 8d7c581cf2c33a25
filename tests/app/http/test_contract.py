"""The routes whose names are fixed exist, in the route table and in the OpenAPI document."""

from __future__ import annotations

from app.access.callers import Scope
from app.http.application import openapi_document
from app.http.channels import BELOW_A_CHANNEL
from tests.support.routes import ROUTES

FIXED = {
    "POST /v1/messages",
    "POST /v1/messages/batch",
    "GET /v1/messages/{message_id}",
    "GET /v1/entries/{digest}",
    "POST /v1/messages/lookup",
    "GET /v1/hints/{hint}",
    "GET /v1/channels",
    "GET /v1/channels/{channel_id}",
    "GET /v1/channels/{channel_id}/messages",
    "GET /v1/channels/{channel_id}/gaps",
    "GET /v1/channels/{channel_id}/live",
    "GET /v1/feed",
    "GET /v1/live",
    "POST /v1/live",
    "POST /v1/entries",
    "POST /v1/negentropy",
    "POST /v1/recon",
    "GET /v1/recon/interests",
    "GET /v1/relay",
    "POST /v1/relay",
    "GET /v1/peers",
    "POST /v1/peers",
    "GET /v1/peers/{peer_id}",
    "DELETE /v1/peers/{peer_id}",
    "POST /v1/peers/{peer_id}/sync",
    "GET /v1/peers/{peer_id}/status",
    "GET /v1/syncs",
    "GET /v1/syncs/{sync_id}",
    "GET /v1/syncs/{sync_id}/events",
    "GET /v1/info",
    "GET /livez",
    "GET /readyz",
    "GET /metrics",
    "GET /openapi.json",
    "GET /docs",
}
OPEN = {"/livez", "/readyz", "/openapi.json", "/docs", "/docs/{name}"}


def test_every_fixed_route_is_there() -> None:
    table = {f"{route.method} {route.template}" for route in ROUTES}
    assert table >= FIXED


def test_only_health_and_documents_are_open_to_everybody() -> None:
    assert {r.template for r in ROUTES if r.scope is Scope.OPEN} == OPEN


def test_every_route_is_documented_with_its_scope_and_its_query_form() -> None:
    paths = openapi_document()["paths"]
    for route in ROUTES:
        operation = paths[route.template][route.method.lower()]
        assert operation["x-sdstore-scope"] == route.scope
        assert "application/problem+json" in operation["responses"]["default"]["content"]
        if route.query_parameter is not None:
            query_form = paths[route.query_template][route.method.lower()]
            names = [p["name"] for p in query_form["parameters"] if p["in"] == "query"]
            assert route.query_parameter in names


def test_a_route_below_a_channel_is_known_where_its_channel_is_missing() -> None:
    below = "/v1/channels/{channel_id}/"
    templates = {r.template for r in ROUTES if r.method == "GET" and r.template.startswith(below)}
    assert {template.removeprefix(below) for template in templates} == set(BELOW_A_CHANNEL)


def test_operations_have_names_of_their_own() -> None:
    paths = openapi_document()["paths"]
    names = [operation["operationId"] for item in paths.values() for operation in item.values()]
    assert len(names) == len(set(names))


def test_generated_clients_name_their_methods_as_the_handlers() -> None:
    paths = openapi_document()["paths"]
    for template, method, name in (
        ("/v1/messages/{message_id}", "get", "get_message"),
        ("/v1/messages", "get", "get_message_by_query"),
        ("/v1/messages", "post", "publish_one"),
        ("/v1/channels", "get", "list_channels"),
        ("/v1/recon", "post", "reconcile"),
    ):
        assert paths[template][method]["operationId"] == name


def test_an_optional_parameter_has_the_schema_of_its_value() -> None:
    count = 0
    from_lamport = next(
        each["schema"]
        for each in openapi_document()["paths"]["/v1/negentropy"]["post"]["parameters"]
        if each["name"] == "from_lamport"
    )
    assert (from_lamport["type"], from_lamport["maximum"]) == ("integer", 2**63 - 1)
    for item in openapi_document()["paths"].values():
        for operation in item.values():
            for parameter in operation.get("parameters", ()):
                count += 1
                assert "anyOf" not in parameter["schema"], parameter
    assert count > 20
