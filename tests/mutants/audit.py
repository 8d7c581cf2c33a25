"""Faults planted in the audit."""

from __future__ import annotations

from typing import Any

from tests.mutants.fault import Fault, Plant, instead

_TESTS = ("tests/app/test_audit.py",)


def _fault(name: str, seam: str, plant: Plant) -> Fault:
    return Fault(f"audit: {name}", f"app.{seam}", plant, _TESTS)


async def _misses_nothing(*_: Any) -> list[Any]:
    return []


async def _never_again(*_: Any) -> None:
    pass


def _no_fault(_entry: Any) -> None:
    return None


FAULTS = [
    _fault("frames are not compared with rows", "audit:message_or_fault", instead(_no_fault)),
    _fault(
        "look-ups through SQL indexes count as found",
        "store.indexprobe:_missed",
        instead(_misses_nothing),
    ),
    _fault(
        "the chain is not followed",
        "store.integrity:RowCheck._of_chain",
        instead(lambda *_: iter(())),
    ),
    _fault(
        "a wrong index is not read again",
        "recon.index:NodeIndex.read_again",
        instead(_never_again),
    ),
    _fault(
        "the numbers of elements are not compared",
        "recon.indexaudit:IndexAudit._has_all",
        instead(property(lambda _: False)),
    ),
    _fault(
        "entries that came meanwhile count as too many",
        "recon.indexaudit:IndexAudit._arrived_since",
        instead(_misses_nothing),
    ),
    _fault(
        "a finding is logged each time",
        "audit:Findings.forget_before",
        instead(lambda each, _: each._open.clear()),
    ),
    _fault("the audit takes no rests", "audit:PAUSE_S_MAX", lambda _: 0.0),
]
