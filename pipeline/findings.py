"""The faults that a check of a snapshot reports."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Fault(StrEnum):
    """Stable names of the faults (docs/pipeline.md explains each)."""

    MISSING_FILE = "missing_file"
    UNLISTED_FILE = "unlisted_file"
    DAMAGED_FILE = "damaged_file"
    UNREADABLE_ROWS = "unreadable_rows"
    FRAME_REFUSED = "frame_refused"
    FRAME_HASH_DIFFERS = "frame_hash_differs"
    DIGEST_DIFFERS = "digest_differs"
    COLUMN_DIFFERS = "column_differs"
    FRAME_LOST = "frame_lost"
    OUTSIDE_OF_RANGE = "outside_of_range"
    SUMMARY_DIFFERS = "summary_differs"
    ROOT_DIFFERS = "root_differs"
    CLAIM_WITHOUT_ENTRY = "claim_without_entry"
    NODE_LACKS_ENTRIES = "node_lacks_entries"
    NODE_DIFFERS = "node_differs"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fault and its place: a file of the snapshot, or a channel of the node.

    `row` counts from 0 within the file.
    """

    fault: Fault
    where: str
    detail: str
    row: int | None = None
    message_id: str | None = None

    def __str__(self) -> str:
        row = "" if self.row is None else f", row {self.row}"
        message = "" if self.message_id is None else f", message {self.message_id!r}"
        return f"{self.where}{row}{message}: {self.fault}: {self.detail}"
