"""Whether two stores are equal: proved by a comparison under a session's key, remembered by root."""

from __future__ import annotations

import time

from app.federation.exchange import Exchange
from app.federation.local import LocalSide
from app.federation.memory import PeerMemory, Proof
from recon.interest import Interest
from recon.proof import closing_request, tells_equality
from recon.session import SessionHeader
from recon.view import View


def proof_of(local: LocalSide, mutual: Interest, view: View) -> Proof:
    """What will be proved, if the peer turns out to hold what a view holds that is up to date."""
    return Proof(mutual, local.index.root_of_ids(mutual), len(view), time.monotonic())


async def compare_everything(
    local: LocalSide, exchange: Exchange, header: SessionHeader, mutual: Interest
) -> Proof | None:
    """Compare all of both sides once more, under the key of the session; None where they differ.

    What came by count alone, or what an accident hid, shows here. A difference is nobody's fault,
    because both sides may have grown meanwhile; the next session finds it.
    """
    await local.index.catch_up()
    view = local.index.view(header.key(), mutual)
    request, proof = closing_request(view), proof_of(local, mutual, view)
    return proof if tells_equality(await exchange.content_call(header, request)) else None


async def is_still_proved(
    local: LocalSide, exchange: Exchange, memory: PeerMemory, mutual: Interest
) -> bool:
    """Whether both sides still hold what they held when they were proved equal: one round trip.

    Sets can be made whose roots agree, so this saves sessions for a bounded time only.
    """
    proof, lifetime_s = memory.proof, local.limits.recon_proof_lifetime_s
    if proof is None or proof.root is None or time.monotonic() - proof.at_s > lifetime_s:
        return False
    await local.index.catch_up()
    if (mutual, local.index.root_of_ids(mutual)) != (proof.interest, proof.root):
        return False
    return await exchange.same_root(proof.root, mutual.encode())
