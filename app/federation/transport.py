"""HTTP transport to a peer: its URL, its checked address, and the calls.

The operator chooses a URL, but not the addresses that its name resolves to: a name that points to an
internal address would open a way through the firewall. So a name is resolved once per session, all its
addresses are checked, and the connection goes to a checked address.

The driver of a session needs two calls (`sdstore.sync.exchange.Transport`). Bodies are opaque here.
They are compressed if both sides support it (zstd, RFC 9659), because most bytes of frames are repeated
bloom filters.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

import httpx
import zstandard

from app.errors import Code, Problem
from app.limits import DEFAULT_LIMITS, Limits

URL_LENGTH_MAX = 2_048  # longer than any URL that is typed, shorter than any attack worth making
PORT_MAX = 65_535
_NAT64 = IPv6Network("64:ff9b::/96")
_DEFAULT_PORTS = {"http": 80, "https": 443}

IpAddress = IPv4Address | IPv6Address

PROTOBUF = "application/x-protobuf"
CONNECT_TIMEOUT_S = 5.0  # a peer that needs longer counts as down
REQUEST_TIMEOUT_S = 60.0  # a reply of 8 MiB at 140 KiB/s
UNPACKED_FREE_BYTES = DEFAULT_LIMITS.unpacked_free_bytes
UNPACK_FACTOR = DEFAULT_LIMITS.unpack_factor_max
COMPRESS_BYTES_MIN = 1_024  # below this the header costs more than compression saves
ERROR_BODY_BYTES_MAX = 4_096  # enough of a problem document to quote

_BUSY = {
    httpx.codes.REQUEST_TIMEOUT,
    httpx.codes.TOO_MANY_REQUESTS,
    httpx.codes.SERVICE_UNAVAILABLE,
    httpx.codes.INSUFFICIENT_STORAGE,
}

INSTANCE_HEADER = "sds-instance"
"""The header with the ID of the node's data directory in the reply of `GET /v1/recon/interests`."""

OWN_URL = "this URL leads to this node itself, or to one that runs on a copy of its data directory"


# --- the URL and its address -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PinnedAddress:
    """The URL of a peer's checked address, and the names that its server expects."""

    base_url: httpx.URL
    host_header: str
    tls_name: str


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
        raise _url_refused("a peer URL must be http://HOST[:PORT] or https://HOST[:PORT]")
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


async def resolve(url: httpx.URL, *, private_allowed: bool) -> PinnedAddress:
    """Resolve a peer's host and pin its first address, after checking all of them.

    Raises Problem: PEER_UNREACHABLE if there is no address, PEER_URL_REFUSED if one is not allowed.
    """
    addresses = await _addresses_of(url)
    for address in addresses:
        if not is_allowed(address, private_allowed=private_allowed):
            raise refused_address(url.host, address)
    return PinnedAddress(
        base_url=url.copy_with(host=str(addresses[0])),
        host_header=url.netloc.decode("ascii"),
        tls_name=url.host,
    )


async def _addresses_of(url: httpx.URL) -> list[IpAddress]:
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

    Never to link-local (cloud metadata services), multicast, reserved or unspecified addresses; to
    private addresses and this machine only if the operator allows it.
    """
    address = _innermost(address)
    if address.is_loopback:  # before the reserved ones, which contain ::1
        return private_allowed
    if (
        address.is_link_local
        or address.is_multicast
        or address.is_reserved
        or address.is_unspecified
    ):
        return False
    return address.is_global or private_allowed


def _innermost(address: IpAddress) -> IpAddress:
    """The IPv4 address that an IPv6 address embeds, if any; else the address itself."""
    if isinstance(address, IPv4Address):
        return address
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    teredo = address.teredo[1] if address.teredo else None
    return address.ipv4_mapped or address.sixtofour or teredo or address


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


# --- calls -------------------------------------------------------------------------------------


class HttpTransport:
    """A peer over HTTP; `client` is bound to the peer's checked address. Calls raise Problem."""

    def __init__(
        self, client: httpx.AsyncClient, limits: Limits, own_instance: str | None = None
    ) -> None:
        """`own_instance`: this node's instance ID; a server that answers with it is this node."""
        self.bytes_up = 0
        self.bytes_down = 0
        self._client = client
        self._reply_bytes_max = limits.recon_reply_bytes_max
        self._peer_reads_zstd = False
        self._own_instance = own_instance

    async def interest(self) -> bytes:
        """GET /v1/recon/interests."""
        return await self._exchange("GET", "v1/recon/interests", None)

    async def recon(self, request: bytes) -> bytes:
        """POST /v1/recon."""
        return await self._exchange("POST", "v1/recon", request)

    async def _exchange(self, method: str, path: str, body: bytes | None) -> bytes:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                return await self._send(method, path, body)
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            detail = str(error) or type(error).__name__
            raise Problem(
                Code.PEER_UNREACHABLE, f"{self._client.base_url.netloc.decode()}: {detail}"
            ) from None

    async def _send(self, method: str, path: str, body: bytes | None) -> bytes:
        headers: dict[str, str] = {}
        if body is not None:
            headers["content-type"] = PROTOBUF
            if self._peer_reads_zstd and len(body) >= COMPRESS_BYTES_MIN:
                packed = zstandard.compress(body)
                # The peer would refuse a body that compresses extremely well as a bomb.
                if len(body) <= max(UNPACKED_FREE_BYTES, UNPACK_FACTOR * len(packed)):
                    body = packed
                    headers["content-encoding"] = "zstd"
            self.bytes_up += len(body)
        async with self._client.stream(method, path, content=body, headers=headers) as response:
            self._peer_reads_zstd = "zstd" in response.headers.get("accept-encoding", "")
            if response.headers.get(INSTANCE_HEADER) == self._own_instance is not None:
                raise Problem(Code.PEER_URL_REFUSED, OWN_URL)
            if response.status_code != httpx.codes.OK:
                raise _refusal(response, await self._read(response, ERROR_BODY_BYTES_MAX))
            raw = await self._read(response, self._reply_bytes_max)
            return self._decoded(raw, response.headers.get("content-encoding", "identity"))

    async def _read(self, response: httpx.Response, bytes_max: int) -> bytes:
        raw = bytearray()
        async for chunk in response.aiter_raw():
            self.bytes_down += len(chunk)
            raw += chunk
            if len(raw) > bytes_max:
                raise _misbehaved(f"a reply larger than {bytes_max} bytes")
        return bytes(raw)

    def _decoded(self, raw: bytes, encoding: str) -> bytes:
        if encoding == "identity":
            return raw
        if encoding != "zstd":
            raise _misbehaved(f"a reply in {encoding}, which this node did not request")
        with zstandard.ZstdDecompressor().stream_reader(raw) as reader:
            try:
                plain = reader.read(self._reply_bytes_max + 1)
            except zstandard.ZstdError as error:
                raise _misbehaved(f"a damaged reply ({error})") from None
        if len(plain) > self._reply_bytes_max:
            raise _misbehaved(f"a reply larger than {self._reply_bytes_max} bytes")
        return plain


@asynccontextmanager
async def open_http_transport(
    url: httpx.URL, limits: Limits, *, private_allowed: bool, own_instance: str | None = None
) -> AsyncIterator[HttpTransport]:
    """A transport to the peer at `url`; it connects only to the checked address.

    If the server answers with `own_instance`, each call raises Problem(PEER_URL_REFUSED).
    """
    pinned = await resolve(url, private_allowed=private_allowed)

    async def send_to_pinned(request: httpx.Request) -> None:
        request.headers["host"] = pinned.host_header
        request.extensions["sni_hostname"] = pinned.tls_name

    async with httpx.AsyncClient(
        base_url=pinned.base_url,
        verify=_tls_context(),
        headers={"accept": PROTOBUF, "accept-encoding": "zstd"},
        timeout=httpx.Timeout(REQUEST_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        follow_redirects=False,
        trust_env=False,
        event_hooks={"request": [send_to_pinned]},
    ) as client:
        yield HttpTransport(client, limits, own_instance)


@cache
def _tls_context() -> ssl.SSLContext:
    """One for all peers: reading the certificates of the authorities takes 20 ms."""
    return httpx.create_ssl_context(trust_env=False)


def _refusal(response: httpx.Response, body: bytes) -> Problem:
    """The problem for a status other than 200: the peer is busy, fails, refuses, or is not a store."""
    text = f"HTTP {response.status_code}: {body[:200].decode('utf-8', 'replace')}"
    if response.status_code in _BUSY:
        return Problem(Code.OVERLOADED, text)
    if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        return Problem(Code.FORBIDDEN, text)
    if response.is_server_error:
        return Problem(Code.PEER_UNREACHABLE, text)
    return _misbehaved(text)


def _misbehaved(detail: str) -> Problem:
    return Problem(Code.PEER_MISBEHAVED, detail)
