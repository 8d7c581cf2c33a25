"""Peer URLs, and the one address each may be reached at.

A URL is text from an operator, but what it resolves to is not: a name that points inwards would
turn a store into a way through the firewall. So a name is resolved once per session, every address
it has is checked, and the connection goes to the address that was checked.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address

import httpx

from app.errors import Code, Problem

URL_LENGTH_MAX = 2_048  # longer than any URL that is typed, shorter than any attack worth making
PORT_MAX = 65_535
_NAT64 = IPv6Network("64:ff9b::/96")
_DEFAULT_PORTS = {"http": 80, "https": 443}

IpAddress = IPv4Address | IPv6Address


@dataclass(frozen=True, slots=True)
class PinnedAddress:
    """Where a peer was found: the URL of its checked address, and the name it goes by."""

    base_url: httpx.URL
    host_header: str
    tls_name: str


def parse_peer_url(text: str) -> httpx.URL:
    """The canonical URL of a peer: http(s), a host, no credentials, no query.

    Raises Problem(PEER_URL_REFUSED).
    """
    try:
        url = httpx.URL(text.strip()) if len(text) <= URL_LENGTH_MAX else httpx.URL("")
        host = url.host  # decoding it fails for some labels that begin with "xn--"
    except (httpx.InvalidURL, ValueError):
        url, host = httpx.URL(""), ""
    if url.scheme not in _DEFAULT_PORTS or not host or set(host) & set(" %"):
        raise _refused("a peer URL is http://HOST[:PORT] or https://HOST[:PORT]")
    if url.port is not None and not 0 < url.port <= PORT_MAX:
        raise _refused(f"a port is 1 to {PORT_MAX}")
    if url.userinfo:
        raise _refused("a peer URL carries no credentials")
    if url.query or url.fragment:
        raise _refused("a peer URL has neither query nor fragment")
    return url.copy_with(raw_path=url.raw_path.rstrip(b"/") or b"/")


def url_text(url: httpx.URL) -> str:
    """The URL as it is shown: without the slash of an empty path."""
    return str(url).removesuffix("/")


async def resolve(url: httpx.URL, *, private_allowed: bool) -> PinnedAddress:
    """Resolve a peer's host and pin its first address, after checking all of them.

    Raises Problem: PEER_UNREACHABLE where there is none, PEER_URL_REFUSED where one is not allowed.
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
    # A link-local address comes with its interface ("%eth0"), which is not part of the address.
    return [ip_address(str(sockaddr[0]).split("%")[0]) for *_, sockaddr in found]


def is_allowed(address: IpAddress, *, private_allowed: bool) -> bool:
    """Whether a node may connect to this address.

    Link-local addresses (cloud metadata services live there), multicast, reserved and unspecified
    ones never; private ones and this machine where the operator allows it.
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
    """The IPv4 address that an IPv6 address leads to, where it does."""
    if isinstance(address, IPv4Address):
        return address
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    teredo = address.teredo[1] if address.teredo else None
    return address.ipv4_mapped or address.sixtofour or teredo or address


def refuse_literal(url: httpx.URL, *, private_allowed: bool) -> None:
    """Raise Problem(PEER_URL_REFUSED) where the host is an address that is not allowed.

    A name may lead elsewhere tomorrow; an address never will.
    """
    try:
        address = ip_address(url.host)
    except ValueError:
        return
    if not is_allowed(address, private_allowed=private_allowed):
        raise refused_address(url.host, address)


def refused_address(host: str, address: IpAddress) -> Problem:
    """The refusal of an address, and what an operator can do about it."""
    where = host if host == str(address) else f"{host} ({address})"
    if is_allowed(address, private_allowed=True):
        return _refused(f"{where} is a private address; to allow them, set private_peers = true")
    return _refused(f"{where} is not an address that a peer can have")


def _refused(detail: str) -> Problem:
    return Problem(Code.PEER_URL_REFUSED, detail)
