"""Faults planted in the policy of sessions, and in the task that follows it."""

from __future__ import annotations

from tests.mutants.fault import Fault, Plant, instead, returns

_POLICY = ("tests/app/federation/test_schedule.py",)


def _fault(name: str, seam: str, plant: Plant, tests: tuple[str, ...] = _POLICY) -> Fault:
    return Fault(f"schedule: {name}", f"app.federation.{seam}", plant, tests)


FAULTS = [
    _fault("news nudges nobody", "schedule:Schedule.nudge_all", returns(False)),
    _fault("nudged sessions may take a core", "schedule:SHARE", instead(1.0)),
    _fault("the back-off has no bound", "schedule:BACKOFF_S_MAX", instead(1e9)),
]
