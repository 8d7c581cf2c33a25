"""Faults planted in the peers' rows: leases, fences, memories and session records."""

from __future__ import annotations

from typing import Any

from tests.mutants.fault import Fault, Plant, instead

_ROWS = ("tests/app/store/test_peerrows.py",)


def _fault(name: str, seam: str, plant: Plant, tests: tuple[str, ...] = _ROWS) -> Fault:
    return Fault(f"peers: {name}", f"app.{seam}", plant, tests)


def _everything_stands(_rows: Any, _transaction: Any, _process: str, fences: Any) -> set[str]:
    return set(fences)


_SHARES = ("tests/app/federation/test_shares.py",)

FAULTS = [
    _fault(
        "a silent process counts for ever",
        "federation.records:SILENT_S_MAX",
        instead(1e9),
        _SHARES,
    ),
    _fault(
        "a write does not look at fences and leases",
        "store.peerrows:PeerRows.standing",
        instead(_everything_stands),
    ),
]
