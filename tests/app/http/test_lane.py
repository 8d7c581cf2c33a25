"""The fast lane gives what FastAPI gives: status, headers, body, counters, audit log."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.http.front import Lane
from sdstore.sds.codec import encode
from sdstore.sds.model import Dialect, Message
from tests.support.server import running_node

IDS = ("m1", "a/b", "ü", "", ".", "batch", "nope")
FRAMES = [
    encode(Message(name, "c", "ada", at, content=b"buzz"), Dialect.V2)
    for at, name in enumerate(IDS[:-1])
    if name
]
CHANGES = re.compile(rb'"(received_at|seq|next)":("[^"]*"|\d+|null)')


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Two nodes, without and with the lane."""
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(running_node(tmp_path_factory.mktemp("node"), fast_lane=is_fast))
            for is_fast in (False, True)
        ]
        yield nodes[0].http, nodes[1].http


METHODS = st.sampled_from(["GET", "GET", "GET", "POST", "POST", "HEAD", "PUT"])
PATHS = st.one_of(
    st.sampled_from(IDS).map(lambda name: f"/v1/messages/{quote(name, safe='')}"),
    st.sampled_from(
        ["/v1/messages", "/v1/recon", "/v1/messages/", "/v1/messages/m1/", "/v1/messages/%FF"]
    ),
)
QUERIES = st.sampled_from(
    ["", "", "", "?channel_id=c", "?message_id=m1", "?digest=00", "?x=1", "?%00"]
)
HEADERS = st.lists(
    st.sampled_from(
        [
            ("accept", "application/x-protobuf"),
            ("accept", "application/json"),
            ("accept", "text/html"),
            ("content-type", "application/x-protobuf"),
            ("content-type", "application/json"),
            ("retrieval-hint", "aabb"),
            ("retrieval-hint", "cc, dd"),
            ("retrieval-hint", "no hex"),
            ("if-none-match", "*"),
            ("origin", "http://evil.example"),
            ("content-encoding", "gzip"),
            ("authorization", "Bearer sds_1_2"),
        ]
    ),
    max_size=4,
)
BODIES = st.one_of(
    st.sampled_from(
        [*FRAMES, b"", b"{}", b'{"message": {"message_id": "j", "channel_id": "c"}}', b"\x08"]
    ),
    st.binary(max_size=20),
)


@given(METHODS, PATHS, QUERIES, HEADERS, BODIES)
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_both_ways_give_the_same_bytes(
    both: tuple[httpx.Client, httpx.Client],
    method: str,
    path: str,
    query: str,
    headers: list[tuple[str, str]],
    body: bytes,
) -> None:
    content = body if method == "POST" else b""
    replies = []
    for http in both:
        request = http.build_request(method, path + query, headers=headers, content=content)
        replies.append(http.send(request))
    slow, fast = replies
    assert fast.status_code == slow.status_code
    assert _told(fast) == _told(slow)


def _told(reply: httpx.Response) -> tuple[object, ...]:
    # `connection`: whether a body that is not read has arrived by then.
    changing = ("date", "etag", "content-length", "connection")
    headers = sorted((k, v) for k, v in reply.headers.multi_items() if k not in changing)
    body = reply.content
    if reply.headers.get("content-type", "").startswith("application/json"):
        body = CHANGES.sub(b"", body)
    return headers, body


def test_the_plain_case_is_taken_and_counted_as_the_route(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    plain = Lane.plain

    def noted(lane: Lane, scope: dict[str, object]) -> object:
        found = plain(lane, scope)
        taken.extend([f"{scope['method']} {scope['path']}"] if found is not None else [])
        return found

    monkeypatch.setattr(Lane, "plain", noted)
    with running_node(tmp_path) as node:
        node.http.post(
            "/v1/messages", content=FRAMES[0], headers={"content-type": "application/x-protobuf"}
        )
        node.http.get("/v1/messages/m1")
        node.http.get("/v1/messages/m1", params={"channel_id": "c"})
        node.http.get("/v1/messages/m1", headers={"origin": node.url})
        metrics = node.http.get("/metrics").text
    assert taken == ["POST /v1/messages", "GET /v1/messages/m1"]
    assert 'method="GET",route="/v1/messages/{message_id}",status="200"} 3.0' in metrics
    assert 'method="POST",route="/v1/messages",status="201"} 1.0' in metrics
