"""Connections to peers: their URLs, their checked addresses, HTTP over them.

The operator chooses a URL, but not the addresses that its name resolves to: a name that points to an
internal address would open a way through the firewall. So a name is resolved once per session, all its
addresses are checked, and the connection goes to a checked address.

httpx makes the calls, `sdstore.client.transport` those of sessions. The URL of a request keeps the peer's name,
so that httpx and TLS ask for it and verify it; the network backend dials the checked address, whatever the name
resolves to by then. Kept connections belong to one name, one address and one set of CAs. So the check of the
addresses before each session still decides where a session connects, and two names of one address share no
connection.

The bounds of what a peer sends before and around a body are here; `sdstore.client.transport` bounds the body,
what it unpacks to, and the time of a whole call.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from pathlib import Path
from typing import Any, NamedTuple

import httpcore
import httpx

from app.errors import Code, Problem
from app.server.limits import Limits
from sdstore.client.exchange import CONNECT_TIMEOUT_S
from sdstore.client.transport import REQUEST_TIMEOUT_S, HttpTransport, HttpxCalls
from sdstore.sync.report import misbehaved

# ---- URLs and addresses

URL_LENGTH_MAX = 2_048  # longer than any URL that is typed, shorter than any attack worth making
PORT_MAX = 65_535
# The tables of `ipaddress` differ between versions of Python, so these are our own, from the registries
# of special-purpose addresses (RFC 6890).
_NAT64 = IPv6Network("64:ff9b::/96")
_PRIVATE = tuple(
    map(
        ip_network,
        (
            *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "127.0.0.0/8"),
            *("fc00::/7", "::1/128"),
        ),
    )
)
"""A site's own addresses, those of a carrier's NAT, and this machine: for operators who allow them."""

_NEVER = tuple(
    map(
        ip_network,
        (
            "0.0.0.0/8",
            "169.254.0.0/16",  # link-local: metadata services of clouds
            "192.0.0.0/24",  # protocol assignments
            *("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24"),  # documentation
            "192.88.99.0/24",  # relays of 6to4
            "198.18.0.0/15",  # benchmarks
            "224.0.0.0/3",  # multicast, reserved, broadcast
            *("2001::/23", "2001:db8::/32", "3fff::/20"),  # protocols (Teredo too), documentation
        ),
    )
)
_GLOBAL_IPV6 = IPv6Network("2000::/3")
"""Others have no global meaning: link-local, site-local, multicast, IPv4-compatible, local NAT64."""

_DEFAULT_PORTS = {"http": 80, "https": 443}

IpAddress = IPv4Address | IPv6Address


# --- the URL and its address -------------------------------------------------------------------


def parse_peer_url(text: str) -> httpx.URL:
    """The canonical URL of a peer: http(s), a host, no credentials, no query.

    Raises Problem(PEER_URL_REFUSED).
    """
    try:
        url = httpx.URL(text.strip()) if len(text) <= URL_LENGTH_MAX else httpx.URL("")
        host = url.host  # decoding fails for some labels that begin with "xn--"
    except (httpx.InvalidURL, ValueError):
        url, host = httpx.URL(""), ""
    if url.scheme not in _DEFAULT_PORTS or not host or set(host) & set(" %"):
        raise _url_refused("a peer URL must be http(s)://HOST[:PORT][/PATH]")
    if url.port is not None and not 0 < url.port <= PORT_MAX:
        raise _url_refused(f"a port must be 1 to {PORT_MAX}")
    if url.userinfo:
        raise _url_refused("a peer URL must not contain credentials")
    if url.query or url.fragment:
        raise _url_refused("a peer URL must not have a query or a fragment")
    return url.copy_with(raw_path=url.raw_path.rstrip(b"/") or b"/")


def url_text(url: httpx.URL) -> str:
    """The URL for display: without the slash of an empty path."""
    return str(url).removesuffix("/")


async def resolve(url: httpx.URL, *, private_allowed: bool) -> IpAddress:
    """Resolve a peer's host: its first address, after checking all of them.

    Raises Problem: PEER_UNREACHABLE if there is no address, PEER_URL_REFUSED if one is not allowed.
    """
    addresses = await _addresses_of(url)
    for address in addresses:
        if not is_allowed(address, private_allowed=private_allowed):
            raise refused_address(url.host, address)
    return addresses[0]


async def _addresses_of(url: httpx.URL) -> list[IpAddress]:
    with suppress(ValueError):
        return [ip_address(url.host)]
    port = url.port or _DEFAULT_PORTS[url.scheme]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            url.raw_host.decode("ascii"), port, type=socket.SOCK_STREAM
        )
    except (OSError, UnicodeError) as error:
        raise Problem(Code.PEER_UNREACHABLE, f"{url.host}: {error}") from None
    # A link-local address includes its interface ("%eth0"), which is not part of the address.
    return [ip_address(str(sockaddr[0]).split("%")[0]) for *_, sockaddr in found]


def is_allowed(address: IpAddress, *, private_allowed: bool) -> bool:
    """Whether a node may connect to this address.

    Never to an address of `_NEVER`; to private addresses and this machine only if the operator allows it.
    """
    address = _innermost(address)
    if _is_in(address, _PRIVATE):
        return private_allowed
    if isinstance(address, IPv6Address) and address not in _GLOBAL_IPV6:
        return False
    return not _is_in(address, _NEVER)


def _is_in(address: IpAddress, networks: tuple[IPv4Network | IPv6Network, ...]) -> bool:
    return any(address in each for each in networks if each.version == address.version)


def _innermost(address: IpAddress) -> IpAddress:
    """The IPv4 address that an IPv6 address embeds, if any; else the address itself."""
    if isinstance(address, IPv4Address):
        return address
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped or address.sixtofour or address


def refuse_literal(url: httpx.URL, *, private_allowed: bool) -> None:
    """Raise Problem(PEER_URL_REFUSED) if the host is an address that is not allowed.

    Names are checked later, because they can resolve to another address tomorrow.
    """
    try:
        address = ip_address(url.host)
    except ValueError:
        return
    if not is_allowed(address, private_allowed=private_allowed):
        raise refused_address(url.host, address)


def refused_address(host: str, address: IpAddress) -> Problem:
    """The refusal of an address, with the operator's remedy."""
    where = host if host == str(address) else f"{host} ({address})"
    if is_allowed(address, private_allowed=True):
        return _url_refused(
            f"{where} is a private address; to allow them, set private_peers = true"
        )
    return _url_refused(f"{where} cannot be the address of a peer")


def _url_refused(detail: str) -> Problem:
    return Problem(Code.PEER_URL_REFUSED, detail)


# --- the connection ----------------------------------------------------------------------------


@asynccontextmanager
async def open_http_transport(
    url: httpx.URL,
    limits: Limits,
    *,
    private_allowed: bool,
    own_instance: str | None = None,
    token: str | None = None,
    ca_file: Path | None = None,
    clients: PeerClients,
) -> AsyncIterator[HttpTransport]:
    """A transport to the peer at `url`, over kept connections to its checked address.

    `token` and `ca_file`: as in `open_http_client`. If the server answers with `own_instance`, each call
    raises SyncError(PEER_URL_REFUSED).
    """
    address = await resolve(url, private_allowed=private_allowed)
    place = Place(url, str(address), tls_context(ca_file))
    bytes_max = limits.recon_reply_bytes_max
    async with clients.to(url, place, token, bytes_max) as client:
        yield HttpTransport(
            HttpxCalls(client), reply_bytes_max=bytes_max, own_instance=own_instance
        )


@asynccontextmanager
async def open_http_client(
    url: httpx.URL,
    *,
    private_allowed: bool,
    token: str | None = None,
    ca_file: Path | None = None,
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the peer at `url` with connections of its own, to the checked address only.

    `token` is an access token of the peer. `ca_file` has the CAs of its certificate, if they are not
    well known; Problem(PEER_UNREACHABLE) if it cannot be read.
    """
    address = await resolve(url, private_allowed=private_allowed)
    transport = PeerTransport(Place(url, str(address), tls_context(ca_file)))
    async with client_over(transport, url, token) as client:
        yield client


# ---- clients

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
