"""The way of a request through the application, without our server: mounts, other servers, faults, both lanes."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from app.errors import Problem
from app.http import messages
from app.http.call import Call
from app.main import create_app, opened
from app.server.settings import Settings
from sdstore.sds.codec import encode
from sdstore.sds.model import Dialect, Message

pytestmark = pytest.mark.anyio
FRAME = encode(Message("m 1", "c", "ada", 1, content=b"buzz"), Dialect.V2)
PROTOBUF = {"content-type": "application/x-protobuf"}


def _client(app: Any, base_url: str = "http://localhost") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
    return httpx.AsyncClient(transport=transport, base_url=base_url)


async def test_the_application_opens_its_node_in_its_lifespan(tmp_path: Path) -> None:
    app = create_app(Settings(data_dir=tmp_path))
    async with _client(app) as http:
        closed = await http.get("/v1/channels")
        async with opened(app):
            assert (
                await http.post("/v1/messages", content=FRAME, headers=PROTOBUF)
            ).status_code == 201
        again = await http.get("/v1/channels")
    for reply in (closed, again):
        assert (reply.status_code, reply.json()["code"]) == (503, "store_unavailable")
        assert "the node is not open" in reply.json()["detail"]


async def test_head_is_get_without_a_body(tmp_path: Path) -> None:
    app = create_app(Settings(data_dir=tmp_path))
    async with _client(app) as http, opened(app):
        await http.post("/v1/messages", content=FRAME, headers=PROTOBUF)
        for path in (
            "/livez",
            "/v1/messages/m%201",
            "/v1/channels/c/messages",
            "/v1/channels/c/live",
        ):
            head = await http.head(path)
            assert head.status_code == 200, path
            if "live" not in path:
                got = await http.get(path)
                assert head.headers == got.headers
        assert (await http.head("/v1/messages/nope")).status_code == 404


async def test_it_is_mounted_in_another_application(tmp_path: Path) -> None:
    node_app = create_app(Settings(data_dir=tmp_path))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with opened(node_app):
            yield

    parent = FastAPI(lifespan=lifespan)
    parent.mount("/the store", node_app)
    async with _client(parent, "http://localhost/the%20store") as http, opened(parent):
        assert (await http.post("/v1/messages", content=FRAME, headers=PROTOBUF)).status_code == 201
        assert (await http.get("/v1/messages/m%201")).json()["message"]["message_id"] == "m 1"
        page = await http.get("/v1/channels/c/messages", params={"limit": 1})
        assert [each["message"]["message_id"] for each in page.json()["messages"]] == ["m 1"]
        assert (await http.get("/v1/nothing")).json()["code"] == "no_such_route"


async def test_a_fault_of_the_node_is_a_problem_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(*_: object) -> None:
        raise RuntimeError("of the store")

    app = create_app(Settings(data_dir=tmp_path))
    async with _client(app) as http, opened(app):
        monkeypatch.setattr(app.state.served.node.store.channels, "named", fails)
        reply = await http.get("/v1/channels/c")
    assert (reply.status_code, reply.json()["code"]) == (500, "internal_error")
    assert "/v1/channels/{channel_id} failed" in caplog.text
    assert "of the store" not in reply.text


async def test_a_stream_that_is_cut_closes_its_generator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = asyncio.Event()

    async def parts(*_: object) -> AsyncIterator[list[bytes]]:
        try:
            while True:
                yield [b"x" * 1_000]
        finally:
            closed.set()

    monkeypatch.setattr(messages, "_parts", parts)
    app = create_app(Settings(data_dir=tmp_path))

    async def leaves(message: MutableMapping[str, Any]) -> None:
        if message.get("body"):
            raise OSError("the client has left")

    sent = iter([{"type": "http.request", "body": b'{"digests": []}', "more_body": False}])

    async def body() -> MutableMapping[str, Any]:
        if (message := next(sent, None)) is None:
            await asyncio.Event().wait()  # a server says nothing more until the client is gone
            raise AssertionError
        return message

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/entries",
        "raw_path": b"/v1/entries",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
        "client": ("127.0.0.1", 1),
    }
    async with opened(app):
        await app(scope, body, leaves)
    assert closed.is_set()


@pytest.mark.parametrize(
    ("path", "media_type", "body"),
    [
        ("/v1/messages", PROTOBUF["content-type"], b"\xff"),
        ("/v1/messages/batch", "application/x-ndjson", b"\n" * 100),
        ("/v1/messages/batch", PROTOBUF["content-type"], b"\x0a\0" * 20_000),
        ("/v1/messages/lookup", "application/json", b'{"message_ids": [1, 2]}'),
        ("/v1/recon", PROTOBUF["content-type"], b"\x2a\0" * 500_000),
        ("/v1/nowhere", PROTOBUF["content-type"], b""),
    ],
    ids=["a frame", "blank lines", "empty items", "faults", "pushed items", "no route"],
)
async def test_nothing_of_a_refused_request_is_left_for_the_garbage_collector(
    tmp_path: Path, path: str, media_type: str, body: bytes
) -> None:
    """100 bytes can unpack to 2 MiB, and the collector comes once in some hundred requests."""
    app = create_app(Settings(data_dir=tmp_path))
    async with _client(app) as http, opened(app):
        gc.collect()
        gc.disable()
        before = _calls_and_problems()
        try:
            for _ in range(3):
                reply = await http.post(path, content=body, headers={"content-type": media_type})
                assert reply.status_code in (400, 404, 413, 422), reply.text
            assert _calls_and_problems() == before
        finally:
            gc.enable()


def _calls_and_problems() -> int:
    return sum(isinstance(each, Call | Problem) for each in gc.get_objects())
