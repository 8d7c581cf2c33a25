"""Faults planted in backfills: the log as a replica, and the renewal of nonces."""

from __future__ import annotations

from typing import Any

from tests.mutants.fault import Fault, Plant, returns

_TESTS = ("tests/participant/test_backfill.py",)


def _fault(name: str, seam: str, plant: Plant) -> Fault:
    return Fault(f"backfill: {name}", f"sdstore.participant.backfill:{seam}", plant, _TESTS)


def _forgets_the_last_piece(right: Any) -> Any:
    async def open_(channel_id: str, log: Any) -> Any:
        class Short:
            def __getattr__(self, name: str) -> Any:
                return getattr(log, name)

            def elements(self) -> Any:
                for lamports, ids in log.elements():
                    yield lamports[:-1], ids[: -32 or None]

        return await right.__func__(_replica(), channel_id, Short())

    return staticmethod(open_)


def _replica() -> Any:
    from sdstore.participant.backfill import LogReplica

    return LogReplica


FAULTS = [
    _fault("messages of other channels are taken", "_refusal", returns("")),
    _fault(
        "the last element of the log is not compared", "LogReplica.open", _forgets_the_last_piece
    ),
]
