"""When to sync with which peer: the policy alone, without a clock, tasks or randomness of its own.

Times are seconds of any clock that never goes back. A caller adds peers, passes on nudges, starts the
sessions that `start_due` names, and reports the end of each. `next_look_s` says when to ask again.

- **Cycle.** A healthy peer gets a session at least every `interval_s`. Each pause is drawn anew, so peers
  that were started together drift apart.
- **Nudge.** News, here or at a peer, makes a session due after `NUDGE_S`, which collects the commits of
  one burst. Under a steady stream of news a peer's sessions have a pause of at least `PAUSE_S_MIN`, and
  of so much that the nudged sessions of all peers together take `SHARE` of a core.
- **Back-off.** The pause before a failing peer doubles, up to `BACKOFF_S_MAX`. After the first failure,
  which can be an accident, one nudge can bring the next session forward. Later only the peer's own nudge
  can, and never to less than `interval_s` after the last session; news of this node's cannot.
- **Places.** One session per peer at a time, `sessions_max` in all. New, failing and slow peers start
  only while fewer than `slow_sessions_max` places are taken by such peers, so peers that hang or send
  very much leave places for the quick ones. Within a class the peer that waits for longest is first.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from random import Random

NUDGE_S = (0.02, 0.08)
"""From news to its session, drawn: longer than one commit takes, and not equal on nodes that heard of
the same message together. With a session of 20 ms a message crosses three hops in a quarter of a second."""

PAUSE_S_MIN = 0.2
"""Between two nudged sessions with a peer: news waits for 0.3 s in all, and no peer gets more than five
sessions a second."""

SHARE = 0.2
"""Of a core, for all nudged sessions together. At 8 ms each, twelve peers get one every 0.5 s."""

COST_S_MAX = 0.05
"""Counted for one session. One that takes longer moves content, which a longer pause does not save."""

JITTER = 0.2
"""A pause is drawn between 1 - JITTER of its length and its length."""

BACKOFF_FACTOR = 2.0
BACKOFF_S_MAX = 600.0  # a recovered peer is found within ten minutes
EARLY_RETRY_S = 2.0  # after a first failure: longer than the restart of a proxy or a full queue
QUICK_S = 5.0  # a session over the news takes milliseconds; one of 10^5 messages, ten seconds


class Verdict(StrEnum):
    """What a session, or the attempt to start one, says about its peer."""

    GOOD = "good"
    APART = "apart"  # reachable, but no channel is of interest to both: nudges are in vain
    FAILED = "failed"
    NOTHING = "nothing"  # a fault of this node, or no session took place


@dataclass(slots=True, eq=False)
class _Peer:
    """The state of one peer. Without a nudge its next session starts at `due_s`. A nudge makes it start at
    `nudged_s`, but not before `ready_s`. `took_s`: the duration of its last session.
    `is_apart`: the last verdict was `APART`."""

    due_s: float
    ready_s: float
    failures: int
    nudged_s: float | None = None
    started_s: float | None = None
    took_s: float = inf
    is_apart: bool = False
    was_nudged: bool = False

    @property
    def start_s(self) -> float:
        """When the next session can start."""
        if self.nudged_s is None:
            return self.due_s
        return min(self.due_s, max(self.nudged_s, self.ready_s))

    @property
    def hears_news(self) -> bool:
        """Whether news of this node can make its next session due earlier."""
        return self.nudged_s is None and self.failures <= 1

    def is_slow(self, now_s: float) -> bool:
        """Whether it shares the places of new, failing and slow peers."""
        runs_long = self.started_s is not None and now_s - self.started_s > QUICK_S
        return runs_long or self.failures > 0 or self.took_s > QUICK_S


class Schedule:
    """See the module. `interval_s`: the longest pause between two sessions with a healthy peer."""

    def __init__(
        self, interval_s: float, random: Random, *, sessions_max: int, slow_sessions_max: int
    ) -> None:
        self.interval_s = interval_s
        self._random = random
        self._sessions_max = sessions_max
        self._slow_sessions_max = slow_sessions_max
        self._peers: dict[str, _Peer] = {}

    def add(self, peer_id: str, due_s: float, failures: int = 0) -> None:
        """Add a peer whose first session is due at `due_s`; replaces one with the same ID."""
        self._peers[peer_id] = _Peer(due_s, due_s, failures)

    def remove(self, peer_id: str) -> None:
        """Forget a peer. Its running session takes no place from now on."""
        self._peers.pop(peer_id, None)

    def failures(self, peer_id: str) -> int:
        """Failed sessions since the last good one."""
        return self._peers[peer_id].failures

    def start_s(self, peer_id: str) -> float:
        """When the next session with a peer can start, if there is a place."""
        return self._peers[peer_id].start_s

    # --- news ----------------------------------------------------------------------------------

    @property
    def hears_news(self) -> bool:
        """Whether `nudge_all` could change anything."""
        return any(peer.hears_news for peer in self._peers.values())

    def nudge(self, peer_id: str, now_s: float) -> bool:
        """A peer says that it has news. Returns whether its next session is now due earlier."""
        peer = self._peers.get(peer_id)
        return peer is not None and self._nudge(peer, now_s)

    def nudge_all(self, now_s: float, without: Collection[str] = ()) -> bool:
        """This node has news for all peers but some. Returns whether a session is now due earlier.

        A peer that failed twice or more is not nudged: its next good session includes all news.
        """
        is_earlier = False
        for peer_id, peer in self._peers.items():
            if peer.hears_news and peer_id not in without:
                is_earlier |= self._nudge(peer, now_s)
        return is_earlier

    def forget_apart(self, now_s: float) -> None:
        """This node's interest has changed: peers that shared no channel hear nudges again."""
        for peer in self._peers.values():
            if peer.is_apart:
                peer.is_apart, peer.ready_s = False, now_s

    def _nudge(self, peer: _Peer, now_s: float) -> bool:
        if peer.nudged_s is not None:
            return False
        before_s = peer.start_s
        peer.nudged_s = now_s + self._random.uniform(*NUDGE_S)
        return peer.start_s < before_s

    # --- sessions ------------------------------------------------------------------------------

    def start_due(self, now_s: float) -> list[str]:
        """The peers whose sessions start now, those that waited for longest first."""
        running = [peer for peer in self._peers.values() if peer.started_s is not None]
        places = self._sessions_max - len(running)
        slow_places = self._slow_sessions_max - sum(peer.is_slow(now_s) for peer in running)
        due = [
            (peer.start_s, peer_id)
            for peer_id, peer in self._peers.items()
            if peer.started_s is None and peer.start_s <= now_s
        ]
        started: list[str] = []
        for _, peer_id in sorted(due):
            is_slow = self._peers[peer_id].is_slow(now_s)
            if places <= 0 or (is_slow and slow_places <= 0):
                continue
            places -= 1
            slow_places -= is_slow
            self.begin(peer_id, now_s)
            started.append(peer_id)
        return started

    def next_look_s(self, now_s: float) -> float | None:
        """When the next session becomes due; None: only a nudge or the end of a session can start one.

        A session that is due and has no place waits for the end of another.
        """
        starts = (peer.start_s for peer in self._peers.values() if peer.started_s is None)
        return min((start_s for start_s in starts if start_s > now_s), default=None)

    def begin(self, peer_id: str, now_s: float, *, is_whole: bool = True) -> None:
        """A session with a peer begins. A whole one has all news up to now: later news needs another."""
        peer = self._peers[peer_id]
        peer.started_s = now_s
        peer.was_nudged = peer.nudged_s is not None
        if is_whole:
            peer.nudged_s = None

    def was_nudged(self, peer_id: str) -> bool:
        """Whether news were waiting when the running session began."""
        return self._peers[peer_id].was_nudged

    def end(self, peer_id: str, now_s: float, verdict: Verdict, cost_s: float = 0.0) -> None:
        """The session with a peer has ended; it took `cost_s` of this node's CPU time."""
        peer = self._peers.get(peer_id)
        if peer is None or peer.started_s is None:
            return
        if verdict is not Verdict.NOTHING:
            peer.took_s = now_s - peer.started_s
        peer.started_s = None
        peer.is_apart = verdict is Verdict.APART
        if verdict is Verdict.FAILED:
            peer.failures += 1
        elif verdict is not Verdict.NOTHING:
            peer.failures = 0
        peer.due_s = now_s + self._pause_s(peer.failures)
        # The earliest start that a nudge can cause. What limits it:
        if verdict is Verdict.GOOD:  # the cost of the sessions of a steady stream of news
            peer.ready_s = now_s + self._nudged_pause_s(cost_s)
        elif verdict is Verdict.FAILED and peer.failures == 1:  # one early retry
            peer.ready_s = now_s + EARLY_RETRY_S
        elif verdict is Verdict.FAILED:  # only the peer's own nudge; the last one changed nothing
            peer.ready_s, peer.nudged_s = now_s + self.interval_s, None
        else:  # nothing shared, or nothing possible here: the next cycle
            peer.ready_s = peer.due_s

    def _pause_s(self, failures: int) -> float:
        slowest_s = max(BACKOFF_S_MAX, self.interval_s)
        pause_s = min(self.interval_s * BACKOFF_FACTOR ** min(failures, 32), slowest_s)
        return pause_s * self._random.uniform(1 - JITTER, 1)

    def _nudged_pause_s(self, cost_s: float) -> float:
        healthy_count = sum(not peer.failures for peer in self._peers.values())
        pause_s = min(cost_s, COST_S_MAX) * healthy_count / SHARE
        return max(PAUSE_S_MIN, min(pause_s, self.interval_s))

    def release(self, peer_id: str) -> None:
        """A session that was not whole has ended: nothing is known of the next one."""
        if peer := self._peers.get(peer_id):
            peer.started_s = None
