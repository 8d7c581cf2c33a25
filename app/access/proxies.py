"""Requests through a proxy: the client's address and scheme, as trusted proxies report them.

A proxy appends the address that it was called from to a header of the request. Everything further left in
that header came with the request, and anybody can write it. So the header counts only on a connection
from a trusted proxy, and the client is the right-most address that is not a trusted proxy itself.

Only one header is read, `X-Forwarded-For` or `Forwarded` (RFC 7239), as the operator says: a proxy that
sets one of them passes the other on as the client wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import NamedTuple

HOPS_MAX = 16
"""Addresses read from the right: a request passes a handful of proxies, so more are forged or a loop."""
FORWARDED_BYTES_MAX = 4_096
"""Of one line of `Forwarded`, which takes 0.5 ms to parse: sixteen elements with host names are shorter."""

IpAddress = IPv4Address | IPv6Address
IpNetwork = IPv4Network | IPv6Network

_SCHEMES = ("http", "https")
_PORT = re.compile(r"[0-9]{1,5}")
# RFC 7239 section 4: token=value, where the value is a token or a quoted string.
_PAIR = re.compile(
    r"""\s*([!#$%&'*+.^_`|~0-9A-Za-z-]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s";,]+))\s*(?:;|$)"""
)


class Seen(NamedTuple):
    """A client as a proxy saw it. `scheme` None: the proxy does not report one."""

    host: str
    scheme: str | None


class Proxies:
    """The proxies that an operator trusts. `header`: the header in which they report addresses."""

    def __init__(self, trusted: Iterable[str], header: str = "x-forwarded-for") -> None:
        self._networks = [_network(each) for each in trusted]
        self._is_forwarded = header == "forwarded"
        self._header = header.encode()

    def trusts(self, host: str) -> bool:
        """Whether an address is that of a trusted proxy."""
        if not self._networks:
            return False
        address = _address(host)
        return address is not None and self._holds(address)

    def client(self, proxy_host: str, headers: Sequence[tuple[bytes, bytes]]) -> Seen:
        """The client behind a trusted proxy at `proxy_host`; `headers` have names in lower case.

        If the header is missing, or an address in it cannot be read, the client is the last trusted proxy
        before that place. Never raises.
        """
        values = [value for name, value in headers if name == self._header]
        if self._is_forwarded:
            # Each line by itself: a quotation that a client opens must not swallow what a proxy adds.
            texts = [each for value in values for each in _split(value.decode("latin-1"))]
            elements = [_pairs(each) for each in texts[-HOPS_MAX:]]
            hosts = [_node(each.get("for", "")) for each in elements]
            scheme = elements[-1].get("proto", "").lower() if elements else ""
        else:
            text = b",".join(values).decode("latin-1")
            hosts = [_node(each) for each in text.rsplit(",", HOPS_MAX)[-HOPS_MAX:]]
            protos = [value for name, value in headers if name == b"x-forwarded-proto"]
            last = protos[-1].rpartition(b",")[2] if protos else b""
            scheme = last.strip().lower().decode("latin-1")
        host = proxy_host
        for address in reversed(hosts):
            if address is None:
                break
            host = str(address)
            if not self._holds(address):
                break
        return Seen(host, scheme if scheme in _SCHEMES else None)

    def _holds(self, address: IpAddress) -> bool:
        return any(address in network for network in self._networks)


@lru_cache(maxsize=4096)
def address_key(host: str) -> str:
    """What identifies a client in bounds per address: its address, or the first 64 bits of IPv6.

    One subscriber owns a /64, so a bound for each of its addresses would bound nothing.
    """
    address = _address(host)
    if isinstance(address, IPv6Address):
        return str(ip_network((int(address), 64), strict=False))
    return host if address is None else str(address)


def check_proxies(trusted: Iterable[str]) -> None:
    """Raise ValueError for a text that is neither an address nor a network."""
    for each in trusted:
        _network(each)


def _network(text: str) -> IpNetwork:
    network = ip_network(text)
    if isinstance(network, IPv6Network) and network.network_address.ipv4_mapped is not None:
        raise ValueError(f"{text} is an IPv4 address within IPv6: write it as IPv4")
    return network


def _address(text: str) -> IpAddress | None:
    """An address without its zone; IPv4 within IPv6 (::ffff:192.0.2.1) is IPv4."""
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def _node(text: str) -> IpAddress | None:
    """The address of `192.0.2.1`, `192.0.2.1:80`, `2001:db8::1`, `[2001:db8::1]` or `[2001:db8::1]:80`."""
    text = text.strip(" \t")
    if text.startswith("["):
        text, bracket, port = text[1:].partition("]")
        if not bracket or (port and not (port[0] == ":" and _PORT.fullmatch(port[1:]))):
            return None
        return _address(text) if ":" in text and "%" not in text else None
    if text.count(":") == 1:
        text, _, port = text.partition(":")
        if not _PORT.fullmatch(port):
            return None
    # A zone names an interface of another machine, in any letters.
    return None if "%" in text else _address(text)


def _split(line: str) -> list[str]:
    """The elements of a list with quoted strings (RFC 9110 section 5.6.1); one unreadable one for others."""
    if len(line) > FORWARDED_BYTES_MAX:
        return ["?"]
    elements, begin, is_quoted, at = [], 0, False, 0
    while at < len(line):
        character = line[at]
        if is_quoted and character == "\\":
            at += 1
        elif character == '"':
            is_quoted = not is_quoted
        elif character == "," and not is_quoted:
            elements.append(line[begin:at])
            begin = at + 1
        at += 1
    elements.append(line[begin:])
    return ["?"] if is_quoted else elements


def _pairs(element: str) -> dict[str, str]:
    """The parameters of one element of `Forwarded`; none if it is malformed or names one twice."""
    pairs: dict[str, str] = {}
    at, text = 0, element.strip(" \t")
    while at < len(text):
        found = _PAIR.match(text, at)
        if found is None or found[1].lower() in pairs:
            return {}
        quoted = found[2]
        value = found[3] if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
        pairs[found[1].lower()] = value
        at = found.end()
    return pairs
