"""Faults planted in backfills: the log as a replica, and the renewal of nonces."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.mutants.fault import Fault, Plant, after, instead, nothing, returns

_TESTS = ("tests/participant/test_backfill.py",)


def _fault(name: str, seam: str, plant: Plant) -> Fault:
    return Fault(f"backfill: {name}", f"sdstore.participant.backfill:{seam}", plant, _TESTS)


def _stages_nothing_noted(right: Any) -> Any:
    async def commit(self: Any, prepared: Any) -> Any:
        log = self._log
        stage = log.stage
        log.stage = lambda messages, _noted: stage(messages, [])
        try:
            return await right(self, prepared)
        finally:
            del log.stage

    return commit


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


def _in_arrival_order(_: Any) -> Any:
    def staged(self: Any, count: int) -> Any:
        return list(self._staged.values())[:count]

    return staged


FAULTS = [
    _fault("messages of other channels are taken", "_refusal", returns("")),
    _fault("names are not noted", "LogReplica.commit", _stages_nothing_noted),
    _fault(
        "the last element of the log is not compared", "LogReplica.open", _forgets_the_last_piece
    ),
    _fault(
        "claims that come alone are not noted",
        "LogReplica._prepared",
        after(
            lambda prepared, *_: [
                replace(each, order=None) if each.entry_id else each for each in prepared
            ]
        ),
    ),
    _fault("a store is not remembered", "Memories.learn", nothing),
    Fault(
        "backfill: the next request waits for the work on an answer",
        "sdstore.sync.content:MOVES_IN_FLIGHT_MAX",
        instead(1),
        (
            "tests/participant/test_backfill.py::test_the_next_request_leaves_before_an_answer_is_stored",
        ),
    ),
    Fault(
        "backfill: staged messages come in the order of their arrival",
        "sdstore.sds.log:MemoryLog.staged",
        _in_arrival_order,
        _TESTS,
    ),
]
