"""Faults planted in the operator's policy and in the quarantine."""

from __future__ import annotations

from typing import Any

from tests.mutants.fault import Fault, Plant, instead, nothing

_TESTS = ("tests/app/test_policy.py",)


def _fault(name: str, seam: str, plant: Plant) -> Fault:
    return Fault(f"policy: {name}", seam, plant, _TESTS)


async def _accept_all(_: Any, checked: Any, *__: Any) -> Any:
    return list(checked)


def _accept_failures(_: Any) -> Any:
    def wrong(judge: Any, each: Any, way: Any) -> Any:
        from app.ingest.policy import ACCEPT

        return right(judge, each, way) or ACCEPT

    right = _
    return wrong


FAULTS = [
    _fault("everything is accepted", "app.ingest.policy:Judge.judge", instead(_accept_all)),
    _fault("a policy that fails accepts", "app.ingest.policy:Judge._verdict", _accept_failures),
    _fault("a released message stays", "app.ingest.quarantine:Quarantine.forget", nothing),
]
