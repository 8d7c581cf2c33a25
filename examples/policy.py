"""A policy for a node: refuse what is too long, hold what mentions certain words, slow down senders.

    PYTHONPATH=examples SDSTORE_POLICY=policy:Moderation sdstore serve

Change `revision` with the rules, so that peers offer again what the node refused before.
"""

from __future__ import annotations

import time
from collections import OrderedDict

from sdstore.policy import ACCEPT, Candidate, Verdict, Way, quarantine, refuse

WORDS = (b"casino", b"lottery")
CONTENT_BYTES_MAX = 16_384
MESSAGES_PER_MINUTE = 60
SENDERS_MAX = 10_000


class Moderation:
    """Its rules for publications; what peers send has passed the rules of another node."""

    revision = "1"

    def __init__(self) -> None:
        # Messages of the current minute by sender; the least recent sender is forgotten.
        self._counts: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def __call__(self, candidate: Candidate) -> Verdict:
        """See `sdstore.policy.Policy`."""
        content = candidate.message.content or b""
        if len(content) > CONTENT_BYTES_MAX:
            return refuse("too_long", f"{len(content)} bytes, at most {CONTENT_BYTES_MAX}")
        for word in WORDS:
            if word in content.lower():
                return quarantine(f"contains {word.decode()!r}")
        if candidate.way in (Way.HTTP, Way.BATCH) and self._is_too_fast(
            candidate.message.sender_id
        ):
            return refuse("too_fast", f"at most {MESSAGES_PER_MINUTE} messages a minute")
        return ACCEPT

    def _is_too_fast(self, sender_id: str) -> bool:
        minute = int(time.monotonic() // 60)
        since, count = self._counts.pop(sender_id, (minute, 0))
        count = count + 1 if since == minute else 1
        self._counts[sender_id] = (minute, count)
        if len(self._counts) > SENDERS_MAX:
            self._counts.popitem(last=False)
        return count > MESSAGES_PER_MINUTE
