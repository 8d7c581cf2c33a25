"""Faults planted in the peers' rows: leases, fences, memories and session records."""

from __future__ import annotations

from typing import Any

from tests.mutants.fault import Fault, Plant, instead

_ROWS = ("tests/app/store/test_peerrows.py",)


def _fault(name: str, seam: str, plant: Plant, tests: tuple[str, ...] = _ROWS) -> Fault:
    return Fault(f"peers: {name}", f"app.{seam}", plant, tests)


def _everything_stands(_rows: Any, _transaction: Any, _process: str, fences: Any) -> set[str]:
    return set(fences)


def _of_epoch() -> Any:
    """A clock at which no lease ever expires."""
    from sqlalchemy import BigInteger, literal_column

    return literal_column("0", BigInteger)


def _silent(*_: Any, **__: Any) -> None:
    pass


def _keeps_its_name(right: Any) -> Any:
    def wrong(sql: Any) -> Any:
        query = right(sql)
        return query._replace(text=query.text.replace("holder=''", "holder=holder"))

    return wrong


async def _nothing(*_: Any, **__: Any) -> None:
    pass


def _alone(right: Any) -> Any:
    return lambda me, settings_peers, *rest: right(me, {me: settings_peers[me]}, *rest)


_SHARES = ("tests/app/federation/test_shares.py",)
_STARTS = "test_a_host_that_starts_gets_its_share_of_the_peers_and_gives_it_back"
_PROCESSES = (f"tests/app/federation/test_several_processes.py::{_STARTS}",)

FAULTS = [
    _fault(
        "a process counts itself alone", "federation.records:share_of", _alone, _PROCESSES + _SHARES
    ),
    _fault(
        "nobody announces itself", "federation.peers:Peers.announce", instead(_silent), _PROCESSES
    ),
    _fault(
        "a silent process counts for ever",
        "federation.records:SILENT_S_MAX",
        instead(1e9),
        _SHARES,
    ),
    _fault(
        "a process takes back what it has handed on",
        "store.peerrows:_release",
        _keeps_its_name,
        _PROCESSES + _ROWS,
    ),
    _fault(
        "a write does not look at fences and leases",
        "store.peerrows:PeerRows.standing",
        instead(_everything_stands),
    ),
    _fault("leases never expire", "store.peerrows:clock_ms", instead(_of_epoch)),
    _fault(
        "a process that stops keeps its leases",
        "store.peerrows:PeerRows.release",
        instead(_nothing),
    ),
]
