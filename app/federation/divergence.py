"""How far this node and a peer are apart, as far as this node can know.

What the peer lacks is counted now: everything of the mutual interest that arrived here after the mark of
the last proof, without what the peer itself sent. What this node lacks, only a session finds; the record
says what the last one found and did not get.
"""

from __future__ import annotations

from typing import Any

from app.federation.peer import Peer
from app.recon.index import NodeIndex
from app.store.store import Store
from recon.elements import order_of_lamport
from recon.errors import RemoteProtocolError
from recon.marks import numbers_of
from recon.session import decode_interest
from sdstore.sync.memory import Baseline, LackedBy, PeerMemory, unpack_elements

COUNTED_MAX = 10_000  # entries of one record: some ten milliseconds


async def divergence_of(
    peer: Peer, memory: PeerMemory, store: Store, index: NodeIndex, now_ms: int
) -> dict[str, Any]:
    """The record as JSON. `memory`: of the process that holds the peer, or as it was written last.

    `missing_there_is_exact` is false if there is more than `COUNTED_MAX`, or nothing was proved yet.
    """
    missing_there, is_exact, oldest_ms = peer.missing_there, False, None
    baseline = memory.baselines[-1] if memory.baselines else None
    if baseline is not None:
        seqs = await _arrived_after(baseline, store, index)
        if seqs is not None:
            missing_there, is_exact = len(seqs), len(seqs) <= COUNTED_MAX
            oldest_ms = await store.arrivals.received_at_ms(min(seqs)) if seqs else None
    first_seen = [
        each for each in (oldest_ms, peer.apart_since_ms if peer.missing_here else None) if each
    ]
    oldest = min(first_seen, default=None)
    aside = [each.lacked_by for kept in memory.asides[-1:] for each in kept.elements]
    return {
        "missing_here": peer.missing_here,
        "missing_there": missing_there,
        "missing_there_is_exact": is_exact,
        "set_aside_here": aside.count(LackedBy.HERE),
        "set_aside_there": aside.count(LackedBy.THERE),
        "oldest_difference_at_ms": oldest,
        "oldest_difference_age_s": None if oldest is None else max(now_ms - oldest, 0) / 1_000,
        "proved_at_ms": peer.proved_at_ms,
    }


async def _arrived_after(baseline: Baseline, store: Store, index: NodeIndex) -> list[int] | None:
    """The numbers of the entries that the peer lacks, one more than the bound at most."""
    numbers = numbers_of(baseline.own, store.mark_secret, baseline.interest)
    try:
        interest = decode_interest(baseline.interest)
    except RemoteProtocolError:
        return None
    if numbers is None:
        return None
    last, _ = await store.arrivals.watermark()
    await index.catch_up()
    channels = index.channel_numbers(interest)
    rows = await store.arrivals.entries_between(numbers.entry, last, channels, COUNTED_MAX + 1)
    brought = unpack_elements(baseline.counted_out)
    window = interest.window
    return [
        seq
        for seq, _, lamport, digest in rows
        if digest not in brought
        and (order := order_of_lamport(lamport)) >= window.lower
        and (window.upper is None or order < window.upper)
    ]
