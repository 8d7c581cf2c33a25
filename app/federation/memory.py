"""What a node remembers of one peer from one session to the next."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from app.federation.aside import RETRY_FACTOR, RETRY_S_MAX, RETRY_S_MIN, SetAside
from recon.session import Interest

INTERESTS_MAX = 4  # whose set-aside elements are remembered; the rest is found once more
LOST_ASKED_MAX = 4_096  # lost entries that this peer could not give; the oldest are asked for again


class Proof(NamedTuple):
    """That both sides held the same of an interest: what its root was, if it has one, and when."""

    interest: Interest
    root: bytes | None
    elements_count: int
    at_s: float


class _Asked(NamedTuple):
    times: int
    again_at_s: float


class LostAsked:
    """Which of our lost entries this peer was asked for in vain, and when to ask again."""

    def __init__(self) -> None:
        self._asked: OrderedDict[bytes, _Asked] = OrderedDict()

    def is_due(self, digest: bytes) -> bool:
        """Whether to ask now."""
        asked = self._asked.get(digest)
        return asked is None or asked.again_at_s <= time.monotonic()

    def add(self, digest: bytes) -> None:
        """It was not given."""
        times = self._asked.pop(digest, _Asked(0, 0.0)).times
        wait_s = min(RETRY_S_MIN * RETRY_FACTOR**times, RETRY_S_MAX)
        self._asked[digest] = _Asked(times + 1, time.monotonic() + wait_s)
        if len(self._asked) > LOST_ASKED_MAX:
            self._asked.popitem(last=False)


@dataclass(slots=True)
class PeerMemory:
    """Kept per peer, so that one peer's bad frame of a message never costs another's good one.

    `responder_nonce` and `interest` save the hand-shake while the peer still honours them;
    `index_length` is the length of our index when the last session began, `proof` the last total
    of the peer's that was ours; `policy` is the peer's, as it last told; after `lost_after` the
    search for lost content to ask this peer for goes on.
    """

    responder_nonce: bytes = b""
    interest: bytes = b""
    interest_read_at_s: float = float("-inf")
    policy: int | None = None
    index_length: int = 0
    proof: Proof | None = None
    lost_after: int = 0
    lost_asked: LostAsked = field(default_factory=LostAsked)
    _aside: OrderedDict[Interest, SetAside] = field(default_factory=OrderedDict)

    def set_aside(self, interest: Interest) -> SetAside:
        """The elements set aside over one mutual interest."""
        found = self._aside.setdefault(interest, SetAside())
        self._aside.move_to_end(interest)
        if len(self._aside) > INTERESTS_MAX:
            self._aside.popitem(last=False)
        return found

    def retry_unserved(self) -> None:
        """Ask again for what the peer could not serve: somebody has reason to believe it can now."""
        self.lost_asked = LostAsked()
        for each in self._aside.values():
            each.retry_unserved()

    def learn_policy(self, policy: int) -> bool:
        """Whether the peer's policy has changed; what it refused is then offered again."""
        known, self.policy = self.policy, policy
        if known in (None, policy):
            return False
        for each in self._aside.values():
            each.forget_refused_there()
        self.interest_read_at_s = float("-inf")
        return True
