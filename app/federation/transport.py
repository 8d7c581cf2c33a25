"""HTTP transport to a peer: its URL and its checked address.

The operator chooses a URL, but not the addresses that its name resolves to: a name that points to an
internal address would open a way through the firewall. So a name is resolved once per session, all its
addresses are checked, and the connection goes to a checked address.

`app.federation.client` connects and makes the calls, `sdstore.client.transport` those of sessions.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from pathlib import Path

import httpx

from app.errors import Code, Problem
from app.federation.client import PeerClients, PeerTransport, Place, client_over, tls_context
from app.server.limits import Limits
from sdstore.client.transport import HttpTransport, HttpxCalls

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
