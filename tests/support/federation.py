"""Stores that sync inside one process, honest ones and others."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from app.access.callers import Caller
from app.ingest.prepare import Publication
from app.recon.replica import NodeReplica
from app.server.limits import DEFAULT_LIMITS, Limits
from app.server.node import Node
from app.server.settings import Settings
from recon.agreement import Interest
from sdstore.sds.codec import encode
from sdstore.sds.model import Dialect, Message
from sdstore.sync import driver
from sdstore.sync.comparison import Mode
from sdstore.sync.driver import Transport
from sdstore.sync.memory import PeerMemory
from sdstore.sync.report import SyncReport
from sdstore.wire.recon_pb2 import ReconRequest, ReconResponse

CALLER = Caller("test", instance_id="a store")
Mangle = Callable[[ReconRequest, ReconResponse], ReconResponse]


@dataclass(slots=True)
class Remembered:
    """A store's memory of a peer between sessions."""

    value: PeerMemory = field(default_factory=PeerMemory)


def local_of(node: Node, nonce_secret: bytes | None = None) -> NodeReplica:
    """The initiating side of a node."""
    secret = nonce_secret or os.urandom(16)
    return NodeReplica(
        node.store,
        node.ingest.door,
        node.recon.index,
        node.limits,
        secret,
        lambda: node.federation.interests.policy,
    )


async def sync_with_peer(
    local: NodeReplica,
    peer: Transport,
    interest: Interest,
    *,
    memory: Remembered | None = None,
    mode: Mode = Mode.MOVE,
    **options: Any,
) -> SyncReport:
    """One session, as a node starts it. With `arrivals=None` as a replica that has no arrival order."""
    memory = memory or Remembered()
    report, memory.value = await driver.sync_with_peer(
        local,
        peer,
        interest,
        memory=memory.value,
        mode=mode,
        **{
            "arrivals": local,
            "limits": local.limits.sync,
            "nonce_secret": local.nonce_secret,
            **options,
        },
    )
    return report


class InProcessPeer:
    """A transport straight into another node; `mangle` can change its answers."""

    def __init__(self, node: Node, mangle: Mangle | None = None) -> None:
        self.bytes_up = 0
        self.bytes_down = 0
        self.requests: list[ReconRequest] = []
        self._node = node
        self._mangle = mangle

    async def recon(self, request: bytes) -> bytes:
        """One call."""
        self.bytes_up += len(request)
        parsed = ReconRequest.FromString(request)
        self.requests.append(parsed)
        response = await self._node.recon.endpoint.answer(request, CALLER)
        if self._mangle:
            response = self._mangle(parsed, response)
        raw = response.SerializeToString()
        self.bytes_down += len(raw)
        return raw


@asynccontextmanager
async def open_nodes(
    folder: Path, *settings: Mapping[str, Any], limits: Limits = DEFAULT_LIMITS
) -> AsyncIterator[list[Node]]:
    """One node for each set of settings."""
    async with AsyncExitStack() as stack:
        nodes = []
        for number, each in enumerate(settings):
            own = Settings(data_dir=folder / str(number), **each)
            nodes.append(await stack.enter_async_context(Node.open(own, limits)))
        yield nodes


async def publish(
    node: Node, messages: Iterable[Message], hints: Mapping[str, tuple[bytes, ...]] = {}
) -> None:
    """Publish messages with the hints of their IDs; all must be taken."""
    items = [
        Publication(encode(each, Dialect.V2), hints.get(each.message_id, ())) for each in messages
    ]
    for outcome in await node.ingest.door.publish_many(items):
        if isinstance(outcome, Exception):
            raise outcome


def message(number: int, channel_id: str = "c", **parts: Any) -> Message:
    """A content message that its number tells apart."""
    made = Message(
        message_id=f"m{number}",
        channel_id=channel_id,
        lamport_timestamp=number,
        content=b"content %d" % number,
    )
    return replace(made, **parts)


async def holdings(node: Node) -> dict[tuple[str, str, bytes], frozenset[bytes]]:
    """(channel, ID, digest) of everything a node has, with the published hints of each."""
    page = await node.store.channels.feed(0, 100_000, 1 << 40)
    claims = await node.store.claims.of([entry.digest for entry in page.entries])
    return {
        (entry.channel_id, entry.message_id, entry.digest): frozenset(
            claim.hint for claim in claims.get(entry.digest, ())
        )
        for entry in page.entries
    }


RUN_SECONDS_MAX = 240
"""Ends a scenario that hangs before pytest's limit of 300 s ends it without its tasks' names."""


def run(scenario: Any) -> Any:
    """Run a coroutine, for at most `RUN_SECONDS_MAX`."""
    return asyncio.run(asyncio.wait_for(scenario, RUN_SECONDS_MAX))
