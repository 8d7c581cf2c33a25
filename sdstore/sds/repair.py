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

from sdstore.errors import LocalProtocolError
from sdstore.sds.codec import serialize_entry
from sdstore.sds.model import HistoryEntry
from sdstore.sds.shares import NOBODY, Member, Shares

PARTICIPANTS_PER_GROUP = 128
"""The specification's number."""

REQUEST_BYTES = 256
"""A request for a message with a longer ID, author and hint counts as several."""


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
    """Messages to ask for, 0.5 MB. At the bound the message that named most of them loses one; another one that
    it names is not asked for. `want` it again later."""
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
    More requests are ignored until the next T_max begins. As many requests of ours, of 256 bytes each,
    are for what one member named: it can have invented that. The others are put off to the next T_max, and
    take turns there: what one message named goes first once in a T_max."""
    answers_in_all: int = 300
    """Answers to all requesters in T_max, 5.6 MB, and requests of ours: senders are not authenticated, so
    one can pretend to be many."""
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
    """Message IDs by the time at which they are due, and among equal times by turn."""

    def __init__(self) -> None:
        self._due: dict[str, tuple[int, int]] = {}
        self._heap: list[tuple[tuple[int, int], str]] = []  # with outdated pairs

    def put(self, message_id: str, due_ms: int, turn_ms: int = 0) -> None:
        """Add an ID, or change its time or its turn."""
        self._due[message_id] = due = due_ms, turn_ms
        heappush(self._heap, (due, message_id))
        if len(self._heap) > 2 * len(self._due) + 64:  # mostly outdated
            self._heap = [(due, message_id) for message_id, due in self._due.items()]
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
        return heap[0][0][0] if heap else None

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
    member: Member  # who named it
    cost: int  # of a request, in requests
    requests: int = 0
    postponements: int = 0  # since our last request
    round: int = 0  # enters the hash
    turn_ms: int = 0  # among what is put off, the lowest goes first


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
        self._shares = Shares()  # of what is wanted
        self._pending: dict[str, _Answer] = {}
        self._t_req = _Schedule()
        self._t_resp = _Schedule()
        self._window = 0
        self._answered: Counter[str] = Counter()  # in the current window, by requester
        self._requested: Counter[tuple[str, str]] = Counter()  # the same, by path and account

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

    def want(self, entry: HistoryEntry, now_ms: int, member: Member = NOBODY) -> None:
        """A cause is missing, which this member named (`Member.naming`). Has no effect if it is wanted already or
        has no known author."""
        message_id = entry.message_id
        if message_id in self._wanted or not (entry.sender_id and self._participant_id):
            return
        cost = 1 + len(serialize_entry(entry)) // REQUEST_BYTES
        cost = min(cost, self._options.answers_per_requester)
        self._wanted[message_id] = wanted = _Wanted(entry, member, cost)
        self._shares.add(message_id, member)
        self._arm(wanted, now_ms)
        if len(self._wanted) > self._options.wanted_max:
            oldest = self._shares.first_to_go()
            self._forget(message_id if self._shares.member(oldest) == member else oldest)

    def named(self, entries: Iterable[HistoryEntry], member: Member, now_ms: int) -> None:
        """A message of this member names these. What several name counts against the message with fewest, and
        against a stranger's only if no other names it: invented IDs delay nothing that another message names too."""
        if not self._wanted:
            return
        shares = self._shares
        for entry in entries:
            wanted = self._wanted.get(entry.message_id)
            if wanted is None:
                continue
            before, after = (
                (not each.account, shares.count(each)) for each in (wanted.member, member)
            )
            if after < before:
                wanted.member = member
                shares.discard(entry.message_id)
                shares.add(entry.message_id, member)
                wanted.turn_ms = min(wanted.turn_ms, self._turn_ms(member, now_ms))

    def _forget(self, message_id: str) -> None:
        del self._wanted[message_id]
        self._shares.discard(message_id)
        self._t_req.discard(message_id)

    def requests(self, now_ms: int) -> tuple[HistoryEntry, ...]:
        """The repair request of the message that is sent now: what is due, lowest T_req first."""
        if not self._wanted:
            return ()
        options = self._options
        due: list[_Wanted] = []
        self._turn_window(now_ms)
        while len(due) < options.requests_per_frame:
            message_id = self._t_req.take(now_ms)
            if message_id is None:
                break
            wanted = self._wanted[message_id]
            if self._may_ask_for(wanted):
                due.append(wanted)
            else:
                next_ms = (self._window + 1) * options.t_max_ms
                self._t_req.put(message_id, next_ms, wanted.turn_ms)
        for wanted in due:
            wanted.requests += 1
            wanted.postponements = 0
            if wanted.requests < options.requests_per_message:
                self._arm(wanted, now_ms)
            else:
                self._forget(wanted.entry.message_id)
        return tuple(wanted.entry for wanted in due)

    def _may_ask_for(self, wanted: _Wanted) -> bool:
        """Count a request against the member who named the message; a long ID counts as several."""
        options, account, cost = self._options, wanted.member[:2], wanted.cost
        is_within = (
            self._requested[account] + cost <= options.answers_per_requester
            and self._requested.total() + cost <= options.answers_in_all
        )
        if is_within:
            self._requested[account] += cost
        return is_within

    def received(self, message_id: str) -> None:
        """The message arrived, perhaps as a duplicate, or is no longer wanted: forget both sides."""
        if message_id in self._wanted:
            self._forget(message_id)
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
        wanted.turn_ms = self._turn_ms(wanted.member, now_ms)
        self._t_req.put(wanted.entry.message_id, now_ms + wait_ms, wanted.turn_ms)

    def _turn_ms(self, member: Member, now_ms: int) -> int:
        """The n-th ID that one message names waits n - 1 times T_max longer than the first one. So a message that
        names hundreds of invented IDs delays those, and an ID goes before another one only once. Message IDs must
        not decide: their authors choose them."""
        return now_ms + self._options.t_max_ms * self._shares.count(member)

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
        """Answers and requests are counted in windows of T_max."""
        window = now_ms // self._options.t_max_ms
        if window != self._window:
            self._window = window
            self._answered.clear()
            self._requested.clear()
