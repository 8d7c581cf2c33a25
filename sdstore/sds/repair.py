"""SDS-R: participants repair each other's logs, without a store.

Asking. A participant that misses a message waits until T_req and then names it in the repair
request of its next message. The waiting time differs between participants, so that mostly one asks.
Whoever hears the request postpones its own.

Answering. Participants that have the message wait until T_resp and then broadcast its original frame.
The author does so at once, the others later and only if they are in the message's response group. The
first answer makes the other answers, and the requests, unnecessary.

With h the hash, S we, A the message's author, I its ID, and ‖ the concatenation of strings:

| | |
|---|---|
| T_req | now + T_min + h(S‖I) mod (T_max - T_min) |
| T_resp | now + ((h(S) xor h(A)) · h(I)) mod T_max |
| response groups | n // 128 + 1 for n participants |
| S answers for I | h(S‖I) and h(A‖I) are equal modulo the number of groups |

The specification leaves h open; the default is js-waku's. It also leaves open what happens if no answer
comes. Here a request that was sent or postponed gets a new T_req, from the hash of S‖I‖"#1", "#2" and
so on, up to `requests_per_message`.

Messages without a known author are neither asked for nor answered for: they have no T_resp.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from zlib import crc32

from sdstore.sds.errors import LocalProtocolError
from sdstore.sds.model import HistoryEntry

PARTICIPANTS_PER_GROUP = 128
"""The specification's number."""


def hash_of_text(text: str) -> int:
    """js-waku's hash: the first 8 bytes of SHA-256 over UTF-8, big-endian."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairOptions:
    """When a participant asks and answers, and the bounds of both."""

    t_min_ms: int = 30_000
    """The shortest wait before asking. A resent message or a store is usually faster."""
    t_max_ms: int = 120_000
    """Requests wait less than this, and so do answers. js-waku's value; nim-sds has 300 s."""
    groups: int | None = None
    """The number of response groups; `None`: by the number of participants heard. With more than one
    group, all participants must use the same hash."""
    hash_text: Callable[[str], int] = hash_of_text
    """The hash of the formulas: a string to an unsigned integer, the same for all participants."""
    participants_max: int = 12_800
    """Senders counted for the number of groups, 1.3 MB: 101 groups. A sender can invent names."""

    wanted_max: int = 1_000
    """Messages to ask for, 0.5 MB. At the bound another one is not asked for; `want` it again later."""
    requests_per_message: int = 10
    """Requests of ours for one message; then it is no longer wanted."""
    requests_per_frame: int = 3
    """Entries in one repair request; the specification's number."""
    postponements_max: int = 3
    """Requests heard that postpone ours, before we ask again ourselves. Without this bound, anybody
    can silence us by asking for what nobody has."""

    answers_max: int = 1_000
    """Answers that wait for their T_resp, 0.3 MB. At the bound a request is ignored."""
    answers_per_requester: int = 30
    """Answers to one requester in T_max, 0.6 MB with js-waku's filters: what ten messages can ask for.
    More requests are ignored until the next T_max begins."""
    answers_in_all: int = 300
    """Answers to all requesters in T_max, 5.6 MB: senders are not authenticated, so one requester can
    pretend to be many."""
    answers_per_call: int = 16
    """Answers that one call of `answers` returns; the others follow with the next call."""

    def __post_init__(self) -> None:
        """Raises `LocalProtocolError` (`bad_option`) for values that make no sense."""
        if not 0 <= self.t_min_ms < self.t_max_ms:
            raise LocalProtocolError(
                "bad_option",
                f"0 <= t_min_ms < t_max_ms does not hold: {self.t_min_ms}, {self.t_max_ms}",
            )
        if self.groups is not None and self.groups < 1:
            raise LocalProtocolError(
                "bad_option", f"groups is {self.groups}, and must be at least 1"
            )


class _Schedule:
    """Message IDs by the time at which they are due."""

    def __init__(self) -> None:
        self._due: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []  # with outdated pairs

    def put(self, message_id: str, due_ms: int) -> None:
        """Add an ID, or change its time."""
        self._due[message_id] = due_ms
        heappush(self._heap, (due_ms, message_id))
        if len(self._heap) > 2 * len(self._due) + 64:  # mostly outdated
            self._heap = [(due_ms, message_id) for message_id, due_ms in self._due.items()]
            heapify(self._heap)

    def discard(self, message_id: str) -> None:
        """Remove an ID if it is there."""
        self._due.pop(message_id, None)

    @property
    def first_ms(self) -> int | None:
        """The earliest time."""
        heap = self._heap
        while heap and self._due.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][0] if heap else None

    def take(self, now_ms: int) -> str | None:
        """Remove and return the ID with the earliest time if it is due."""
        first_ms = self.first_ms
        if first_ms is None or first_ms > now_ms:
            return None
        _, message_id = heappop(self._heap)
        del self._due[message_id]
        return message_id


@dataclass(slots=True)
class _Wanted:
    entry: HistoryEntry
    requests: int = 0
    postponements: int = 0  # since our last request
    round: int = 0  # enters the hash


@dataclass(slots=True)
class _Answer:
    requester_id: str
    window: int


class Repair:
    """The repair requests of one participant in one channel, and its answers.

    Times are in ms of any clock that does not go back. Nothing here survives a restart: what is still
    missing is wanted again, and requesters ask again.
    """

    def __init__(self, participant_id: str, options: RepairOptions | None = None) -> None:
        self._options = options or RepairOptions()
        self._participant_id = participant_id
        self._own_hash = self._options.hash_text(participant_id)
        self._participants: set[int] = set()  # CRC-32 of sender IDs, which can be long
        self._wanted: dict[str, _Wanted] = {}
        self._pending: dict[str, _Answer] = {}
        self._t_req = _Schedule()
        self._t_resp = _Schedule()
        self._window = 0
        self._answered: Counter[str] = Counter()  # in the current window, by requester

    @property
    def group_count(self) -> int:
        """The number of response groups now."""
        if self._options.groups is not None:
            return self._options.groups
        # The participants heard, and this one.
        return (len(self._participants) + 1) // PARTICIPANTS_PER_GROUP + 1

    @property
    def wanted_count(self) -> int:
        """The number of messages to ask for."""
        return len(self._wanted)

    @property
    def pending_count(self) -> int:
        """The number of answers that wait for their T_resp."""
        return len(self._pending)

    @property
    def request_due_ms(self) -> int | None:
        """The earliest T_req. A message should be sent then, if only a sync message."""
        return self._t_req.first_ms

    @property
    def answer_due_ms(self) -> int | None:
        """The earliest T_resp."""
        return self._t_resp.first_ms

    def heard(self, sender_id: str) -> None:
        """A message of this sender was received."""
        participants = self._participants
        if sender_id and len(participants) < self._options.participants_max:
            participants.add(crc32(sender_id.encode()))

    # ---- asking

    def want(self, entry: HistoryEntry, now_ms: int) -> None:
        """A cause is missing. Has no effect if it is wanted already or has no known author."""
        if (
            entry.message_id in self._wanted
            or not (entry.sender_id and self._participant_id)
            or len(self._wanted) >= self._options.wanted_max
        ):
            return
        self._wanted[entry.message_id] = wanted = _Wanted(entry)
        self._arm(wanted, now_ms)

    def requests(self, now_ms: int) -> tuple[HistoryEntry, ...]:
        """The repair request of the message that is sent now: what is due, lowest T_req first."""
        if not self._wanted:
            return ()
        options = self._options
        due: list[_Wanted] = []
        while len(due) < options.requests_per_frame:
            message_id = self._t_req.take(now_ms)
            if message_id is None:
                break
            due.append(self._wanted[message_id])
        for wanted in due:
            wanted.requests += 1
            wanted.postponements = 0
            if wanted.requests < options.requests_per_message:
                self._arm(wanted, now_ms)
            else:
                del self._wanted[wanted.entry.message_id]
        return tuple(wanted.entry for wanted in due)

    def received(self, message_id: str) -> None:
        """The message arrived, perhaps as a duplicate, or is no longer wanted: forget both sides."""
        if self._wanted.pop(message_id, None) is not None:
            self._t_req.discard(message_id)
        answer = self._pending.pop(message_id, None)
        if answer is not None:
            self._t_resp.discard(message_id)
            if answer.window == self._window:
                self._answered[answer.requester_id] -= 1  # somebody else answered

    # ---- answering

    def requested(
        self,
        requester_id: str,
        entries: Iterable[HistoryEntry],
        has: Callable[[str], bool],
        now_ms: int,
    ) -> None:
        """Another participant's message carries this repair request.

        `has(message_id)` says whether we can broadcast the message.
        """
        if not (requester_id and self._participant_id):
            return
        options = self._options
        self._turn_window(now_ms)
        for entry in entries:
            message_id = entry.message_id
            wanted = self._wanted.get(message_id)
            if wanted is not None:
                if wanted.postponements < options.postponements_max:
                    wanted.postponements += 1
                    self._arm(wanted, now_ms)
                continue
            if (
                not entry.sender_id
                or message_id in self._pending
                or len(self._pending) >= options.answers_max
                or self._answered[requester_id] >= options.answers_per_requester
                or self._answered.total() >= options.answers_in_all
                or not self._is_in_group(entry)
                or not has(message_id)
            ):
                continue
            self._answered[requester_id] += 1
            self._pending[message_id] = _Answer(requester_id, self._window)
            self._t_resp.put(message_id, self._t_resp_ms(entry, now_ms))

    def answers(self, now_ms: int) -> list[str]:
        """IDs of the messages to broadcast again now, lowest T_resp first."""
        due: list[str] = []
        while len(due) < self._options.answers_per_call:
            message_id = self._t_resp.take(now_ms)
            if message_id is None:
                break
            del self._pending[message_id]
            due.append(message_id)
        return due

    # ---- times

    def _arm(self, wanted: _Wanted, now_ms: int) -> None:
        """Give a wanted message its next T_req."""
        options = self._options
        text = self._participant_id + wanted.entry.message_id
        if wanted.round:
            text += f"#{wanted.round}"
        wanted.round += 1
        spread_ms = options.t_max_ms - options.t_min_ms
        wait_ms = options.t_min_ms + options.hash_text(text) % spread_ms
        self._t_req.put(wanted.entry.message_id, now_ms + wait_ms)

    def _t_resp_ms(self, entry: HistoryEntry, now_ms: int) -> int:
        hash_text = self._options.hash_text
        distance = self._own_hash ^ hash_text(entry.sender_id)
        return now_ms + distance * hash_text(entry.message_id) % self._options.t_max_ms

    def _is_in_group(self, entry: HistoryEntry) -> bool:
        count = self.group_count
        if count == 1:
            return True
        hash_text, message_id = self._options.hash_text, entry.message_id
        own = hash_text(self._participant_id + message_id) % count
        return own == hash_text(entry.sender_id + message_id) % count

    def _turn_window(self, now_ms: int) -> None:
        """Answers are counted in windows of T_max."""
        window = now_ms // self._options.t_max_ms
        if window != self._window:
            self._window = window
            self._answered.clear()
