"""The sending side of one request: whole replies and streams, bounded, and paid by their caller."""

from __future__ import annotations

from collections.abc import AsyncGenerator, MutableMapping, Sequence
from contextlib import aclosing
from typing import Any

from app.access.callers import Rate
from app.access.rates import Bucket
from app.errors import Problem
from app.http.call import Call, Exchange, Parts, Reply, Send, StreamedReply, length_of
from app.http.replies import problem_reply
from app.server.node import Node


class Answer:
    """Sends the reply of one request. `status` is 0 until it has begun.

    `who` is the caller's name and `call` its call, as soon as they are known; `code` is that of the problem
    that was given. `has_room`: the request holds room for a large reply.
    """

    __slots__ = (
        "_exchange",
        "_is_head",
        "_node",
        "_send",
        "call",
        "code",
        "has_room",
        "status",
        "who",
    )

    def __init__(self, send: Send, exchange: Exchange | None, node: Node, *, is_head: bool) -> None:
        self._send = send
        self._exchange = exchange
        self._node = node
        self._is_head = is_head
        self.status = 0
        self.who = "unknown"
        self.call: Call | None = None
        self.code = ""
        self.has_room = False

    @property
    def exchange(self) -> Exchange | None:
        """That of our server; None if another one serves."""
        return self._exchange

    async def refuse(self, problem: Problem) -> None:
        """Send a problem document."""
        self.code = problem.code
        await self.give(problem_reply(problem))

    async def give(self, reply: Reply) -> None:
        """Send a whole reply, unless another one has begun (it can only be cut short)."""
        if self.status:
            return
        node, body = self._node, reply.body
        is_large = len(body) > node.limits.reply_free_bytes
        if is_large and node.sharing.replies.free_units <= 0 and not self.has_room:
            # Do not keep the finished reply for a client that might never read it.
            reply = problem_reply(node.sharing.replies.refuse())
        self.status = reply.status_code
        if self.call is not None and self.call.bucket is not None:
            self.call.bucket.spend(len(reply.body))
        if self._exchange is not None:
            await self._exchange.give(reply)
            return
        headers = [*reply.raw_headers, *length_of(reply)]
        start = {"type": "http.response.start", "status": reply.status_code, "headers": headers}
        await self._send(start)
        await self._send({"type": "http.response.body", "body": reply.body})

    async def stream(self, reply: StreamedReply) -> None:
        """Send a reply in parts; the next one is made when the client has read the one before."""
        if self._is_head:
            await reply.parts.aclose()
            await self.give(Reply(reply.status_code, reply.raw_headers))
            return
        call = self.call
        bucket = None if call is None else call.bucket
        if call is None or bucket is None:
            await self._stream(reply, reply.parts)
            return
        rates = self._node.rates
        is_counted = reply.is_live and call.caller.rate is Rate.STRANGER
        if is_counted:
            try:
                rates.begin_live(bucket)
            except Problem:
                await reply.parts.aclose()
                raise
        try:
            await self._stream(reply, _paid(reply.parts, bucket))
        finally:
            if is_counted:
                rates.end_live(bucket)

    async def _stream(self, reply: StreamedReply, parts: Parts) -> None:
        self.status, headers = reply.status_code, reply.raw_headers
        if self._exchange is not None:
            await self._exchange.stream(self.status, headers, parts, is_live=reply.is_live)
            return
        # Also closed if this task is cancelled, as it is when the client has left.
        async with aclosing(parts):
            start = {"type": "http.response.start", "status": self.status, "headers": headers}
            await self._send(start)
            async for part in parts:
                body = b"".join(part)
                await self._send({"type": "http.response.body", "body": body, "more_body": True})
        await self._send({"type": "http.response.body", "body": b""})

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        """ASGI's `send`, for a response that is not one of ours."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


async def _paid(parts: Parts, bucket: Bucket) -> AsyncGenerator[Sequence[bytes], None]:
    """Parts of a reply, each taken from the bytes of its caller."""
    async with aclosing(parts):
        async for part in parts:
            bucket.spend(sum(map(len, part)))
            yield part
