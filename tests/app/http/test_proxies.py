"""A node behind a proxy: whose request it is, where links lead, and that nobody is local any more."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from app.access.callers import Caller, Scope
from app.access.operator import operator_token
from app.access.tokens import TokenFile
from app.server.limits import DEFAULT_LIMITS
from sdstore.sds.codec import encode
from sdstore.sds.model import Message
from tests.support.server import PROTOBUF, RunningNode, running_node

PUBLIC_URL = "https://store.example/sds"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("proxied")


@pytest.fixture(scope="module")
def node(folder: Path) -> Iterator[RunningNode]:
    with running_node(folder, trusted_proxies=["127.0.0.1"], public_url=PUBLIC_URL) as node:
        _, text = TokenFile(folder / "tokens.json").create(scopes=[Scope.READ, Scope.PUBLISH])
        node.http.headers["authorization"] = f"Bearer {text}"
        yield node


class ShowingAuthorizer:
    """Refuses everybody, and shows whom it saw."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def identify(self, client_host: str, headers: object) -> Caller:  # noqa: ARG002
        self.seen.append(client_host)
        return Caller(client_host, frozenset({Scope.OPEN}))


@pytest.mark.parametrize("trusted", [["127.0.0.0/8"], ["10.0.0.1"]])
def test_the_address_that_a_header_claims_counts_from_a_trusted_proxy_only(
    tmp_path: Path, trusted: list[str]
) -> None:
    authorizer = ShowingAuthorizer()
    with running_node(tmp_path, authorizer=authorizer, trusted_proxies=trusted) as node:
        node.http.get("/livez", headers={"x-forwarded-for": "1.1.1.1, 203.0.113.9"})
    is_trusted = trusted == ["127.0.0.0/8"]
    assert authorizer.seen == ["203.0.113.9" if is_trusted else "127.0.0.1"]


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"x-forwarded-for": "127.0.0.1"},
        {"forwarded": "for=127.0.0.1"},
        {"host": "localhost"},
        {"host": "store.example"},
        {"x-forwarded-for": "127.0.0.1", "host": "127.0.0.1"},
    ],
)
def test_nobody_is_local_behind_a_proxy(node: RunningNode, headers: dict[str, str]) -> None:
    without_token = {"authorization": "", **headers}
    for path in ("/v1/peers", "/v1/tokens", "/v1/channels"):
        assert node.http.get(path, headers=without_token).status_code == 401


def test_links_begin_with_the_public_url_in_every_place(node: RunningNode) -> None:
    for number in range(2):
        message = Message(f"m{number}", "c", lamport_timestamp=number, content=b"x")
        published = node.http.post("/v1/messages", content=encode(message), headers=PROTOBUF)
        assert published.headers["location"].startswith(f"{PUBLIC_URL}/v1/entries/")
    page = node.http.get("/v1/channels/c/messages?limit=1", headers={"host": "elsewhere.example"})
    assert page.headers["link"].startswith(f"<{PUBLIC_URL}/v1/channels/c/messages?")
    assert node.http.get("/openapi.json").json()["servers"] == [{"url": PUBLIC_URL}]


def test_without_a_public_url_links_have_the_scheme_that_the_proxy_reports(tmp_path: Path) -> None:
    with running_node(tmp_path, trusted_proxies=["127.0.0.1"]) as node:
        _, text = TokenFile(tmp_path / "tokens.json").create(scopes=[Scope.READ, Scope.PUBLISH])
        node.http.headers["authorization"] = f"Bearer {text}"
        for number in range(2):
            node.publish(Message(f"m{number}", "c", lamport_timestamp=number, content=b"x"))
        headers = {"host": "store.example", "x-forwarded-proto": "https"}
        page = node.http.get("/v1/channels/c/messages?limit=1", headers=headers)
        assert page.headers["link"].startswith("<https://store.example/v1/channels/c/messages?")


def test_a_page_of_the_public_url_is_a_page_of_this_node(tmp_path: Path) -> None:
    options = {"public_url": "https://store.example", "trust_loopback": True}
    with running_node(tmp_path, **options) as node:
        token = {"authorization": f"Bearer {operator_token(tmp_path)}"}

        def of_page(origin: str) -> int:
            return node.http.get("/v1/peers", headers=token | {"origin": origin}).status_code

        assert of_page("https://store.example") == 200
        assert of_page("https://other.example") == 403
        # Who calls the public name may have come through a proxy that nobody declared.
        public = node.http.get("/v1/channels", headers={"host": "store.example"})
        assert public.status_code == 401


def test_a_proxy_may_open_more_connections_than_a_client(tmp_path: Path) -> None:
    limits = replace(DEFAULT_LIMITS, connections_per_address_max=2)
    for trusted, answered in ((["127.0.0.1"], 4), ([], 2)):
        with running_node(tmp_path, limits, trusted_proxies=trusted) as node, ExitStack() as stack:
            port = int(node.url.rpartition(":")[2])
            count = 0
            node.http.close()
            for _ in range(4):
                client = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                try:
                    client.sendall(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
                    count += client.recv(12) == b"HTTP/1.1 200"
                except ConnectionError:
                    continue
            assert count == answered
