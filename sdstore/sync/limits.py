"""What the owner of a replica may set of a session. Without numpy, because settings read it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncLimits:
    """Bounds of one session; numbers that nobody sets are beside the code that they tune."""

    seconds_max: int = 3_600  # of a session; what is left is the next one's
    nonce_lifetime_s: int = 600  # how long the peer's interest is taken as read
    proof_lifetime_s: int = 900  # how long equal pairs compare roots, which have no key
    answer_bytes_max: int = 1 << 20  # summaries and lists of one answer: at most 50 ms of the peer


DEFAULT_LIMITS = SyncLimits()
