"""Callers and their grants: the only place where grants are applied.

An `Authorizer` identifies the caller of each request; `app.access.tokens` has the one for access tokens.
Before it reads the body, the admission of a request checks the route's scope and the channel that path or query
names. Routes and reconciliation check everything else through `Caller` (channels that bodies, frames
and interests name) and `Readable` (the part of the store that the grants cover).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from functools import lru_cache
from ipaddress import ip_address
from typing import Any, NamedTuple, Protocol, TypeVar

from app.access.proxies import address_key
from app.entries import Entry
from app.errors import Code, Problem, problem_of_message
from app.server.settings import Settings
from app.store.channelpages import ChannelInfo
from app.store.entryrows import ContentState
from app.store.lookups import Found
from app.store.store import Store
from recon.agreement import Interest
from sdstore.sds.codec import MessageError, decode


class Scope(StrEnum):
    """The right that a route demands of its caller."""

    OPEN = "open"
    READ = "read"
    PUBLISH = "publish"
    SYNC = "sync"
    ADMIN = "admin"


_HINTS = {
    Scope.ADMIN: "; on the node's machine, `sdstore --token-file DATA_DIR/operator.token` has it"
}
EVERY_SCOPE = frozenset(Scope)
SCOPES_OF_PAGES = EVERY_SCOPE - {Scope.ADMIN}
"""The scopes of a web page of another origin: never the operator's."""


class Rate(Enum):
    """The kind of a caller's rate limit; `app.access.rates` has the limits."""

    FREE = "free"
    """Callers on this machine: the operator bounds what runs there."""
    CALLER = "caller"
    """Callers with a token, and everybody on a node that is open to all (`--insecure`)."""
    ANONYMOUS = "anonymous"


class Binding(StrEnum):
    """What the credentials of a caller say of the sender of a message that it brings."""

    BOUND = "bound"
    """The caller is this sender, or speaks for it."""
    VOUCHED = "vouched"
    """The caller brings messages of others and vouches for them: an operator, a peer, a bridge."""
    UNBOUND = "unbound"


class SenderGrant(NamedTuple):
    """A sender that a caller is bound to, and in which channels. `*` at the end: all that begin so."""

    sender: str
    channels: str

    def covers(self, sender_id: str, channel_id: str) -> bool:
        """Whether it covers the sender in the channel."""
        return _fits(self.sender, sender_id) and _fits(self.channels, channel_id)


def _fits(pattern: str, name: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern


class InChannel(Protocol):
    """Anything that belongs to a channel."""

    @property
    def channel_id(self) -> str:
        """The channel."""
        ...


_InChannel = TypeVar("_InChannel", bound=InChannel)


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller and its grants.

    `name` identifies the caller in budgets and logs; `channels` None means every channel; `token_id` names
    the token that it sent. `publishable` are the channels of the scope publish where they are others than
    `channels`. `senders` are those that it is bound to; `vouches`: it can bring messages of any sender.
    `instance_id` is what a store says of itself in the calls between stores; nothing is granted for it.
    """

    name: str
    scopes: frozenset[Scope] = EVERY_SCOPE
    channels: Interest | None = None
    token_id: str | None = None
    rate: Rate = Rate.FREE
    publishable: Interest | None = None
    instance_id: str = ""
    senders: tuple[SenderGrant, ...] = ()
    vouches: bool = False

    def binding(self, sender_id: str, channel_id: str) -> Binding:
        """What the credentials say of a sender of a message in a channel."""
        if any(each.covers(sender_id, channel_id) for each in self.senders):
            return Binding.BOUND
        return Binding.VOUCHED if self.vouches else Binding.UNBOUND

    def covers(self, channel_id: str) -> bool:
        """Whether the grants reach a channel."""
        return self.channels is None or self.channels.matches(channel_id)

    def reads(self, channel_id: str) -> bool:
        """Whether the caller may read a channel."""
        return not self.scopes.isdisjoint((Scope.READ, Scope.SYNC)) and self.covers(channel_id)

    def visible(self, items: Iterable[_InChannel]) -> list[_InChannel]:
        """The items of channels that the grants reach."""
        return [each for each in items if self.covers(each.channel_id)]

    @property
    def sees_all(self) -> bool:
        """Whether the grants reach figures of every channel, such as the metrics."""
        return self.channels is None and self.rate is not Rate.ANONYMOUS

    def may(self, scope: Scope) -> bool:
        """Whether the grants cover a scope: which parts a page shows."""
        try:
            self.require(scope, None)
        except Problem:
            return False
        return True

    def require(self, scope: Scope, channel_id: str | None) -> None:
        """Raise `forbidden` unless the grants cover the scope and the channel, if one is named.

        An operator's actions reach every channel, so they need grants for all of them.
        """
        if scope not in self.scopes and scope is not Scope.OPEN:
            if self.rate is Rate.ANONYMOUS:
                raise unauthenticated("this needs an access token (Authorization: Bearer TOKEN)")
            raise Problem(Code.FORBIDDEN, f"this needs the scope {scope}{_HINTS.get(scope, '')}")
        if scope is Scope.ADMIN and self.channels is not None:
            raise Problem(Code.FORBIDDEN, "this needs credentials for every channel")
        if channel_id is None:
            return
        channels = self._channels_of(scope)
        if channels is not None and not channels.matches(channel_id):
            if self.rate is Rate.ANONYMOUS:
                raise unauthenticated("this channel needs an access token")
            raise Problem(Code.FORBIDDEN, "the credentials do not cover this channel")

    def _channels_of(self, scope: Scope) -> Interest | None:
        is_apart = scope is Scope.PUBLISH and self.publishable is not None
        return self.publishable if is_apart else self.channels

    def require_channel_of_body(self, channel_id: str | None) -> None:
        """Raise `forbidden` unless the grants cover the channel of a body, or all if it names none."""
        if channel_id is None and self.channels is not None:
            raise Problem(Code.FORBIDDEN, "these credentials need a channel_id in every look-up")
        self.require(Scope.READ, channel_id)

    def covers_prefix(self, prefix: str) -> bool:
        """Whether the grants reach every channel that begins with a prefix."""
        return _is_within(Interest.make(prefixes=frozenset({prefix})), self.channels)

    def require_channel_of_frame(self, frame: bytes) -> None:
        """Raise `forbidden` unless the grants cover the channel of a frame.

        If they are limited, raises the decoder's code for a frame that is not a message.
        """
        if self._channels_of(Scope.PUBLISH) is None:
            return
        try:
            message, _ = decode(frame)
        except MessageError as error:
            raise problem_of_message(error) from None
        self.require(Scope.PUBLISH, message.channel_id)

    def is_within(self, other: Caller) -> bool:
        """Whether another caller's grants cover those of this one."""
        return self.scopes <= other.scopes and all(
            _is_within(self._channels_of(scope), other._channels_of(scope))
            for scope in self.scopes - {Scope.OPEN}
        )

    def readable_part(self, interest: Interest) -> Interest:
        """The part of an interest that the caller may read."""
        return interest if self.channels is None else interest.intersect(self.channels)


def _is_within(channels: Interest | None, others: Interest | None) -> bool:
    if others is None or channels is others:
        return True
    return channels is not None and channels.intersect(others) == channels


@dataclass(frozen=True, slots=True)
class Readable:
    """The caller's view of the store: it contains only the channels that the grants reach.

    Callers of the methods check beforehand that the grants cover `channel_id`.
    """

    store: Store
    caller: Caller

    async def find(self, message_id: str, channel_id: str | None) -> Found:
        """The variant served under an ID; `not_found`, `content_lost`, `retired`."""
        channels = self.caller.channels
        if channel_id is None and channels is not None:
            found = await self.store.entries.find_within(message_id, channels)
        else:
            found = await self.store.entries.find(message_id, channel_id)
        if found is None:
            raise no_such_message()
        return found

    async def entry(self, digest: bytes) -> Entry:
        """The entry with a digest; `not_found`, `content_lost`, `retired`."""
        try:
            entry = await self.store.entries.entry(digest) if len(digest) == 32 else None
        except Problem as problem:
            is_gone = problem.code in (Code.CONTENT_LOST, Code.RETIRED)
            if is_gone and self.caller.channels is not None:
                known = await self.store.frames.left_out([digest])
                if not self.caller.visible(known):
                    raise no_such_message() from None
            raise
        if entry is None or not self.caller.covers(entry.channel_id):
            raise no_such_message()
        return entry

    async def frame_sizes(self, digests: Sequence[bytes]) -> Mapping[bytes, int]:
        """Bytes of the frames of the known entries."""
        rows = self.caller.visible(await self.store.entries.rows(digests))
        return {row.digest: row.frame_bytes for row in rows}

    async def contents(self, digests: Sequence[bytes]) -> Mapping[bytes, Entry | ContentState]:
        """The entries with these digests, and the reason for each whose content is gone."""
        rows = self.caller.visible(await self.store.entries.rows(digests))
        entries = await self.store.frames.entries(rows)
        found: dict[bytes, Entry | ContentState] = {entry.digest: entry for entry in entries}
        if len(entries) < len(digests):
            for left_out in self.caller.visible(await self.store.frames.left_out(digests)):
                found.setdefault(left_out.digest, left_out.state)
        return found

    async def channels(
        self, after: str | None, limit: int, prefix: str | None
    ) -> list[ChannelInfo]:
        """Channels in the order of their names, after a given one."""
        if self.caller.channels is None:
            return await self.store.channels.after(after, limit, prefix)
        return await self.store.channels.within(self.caller.channels, after, limit, prefix)


def no_such_message() -> Problem:
    """The same for a message that is not here and for one that the caller may not see."""
    return Problem(Code.NOT_FOUND, "no such message is here")


def unauthenticated(detail: str) -> Problem:
    """The refusal of a caller without valid credentials."""
    return Problem(Code.UNAUTHENTICATED, detail, headers={"WWW-Authenticate": "Bearer"})


def confined(caller: Caller, headers: Mapping[bytes, bytes], public_host: bytes = b"") -> Caller:
    """The caller of a request with an Origin: a page of another origin lacks the operator's scope.

    It distinguishes a page of this node from any other page that is open on this machine and tries to use
    the machine's rights.
    """
    if is_of_this_node(headers, public_host):
        return caller
    return replace(caller, scopes=caller.scopes & SCOPES_OF_PAGES)


def is_of_this_node(headers: Mapping[bytes, bytes], public_host: bytes = b"") -> bool:
    """Whether the Origin of a request is this node.

    Browsers send the Origin of a page, and no page can forge it. A page of this node has the host of the
    request, or `public_host` where a proxy names another one.
    """
    _, _, origin_host = headers.get(b"origin", b"").partition(b"://")
    return bool(origin_host) and origin_host in (headers.get(b"host"), public_host)


class Authorizer(Protocol):
    """Identifies callers; raises `unauthenticated` or `forbidden`."""

    def identify(self, client_host: str, headers: Mapping[bytes, bytes]) -> Caller:
        """The caller behind an address and the request's headers (names in lower case)."""
        ...


class LoopbackAuthorizer:
    """Without credentials: all but an operator's actions for callers on this machine, open routes for others.

    An address makes nobody an operator: a proxy on this machine can make every caller look local. The scope
    `sync` remains, so that stores on one machine sync without tokens: it reads what `read` does.

    A request for another host name is refused even if it comes from this machine: a web page could
    reach a local service through DNS that it controls, and an anonymous caller through a proxy. A request for the
    name in the public URL is that of an anonymous caller, because whoever calls it may have come through a proxy.
    """

    def __init__(self, public_host: bytes = b"") -> None:
        self._public_name = _host_name(public_host)

    def identify(self, client_host: str, headers: Mapping[bytes, bytes]) -> Caller:
        """See `Authorizer`."""
        if not _is_loopback(client_host):
            return anonymous(client_host)
        name = _host_name(headers.get(b"host", b"localhost"))
        if not _is_loopback(name):
            if name and name == self._public_name:
                return anonymous(client_host)
            raise Problem(
                Code.FORBIDDEN,
                "the Host header names another machine; a node behind a proxy needs --public-url",
            )
        return _LOCAL


class OpenAuthorizer:
    """Everything but the operator's actions for everybody (`--insecure`)."""

    def identify(self, client_host: str, headers: Mapping[bytes, bytes]) -> Caller:  # noqa: ARG002
        """See `Authorizer`."""
        return _LOCAL if _is_loopback(client_host) else _anybody(client_host)


class DistrustingAuthorizer:
    """No caller is trusted for its address, as behind a proxy on this machine (`trust_loopback`)."""

    def __init__(self, *, is_open: bool) -> None:
        self._is_open = is_open

    def identify(self, client_host: str, headers: Mapping[bytes, bytes]) -> Caller:  # noqa: ARG002
        """See `Authorizer`."""
        return _anybody(client_host) if self._is_open else anonymous(client_host)


class AnonymousAuthorizer:
    """Lets anonymous callers read or publish in some channels; everybody else as another authorizer says.

    `reads` and `publishes` are prefixes of channels, or "*" for all; empty for none.
    """

    def __init__(
        self, known: Authorizer, *, reads: Sequence[str] = (), publishes: Sequence[str] = ()
    ) -> None:
        self._known = known
        self._granted = granted_to_anonymous(reads, publishes)

    def identify(self, client_host: str, headers: Mapping[bytes, bytes]) -> Caller:
        """See `Authorizer`."""
        caller = self._known.identify(client_host, headers)
        if caller.rate is not Rate.ANONYMOUS:
            return caller
        granted = self._granted
        return Caller(
            caller.name,
            granted.scopes,
            granted.channels,
            rate=Rate.ANONYMOUS,
            publishable=granted.publishable,
        )


def granted_to_anonymous(reads: Sequence[str], publishes: Sequence[str]) -> Caller:
    """An anonymous caller without a name, with what the operator opens to all of them (`AnonymousAuthorizer`)."""
    scopes = {Scope.OPEN: True, Scope.READ: bool(reads), Scope.PUBLISH: bool(publishes)}
    return Caller(
        "",
        frozenset(scope for scope, is_open in scopes.items() if is_open),
        _covered(tuple(reads)),
        rate=Rate.ANONYMOUS,
        # Not None, which would mean the channels that anonymous callers read.
        publishable=_covered(tuple(publishes)) or _EVERY_CHANNEL,
    )


def authorizer_without_tokens(
    *,
    trust_loopback: bool,
    insecure: bool,
    public_host: bytes = b"",
    anonymous_read: Sequence[str] = (),
    anonymous_publish: Sequence[str] = (),
) -> Authorizer:
    """Identifies the callers that send no token, as the settings of these names say."""
    known: Authorizer
    if not trust_loopback:
        known = DistrustingAuthorizer(is_open=insecure)
    else:
        known = OpenAuthorizer() if insecure else LoopbackAuthorizer(public_host)
    if not (anonymous_read or anonymous_publish):
        return known
    return AnonymousAuthorizer(known, reads=anonymous_read, publishes=anonymous_publish)


@lru_cache(maxsize=16)
def _covered(prefixes: tuple[str, ...]) -> Interest | None:
    """The channels with one of these prefixes; None for every channel."""
    # The cache gives equal grants one object, so comparing them costs nothing.
    return None if "*" in prefixes else Interest.make(prefixes=frozenset(prefixes))


_EVERY_CHANNEL = Interest.make(everything=True)


def channels_of(prefixes: Sequence[str]) -> Interest:
    """The channels that a setting names by prefixes, or by `*`."""
    return _covered(tuple(prefixes)) or _EVERY_CHANNEL


_LOCAL = Caller("local", EVERY_SCOPE - {Scope.ADMIN})


@lru_cache(maxsize=4096)
def _anybody(client_host: str) -> Caller:
    scopes = EVERY_SCOPE - {Scope.ADMIN}
    return Caller(f"address {address_key(client_host)}", scopes, rate=Rate.CALLER)


@lru_cache(maxsize=4096)
def anonymous(client_host: str) -> Caller:
    """A caller without credentials, who may use open routes only."""
    name = f"address {address_key(client_host)}"
    return Caller(name, frozenset({Scope.OPEN}), rate=Rate.ANONYMOUS)


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


# ---- running requests of anonymous callers


class AnonymousCallers:
    """What anonymous callers may do now, and the tasks that work for them: as many as requests run."""

    def __init__(self, settings: Settings) -> None:
        self._granted = _granted(settings)
        self._running: dict[asyncio.Task[Any], Caller] = {}

    def configure(self, settings: Settings) -> None:
        """Take over the settings, and end the requests that they do not allow."""
        self._granted = _granted(settings)
        for task, caller in list(self._running.items()):
            if not caller.is_within(self._granted):
                del self._running[task]
                task.cancel("anonymous access was withdrawn")

    def begin(self, caller: Caller, task: asyncio.Task[Any]) -> None:
        """A task works for an anonymous caller: a withdrawal cancels it until `end`.

        Raises Problem(UNAUTHENTICATED) if it came since the caller was identified.
        """
        if not caller.is_within(self._granted):
            raise unauthenticated("anonymous access was withdrawn; this needs an access token")
        self._running[task] = caller

    def end(self, task: asyncio.Task[Any]) -> None:
        """A task has ended its work for the caller of `begin`."""
        self._running.pop(task, None)


def _granted(settings: Settings) -> Caller:
    return granted_to_anonymous(settings.anonymous_read, settings.anonymous_publish)
