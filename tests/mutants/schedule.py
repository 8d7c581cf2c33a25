"""Faults planted in the policy of sessions, and in the task that follows it."""

from __future__ import annotations

from typing import Any

from tests.mutants.fault import Fault, Plant, before, instead, nothing, returns

_POLICY = ("tests/app/federation/test_schedule.py",)
_NODES = ("tests/app/federation/test_scheduling.py",)


def _fault(name: str, seam: str, plant: Plant, tests: tuple[str, ...] = _POLICY) -> Fault:
    return Fault(f"schedule: {name}", f"app.federation.{seam}", plant, tests)


def _always(value: Any) -> Plant:
    """A property with one value."""
    return instead(property(lambda _: value))


def _keeps_the_nudge(right: Any) -> Any:
    def wrong(schedule: Any, peer_id: str, now_s: float, *, is_whole: bool = True) -> None:
        right(schedule, peer_id, now_s, is_whole=False)

    return wrong


def _forgets_news_during_the_session(right: Any) -> Any:
    def wrong(schedule: Any, peer_id: str, *args: Any) -> None:
        if peer := schedule._peers.get(peer_id):
            peer.nudged_s = None
        right(schedule, peer_id, *args)

    return wrong


def _alphabetical(right: Any) -> Any:
    """The peers that waited are started in the order of their IDs."""

    def wrong(schedule: Any, now_s: float) -> Any:
        schedule._peers = dict(sorted(schedule._peers.items()))
        dues = [peer.due_s for peer in schedule._peers.values()]
        for peer in schedule._peers.values():
            if peer.started_s is None and peer.start_s <= now_s:
                peer.due_s = min(dues)
        return right(schedule, now_s)

    return wrong


FAULTS = [
    _fault("news nudges nobody", "schedule:Schedule.nudge_all", returns(False)),
    _fault("a peer's nudge is not heard", "schedule:Schedule.nudge", returns(False)),
    _fault("a session does not answer a nudge", "schedule:Schedule.begin", _keeps_the_nudge),
    _fault(
        "news during a session is forgotten",
        "schedule:Schedule.end",
        _forgets_news_during_the_session,
    ),
    _fault("a burst is not collected", "schedule:NUDGE_S", instead((0.0, 0.0))),
    _fault("nudged sessions have no pause", "schedule:PAUSE_S_MIN", instead(0.0)),
    _fault("nudged sessions may take a core", "schedule:SHARE", instead(1.0)),
    _fault("what a long session cost counts", "schedule:COST_S_MAX", instead(1e9)),
    _fault("all pauses are equal", "schedule:JITTER", instead(0.0)),
    _fault("the back-off has no bound", "schedule:BACKOFF_S_MAX", instead(1e9)),
    _fault("the back-off does not grow", "schedule:BACKOFF_FACTOR", instead(1.0)),
    _fault(
        "news retries a failing peer again and again", "schedule:_Peer.hears_news", _always(True)
    ),
    _fault("a changed interest changes nothing", "schedule:Schedule.forget_apart", nothing),
    _fault("no peer counts as slow", "schedule:_Peer.is_slow", returns(False)),
    _fault("places go by name", "schedule:Schedule.start_due", _alphabetical),
    _fault("commits are not announced", "peers:Peers.on_committed", nothing, _NODES),
    Fault(
        "schedule: what another process commits is no news",
        "app.live.relay:Relay.on_notified_commit",
        nothing,
        _NODES,
    ),
    _fault("every commit is for every peer", "peer:Peer.wants_one_of", returns(True), _NODES),
    Fault(
        "schedule: other processes do not learn the source of a commit",
        "app.live.relay:Outgoing.send_commit",
        before(lambda bus, channels, source="": (bus, channels)),
        _NODES,
    ),
    _fault(
        "a store that pushes is not known as a peer",
        "peer:Peer.instance",
        instead(property(lambda _: "", lambda *_: None)),
        _NODES,
    ),
    Fault(
        "schedule: the source of what a session brought is not known",
        "app.recon.replica:NodeReplica.for_peer",
        before(lambda replica, _: (replica, "")),
        _NODES,
    ),
]
