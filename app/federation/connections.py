"""Connections to peers, kept open between sessions.

A session with little news is two short requests; connecting costs as much work as a request, and TLS two
round trips more. What is kept belongs to one checked address and one TLS name, so the check of the
addresses before each session still decides where a session connects.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple

import httpx

IDLE_S = 50.0
"""Seconds for which a connection is kept without a request: servers close it after 60 or more."""

PER_PEER_MAX = 4
"""Idle connections to one peer: as many as a session has requests in flight."""

PEERS_KEPT_MAX = 64
"""Peers with idle connections; those used longest ago are closed. 256 descriptors at most."""

CONNECTIONS_MAX = 100
"""Connections to one peer at once, as of httpx: several sessions cannot use more."""


class Place(NamedTuple):
    """Where connections lead: the URL of a checked address, its TLS name, and the CAs to trust."""

    base_url: httpx.URL
    tls_name: str
    context: ssl.SSLContext


class Connections:
    """The kept connections of a node. Belongs to one event loop; call `close` at the end."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Place, _Pool] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    @asynccontextmanager
    async def to(self, place: Place) -> AsyncIterator[httpx.AsyncBaseTransport]:
        """The connections to a place, for one session, and at once for others too."""
        pool = self._kept.get(place)
        if pool is None:
            pool = self._kept[place] = _Pool(_new_transport(place.context))
        self._kept.move_to_end(place)
        pool.users += 1
        try:
            yield _Shared(pool.transport)
        finally:
            pool.users -= 1
            pool.used_at_s = _now_s()
            await self._drop_unused()

    async def _drop_unused(self) -> None:
        """Close what was not used for `IDLE_S`, and the oldest beyond the bound."""
        surplus = len(self._kept) - PEERS_KEPT_MAX
        for place, pool in list(self._kept.items()):
            if pool.users or (surplus <= 0 and _now_s() - pool.used_at_s < IDLE_S):
                continue
            del self._kept[place]
            surplus -= 1
            await pool.transport.aclose()

    async def close(self) -> None:
        """Close all connections."""
        while self._kept:
            await self._kept.popitem()[1].transport.aclose()


@dataclass(slots=True, eq=False)
class _Pool:
    transport: httpx.AsyncHTTPTransport
    users: int = 0
    used_at_s: float = 0.0


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _new_transport(context: ssl.SSLContext) -> httpx.AsyncHTTPTransport:
    limits = httpx.Limits(
        max_connections=CONNECTIONS_MAX,
        max_keepalive_connections=PER_PEER_MAX,
        keepalive_expiry=IDLE_S,
    )
    return httpx.AsyncHTTPTransport(verify=context, trust_env=False, limits=limits)


class _Shared(httpx.AsyncBaseTransport):
    """A transport that stays open when its client is closed."""

    def __init__(self, transport: httpx.AsyncHTTPTransport) -> None:
        self._transport = transport

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self._transport.handle_async_request(request)
