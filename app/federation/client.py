"""HTTP clients of peers: httpx, over connections that lead only to a checked address.

The URL of a request keeps the peer's name, so that httpx and TLS ask for it and verify it; the network backend
dials the checked address, whatever the name resolves to by then. Kept connections belong to one name, one
address and one set of CAs. So the check of the addresses before each session still decides where a session
connects, and two names of one address share no connection.

The bounds of what a peer sends before and around a body are here; `sdstore.client.transport` bounds the body,
what it unpacks to, and the time of a whole call.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import httpcore
import httpx

from app.errors import Code, Problem
from sdstore.client.exchange import CONNECT_TIMEOUT_S
from sdstore.client.transport import REQUEST_TIMEOUT_S
from sdstore.sync.report import misbehaved

IDLE_S = 50.0
"""Seconds for which a connection is kept without a request: servers close it after 60 or more."""

PER_PEER_MAX = 4
"""Idle connections to one peer: as many as a session has requests in flight."""

PEERS_KEPT_MAX = 64
"""Peers with idle connections; those used longest ago are closed. 256 descriptors at most."""

HEAD_BYTES_MAX = 1 << 15
"""Before the body of an answer, answers 1xx too: as much as a node takes in a request."""

FRAMING_FACTOR = 2
"""Bytes on the wire for each byte of a body: chunks of ten bytes and more have less around them."""

READ_BYTES = 8_192
"""Of a peer's answer, parsed before others are served: chunks of one byte take 60 ms."""


class Place(NamedTuple):
    """Where connections lead: a URL, the checked address of its name, and the CAs to trust."""

    origin: httpx.URL
    address: str
    context: ssl.SSLContext


class PeerClients:
    """The kept connections of a node. Belongs to one event loop; call `close` at the end."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Place, _Kept] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    @asynccontextmanager
    async def to(
        self, url: httpx.URL, place: Place, token: str | None, reply_bytes_max: int
    ) -> AsyncIterator[httpx.AsyncClient]:
        """A client of the peer at `url`, for one session, over connections that others use too."""
        kept = self._kept.get(place)
        if kept is None:
            kept = self._kept[place] = _Kept(PeerTransport(place, reply_bytes_max))
        self._kept.move_to_end(place)
        kept.users += 1
        try:
            yield client_over(kept.transport, url, token)
        finally:
            kept.users -= 1
            kept.used_at_s = _now_s()
            await self._drop_unused()

    async def _drop_unused(self) -> None:
        """Close what was not used for `IDLE_S`, and the oldest beyond the bound."""
        surplus = len(self._kept) - PEERS_KEPT_MAX
        for place, kept in list(self._kept.items()):
            if kept.users or (surplus <= 0 and _now_s() - kept.used_at_s < IDLE_S):
                continue
            surplus -= 1
            # Another session's end may be closing it.
            if self._kept.pop(place, None) is not None:
                await kept.transport.aclose()

    async def close(self) -> None:
        """Close all connections."""
        while self._kept:
            await self._kept.popitem()[1].transport.aclose()


class _Kept:
    """`users`: sessions that use the transport; `used_at_s`: when the last of them ended."""

    def __init__(self, transport: PeerTransport) -> None:
        self.transport = transport
        self.users = 0
        self.used_at_s = 0.0


def client_over(transport: PeerTransport, url: httpx.URL, token: str | None) -> httpx.AsyncClient:
    """A client that follows no redirects and uses no proxies. It need not be closed."""
    return httpx.AsyncClient(
        base_url=url,
        transport=transport,
        headers={} if token is None else {b"authorization": b"Bearer " + token.encode()},
        timeout=httpx.Timeout(REQUEST_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        follow_redirects=False,
        trust_env=False,
    )


class PeerTransport(httpx.AsyncHTTPTransport):
    """Connections to one place. The bodies of answers have at most `reply_bytes_max` bytes; None: any.

    A server may close a kept connection at the moment of a request: then the request goes out again.
    """

    def __init__(self, place: Place, reply_bytes_max: int | None = None) -> None:
        super().__init__(verify=place.context, trust_env=False)
        # httpx has no argument for the backend.
        self._pool: httpcore.AsyncConnectionPool = httpcore.AsyncConnectionPool(
            ssl_context=place.context,
            max_connections=None,
            max_keepalive_connections=PER_PEER_MAX,
            keepalive_expiry=IDLE_S,
            network_backend=_PinnedBackend(place, reply_bytes_max),
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See `httpx.AsyncBaseTransport`."""
        for _ in range(PER_PEER_MAX):
            with suppress(_EndedWhileKeptError):
                return await self._handled(request)
        return await self._handled(request)

    async def _handled(self, request: httpx.Request) -> httpx.Response:
        try:
            response = await super().handle_async_request(request)
        except httpx.ReadError as error:
            if isinstance(error.__cause__, _EndedWhileKeptError):
                raise error.__cause__ from None
            raise
        response.extensions["network_stream"].is_in_head = False
        response.stream = _Body(response.stream, self._drop_spoiled)
        return response

    async def _drop_spoiled(self) -> None:
        """Close idle connections on which more has come than the answer to a request."""
        for each in self._pool.connections:
            if each.is_idle() and _has_more(each):
                await each.aclose()


def _has_more(connection: Any) -> bool:
    """Whether the parser of an idle connection holds bytes, which would answer the next request."""
    # httpcore reads on from them, and has no way to ask.
    parser = getattr(connection._connection, "_h11_state", None)  # noqa: SLF001
    return parser is not None and bool(parser.trailing_data[0])


class _Body(httpx.AsyncByteStream):
    """The body of an answer; `ended` is called when its connection is idle or closed."""

    def __init__(self, stream: Any, ended: Callable[[], Awaitable[None]]) -> None:
        self._stream = stream
        self._ended = ended

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            yield part

    async def aclose(self) -> None:
        """See `httpx.AsyncByteStream`."""
        await self._stream.aclose()
        await self._ended()


class _EndedWhileKeptError(httpcore.ReadError):
    """A kept connection ended before the answer to a request began."""


class _PinnedBackend(httpcore.AnyIOBackend):
    """Connects to the checked address of one place."""

    def __init__(self, place: Place, reply_bytes_max: int | None) -> None:
        self._place = place
        self._reply_bytes_max = reply_bytes_max

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - of httpcore
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """See `httpcore.AsyncNetworkBackend`."""
        if host != self._place.origin.raw_host.decode("ascii"):
            raise httpcore.ConnectError(f"the address of {host} was not checked")
        stream = await super().connect_tcp(
            self._place.address, port, timeout, local_address, socket_options
        )
        return _BoundedStream(stream, self._reply_bytes_max)


class _BoundedStream(httpcore.AsyncNetworkStream):
    """A connection. `is_in_head`: the answer to the last request has not begun its body."""

    def __init__(self, stream: httpcore.AsyncNetworkStream, reply_bytes_max: int | None) -> None:
        self.is_in_head = False
        self._stream = stream
        self._reply_bytes_max = reply_bytes_max
        self._received_bytes = 0
        self._is_kept = False

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        """See `httpcore.AsyncNetworkStream`."""
        try:
            data = await self._stream.read(min(max_bytes, READ_BYTES), timeout)
        except httpcore.ReadError as error:
            if self._is_kept and not self._received_bytes:
                raise _EndedWhileKeptError from error
            raise
        if self._is_kept and not self._received_bytes and not data:
            raise _EndedWhileKeptError
        self._received_bytes += len(data)
        if self.is_in_head and self._received_bytes > HEAD_BYTES_MAX:
            raise misbehaved(f"a reply with more than {HEAD_BYTES_MAX} bytes of headers")
        if self._reply_bytes_max is not None:
            bytes_max = FRAMING_FACTOR * self._reply_bytes_max + HEAD_BYTES_MAX
            if self._received_bytes > bytes_max:
                raise misbehaved(f"a reply larger than {self._reply_bytes_max} bytes")
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """See `httpcore.AsyncNetworkStream`."""
        self._is_kept = self._is_kept or self._received_bytes > 0
        self.is_in_head, self._received_bytes = True, 0
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        """See `httpcore.AsyncNetworkStream`."""
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> httpcore.AsyncNetworkStream:
        """See `httpcore.AsyncNetworkStream`."""
        encrypted = await self._stream.start_tls(ssl_context, server_hostname, timeout)
        return _BoundedStream(encrypted, self._reply_bytes_max)

    def get_extra_info(self, info: str) -> object:
        """See `httpcore.AsyncNetworkStream`."""
        return self._stream.get_extra_info(info)


def tls_context(ca_file: Path | None) -> ssl.SSLContext:
    """One for all peers until the file changes: reading the certificates of the authorities takes 20 ms.

    Problem(PEER_UNREACHABLE) if the file cannot be read.
    """
    if ca_file is None:
        return _tls_context_of(None, ())
    try:
        stat = ca_file.stat()
        return _tls_context_of(ca_file, (stat.st_ino, stat.st_mtime_ns, stat.st_size))
    except (OSError, ssl.SSLError) as error:
        reason = f"the CA certificates in {ca_file} cannot be read: {error}"
        raise Problem(Code.PEER_UNREACHABLE, reason) from None


@lru_cache(maxsize=4)
def _tls_context_of(ca_file: Path | None, _identity: tuple[int, ...]) -> ssl.SSLContext:
    if ca_file is None:
        return httpx.create_ssl_context(trust_env=False)
    return ssl.create_default_context(cafile=ca_file)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
