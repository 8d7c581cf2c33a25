"""A participant's log of one channel: the interface, and a log in memory.

The log holds every content message that the participant sent or delivered, in log order: Lamport
timestamp, then message ID as UTF-8 bytes. It also holds staged messages: a backfill puts them there,
and the participant takes them out in log order (`Participant.take_staged`).

`append` and `unstage` take effect at once for the reading methods. They are written when the next
`Save` effect is carried out, in its transaction.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sdstore.sds.model import HistoryEntry, Message


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A message in the log, with its frame as first seen.

    `number` is the number of its delivery, 0 for a message of our own. `after_gap` and `is_late` are
    those of `Deliver`. `retrieval_hint` is empty if unknown.
    """

    message: Message
    frame: bytes
    number: int = 0
    retrieval_hint: bytes = b""
    after_gap: tuple[str, ...] = ()
    is_late: bool = False


class Reference(NamedTuple):
    """A logged message as causal histories name it."""

    lamport_timestamp: int
    entry: HistoryEntry


@dataclass(frozen=True, slots=True)
class Staged:
    """A message that a backfill fetched and the participant has not taken yet."""

    message: Message
    frame: bytes
    retrieval_hint: bytes = b""


class ParticipantLog(Protocol):
    """See the module. One participant uses a log at a time."""

    def __len__(self) -> int:
        """The number of logged messages, without staged ones."""

    def contains(self, message_id: str) -> bool:
        """Whether the log has a message with this ID."""

    def newest(self, count: int, before_lamport: int) -> Sequence[Reference]:
        """The last `count` messages in log order with a lower Lamport timestamp, ascending."""

    def frame(self, message_id: str) -> bytes | None:
        """The frame of a logged message."""

    def append(self, entry: LogEntry) -> None:
        """Add a message that the log does not contain."""

    def deliveries(self, after_number: int, count: int) -> Sequence[LogEntry]:
        """Logged messages by delivery number, ascending, those above `after_number`."""

    def staged(self, count: int) -> Sequence[Staged]:
        """The first staged messages in log order."""

    def unstage(self, message_ids: Sequence[str]) -> None:
        """Remove staged messages."""


class MemoryLog:
    """A log that ends with the process, for tests and for participants that keep nothing."""

    def __init__(self) -> None:
        self._entries: dict[str, LogEntry] = {}
        self._order: list[tuple[int, bytes, str]] = []
        self._deliveries: list[str] = []
        self._staged: dict[str, Staged] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def contains(self, message_id: str) -> bool:
        """See `ParticipantLog`."""
        return message_id in self._entries

    def newest(self, count: int, before_lamport: int) -> list[Reference]:
        """See `ParticipantLog`."""
        order = self._order
        end = len(order)
        if end and order[-1][0] >= before_lamport:
            end = bisect_left(order, (before_lamport,))
        return [
            Reference(lamport, self._entry_of(message_id))
            for lamport, _, message_id in order[max(end - count, 0) : end]
        ]

    def frame(self, message_id: str) -> bytes | None:
        """See `ParticipantLog`."""
        entry = self._entries.get(message_id)
        return None if entry is None else entry.frame

    def append(self, entry: LogEntry) -> None:
        """See `ParticipantLog`."""
        message = entry.message
        message_id = message.message_id
        self._entries[message_id] = entry
        place = (message.lamport_timestamp or 0, message_id.encode(), message_id)
        if self._order and place < self._order[-1]:
            insort(self._order, place)
        else:
            self._order.append(place)
        if entry.number:
            self._deliveries.append(message_id)

    def deliveries(self, after_number: int, count: int) -> list[LogEntry]:
        """See `ParticipantLog`."""
        ids = self._deliveries[after_number : after_number + count]
        return [self._entries[message_id] for message_id in ids]

    def staged(self, count: int) -> list[Staged]:
        """See `ParticipantLog`."""
        in_order = sorted(
            self._staged.values(),
            key=lambda each: (
                each.message.lamport_timestamp or 0,
                each.message.message_id.encode(),
            ),
        )
        return in_order[:count]

    def stage(self, messages: Sequence[Staged]) -> None:
        """Add fetched messages; the log already has none of them."""
        for each in messages:
            self._staged[each.message.message_id] = each

    def unstage(self, message_ids: Sequence[str]) -> None:
        """See `ParticipantLog`."""
        for message_id in message_ids:
            self._staged.pop(message_id, None)

    def _entry_of(self, message_id: str) -> HistoryEntry:
        entry = self._entries[message_id]
        return HistoryEntry(message_id, entry.retrieval_hint, entry.message.sender_id)
