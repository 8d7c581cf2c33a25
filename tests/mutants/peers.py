"""Faults planted in the peers' rows (leases, fences, memories, session records), and in what stores retire."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.mutants.fault import Fault, Plant, instead

_ROWS = ("tests/app/store/test_peerrows.py",)


def _fault(name: str, seam: str, plant: Plant, tests: tuple[str, ...] = _ROWS) -> Fault:
    return Fault(f"peers: {name}", f"app.{seam}", plant, tests)


def _everything_stands(_rows: Any, _transaction: Any, _process: str, fences: Any) -> set[str]:
    return set(fences)


def _all_that_are_retired(rows: Any, _pairs: Any, size: int) -> Any:
    mask = np.zeros(size, bool)
    mask[rows.rows] = True
    return mask


_SHARES = ("tests/app/federation/test_shares.py",)

FAULTS = [
    _fault(
        "a silent process counts for ever",
        "federation.records:SILENT_S_MAX",
        instead(1e9),
        _SHARES,
    ),
    _fault(
        "comparisons leave out what is retired now",
        "recon.index:RetiredRows.mask",
        instead(_all_that_are_retired),
        ("tests/app/federation/test_retired.py",),
    ),
    _fault(
        "the last rule of retention holds",
        "ingest.retention:rule_of",
        instead(lambda rules, _: len(rules) - 1 if rules else None),
        ("tests/app/http/test_retention.py",),
    ),
    _fault(
        "a write does not look at fences and leases",
        "store.peerrows:PeerRows.standing",
        instead(_everything_stands),
    ),
]
