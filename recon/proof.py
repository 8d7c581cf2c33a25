"""Proofs that two sets are equal: the closing comparison of a session, and the root of idle pairs.

A session learns where both sides differ, and content is moved; whether all of it arrived is known
when everything has been compared once more. That is a proof, by a hash under the session's key. A
root has no key, so it only tells whether two sides still hold what they were proved to hold.
"""

from __future__ import annotations

import blake3
import numpy as np

from recon.codec import Asks, pack_asks
from recon.columns import U8, U64
from recon.limits import PHASE_NONE, PROTOCOL_VERSION
from recon.ranges import WHOLE, RangeColumns
from recon.replies import EQUAL, unpack_reply
from recon.view import View
from sdstore.wire.recon_pb2 import ReconRequest, ReconResponse

_ROOT_CONTEXT = "sdstore recon v1 idle root"
_PARTS = 2  # an answer that differs says so in the fewest bytes
_EVERYTHING = RangeColumns.of(WHOLE)


def closing_request(view: View) -> ReconRequest:
    """Compares all of a view with the responder's; the caller adds the session."""
    summary, count = view.summary(WHOLE)
    hashes: U8 = np.frombuffer(summary, np.uint8).reshape(1, -1)
    asks = Asks(_EVERYTHING, np.zeros(1, bool), np.array([count]), hashes)
    return ReconRequest(version=PROTOCOL_VERSION, ranges=pack_asks(asks, _PARTS, 0, PHASE_NONE))


def tells_equality(response: ReconResponse) -> bool:
    """Whether the answer to `closing_request` says equal. Raises `RemoteProtocolError`."""
    reply = unpack_reply(response.answers, _EVERYTHING, _PARTS, PHASE_NONE)
    return bool(reply.kinds[0] == EQUAL)


def idle_root(count: int, sums: U64) -> bytes:
    """Root of a set of `count` elements: 32 bytes of BLAKE3 over the count and u64[4] sums.

    `sums`: the ids added up, each little-endian 64-bit word for itself, mod 2^64.
    """
    material = count.to_bytes(8, "little") + sums.astype("<u8").tobytes()
    return blake3.blake3(material, derive_key_context=_ROOT_CONTEXT).digest()
