"""Who calls, and what the caller may do: asked once for every route, before its body is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from ipaddress import ip_address
from typing import Protocol

from app.errors import Code, Problem


class Scope(StrEnum):
    """What a route demands of its caller."""

    OPEN = "open"
    READ = "read"
    PUBLISH = "publish"
    SYNC = "sync"
    ADMIN = "admin"


EVERY_SCOPE = frozenset(Scope)
SCOPES_OF_PAGES = EVERY_SCOPE - {Scope.ADMIN}
"""What a web page of another origin may do at most: never what is the operator's."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller and its grants.

    `name` keys budgets and may be logged; `channels` None means every channel; `is_trusted` says
    that the caller showed credentials or sits on this machine.
    """

    name: str
    scopes: frozenset[Scope] = EVERY_SCOPE
    channels: frozenset[str] | None = None
    is_trusted: bool = True

    def covers(self, channel_id: str) -> bool:
        """Whether the grants reach a channel."""
        return self.channels is None or channel_id in self.channels

    def require(self, scope: Scope, channel_id: str | None) -> None:
        """`forbidden` unless the grants cover the scope and, where one is named, the channel.

        What an operator does reaches every channel, so it needs grants for all of them.
        """
        if scope not in self.scopes and scope is not Scope.OPEN:
            raise Problem(Code.FORBIDDEN, f"this needs the scope {scope}")
        if scope is Scope.ADMIN and self.channels is not None:
            raise Problem(Code.FORBIDDEN, "this needs credentials for every channel")
        if channel_id is not None and not self.covers(channel_id):
            raise Problem(Code.FORBIDDEN, "the credentials do not cover this channel")


def confined(caller: Caller, headers: Mapping[bytes, bytes]) -> Caller:
    """The caller of a request that bears an Origin, without the scopes that another one's lack.

    Browsers send the Origin of a page and no page can forge it, so a page of this node is told from
    one that was opened on this machine and means to use what the machine may do.
    """
    _, _, origin_host = headers[b"origin"].partition(b"://")
    if origin_host == headers.get(b"host"):
        return caller
    return replace(caller, scopes=caller.scopes & SCOPES_OF_PAGES)


class Authorizer(Protocol):
    """Tells who calls; raises `unauthenticated` or `forbidden`."""

    def identify(self, client_host: str, headers: Mapping[bytes, bytes]) -> Caller:
        """The caller behind an address and the request's headers (names in lower case)."""
        ...


class LoopbackAuthorizer:
    """Without credentials: everything for callers on this machine, nothing for others.

    A request for another host name is refused although it comes from this machine: it is how a
    web page reaches a local service through DNS it controls, and how strangers come through a
    proxy.
    """

    def identify(self, client_host: str, headers: Mapping[bytes, bytes]) -> Caller:
        """See `Authorizer`."""
        if not _is_loopback(client_host):
            raise Problem(
                Code.UNAUTHENTICATED,
                "this node serves its own machine only",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if not _is_loopback(_host_name(headers.get(b"host", b"localhost"))):
            raise Problem(Code.FORBIDDEN, "the Host header names another machine")
        return _LOCAL


class OpenAuthorizer:
    """Everything for everybody: what an operator asks for with `--insecure`."""

    def identify(self, client_host: str, headers: Mapping[bytes, bytes]) -> Caller:  # noqa: ARG002
        """See `Authorizer`."""
        return _LOCAL if _is_loopback(client_host) else _stranger(client_host)


_LOCAL = Caller("local")


@lru_cache(maxsize=4096)
def _stranger(client_host: str) -> Caller:
    return Caller(f"address {client_host}", is_trusted=False)


@lru_cache(maxsize=256)
def _host_name(host: bytes) -> str:
    name = host.decode("latin-1").lower()
    return name[1 : name.find("]")] if name.startswith("[") else name.partition(":")[0]


@lru_cache(maxsize=4096)
def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
