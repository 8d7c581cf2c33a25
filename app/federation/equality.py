"""Whether two stores are equal: proved by the total that the peer states, remembered by root."""

from __future__ import annotations

import time

from app.federation.aside import LackedBy, SetAside
from app.federation.exchange import Exchange
from app.federation.local import LocalSide
from app.federation.memory import PeerMemory, Proof
from recon.codec import closing_request, read_total
from recon.session import Interest, SessionHeader
from recon.view import View


def proof_of(
    local: LocalSide, mutual: Interest, view: View, aside: SetAside, policy: int | None
) -> Proof:
    """The proof to record if the peer equals this view, without what is set aside."""
    return Proof(mutual, _root(local, mutual, aside, policy or 0), len(view), time.monotonic())


def _root(local: LocalSide, mutual: Interest, aside: SetAside, policy: int) -> bytes | None:
    added, removed = (aside.columns(side).ids for side in (LackedBy.HERE, LackedBy.THERE))
    return local.index.root_of_ids(mutual, policy, added, removed)


async def compare_everything(
    local: LocalSide,
    exchange: Exchange,
    header: SessionHeader,
    mutual: Interest,
    aside: SetAside,
) -> Proof | None:
    """Ask for the peer's total under the key of the session; None where it is not ours.

    A difference is nobody's fault, because both sides may have grown: the next pass finds it.
    """
    await local.index.catch_up()
    aside.forget_held(local.index)
    view = local.index.view(header.key(), mutual)
    ours, proof = aside.total(view), proof_of(local, mutual, view, aside, exchange.policy)
    theirs = read_total(await exchange.content_call(header, closing_request()))
    return proof if ours == theirs else None


async def is_still_proved(
    local: LocalSide, exchange: Exchange, memory: PeerMemory, mutual: Interest
) -> bool:
    """Whether both sides still hold what they held when they were proved equal: one round trip.

    Sets can be made whose roots agree, so this saves sessions for a bounded time only.
    """
    proof, lifetime_s = memory.proof, local.limits.recon_proof_lifetime_s
    if proof is None or proof.root is None or time.monotonic() - proof.at_s > lifetime_s:
        return False
    aside = memory.set_aside(mutual)
    if aside.is_due() or memory.policy is None:
        return False
    await local.index.catch_up()
    root = _root(local, mutual, aside, memory.policy)
    if (mutual, root) != (proof.interest, proof.root):
        return False
    return await exchange.same_root(proof.root, mutual.encode())
