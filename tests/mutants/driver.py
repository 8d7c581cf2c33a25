"""Faults planted in the driver of participants."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from tests.mutants.fault import Fault, Plant, instead, nothing, returns

_PARTS = "tests/participant/test_driver_parts.py::test_"
_WHOLE = "tests/participant/test_driver.py::test_"
_SAVING = "tests/participant/test_driver_saving.py::test_"


def _fault(name: str, seam: str, plant: Plant, *tests: str) -> Fault:
    return Fault(f"driver: {name}", f"sdstore.{seam}", plant, tests)


class _Careless:
    """A persistence whose failures nobody notices."""

    def __init__(self, persistence: Any) -> None:
        self._persistence = persistence

    def __getattr__(self, name: str) -> Any:
        return getattr(self._persistence, name)

    def save_all(self, effects: Any) -> None:
        with suppress(Exception):
            self._persistence.save_all(effects)


def _saved_carelessly(right: Any) -> Any:
    def wrong(driver: Any) -> Any:
        if not isinstance(driver.persistence, _Careless):
            driver.persistence = _Careless(driver.persistence)
        return right(driver)

    return wrong


def _without_store_errors(right: Any) -> Any:
    async def wrong(*args: Any) -> Any:
        from sdstore.errors import StoreError

        with suppress(StoreError):
            await right(*args)

    return wrong


async def _none(*_: Any) -> None:
    return None


def _dropped(queue: Any) -> None:
    queue._events.clear()
    queue._others_count = 0


FAULTS = [
    _fault(
        "effects are carried out before they are saved",
        "participant.driver:ParticipantDriver.save",
        _saved_carelessly,
        f"{_WHOLE}nothing_is_delivered_or_published_before_it_is_saved",
    ),
    _fault(
        "the end of a driver does not say that the last changes are not saved",
        "participant.driver:ParticipantDriver._last_save",
        nothing,
        f"{_SAVING}the_end_of_a_driver_says_if_the_last_changes_are_not_saved",
    ),
    _fault(
        "the cursor of a failed catch-up is kept",
        "participant.follower:Follower._catch_up",
        _without_store_errors,
        f"{_WHOLE}a_catch_up_that_fails_goes_on_with_another_store",
    ),
    _fault(
        "what is staged is not taken",
        "participant.follower:Follower.take_staged",
        returns(False),
        f"{_WHOLE}after_a_long_absence_the_log_is_backfilled",
    ),
    _fault(
        "confirmations are ignored",
        "participant.driver:ParticipantChannel.confirm",
        instead(_none),
        f"{_WHOLE}an_application_that_confirms_gets_nothing_twice",
    ),
    _fault(
        "lost content stays lost",
        "participant.follower:Follower._note_left_out",
        nothing,
        f"{_WHOLE}content_that_one_store_lost_comes_from_another",
    ),
    _fault(
        "deliveries are dropped with other events",
        "participant.events:EventQueue._drop",
        instead(_dropped),
        f"{_PARTS}events_are_dropped_from_the_oldest_and_deliveries_never",
    ),
    _fault(
        "no other store gets a copy",
        "participant.stores:Outbox._copy",
        nothing,
        f"{_WHOLE}participants_that_follow_different_stores_hear_each_other",
    ),
]
