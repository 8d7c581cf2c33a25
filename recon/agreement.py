"""Interests, nonces and the session key: what both sides agree on before they compare.

An interest is a set of channels and a window of Lamport timestamps, with one canonical encoding.
Both sides hash it into the session key, so two encodings of one interest would give two keys:
decoding accepts the canonical form only.

Both sides contribute a nonce to the key, so neither can choose it alone, and messages that were
crafted to collide under one key are worthless under the next. The responder stores nothing: its
nonce is a keyed hash of a secret, the pair and an epoch, so it recognises its own nonce when the
initiator repeats it, and refuses one that is too old.
"""

from __future__ import annotations

import hmac
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import blake3
from google.protobuf.message import DecodeError

from recon.elements import OrderWindow, order_of_lamport
from recon.errors import LocalProtocolError, RemoteProtocolError
from recon.limits import (
    INTEREST_BYTES_MAX,
    INTEREST_HASH_BYTES,
    INTEREST_NAMES_MAX,
    NONCE_BYTES,
    SESSION_KEY_BYTES,
)
from sdstore.wire import recon_pb2
from sdstore.wire.recon_pb2 import Session

_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1  # a window may be wider than messages are


def _minimal_prefixes(prefixes: frozenset[str]) -> tuple[str, ...]:
    kept: list[str] = []
    for prefix in sorted(prefixes):  # code points sort as their UTF-8 bytes do
        if not (kept and prefix.startswith(kept[-1])):
            kept.append(prefix)
    return tuple(kept)


@dataclass(frozen=True, slots=True)
class Interest:
    """The channels and Lamport timestamps that a node wants, in canonical form. Build it with `make`."""

    everything: bool = False
    channels: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    lamport_from: int | None = None
    lamport_to: int | None = None

    @classmethod
    def make(
        cls,
        *,
        everything: bool = False,
        channels: frozenset[str] = frozenset(),
        prefixes: frozenset[str] = frozenset(),
        lamport_from: int | None = None,
        lamport_to: int | None = None,
    ) -> Interest:
        """The canonical interest: sorted, without names that another part already covers."""
        for lamport in (lamport_from, lamport_to):
            if lamport is not None and not _INT64_MIN <= lamport <= _INT64_MAX:
                raise LocalProtocolError(
                    f"the Lamport bound {lamport} is not a signed 64-bit number"
                )
        if everything or "" in prefixes:
            return cls(True, (), (), lamport_from, lamport_to)
        minimal = _minimal_prefixes(prefixes)
        loose = (c for c in channels if not _begins_with_one(minimal, c))
        return cls(False, tuple(sorted(loose)), minimal, lamport_from, lamport_to)

    def matches(self, channel: str) -> bool:
        """Whether the channel belongs to the interest."""
        if self.everything or _begins_with_one(self.prefixes, channel):
            return True
        at = bisect_left(self.channels, channel)
        return at < len(self.channels) and self.channels[at] == channel

    @property
    def window(self) -> OrderWindow:
        """The Lamport window as order values."""
        lower = 0 if self.lamport_from is None else order_of_lamport(self.lamport_from)
        upper = None if self.lamport_to is None else order_of_lamport(self.lamport_to)
        return OrderWindow(lower, upper)

    def intersect(self, other: Interest) -> Interest:
        """The mutual interest. An empty one has no channels, no prefixes and not `everything`."""
        low = _pick(max, self.lamport_from, other.lamport_from)
        high = _pick(min, self.lamport_to, other.lamport_to)
        if self.everything or other.everything:
            narrow = other if self.everything else self
            return Interest(narrow.everything, narrow.channels, narrow.prefixes, low, high)
        channels = {c for c in self.channels if other.matches(c)}
        channels |= {c for c in other.channels if self.matches(c)}
        prefixes = {p for p in self.prefixes if _begins_with_one(other.prefixes, p)}
        prefixes |= {p for p in other.prefixes if _begins_with_one(self.prefixes, p)}
        return Interest.make(
            channels=frozenset(channels),
            prefixes=frozenset(prefixes),
            lamport_from=low,
            lamport_to=high,
        )

    @property
    def is_empty(self) -> bool:
        """Whether no channel at all, or no Lamport timestamp, can match."""
        nothing = not (self.everything or self.channels or self.prefixes)
        low, high = self.lamport_from, self.lamport_to
        return nothing or (low is not None and high is not None and low >= high)

    def encode(self) -> bytes:
        """Canonical bytes (`Interest` of proto/recon.proto)."""
        message = recon_pb2.Interest(
            all=self.everything,
            channels=self.channels,
            prefixes=self.prefixes,
            lamport_from=self.lamport_from,
            lamport_to=self.lamport_to,
        )
        return message.SerializeToString(deterministic=True)


def decode_interest(raw: bytes) -> Interest:
    """The interest of canonical bytes. `RemoteProtocolError` for anything else."""
    if len(raw) > INTEREST_BYTES_MAX:
        raise RemoteProtocolError("interest_too_large", f"{len(raw)} bytes")
    try:
        message = recon_pb2.Interest.FromString(raw)
    except DecodeError as error:
        raise RemoteProtocolError("interest_malformed", str(error)) from error
    if len(message.channels) + len(message.prefixes) > INTEREST_NAMES_MAX:
        raise RemoteProtocolError("interest_too_large", "too many channels and prefixes")
    interest = Interest.make(
        everything=message.all,
        channels=frozenset(message.channels),
        prefixes=frozenset(message.prefixes),
        lamport_from=message.lamport_from if message.HasField("lamport_from") else None,
        lamport_to=message.lamport_to if message.HasField("lamport_to") else None,
    )
    if interest.encode() != raw:
        raise RemoteProtocolError("interest_not_canonical", "another encoding of this is canonical")
    return interest


def _begins_with_one(prefixes: tuple[str, ...], name: str) -> bool:
    """Whether one of minimal prefixes begins the name: only the last one that sorts below can."""
    at = bisect_right(prefixes, name)
    return at > 0 and name.startswith(prefixes[at - 1])


def _pick(choose: Callable[[list[int]], int], left: int | None, right: int | None) -> int | None:
    given = [value for value in (left, right) if value is not None]
    return choose(given) if given else None


# ---- nonces and keys


_KEY_CONTEXT = "sdstore recon v3 session key"
_OWN_NONCE_CONTEXT = "sdstore recon v3 initiator nonce"
_NONCE_CONTEXT = "sdstore recon v3 responder nonce"


@dataclass(frozen=True, slots=True)
class SessionKey:
    """The AES-128 key of one session's element hashes."""

    raw: bytes

    def __post_init__(self) -> None:
        if len(self.raw) != SESSION_KEY_BYTES:
            raise LocalProtocolError("a session key has 16 bytes")


@dataclass(frozen=True, slots=True)
class SessionHeader:
    """Both nonces and the interest's canonical bytes, which every request of a session carries."""

    initiator_nonce: bytes
    responder_nonce: bytes
    interest: bytes

    def message(self, *, in_full: bool = False) -> Session:
        """The `session` field of a request, with the interest's hash or (in full) its bytes."""
        session = Session(
            initiator_nonce=self.initiator_nonce, responder_nonce=self.responder_nonce
        )
        if in_full:
            session.interest_bytes = self.interest
        else:
            session.interest_hash = interest_hash(self.interest)
        return session

    def key(self) -> SessionKey:
        """The session key of this header."""
        return derive_session_key(
            self.initiator_nonce, self.responder_nonce, interest_hash(self.interest)
        )


def interest_hash(interest: bytes) -> bytes:
    """Name of an interest: 16 bytes of BLAKE3 over its canonical bytes."""
    return blake3.blake3(interest).digest(length=INTEREST_HASH_BYTES)


def derive_session_key(
    initiator_nonce: bytes, responder_nonce: bytes, interest_digest: bytes
) -> SessionKey:
    """BLAKE3 in derive-key mode over the two nonces and the interest's hash, 16 bytes each."""
    lengths = (len(initiator_nonce), len(responder_nonce), len(interest_digest))
    if lengths != (NONCE_BYTES, NONCE_BYTES, INTEREST_HASH_BYTES):
        raise LocalProtocolError(f"nonces and interest hash have 16 bytes each, not {lengths}")
    material = initiator_nonce + responder_nonce + interest_digest
    hasher = blake3.blake3(material, derive_key_context=_KEY_CONTEXT)
    return SessionKey(hasher.digest(length=SESSION_KEY_BYTES))


def responder_nonce(node_secret: bytes, pair: bytes, epoch: int) -> bytes:
    """The responder's nonce for one pair of nodes in one epoch.

    `node_secret`: at least 16 random bytes; `pair`: a name of the caller's credential;
    `epoch`: the clock divided by the nonce's lifetime, read by the application.
    """
    keyed = blake3.blake3(node_secret, derive_key_context=_NONCE_CONTEXT).digest()
    message = epoch.to_bytes(8, "big") + pair
    return blake3.blake3(message, key=keyed).digest(length=NONCE_BYTES)


def initiator_nonce(node_secret: bytes, fresh: bytes) -> bytes:
    """The initiator's nonce for one session: 8 random bytes, and what the node knows it by.

    A peer that hands our own session back to us, as its initiator, would have us state our total
    under the key under which we asked for its own.
    """
    keyed = blake3.blake3(node_secret, derive_key_context=_OWN_NONCE_CONTEXT).digest()
    return fresh + blake3.blake3(fresh, key=keyed).digest(length=NONCE_BYTES - len(fresh))


def is_own_nonce(nonce: bytes, node_secret: bytes) -> bool:
    """Whether an initiator's nonce is one that this node made."""
    half = NONCE_BYTES // 2
    return hmac.compare_digest(nonce, initiator_nonce(node_secret, nonce[:half]))


def nonce_is_fresh(nonce: bytes, node_secret: bytes, pair: bytes, epoch: int) -> bool:
    """Whether `nonce` is ours, of this epoch or the one before (so that no session is cut short)."""
    candidates = (responder_nonce(node_secret, pair, e) for e in (epoch, max(epoch - 1, 0)))
    return any(hmac.compare_digest(nonce, candidate) for candidate in candidates)
