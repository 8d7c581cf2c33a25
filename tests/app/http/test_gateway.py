"""The way of a request through the HTTP layer, without a network."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest

from app.http.application import create_app
from app.http.call import EXCHANGE_KEY, Headers, Parts, Reply
from app.node import Node
from app.settings import Settings
from app.sharing import Turns

pytestmark = pytest.mark.anyio


class Client:
    """The server's side of a request, whose client may hang up."""

    caller = "a"

    def __init__(self) -> None:
        self.has_left = False
        self.reply: Reply | None = None

    async def give(self, reply: Reply) -> None:
        self.reply = reply

    async def stream(self, status: int, headers: Headers, parts: Parts, *, is_live: bool) -> None:
        raise NotImplementedError


async def _nothing(*_: Any) -> Any:
    raise NotImplementedError


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_page_is_not_made_for_a_client_that_left_while_it_waited(
    tmp_path: Path, leaves: bool
) -> None:
    client = Client()
    scope: MutableMapping[str, Any] = {
        "type": "http",
        "method": "GET",
        "path": "/v1/channels",
        "raw_path": b"/v1/channels",
        "query_string": b"",
        "headers": [(b"host", b"localhost")],
        "client": ("127.0.0.1", 1),
        EXCHANGE_KEY: client,
    }
    async with Node.open(Settings(data_dir=tmp_path)) as node:
        app, turns = create_app(node), node.sharing.turns[Turns.READS]
        taken = turns.take_now(turns.free_units)
        request = asyncio.create_task(app(scope, _nothing, _nothing))
        await asyncio.sleep(0)
        assert not request.done()
        client.has_left = leaves
        taken.release()
        await request
        assert (client.reply is None) == leaves
        await asyncio.sleep(0)
        assert turns.free_units == node.limits.turns_max
