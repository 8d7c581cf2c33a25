"""A request on its way through the node (`Call`), and the replies that a handler returns.

Replies are responses of Starlette. They are sent by the `Answer` of their request (`app.http.answer`),
which bounds what waits for slow readers.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

from starlette.responses import Response

from app.access.callers import Caller, Readable
from app.access.rates import Bucket
from app.http.forms import Form, answer_form
from app.ingest.quarantine import Absence
from app.server.sharing import Holding
from sdstore.client.transport import INSTANCE_HEADER

if TYPE_CHECKING:
    from app.server.node import Node

AsgiScope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[AsgiScope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
_INSTANCE_ID = re.compile(rb"[0-9a-f]{32}")

EXCHANGE_KEY = "sdstore.exchange"
"""Where our server leaves its `Exchange` in the ASGI scope. Other servers leave nothing."""

Parts = AsyncGenerator[Sequence[bytes], None]
"""The parts of a reply. The next one is made when the client has read the one before."""


ANSWER_KEY = "sdstore.answer"
"""Where the `Sender` of a request is in the ASGI scope."""


class Sender(Protocol):
    """Sends the reply of a request."""

    async def give(self, reply: Reply) -> None:
        """Send a whole reply."""
        ...

    async def stream(self, reply: StreamedReply) -> None:
        """Send a reply in parts."""
        ...


class Reply(Response):
    """A whole reply in memory. Its sender adds the content length."""

    # Starlette's constructor copies and encodes headers, which these are already.
    def __init__(self, status: int, headers: Headers, body: bytes = b"") -> None:
        self.status_code = status
        self.raw_headers = headers
        self.body = body
        self.background = None

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """See `Response`."""
        await scope[ANSWER_KEY].give(self)


class StreamedReply(Response):
    """A reply in parts; `is_live`: other readers are shown the same bytes."""

    def __init__(self, headers: Headers, parts: Parts, *, is_live: bool = False) -> None:
        self.status_code = 200
        self.raw_headers = headers
        self.parts = parts
        self.is_live = is_live
        self.background = None

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """See `Response`."""
        await scope[ANSWER_KEY].stream(self)


def length_of(reply: Reply) -> Headers:
    """The Content-Length header of a reply; none for a status without a body (RFC 9110, 8.6)."""
    if reply.status_code in (204, 304):
        return []
    return [(b"content-length", b"%d" % len(reply.body))]


@dataclass(slots=True)
class Call:
    """One request after authorization.

    `query` is the decoded query; `headers` maps names in lower case to values, several lines of one name
    joined. `asgi` is the ASGI scope. `body` is the whole unpacked body (empty if the route reads none),
    `sent_bytes` its length as sent. `address` identifies the client in shares and turns. `turn` is what a
    request of a route with turns holds: a handler that only waits from some point on releases it there.
    `exchange` is that of our server; `target` is what an audited action is about, if the path does not say
    it; `bucket` is the rate limit of a caller that has one. `held` releases what the request holds.
    """

    node: Node
    caller: Caller
    query: Mapping[str, str]
    headers: Mapping[bytes, bytes]
    asgi: AsgiScope
    address: str = ""
    exchange: Exchange | None = None
    bucket: Bucket | None = None
    body: bytes = b""
    sent_bytes: int = 0
    turn: Holding | None = None
    target: str = ""
    held: list[Callable[[], None]] = field(default_factory=list)

    def end(self) -> None:
        """Release what the request holds, the last first."""
        while self.held:
            self.held.pop()()

    @property
    def readable(self) -> Readable:
        """The store as the caller may read it."""
        return Readable(self.node.store, self.caller)

    async def channel_nos(self) -> Sequence[int] | None:
        """The numbers of the channels that the caller may read, ascending; None: of every channel."""
        if self.caller.channels is None:
            return None
        await self.node.index.catch_up()
        return self.node.index.channel_numbers(self.caller.channels)

    async def absences(
        self, message_ids: Sequence[str], channel_id: str | None
    ) -> Mapping[str, Absence]:
        """Why these messages are not stored, where that is known and the caller reads their channel.

        Callers check beforehand that the grants cover `channel_id`. Without a policy nothing is known.
        """
        if self.node.judge is None or not message_ids:
            return {}
        known = await asyncio.to_thread(self.node.quarantine.absences, message_ids)
        return {
            message_id: why
            for message_id, channel, why in known
            if channel_id in (None, channel) and self.caller.covers(channel)
        }

    @property
    def has_left(self) -> bool:
        """Whether the client hung up before it got a reply."""
        return self.exchange is not None and self.exchange.has_left

    def location(self, path: str) -> tuple[bytes, bytes]:
        """The header `Location` of a path of this node: a URL if the node knows its public one."""
        return b"location", f"{self.node.settings.public_url or ''}{path}".encode()

    @property
    def instance_id(self) -> str:
        """The instance ID that another store gives as its own; empty if the caller gives none."""
        given = self.headers.get(INSTANCE_HEADER.encode(), b"")
        return given.decode() if _INSTANCE_ID.fullmatch(given) else ""

    @property
    def form(self) -> Form:
        """The form of the reply that the caller accepts; raises `not_acceptable`."""
        return answer_form(self.headers.get(b"accept"))


def raw_path(asgi: AsgiScope) -> bytes:
    """The path of a request, still percent-encoded."""
    path: bytes | None = asgi.get("raw_path")
    # ASGI servers can leave it out; then "%2F" and "/" cannot be distinguished.
    return quote(asgi["path"]).encode() if path is None else path


def client_of(asgi: AsgiScope) -> str:
    """The IP address of the client; empty over a UNIX socket."""
    client = asgi["client"]
    return client[0] if client else ""


class Exchange(Protocol):
    """Features of our server beyond ASGI: replies in one write, and parts that are not copied."""

    task: asyncio.Task[None]
    """The task that answers the request."""

    @property
    def caller(self) -> str:
        """The client's address, which identifies it in shares and turns."""
        ...

    @property
    def has_left(self) -> bool:
        """Whether the client hung up before it got a reply."""
        ...

    async def give(self, reply: Reply) -> None:
        """Send a whole reply."""
        ...

    async def stream(self, status: int, headers: Headers, parts: Parts, *, is_live: bool) -> None:
        """Send a reply in parts; `is_live`: other readers are shown the same bytes."""
        ...
