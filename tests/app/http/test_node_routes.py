"""Health, metrics, info, documents, CORS, callers: the node around the messages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from app.access.operator import operator_token
from app.server.limits import DEFAULT_LIMITS
from sdstore.sds.model import Message
from tests.support.routes import ROUTES, Route
from tests.support.server import RunningNode, running_node

ORIGIN = "https://app.example"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("node")) as running:
        yield running


def test_a_node_that_serves_is_alive_and_ready(node: RunningNode) -> None:
    assert node.http.get("/livez").json() == {"status": "alive"}
    assert node.http.get("/readyz").json() == {"status": "ready"}


def test_info_names_the_node_its_limits_and_its_protocols(node: RunningNode) -> None:
    info = node.http.get("/v1/info").json()
    assert info["limits"] == asdict(DEFAULT_LIMITS)
    assert info["protocols"] == {"recon": [3], "negentropy": [1]}
    assert info["node_id"]
    assert info["digest"]["context"] == "sdstore entry digest v1"


def test_the_node_id_outlives_a_restart(tmp_path: Path) -> None:
    found = set()
    for _ in range(2):
        with running_node(tmp_path) as node:
            found.add(node.http.get("/v1/info").json()["node_id"])
    assert len(found) == 1


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.template}")
def test_no_route_ignores_a_query_parameter_that_it_does_not_have(
    node: RunningNode, route: Route
) -> None:
    path = re.sub(r"\{\w+\}", "x", route.template)
    # In the path form the ID is in the path, and a second one in the query would be ignored.
    for name in ("limt", route.query_parameter or "Limit"):
        answer = node.http.request(route.method, path, params={name: "5"})
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_parameter"), name
        assert repr(name) in answer.json()["detail"]


def test_a_parameter_that_is_not_valid_is_named_on_every_kind_of_route(node: RunningNode) -> None:
    for path, name in (
        ("/v1/feed?limit=0", "limit"),
        ("/v1/channels/c/messages?order=newest", "order"),
        ("/v1/channels/c/messages?from_lamport=many", "from_lamport"),
    ):
        problem = node.http.get(path).json()
        assert problem["code"] == "invalid_parameter"
        assert problem["detail"].startswith(f"{name}: Input should be ")
    answer = node.http.post("/v1/negentropy", headers={"content-type": "application/octet-stream"})
    assert answer.json()["detail"] == "channel_id: Field required"


def test_metrics_count_requests_by_template_and_never_by_what_callers_send(
    node: RunningNode,
) -> None:
    node.publish(Message("counted", "c", lamport_timestamp=1, content=b"hi"))
    for path in ("/v1/messages/counted", "/v1/messages/no-such", "/nowhere/at-all"):
        node.http.get(path)
    node.http.request("BREW", "/v1/feed")
    text = node.http.get("/metrics").text
    route = 'method="GET",route="/v1/messages/{message_id}"'
    assert re.search(rf'sdstore_http_requests_total{{{route},status="200"}} \d', text)
    assert re.search(rf'sdstore_http_requests_total{{{route},status="404"}} \d', text)
    assert re.search(rf'sdstore_http_request_seconds_bucket{{le="\+Inf",{route}}} \d', text)
    assert re.search(r"sdstore_ingest_entries_total [1-9]", text)
    for secret in ("counted", "no-such", "nowhere", "BREW"):
        assert secret not in text
    families = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert all(family.startswith("sdstore_") for family in families)


def test_the_page_needs_nothing_from_elsewhere(node: RunningNode) -> None:
    page = node.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    names = re.findall(r'(?:src|href)="([^"]*)"', page.text)
    assert len(names) == 5
    for name in names:
        found = node.http.get(f"/{name}")
        assert found.status_code == 200
        assert found.content
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert node.http.get("/docs/__init__.py").status_code == 404


def test_a_page_of_another_origin_may_call_only_where_the_operator_said_so(
    node: RunningNode, tmp_path: Path
) -> None:
    asked = {"origin": ORIGIN}
    assert "access-control-allow-origin" not in node.http.get("/livez", headers=asked).headers
    with running_node(tmp_path, cors_origins=[ORIGIN]) as opened:
        allowed = opened.http.get("/v1/feed", headers=asked)
        assert allowed.headers["access-control-allow-origin"] == ORIGIN
        assert "sds-digest" in allowed.headers["access-control-expose-headers"].lower()
        other = opened.http.get("/v1/feed", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        wanted = {
            "access-control-request-method": "POST",
            "access-control-request-headers": "content-type,content-encoding,last-event-id",
        }
        preflight = opened.http.options("/v1/messages", headers=asked | wanted)
        assert preflight.status_code == 200
        preflight = opened.http.options(
            "/v1/peers/x", headers=asked | {"access-control-request-method": "DELETE"}
        )
        assert preflight.status_code == 400
        refused = opened.http.get("/v1/feed?limit=0", headers=asked)
        assert refused.headers["access-control-allow-origin"] == ORIGIN


@pytest.mark.parametrize("origins", [[], ["*"]])
def test_no_page_of_another_origin_does_what_is_the_operators(
    tmp_path: Path, origins: list[str]
) -> None:
    with running_node(tmp_path, cors_origins=origins) as opened:
        token = {"authorization": f"Bearer {operator_token(tmp_path)}"}
        for origin, status in ((ORIGIN, 403), ("null", 403), (opened.url, 202)):
            # No preflight asks before such a request.
            answer = opened.http.post(
                "/v1/syncs", json={"peer_url": opened.url}, headers=token | {"origin": origin}
            )
            assert answer.status_code == status, answer.text
        assert opened.http.get("/v1/feed", headers={"origin": ORIGIN}).status_code == 200


def test_a_request_under_another_host_name_is_forbidden_on_every_route(node: RunningNode) -> None:
    for path in ("/v1/feed", "/v1/messages/x", "/metrics"):
        answer = node.http.get(path, headers={"host": "store.example"})
        assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")


def test_a_fault_of_the_node_is_a_problem_document_that_tells_nothing(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_args: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr("app.http.about._document", broken)
    monkeypatch.setattr("app.access.callers.no_such_message", broken)
    for path in ("/v1/info", "/v1/messages/absent"):
        answer = node.http.get(path)
        assert answer.status_code == 500
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["code"] == "internal_error"
        assert "secret" not in answer.text
    assert "secret detail" in caplog.text


@pytest.mark.parametrize("lamport", ["+5", "5.0", "1_0", " 5", "5 ", "", "-", "٥", "0" * 20])
def test_a_lamport_timestamp_in_a_query_is_decimal_digits(node: RunningNode, lamport: str) -> None:
    query = {"channel_id": "c", "from_lamport": lamport}
    octets = {"content-type": "application/octet-stream"}
    for answer in (
        node.http.get("/v1/channels/messages", params=query),
        node.http.get("/v1/channels/messages", params={"channel_id": "c", "to_lamport": lamport}),
        node.http.post("/v1/negentropy", params=query, content=b"\x61", headers=octets),
    ):
        assert (answer.status_code, answer.json()["code"]) == (400, "invalid_parameter")
        assert "decimal digits" in answer.json()["detail"]


def test_only_replies_with_two_forms_vary_with_accept(node: RunningNode) -> None:
    varying = ["/v1/channels", "/v1/feed", "/v1/recon/interests"]
    fixed = ["/livez", "/readyz", "/v1/info", "/v1/peers", "/v1/syncs", "/openapi.json"]
    found = {path: node.http.get(path).headers.get("vary") for path in varying + fixed}
    assert found == dict.fromkeys(varying, "accept") | dict.fromkeys(fixed)
