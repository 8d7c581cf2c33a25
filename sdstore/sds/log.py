"""A participant's log of one channel: the interface, and a log in memory.

The log holds every content message that the participant sent or delivered, in log order: Lamport
timestamp, then message ID as UTF-8 bytes. It also holds staged messages: a backfill puts them there,
and the participant takes them out in log order (`Participant.take_staged`).

`append` and `unstage` take effect at once for the reading methods. They are written when the next
`Save` effect is carried out, in its transaction.

A backfill compares the log with a store, so a log that can be backfilled also lists its elements
(`BackfillLog`): the messages that it holds, and those that it knows by name alone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

from sdstore.sds.codec import decode
from sdstore.sds.model import HistoryEntry, Message, entry_digest


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A message in the log, with its frame as first seen.

    `number` is the number of its delivery, 0 for a message of our own. `after_gap` and `is_late` are
    those of `Deliver`, as `supersedes` is. `retrieval_hint` is empty if unknown.
    """

    message: Message
    frame: bytes
    number: int = 0
    retrieval_hint: bytes = b""
    after_gap: tuple[str, ...] = ()
    is_late: bool = False
    supersedes: bool = False


class Reference(NamedTuple):
    """A logged message as causal histories name it."""

    lamport_timestamp: int
    entry: HistoryEntry


@dataclass(frozen=True, slots=True)
class Staged:
    """A message that a backfill fetched and the participant has not taken yet; its entry digest."""

    message: Message
    frame: bytes
    digest: bytes
    retrieval_hint: bytes = b""


@dataclass(frozen=True, slots=True)
class Noted:
    """A name that a backfill must not fetch again, without its content.

    It is a hint claim (`element_id` is its claim ID), or a message that the log refuses, such as
    another message with the ID of a logged one (`element_id` is its digest). `lamport_timestamp`: of
    the message, or of the message that the claim is about.
    """

    lamport_timestamp: int
    element_id: bytes


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
        """Add a message. It takes the place of one with its ID, whose number nobody has then."""

    def deliveries(self, after_number: int, count: int) -> Sequence[LogEntry]:
        """Logged messages by delivery number, ascending, those above `after_number`.

        At most `count`; fewer if they are large, but at least one if there is one.
        """

    def staged(self, count: int) -> Sequence[Staged]:
        """The first staged messages in log order, at most `count`; fewer if they are large."""

    def unstage(self, message_ids: Sequence[str]) -> None:
        """Remove staged messages."""


ELEMENTS_PER_PIECE_MAX = 65_536
"""Elements of one piece of `BackfillLog.elements`: some 50 ms of a SQLite file."""


class BackfillLog(Protocol):
    """What a backfill asks of a log (`sdstore.participant.backfill`). No method blocks for long."""

    def elements(self) -> Iterator[tuple[Sequence[int], bytes]]:
        """All elements, in pieces of at most `ELEMENTS_PER_PIECE_MAX`, in any order: Lamport timestamps, and their IDs.

        The IDs have 32 bytes each, joined. Elements are the digests of logged and of staged messages,
        the noted names, and the digests of messages that were unstaged and are not logged: the
        participant refused them, or they wait for their causes. An element can come twice.
        """

    @property
    def keeps_variants(self) -> bool:
        """Whether it takes several messages with one ID. A participant's log does not."""

    @property
    def noted_count(self) -> int:
        """The number of noted names. It is kept, not counted."""

    def digests(self, message_ids: Sequence[str]) -> Mapping[str, bytes]:
        """The digests of the logged and the staged messages with these IDs."""

    def frames(self, digests: Sequence[bytes]) -> Mapping[bytes, tuple[bytes, bytes]]:
        """Frame and retrieval hint (empty if unknown) of logged and staged messages, by digest."""

    def stage(self, messages: Sequence[Staged], noted: Sequence[Noted]) -> None:
        """Add fetched messages, and names. They are on disk when this returns.

        The log has no message with any of these IDs. It can know some of the names.
        """


class MemoryLog:
    """A log that ends with the process, for tests and for participants that keep nothing.

    It keeps frames, and decodes them when it is asked for messages. A logged message is a tuple of
    bytes, strings and numbers, which Python's garbage collector does not visit: with objects, its
    visits cost as much as the participant itself from some 10,000 messages on.
    """

    keeps_variants = False

    def __init__(self) -> None:
        # By message ID: frame, retrieval hint, sender ID, delivery number, is_late, supersedes.
        self._logged: dict[str, tuple[bytes, bytes, str, int, bool, bool]] = {}
        self._gaps: dict[str, tuple[str, ...]] = {}  # after_gap, where there is one
        self._order: list[tuple[int, bytes, str]] = []
        self._deliveries: list[tuple[int, str]] = []
        self._staged: dict[str, Staged] = {}
        self._staged_order: list[str] = []  # the last message ID first; empty if not sorted yet
        self._noted: set[Noted] = set()

    def __len__(self) -> int:
        return len(self._logged)

    def contains(self, message_id: str) -> bool:
        """See `ParticipantLog`."""
        return message_id in self._logged

    def newest(self, count: int, before_lamport: int) -> list[Reference]:
        """See `ParticipantLog`."""
        order = self._order
        end = len(order)
        if end and order[-1][0] >= before_lamport:
            end = bisect_left(order, (before_lamport,))
        return [
            Reference(lamport, HistoryEntry(message_id, *self._logged[message_id][1:3]))
            for lamport, _, message_id in order[max(end - count, 0) : end]
        ]

    def frame(self, message_id: str) -> bytes | None:
        """See `ParticipantLog`."""
        logged = self._logged.get(message_id)
        return None if logged is None else logged[0]

    def append(self, entry: LogEntry) -> None:
        """See `ParticipantLog`."""
        message = entry.message
        message_id = message.message_id
        if entry.supersedes and (old := self._logged.get(message_id)) is not None:
            replaced, _ = decode(old[0])
            lamport = replaced.lamport_timestamp or 0
            self._noted.add(Noted(lamport, entry_digest(replaced)))
            self._order.remove((lamport, message_id.encode(), message_id))
            self._deliveries.remove((old[3], message_id))
            self._gaps.pop(message_id, None)
        self._logged[message_id] = (
            entry.frame,
            entry.retrieval_hint,
            message.sender_id,
            entry.number,
            entry.is_late,
            entry.supersedes,
        )
        if entry.after_gap:
            self._gaps[message_id] = entry.after_gap
        place = (message.lamport_timestamp or 0, message_id.encode(), message_id)
        if self._order and place < self._order[-1]:
            insort(self._order, place)
        else:
            self._order.append(place)
        if entry.number:
            self._deliveries.append((entry.number, message_id))

    def deliveries(self, after_number: int, count: int) -> list[LogEntry]:
        """See `ParticipantLog`."""
        start = bisect_left(self._deliveries, (after_number + 1,))
        chosen = self._deliveries[start : start + count]
        return [self._entry(message_id) for _, message_id in chosen]

    def staged(self, count: int) -> list[Staged]:
        """See `ParticipantLog`."""
        if not self._staged_order:
            self._staged_order = sorted(self._staged, key=self._staged_place, reverse=True)
        in_order = (self._staged.get(each) for each in reversed(self._staged_order))
        return list(islice(filter(None, in_order), count))

    def unstage(self, message_ids: Sequence[str]) -> None:
        """See `ParticipantLog`."""
        for message_id in message_ids:
            each = self._staged.pop(message_id, None)
            if each is not None and message_id not in self._logged:
                self._noted.add(Noted(each.message.lamport_timestamp or 0, each.digest))
        order = self._staged_order
        while order and order[-1] not in self._staged:
            order.pop()

    # --- backfill --------------------------------------------------------------------------------

    def elements(self) -> Iterator[tuple[list[int], bytes]]:
        """See `BackfillLog`."""
        rows = [
            Noted(each.message.lamport_timestamp or 0, entry_digest(each.message))
            for each in self._held()
        ]
        rows += self._noted
        for start in range(0, len(rows), ELEMENTS_PER_PIECE_MAX):
            piece = rows[start : start + ELEMENTS_PER_PIECE_MAX]
            ids = b"".join(each.element_id for each in piece)
            yield [each.lamport_timestamp for each in piece], ids

    @property
    def noted_count(self) -> int:
        """See `BackfillLog`."""
        return len(self._noted)

    def digests(self, message_ids: Sequence[str]) -> dict[str, bytes]:
        """See `BackfillLog`."""
        found = {}
        for message_id in message_ids:
            if message_id in self._logged:
                found[message_id] = entry_digest(self._entry(message_id).message)
            elif message_id in self._staged:
                found[message_id] = entry_digest(self._staged[message_id].message)
        return found

    def frames(self, digests: Sequence[bytes]) -> dict[bytes, tuple[bytes, bytes]]:
        """See `BackfillLog`."""
        wanted = set(digests)
        held = ((entry_digest(each.message), each) for each in self._held())
        return {digest: (e.frame, e.retrieval_hint) for digest, e in held if digest in wanted}

    def stage(self, messages: Sequence[Staged], noted: Sequence[Noted]) -> None:
        """See `BackfillLog`."""
        self._staged |= {each.message.message_id: each for each in messages}
        self._staged_order = []
        self._noted.update(noted)

    def _staged_place(self, message_id: str) -> tuple[int, bytes]:
        return self._staged[message_id].message.lamport_timestamp or 0, message_id.encode()

    def _held(self) -> Iterator[LogEntry | Staged]:
        """Logged messages last: if a message is staged too, its logged frame and hint count."""
        yield from self._staged.values()
        yield from map(self._entry, self._logged)

    def _entry(self, message_id: str) -> LogEntry:
        frame, hint, _, number, is_late, supersedes = self._logged[message_id]
        message, _ = decode(frame)
        return LogEntry(
            message, frame, number, hint, self._gaps.get(message_id, ()), is_late, supersedes
        )
