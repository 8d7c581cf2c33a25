"""Proofs that two sets are equal: the total that a peer states, and the root of idle pairs.

A session learns where both sides differ, and content is moved; that all of it arrived is known when
the peer has stated its total, which it is never told: a count and a sum under the session's key. A
root has no key, so it only tells whether two sides still hold what they were proved to hold.
"""

from __future__ import annotations

import blake3

from recon.columns import U64
from recon.errors import RemoteProtocolError
from recon.limits import COUNT_MAX, PROTOCOL_VERSION, SUM_BYTES
from recon.view import Total
from sdstore.wire.recon_pb2 import ReconRequest, ReconResponse

_ROOT_CONTEXT = "sdstore recon v2 idle root"


def closing_request() -> ReconRequest:
    """Asks for the responder's total; the caller adds the session."""
    return ReconRequest(version=PROTOCOL_VERSION, total=True)


def read_total(response: ReconResponse) -> Total:
    """The total that was asked for. Raises `RemoteProtocolError`."""
    total = response.total
    if not response.HasField("total") or len(total.sum) != SUM_BYTES or total.count > COUNT_MAX:
        raise RemoteProtocolError("total", "the total that was asked for is missing or malformed")
    return Total(total.count, total.sum)


def idle_root(count: int, sums: U64, policy: int = 0) -> bytes:
    """Root of a set of `count` elements: 32 bytes of BLAKE3 over the count and u64[4] sums.

    `sums`: the ids added up, each little-endian 64-bit word for itself, mod 2^64. `policy`: the
    responder's, so that its changes are noticed too.
    """
    material = count.to_bytes(8, "little") + sums.astype("<u8").tobytes()
    material += policy.to_bytes(4, "little")
    return blake3.blake3(material, derive_key_context=_ROOT_CONTEXT).digest()
