"""Session keys and the responder's stateless nonces: pure functions.

Both sides contribute to the key, so neither can fix it alone, and a set of messages crafted to
collide under one key is worthless under the next. The responder stores nothing: its nonce is a PRF
of a node secret, the pair and an epoch, so it can recognise its own nonce when the initiator
repeats it, and refuse it when its time is over.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

import blake3

from recon.errors import LocalProtocolError
from recon.limits import INTEREST_HASH_BYTES, NONCE_BYTES, SESSION_KEY_BYTES
from sdstore.wire.recon_pb2 import Session

_KEY_CONTEXT = "sdstore recon v2 session key"
_OWN_NONCE_CONTEXT = "sdstore recon v2 initiator nonce"
_NONCE_CONTEXT = "sdstore recon v2 responder nonce"


@dataclass(frozen=True, slots=True)
class SessionKey:
    """The AES-128 key of one session's element hashes."""

    raw: bytes

    def __post_init__(self) -> None:
        if len(self.raw) != SESSION_KEY_BYTES:
            raise LocalProtocolError("a session key has 16 bytes")


@dataclass(frozen=True, slots=True)
class SessionHeader:
    """What every request of a session carries: both nonces and the interest's canonical bytes."""

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

    `node_secret`: at least 16 random bytes; `pair`: whatever names the caller's credential;
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
