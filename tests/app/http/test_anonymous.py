"""What strangers may do where the operator opened channels to them, and how much of it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from app.access.callers import Scope
from app.access.tokens import TokenFile
from app.server.limits import DEFAULT_LIMITS
from sdstore.sds.codec import encode
from sdstore.sds.model import Message
from tests.support.routes import ROUTES, Route
from tests.support.server import PROTOBUF, RunningNode, running_node

GENEROUS = replace(
    DEFAULT_LIMITS, anonymous_requests_per_minute=100_000, anonymous_live_readers_max=100
)


def frame(message_id: str, channel_id: str) -> bytes:
    return encode(Message(message_id, channel_id, lamport_timestamp=1, content=b"SECRET"))


def token(folder: Path, *scopes: Scope) -> dict[str, str]:
    _, text = TokenFile(folder / "tokens.json").create(scopes=scopes)
    return {"authorization": f"Bearer {text}"}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    """AnonymousCallers read in /open/ and publish in /in/; each has a message, and so has /closed/."""
    folder = tmp_path_factory.mktemp("anonymous")
    with running_node(
        folder,
        GENEROUS,
        trust_loopback=False,
        anonymous_read=["/open/"],
        anonymous_publish=["/in/"],
    ) as node:
        publisher = token(folder, Scope.PUBLISH) | PROTOBUF
        for name in ("open", "in", "closed"):
            sent = node.http.post(
                "/v1/messages", content=frame(name, f"/{name}/1"), headers=publisher
            )
            assert sent.status_code == 201
        yield node


def status_of(node: RunningNode, route: Route, channel: str) -> int:
    path = re.sub(r"\{\w+\}", "x", route.template.replace("{channel_id}", channel))
    with node.http.stream(route.method, path) as answer:
        return answer.status_code


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.template}")
def test_a_stranger_reaches_what_is_open_on_every_route_and_nothing_else(
    node: RunningNode, route: Route
) -> None:
    is_open = route.scope in {Scope.OPEN, Scope.READ, Scope.PUBLISH}
    name = "%2Fopen%2F1" if route.scope is Scope.READ else "%2Fin%2F1"
    status = status_of(node, route, name)
    assert status < 500
    if route.template == "/metrics":
        assert status == 403  # they are of every channel
    else:
        assert (status in {401, 403}) is not is_open, status
    if "{channel_id}" in route.template:
        assert status_of(node, route, "%2Fclosed%2F1") == 401


def test_a_token_that_is_not_valid_is_refused_where_none_would_do(node: RunningNode) -> None:
    bad = {"authorization": "Bearer sds_000000000000_" + "0" * 64}
    assert node.http.get("/v1/messages/open", headers=bad).status_code == 401


@pytest.mark.parametrize("settings", [{"anonymous_read": "*"}, {"anonymous_publish": "*"}])
def test_a_star_opens_every_channel_for_that_and_nothing_else(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    with running_node(tmp_path, trust_loopback=False, **settings) as node:
        sent = node.http.post("/v1/messages", content=frame("m", "any"), headers=PROTOBUF)
        got = node.http.get("/v1/channels")
        reads = "anonymous_read" in settings
        assert (sent.status_code, got.status_code) == ((401, 200) if reads else (201, 401))
        for path in ("/v1/peers", "/v1/tokens", "/metrics"):
            assert node.http.get(path).status_code in {401, 403}


def test_a_flood_of_strangers_leaves_an_honest_stranger_and_a_token_their_service(
    tmp_path: Path,
) -> None:
    limits = replace(DEFAULT_LIMITS, anonymous_requests_per_minute=60)
    options = {"trusted_proxies": ["127.0.0.1"], "anonymous_read": "*", "anonymous_publish": "*"}
    with running_node(tmp_path, limits, **options) as node:
        sent = node.http.post("/v1/messages", content=frame("m", "c"), headers=PROTOBUF)
        assert sent.status_code == 201
        flood: list[httpx.Response] = []
        honest_s: list[float] = []
        known = token(tmp_path, Scope.READ)
        began_s = time.monotonic()
        for number in range(300):
            headers = {"x-forwarded-for": "203.0.113.9"}
            flood.append(node.http.get("/v1/messages/m", headers=headers))
            if number % 10 == 0:
                honest = {"x-forwarded-for": "203.0.113.10"}
                started_s = time.monotonic()
                for headers in (honest, known | {"x-forwarded-for": "203.0.113.9"}):
                    assert node.http.get("/v1/messages/m", headers=headers).status_code == 200
                honest_s.append(time.monotonic() - started_s)
        took_s = time.monotonic() - began_s
        statuses = [each.status_code for each in flood]
        assert statuses[:60] == [200] * 60
        assert statuses.count(200) <= 60 + took_s + 1  # one a second
        first = flood[statuses.index(429)]
        assert int(first.headers["retry-after"]) >= 1
        assert first.json()["code"] == "rate_limited"
        assert sorted(honest_s)[len(honest_s) // 2] < 0.25


def test_bytes_of_bodies_and_replies_count(tmp_path: Path) -> None:
    limits = replace(DEFAULT_LIMITS, anonymous_bytes_per_minute=100_000)
    options = {"trust_loopback": False, "anonymous_publish": "*", "anonymous_read": "*"}
    with running_node(tmp_path, limits, **options) as node:
        large = encode(Message("m", "c", lamport_timestamp=1, content=bytes(60_000)))
        assert node.http.post("/v1/messages", content=large, headers=PROTOBUF).status_code == 201
        assert node.http.get("/v1/messages/m").status_code == 200
        assert node.http.get("/v1/messages/m").status_code == 429


def test_bytes_of_a_stream_count(tmp_path: Path) -> None:
    limits = replace(DEFAULT_LIMITS, anonymous_bytes_per_minute=100_000)
    with running_node(tmp_path, limits, trust_loopback=False, anonymous_read="*") as node:
        publisher = token(tmp_path, Scope.PUBLISH) | PROTOBUF
        with node.http.stream("GET", "/v1/live") as stream:
            pieces = stream.iter_raw()
            next(pieces)
            large = encode(Message("m", "c", lamport_timestamp=1, content=bytes(110_000)))
            with httpx.Client(base_url=node.url, trust_env=False) as other:
                other.post("/v1/messages", content=large, headers=publisher)
            seen = 0
            while seen < 110_000:
                seen += len(next(pieces))
        assert node.http.get("/v1/channels").status_code == 429


def test_a_stranger_has_few_live_streams_and_a_token_any_number(tmp_path: Path) -> None:
    limits = replace(DEFAULT_LIMITS, anonymous_live_readers_max=2)
    with running_node(tmp_path, limits, trust_loopback=False, anonymous_read="*") as node:
        with ExitStack() as stack:

            def opened(headers: dict[str, str]) -> int:
                stream = stack.enter_context(node.http.stream("GET", "/v1/live", headers=headers))
                return stream.status_code

            assert [opened({}) for _ in range(3)] == [200, 200, 429]
            known = token(tmp_path, Scope.READ)
            assert [opened(known) for _ in range(3)] == [200, 200, 200]
        ends_s = time.monotonic() + 10
        while True:  # the node has noticed that they are closed
            with node.http.stream("GET", "/v1/live") as stream:
                if stream.status_code == 200:
                    break
            assert time.monotonic() < ends_s
            time.sleep(0.05)


def test_refused_tokens_count_as_requests_of_the_address(tmp_path: Path) -> None:
    limits = replace(DEFAULT_LIMITS, anonymous_requests_per_minute=5)
    with running_node(tmp_path, limits) as node:
        bad = {"authorization": "Bearer sds_000000000000_" + "0" * 64}
        statuses = [node.http.get("/v1/channels", headers=bad).status_code for _ in range(7)]
        assert statuses[0] == 401
        assert statuses[-1] == 429
        # Callers on this machine have no limit.
        assert node.http.get("/v1/channels").status_code == 200
