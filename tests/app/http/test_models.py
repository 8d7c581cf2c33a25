"""Replies have the members that the OpenAPI document gives them, and no others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema_rs
import pytest
from pydantic import BaseModel

from app.http import channels, openapi
from app.http.application import openapi_document
from app.http.call import WHOLE, Form
from sdstore.sds.codec import encode
from sdstore.sds.model import Dialect, HistoryEntry, Message
from sdstore.wire import store_pb2 as wire
from tests.support.server import RunningNode, running_node


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("node")) as opened:
        history = (HistoryEntry("gone", b"\xaa\xbb", "bob"),)
        message = Message("m1", "c", "ada", 1, causal_history=history, content=b"buzz")
        headers = {"content-type": "application/x-protobuf", "retrieval-hint": "cc"}
        opened.http.post("/v1/messages", content=encode(message, Dialect.V2), headers=headers)
        yield opened


def check(schema: dict[str, Any], value: Any) -> None:
    """Whether JSON has the shape that a schema gives it; objects have no other members."""
    jsonschema_rs.validate({**schema, "components": STRICT}, value)


def _without_others(schema: dict[str, Any]) -> dict[str, Any]:
    is_open = schema.get("type") != "object" or "additionalProperties" in schema
    return schema if is_open else {**schema, "additionalProperties": False}


DOCUMENT = openapi_document()
_SCHEMAS = DOCUMENT["components"]["schemas"]
STRICT = {"schemas": {name: _without_others(each) for name, each in _SCHEMAS.items()}}


def told(method: str, template: str, reply: Any) -> None:
    """Check a reply against its route in the document."""
    described = DOCUMENT["paths"][template][method.lower()]["responses"][str(reply.status_code)]
    check(described["content"]["application/json"]["schema"], reply.json())


@pytest.mark.parametrize(
    ("template", "path"),
    [
        ("/livez", "/livez"),
        ("/readyz", "/readyz"),
        ("/v1/info", "/v1/info"),
        ("/v1/messages/{message_id}", "/v1/messages/m1"),
        ("/v1/messages/{message_id}/ancestors", "/v1/messages/m1/ancestors"),
        ("/v1/hints/{hint}", "/v1/hints/cc"),
        ("/v1/channels", "/v1/channels"),
        ("/v1/channels", "/v1/channels?channel_id=c"),
        ("/v1/channels/{channel_id}", "/v1/channels/c"),
        ("/v1/channels/{channel_id}/messages", "/v1/channels/c/messages"),
        ("/v1/channels/{channel_id}/gaps", "/v1/channels/c/gaps"),
        ("/v1/channels/{channel_id}/order", "/v1/channels/c/order?indexer=ada&indexer=eve"),
        ("/v1/feed", "/v1/feed"),
        ("/v1/recon/interests", "/v1/recon/interests"),
        ("/v1/peers", "/v1/peers"),
        ("/v1/syncs", "/v1/syncs"),
        ("/v1/tokens", "/v1/tokens"),
        ("/v1/quarantine", "/v1/quarantine"),
    ],
)
def test_what_a_route_answers_is_documented(node: RunningNode, template: str, path: str) -> None:
    reply = node.http.get(path)
    assert reply.status_code == 200
    told("GET", template, reply)


def test_bodies_and_their_replies_are_documented(node: RunningNode, tmp_path: Path) -> None:
    looked_up = {
        "message_ids": ["m1", "gone", "x"],
        "retrieval_hints": ["cc", "dd"],
        "channel_id": "c",
    }
    told("POST", "/v1/messages/lookup", node.http.post("/v1/messages/lookup", json=looked_up))
    walk = {"channel_id": "c", "heads": ["m1"]}
    told("POST", "/v1/messages/ancestors", node.http.post("/v1/messages/ancestors", json=walk))
    published = node.http.get("/v1/messages/m1").json()
    told("POST", "/v1/messages", node.http.post("/v1/messages", json=published))
    told("POST", "/v1/tokens", node.http.post("/v1/tokens", json={"scopes": ["read"]}))
    told(
        "PUT",
        "/v1/recon/interests",
        node.http.put("/v1/recon/interests", json={"all": True, "lamport_from": 5}),
    )
    told("POST", "/v1/reload", node.http.post("/v1/reload"))
    with running_node(tmp_path) as peer:
        added = node.http.post("/v1/peers", json={"url": peer.url})
        told("POST", "/v1/peers", added)
        told("GET", "/v1/peers", node.http.get("/v1/peers"))
        # The new peer can be in its first session already.
        while (
            started := node.http.post(f"/v1/peers/{added.json()['id']}/sync", json={})
        ).status_code == 409:
            time.sleep(0.05)
        told("POST", "/v1/peers/{peer_id}/sync", started)
        path = f"/v1/syncs/{started.json()['id']}"
        deadline_s = time.monotonic() + 20
        while node.http.get(path).json()["state"] != "finished" and time.monotonic() < deadline_s:
            time.sleep(0.05)
        told("GET", "/v1/syncs/{sync_id}", node.http.get(path))
        told("GET", "/v1/syncs", node.http.get("/v1/syncs"))
        status = node.http.get(f"/v1/peers/{added.json()['id']}/status")
        told("GET", "/v1/peers/{peer_id}/status", status)


def test_refusals_are_documented(node: RunningNode) -> None:
    problem = node.http.get("/v1/messages/nope")
    check({"$ref": "#/components/schemas/ProblemJson"}, problem.json())
    responses = DOCUMENT["paths"]["/v1/feed"]["get"]["responses"]
    assert responses["default"]["content"]["application/problem+json"]["schema"]["$ref"].endswith(
        "/ProblemJson"
    )


def test_every_model_is_in_the_document() -> None:
    made = {
        each.__name__
        for each in vars(openapi).values()
        if isinstance(each, type) and issubclass(each, BaseModel) and each is not BaseModel
    }
    assert made <= set(DOCUMENT["components"]["schemas"])


def test_both_forms_of_a_reply_have_the_same_members() -> None:
    compared = 0
    for operations in DOCUMENT["paths"].values():
        for operation in operations.values():
            for described in operation["responses"].values():
                forms = described.get("content", {})
                name = forms.get("application/x-protobuf", {}).get("schema", {}).get("description")
                told = forms.get("application/json", {}).get("schema", {}).get("$ref")
                if name is not None and told is not None and hasattr(wire, name):
                    members = _SCHEMAS[told.rpartition("/")[2]]["properties"]
                    fields = getattr(wire, name).DESCRIPTOR.fields_by_name
                    assert set(members) == set(fields), name
                    compared += 1
    assert compared >= 10


def test_a_page_in_protobuf_gives_every_member(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "next_link", lambda *_: ())
    monkeypatch.setattr(channels, "message_protobuf", lambda *_: wire.StoredMessage())
    call: Any = SimpleNamespace(
        form=Form.PROTOBUF, caller=SimpleNamespace(visible=lambda entries: entries)
    )
    page: Any = SimpleNamespace(left_out=[SimpleNamespace(digest=b"d")])
    shown: Any = [(None, SimpleNamespace(variants=(), hints=()), b"{}")]
    reply = channels.page_reply(call, page, shown, "cursor", WHOLE)
    given = wire.MessagePage.FromString(reply.body).ListFields()
    assert {field.name for field, _ in given} == set(openapi.MessagePage.model_fields)
