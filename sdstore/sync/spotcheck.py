"""Spot checks: whether a peer that was proved equal is equal in a part of the set, chosen at random.

Sessions between marks compare only what is new, so a false proof (an accident of short hashes, a fault,
a lying peer) would last until the next session that compares everything. A spot check compares the
totals of a part, such as a window of Lamport timestamps, under a session key. Totals can differ because
news has just come to one side. Then the same part is compared again, under the same key and after
another proved session: that session moved all that was missing before, so a healthy pair differs
by nothing or by other elements. A difference that is the same to the last bit was not moved.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from recon.codec import closing_request, read_total
from recon.elements import OrderWindow
from recon.hashing import Total
from recon.limits import NONCE_BYTES
from recon.session import Interest, SessionHeader, SessionKey, initiator_nonce
from recon.store import Columns
from sdstore.sync.exchange import Exchange, Transport
from sdstore.sync.memory import LackedBy, PeerMemory, SetAside
from sdstore.sync.replica import Replica
from sdstore.sync.report import Counts

_WORD = 1 << 64


class Verdict(StrEnum):
    """What a spot check shows. `CHANGED`: elements came meanwhile, so nothing is known."""

    EQUAL = "equal"
    DIFFERENT = "different"
    CHANGED = "changed"
    FALSE_PROOF = "false_proof"


@dataclass(frozen=True, slots=True)
class Difference:
    """A part whose totals differed: the part, the header that keys it, what was set aside, and by what."""

    part: Interest
    header: SessionHeader
    aside: bytes
    by: tuple[int, int, int]


async def check_part(
    replica: Replica,
    transport: Transport,
    memory: PeerMemory,
    part: Interest,
    nonce_secret: bytes,
    prepare: Callable[[SessionKey, Interest], Awaitable[None]],
    before: Difference | None = None,
) -> tuple[Verdict, Difference | None]:
    """Compare a part of what the last baseline in `memory` covers; one request.

    `before`: the difference of an earlier check, whose part and key are used again. `prepare` builds a
    large view. Returns the difference to check again after the next proved session, if there is one.
    Raises SyncError, NonceExpiredError, RemoteProtocolError.
    """
    if before is not None:
        part, header = before.part, before.header
    else:
        ours = initiator_nonce(nonce_secret, os.urandom(NONCE_BYTES // 2))
        header = SessionHeader(ours, memory.responder_nonce, part.encode())
    theirs = read_total(await Exchange(transport, Counts()).content_call(header, closing_request()))
    await replica.catch_up()
    await prepare(header.key(), part)
    aside = SetAside(memory.aside_over(memory.baselines[-1].interest))
    aside.forget_held(replica)
    view = replica.view(header.key(), part)
    added, removed = (
        _inside(aside.columns(side), part.window) for side in (LackedBy.HERE, LackedBy.THERE)
    )
    by = _difference(view.total(added, removed), theirs)
    now = Difference(part, header, aside.name, by)
    if not any(by):
        return Verdict.EQUAL, None
    if before is None:
        return Verdict.DIFFERENT, now
    is_same = now.by == before.by and now.aside == before.aside
    return (Verdict.FALSE_PROOF, now) if is_same else (Verdict.CHANGED, None)


def forget_proof(memory: PeerMemory) -> PeerMemory:
    """The memory without what proves the peer equal: the next session compares everything."""
    return replace(memory, proof=None, baselines=())


def _inside(columns: Columns, window: OrderWindow) -> Columns:
    inside = columns.orders >= np.uint64(window.lower)
    if window.upper is not None:
        inside &= columns.orders < np.uint64(window.upper)
    return columns.take(inside)


def _difference(ours: Total, theirs: Total) -> tuple[int, int, int]:
    """(elements, low sum, high sum) that the other side has more, the sums mod 2^64."""
    sums = [
        (
            int.from_bytes(theirs.sum[at : at + 8], "little")
            - int.from_bytes(ours.sum[at : at + 8], "little")
        )
        % _WORD
        for at in (0, 8)
    ]
    return theirs.count - ours.count, sums[0], sums[1]
