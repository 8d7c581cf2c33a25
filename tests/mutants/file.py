"""Faults planted in the file of participants."""

from __future__ import annotations

import sqlite3
from typing import Any

from tests.mutants.fault import Fault, Plant, after, before, instead, nothing, returns

_TEST = "tests/participant/test_participant_file.py::"
_LOGS = f"{_TEST}TestLogs"
_ORDER = f"{_TEST}test_order_and_deliveries_span_what_is_saved_and_what_is_not"
_CUT = "tests/participant/test_participant_file_killed.py::test_a_power_cut_at_any_byte_of_the_log_leaves_a_save_as_a_whole"


def _fault(name: str, seam: str, plant: Plant, test: str) -> Fault:
    return Fault(f"file: {name}", f"sdstore.participant.{seam}", plant, (test,))


def _unlocked(_: Any) -> Any:
    return lambda path: sqlite3.connect(":memory:")


def _committed_in_the_middle(right: Any) -> Any:
    """The state of a channel is on the disk before its log."""

    def wrong(log: Any, raw: Any) -> None:
        unsaved, log._unsaved = log._unsaved, {}
        right(log, raw)
        raw.execute("COMMIT")
        raw.execute("BEGIN IMMEDIATE")
        log._unsaved, log._changes, log._unstaged, log._new_noted = unsaved, {}, {}, set()
        right(log, raw)

    return wrong


def _keeps_offers(right: Any) -> Any:
    """A row that a save removed is taken for the row of a message that waited."""

    def wrong(log: Any) -> None:
        offered = dict(log._offered)
        right(log)
        log._offered = offered

    return wrong


def _appended(places: Any, place: Any) -> None:
    places.append(place)


FAULTS = [
    _fault("two processes open it", "database:_lock", _unlocked, f"{_TEST}test_a_file_is_open_once"),
    _fault("a deleted file is written", "database:_inode", returns(None),
           f"{_TEST}test_a_file_that_was_deleted_is_not_written_in_vain"),
    _fault("frames are not checked", "database:HASH_BYTES", instead(0),
           f"{_TEST}test_damaged_pages_raise_and_are_never_read_as_content"),
    _fault("state and log are two transactions", "file:FileLog.write", _committed_in_the_middle,
           _CUT),
    _fault("the application's confirmation is forgotten", "file:ParticipantFile.confirmed",
           returns(0), f"{_TEST}test_what_the_application_confirmed_is_not_delivered_again"),
    _fault("a failed save counts as done", "file:FileLog.forget_references",
           after(lambda _, log: log.written()),
           f"{_TEST}test_a_full_disk_is_an_error_and_the_next_save_writes_everything"),
    _fault("a reference that was rolled back is used", "file:FileLog.forget_references", nothing,
           f"{_TEST}test_a_reference_of_a_failed_save_is_not_used_by_the_next"),
    _fault("the log is in order of arrival", "file:_insert", instead(_appended), _ORDER),
    _fault("staged messages come again", "file:FileLog.unstage", nothing, _LOGS),
    _fault("the log counts no unsaved messages", "file:FileLog.__len__",
           after(lambda _, log: log._saved_count), _LOGS),
    _fault("deliveries begin one too early", "file:FileLog.deliveries",
           before(lambda log, number, count: (log, number - 1, count)), _ORDER),
    _fault("removed rows are offered for ever", "file:FileLog.written", _keeps_offers,
           f"{_TEST}test_a_staged_message_that_waited_is_logged_with_its_frame"),
    _fault("unsaved rows are not bounded", "file:FileLog._count_unsaved", nothing,
           f"{_TEST}test_too_much_without_a_save_ends_the_use_of_the_file"),
]  # fmt: skip
