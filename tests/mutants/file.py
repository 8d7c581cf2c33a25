"""Faults planted in the file of participants."""

from __future__ import annotations

import sqlite3
from typing import Any

from tests.mutants.fault import Fault, Plant, instead, returns

_TEST = "tests/participant/test_participant_file.py::"
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
]  # fmt: skip
