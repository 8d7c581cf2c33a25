"""Faults planted in the driver of participants."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from tests.mutants.fault import Fault, Plant, after, before, instead, nothing, returns

_PARTS = "tests/participant/test_driver_parts.py::test_"
_WHOLE = "tests/participant/test_driver.py::test_"
_SAVING = "tests/participant/test_driver_saving.py::test_"
_LIVE = "tests/client/test_live.py::test_"


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
        from sdstore.client.errors import StoreError

        with suppress(StoreError):
            await right(*args)

    return wrong


def _is_caught_up(channel: Any) -> tuple[Any]:
    channel._follower._is_caught_up.set()
    return (channel,)


def _gap_noted(following: Any) -> None:
    following.has_gap = True


def _healthy_at_once(follower: Any, store: Any) -> tuple[Any, Any]:
    follower._stores.succeeded(store, follower._scope)
    return follower, store


async def _false(*_: Any) -> bool:
    return False


async def _true(*_: Any) -> bool:
    return True


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
        "nobody hears that nothing can be saved",
        "participant.driver:ParticipantDriver.saving_failed",
        nothing,
        f"{_SAVING}an_application_hears_of_a_full_disk_and_of_room_and_nothing_leaves_meanwhile",
    ),
    _fault(
        "the end of a driver does not say that the last changes are not saved",
        "participant.driver:ParticipantDriver._last_save",
        nothing,
        f"{_SAVING}the_end_of_a_driver_says_if_the_last_changes_are_not_saved",
    ),
    _fault(
        "gaps are answered at once for ever",
        "client.live:Following._note_gap",
        instead(_gap_noted),
        f"{_LIVE}a_node_that_sends_nothing_but_gaps_is_given_up_after_the_attempts",
    ),
    _fault(
        "a store that ends each stream is healthy at once",
        "participant.follower:Follower._lasting",
        before(_healthy_at_once),
        f"{_WHOLE}a_store_that_ends_each_stream_is_called_ever_less_often",
    ),
    _fault(
        "the cursor of a failed catch-up is kept",
        "participant.follower:Follower._catch_up",
        _without_store_errors,
        f"{_WHOLE}a_catch_up_that_fails_goes_on_with_another_store",
    ),
    _fault(
        "nothing is read after a kept cursor",
        "participant.follower:Follower._read_missed",
        instead(_true),
        f"{_WHOLE}the_last_message_is_found_when_a_broken_connection_comes_back",
    ),
    _fault(
        "every absence is long",
        "participant.follower:Follower._read_missed",
        instead(_false),
        f"{_WHOLE}after_a_short_absence_one_page_brings_what_was_missed",
    ),
    _fault(
        "no cursor is kept",
        "participant.follower:Follower._keep_cursor",
        nothing,
        f"{_WHOLE}after_a_short_absence_one_page_brings_what_was_missed",
    ),
    _fault(
        "nothing is backfilled",
        "participant.follower:Follower._reconcile",
        instead(_none),
        f"{_WHOLE}after_a_long_absence_the_log_is_backfilled",
    ),
    _fault(
        "what is staged is not taken",
        "participant.follower:Follower.take_staged",
        returns(False),
        f"{_WHOLE}after_a_long_absence_the_log_is_backfilled",
    ),
    _fault(
        "time passes while no store answers",
        "participant.driver:ParticipantChannel.tick",
        before(_is_caught_up),
        f"{_WHOLE}while_no_store_answers_nothing_is_lost_or_given_up",
    ),
    _fault(
        "confirmations are ignored",
        "participant.driver:ParticipantChannel.confirm",
        instead(_none),
        f"{_WHOLE}an_application_that_confirms_gets_nothing_twice",
    ),
    _fault(
        "the participant does not learn what is stored",
        "participant.driver:ParticipantChannel.on_published",
        nothing,
        f"{_WHOLE}a_burst_is_published_in_batches",
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
        "what a store refuses is offered to no other",
        "participant.outbox:Outbox._leave_undecided",
        nothing,
        f"{_PARTS}a_message_is_refused_only_when_the_store_that_did_not_answer_refuses_it_too",
    ),
    _fault(
        "readers wait for what every store refuses",
        "participant.follower:Follower._is_unobtainable",
        nothing,
        "tests/participant/test_driver_refused.py::test_a_message_that_an_operator_releases_arrives_late",
    ),
    _fault(
        "no other store gets a copy",
        "participant.outbox:Outbox._copy",
        nothing,
        f"{_WHOLE}participants_that_follow_different_stores_hear_each_other",
    ),
    _fault(
        "frames that could not be published are dropped",
        "participant.outbox:Outbox._put_back",
        nothing,
        f"{_PARTS}what_a_store_cannot_store_now_is_published_later_in_order",
    ),
    _fault(
        "the outbox has no bound",
        "participant.outbox:OUTBOX_BYTES_MAX",
        instead(1 << 40),
        f"{_PARTS}a_full_outbox_takes_no_more_and_loses_nothing_else",
    ),
    _fault(
        "a failed store is tried again at once",
        "participant.stores:BackOff.pause_s",
        returns(0.0),
        f"{_WHOLE}a_busy_store_is_left_alone_for_as_long_as_it_asks",
    ),
    _fault(
        "the first healthy store is taken",
        "participant.stores:Stores.ready",
        after(lambda found, stores, _: [each for each in stores.all if each in found]),
        f"{_PARTS}the_home_is_drawn_at_random_and_kept",
    ),
    _fault(
        "a refusal of one channel is taken for a dead node",
        "participant.stores:concerns_the_request",
        returns(False),
        f"{_PARTS}a_refusal_concerns_only_what_was_refused",
    ),
    _fault(
        "other stores are not asked for missing messages",
        "participant.stores:Stores.ready",
        after(lambda found, *_: found[:1]),
        f"{_WHOLE}a_missing_chain_of_1000_comes_from_another_store_in_few_calls",
    ),
    _fault(
        "causes are looked up one by one",
        "participant.stores:Retrieval._walk",
        instead(_false),
        f"{_WHOLE}a_missing_chain_of_1000_comes_from_another_store_in_few_calls",
    ),
    _fault(
        "a walk does not stop at what the log has",
        "participant.stores:KNOWN_MAX",
        instead(0),
        f"{_PARTS}a_hint_leads_to_the_wanted_message_only_and_its_causes_follow",
    ),
    _fault(
        "whatever a hint leads to is taken",
        "participant.stores:Retrieval._keep",
        before(lambda retrieval, messages, *_: (retrieval, messages)),
        f"{_PARTS}a_hint_leads_to_the_wanted_message_only_and_its_causes_follow",
    ),
]
