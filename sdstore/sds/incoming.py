"""Messages that wait for their causes, and the causes that are missing.

A message waits while a cause of it is not met. A cause is met when it is in the log, or lost (under
`OnLost.DELIVER`), or the message itself. A message that waits itself is not met. Participants of
version 1 log sync messages and name them: in messages without a sender, as theirs are, the ID of a sync
message is met as well.

A missing message is known by reference only: a waiting message or a sync message names it. It is asked
for at once and then with doubling pauses. Each message waits `lost_after_ms` for it, whoever named it
before, and it is lost when none waits for it any more. Lost IDs are remembered, and asked for now and then.
A lost message is met for the account that it was lost for, and for all if no store has it: another member's
message waits for it anew, because the first one might have named what was still on its way.

At the bounds the member with most loses a message, or a name (`shares`), so that a flood displaces itself. A
displaced message is delivered after a gap, or dropped under `OnLost.HOLD`. Its causes are as missing as before:
another message can wait for them. A dropped message that others wait for is missing again; it is asked for
after the first pause.

An ID that a delivered message has skipped is remembered until it arrives, late.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from sdstore.sds.effects import Lost, Missing
from sdstore.sds.model import HistoryEntry, Message, Rank
from sdstore.sds.options import OnLost, ParticipantOptions
from sdstore.sds.references import HINT_BYTES_MAX, Hints
from sdstore.sds.shares import NOBODY, Member, Shares
from sdstore.sds.state import LOST, PASSED, SYNC, WAITING, SavedState, Turn
from sdstore.wire import participant_pb2 as pb


@dataclass(slots=True)
class Arrived:
    """A content message that is not in the log yet."""

    message: Message
    frame: bytes
    retrieval_hint: bytes
    rank: Rank
    member: Member  # whom it counts against while it waits
    supersedes: bool = False  # a logged message of a lower rank
    gap: tuple[str, ...] = ()  # lost causes
    unmet: set[str] = field(default_factory=set)
    since_ms: int | None = None  # when it, or a copy in whose place it waits, began to wait
    place: int = 0

    @property
    def order(self) -> tuple[int, bytes]:
        """Its place in log order."""
        return self.message.lamport_timestamp or 0, self.message.message_id.encode()


def _within_bounds(entry: HistoryEntry) -> HistoryEntry:
    """The entry to remember: without a hint that is too long, which could be as large as a frame."""
    if len(entry.retrieval_hint) <= HINT_BYTES_MAX:
        return entry
    return HistoryEntry(entry.message_id, b"", entry.sender_id)


@dataclass(slots=True)
class _Missing:
    entry: HistoryEntry
    member: Member  # who named it
    named_in: str  # in which message
    lost_ms: int  # when it is lost
    fetch_ms: int  # when to ask for it again
    attempts: int = 1

    @property
    def due_ms(self) -> int:
        return min(self.lost_ms, self.fetch_ms)


@dataclass(slots=True)
class _LostId:
    entry: HistoryEntry
    place: int
    account: tuple[str, str] | None  # for whom it is lost; `None`: for all
    fetch_ms: int = 0
    attempts: int = 0


class Incoming:
    """See the module. Times are those of the participant's monotonic clock."""

    def __init__(
        self,
        options: ParticipantOptions,
        turn: Turn,
        is_logged: Callable[[str], bool],
        hints: Hints,
    ) -> None:
        self._options = options
        self._turn = turn
        self._is_logged = is_logged
        self._hints = hints
        self._waiting: dict[str, Arrived] = {}
        self._bytes = 0
        self._dependents: dict[str, dict[str, None]] = {}
        self._shares = Shares()  # of what waits: in messages, bytes, and causes
        self._byte_shares, self._cause_shares = Shares(), Shares()
        self._missing: dict[str, _Missing] = {}
        self._noted = Shares()  # missing, and no message waits for it
        self._due: list[tuple[int, str]] = []
        self._deadlines: list[tuple[int, str]] = []  # of messages that wait, for what is missing
        self._to_fetch: dict[str, None] = {}
        self._lost: dict[str, _LostId] = {}
        self._lost_shares = Shares()
        self._lost_due: list[tuple[int, str]] = []
        self._sync_ids: OrderedDict[str, None] = OrderedDict()
        self._passed = Shares()  # skipped by delivered messages
        self._place = 0
        self._knots_ms = 0

    # ---- counts

    def counts(self) -> tuple[int, int, int]:
        """Messages that are missing, that wait, and that are lost: the first numbers of a `Status`."""
        return len(self._missing), len(self._waiting), len(self._lost)

    @property
    def has_none_waiting(self) -> bool:
        """Whether no message waits for its causes."""
        return not self._waiting

    @property
    def has_room(self) -> bool:
        """Whether one more message can wait without displacing another."""
        return (
            len(self._waiting) < self._options.waiting_max
            and self._bytes < self._options.waiting_bytes_max
            and len(self._missing) < self._options.missing_max
        )

    def waits(self, message_id: str) -> bool:
        """Whether this message waits for its causes."""
        return message_id in self._waiting

    def waiting_ids(self) -> list[str]:
        """The messages that wait for their causes."""
        return list(self._waiting)

    def waiting(self, message_id: str) -> Arrived | None:
        """A waiting message."""
        return self._waiting.get(message_id)

    # ---- arrival

    def causes(self, arrived: Arrived) -> bool:
        """Fill in `unmet` and `gap`; whether all causes are met."""
        message = arrived.message
        for entry in message.causal_history:
            cause = entry.message_id
            if self._is_logged(cause) or cause == message.message_id:
                continue
            if self._is_sync(cause, message):
                continue
            if self._is_lost_for(arrived.member, cause):
                if cause not in arrived.gap:
                    arrived.gap = (*arrived.gap, cause)
            else:
                arrived.unmet.add(cause)
        return not arrived.unmet

    def _is_lost_for(self, member: Member, cause: str) -> bool:
        lost = self._lost.get(cause)
        if lost is None or self._options.on_lost is OnLost.HOLD:
            return False
        return lost.account is None or lost.account == member[:2]

    def _is_sync(self, message_id: str, named_by: Message) -> bool:
        """Whether a message without a sender, as those of version 1 are, means a sync message by this ID.

        Anybody can send a sync message under the ID of content: whoever has a sender means the content.
        """
        return not named_by.sender_id and message_id in self._sync_ids

    def arrive(self, message_id: str) -> None:
        """The message is no longer missing or lost."""
        if message_id in self._missing:
            self._forget_missing(message_id)
        if message_id in self._lost:
            self._forget_lost(message_id)

    def _forget_lost(self, message_id: str) -> None:
        self._lost_shares.discard(message_id)
        self._to_fetch.pop(message_id, None)
        self._turn.delete(LOST + message_id)
        del self._lost[message_id]

    def learn_author(self, named: HistoryEntry) -> None:
        """A history names a message with its sender: if it is known without one, ask for it again.

        Only messages with a known author are repaired, and older dialects name none.
        """
        message_id = named.message_id
        known = self._missing.get(message_id) or self._lost.get(message_id)
        if known is None or known.entry.sender_id or not named.sender_id:
            return
        known.entry = _within_bounds(named)
        self._to_fetch[message_id] = None
        if isinstance(known, _LostId):
            self._save_lost(known)
        if message_id in self._passed:
            self._save_passed(known.entry)

    def passed(self, cause: str, member: Member) -> None:
        """A message of this member is delivered although it depends on this cause, which will be late."""
        if cause in self._passed:
            return
        known = self._missing.get(cause) or self._lost.get(cause)
        self._save_passed(HistoryEntry(cause) if known is None else known.entry)
        self._passed.add(cause, member)
        if len(self._passed) > self._options.lost_max:
            self._forget_passed(self._passed.first_to_go())

    def _save_passed(self, entry: HistoryEntry) -> None:
        self._place += 1
        record = pb.Forgone(
            place=self._place, retrieval_hint=entry.retrieval_hint, sender_id=entry.sender_id
        )
        self._turn.put(PASSED + entry.message_id, record)

    def is_late(self, message_id: str) -> bool:
        """Whether a message that depends on this one, which is delivered now, was delivered before."""
        if message_id not in self._passed:
            return False
        self._forget_passed(message_id)
        return True

    def _forget_passed(self, message_id: str) -> None:
        self._passed.discard(message_id)
        self._turn.delete(PASSED + message_id)

    def wait(self, arrived: Arrived, elapsed_ms: int, *, is_saved: bool = False) -> None:
        """Keep a message until its causes are met."""
        message = arrived.message
        message_id = message.message_id
        if arrived.since_ms is None:
            arrived.since_ms = elapsed_ms
        if self._options.on_lost is OnLost.DELIVER:
            self._set_deadline(arrived)
        self._waiting[message_id] = arrived
        self._bytes += len(arrived.frame)
        self._count(arrived)
        for entry in message.causal_history:
            cause = entry.message_id
            if cause in arrived.unmet:
                self._dependents.setdefault(cause, {})[message_id] = None
                if cause not in self._waiting:
                    self._miss(entry, elapsed_ms, arrived.member, message_id)
        if not is_saved:
            self._place += 1
            arrived.place = self._place
            self._save_waiting(arrived)

    def _save_waiting(self, arrived: Arrived) -> None:
        record = pb.Waiting(
            place=arrived.place,
            frame=arrived.frame,
            retrieval_hint=arrived.retrieval_hint,
        )
        self._turn.put(WAITING + arrived.message.message_id, record)

    def _count(self, arrived: Arrived) -> None:
        message_id, member = arrived.message.message_id, arrived.member
        self._shares.add(message_id, member)
        self._byte_shares.add(message_id, member, len(arrived.frame))
        self._cause_shares.add(message_id, member, len(arrived.unmet))

    def _uncount(self, message_id: str) -> None:
        for shares in (self._shares, self._byte_shares, self._cause_shares):
            shares.discard(message_id)

    def meet(self, sender_id: str) -> None:
        """A sender is no stranger any more: what waits of it counts against its own account."""
        for message_id in self._shares.keys_of_stranger(sender_id):
            arrived = self._waiting[message_id]
            self._uncount(message_id)
            arrived.member = Member(arrived.member.path, sender_id, sender_id)
            self._count(arrived)

    def _set_deadline(self, arrived: Arrived) -> None:
        heappush(self._deadlines, (self._deadline_ms(arrived), arrived.message.message_id))
        if len(self._deadlines) > 2 * len(self._waiting) + 64:  # mostly of messages that went on
            self._deadlines = [
                (self._deadline_ms(each), key) for key, each in self._waiting.items()
            ]
            heapify(self._deadlines)

    def _deadline_ms(self, arrived: Arrived) -> int:
        return (arrived.since_ms or 0) + self._options.lost_after_ms

    def note(self, sync: Message, elapsed_ms: int, member: Member) -> None:
        """A sync message names these messages."""
        for entry in sync.causal_history:
            message_id = entry.message_id
            if (
                message_id in self._missing
                or message_id in self._waiting
                or message_id in self._lost
                or self._is_sync(message_id, sync)
                or self._is_logged(message_id)
            ):
                continue
            self._miss(entry, elapsed_ms, member, sync.message_id)
            self._note(message_id, elapsed_ms)

    def _note(self, message_id: str, elapsed_ms: int) -> None:
        """No message waits for this missing one."""
        self._noted.add(message_id, self._missing[message_id].member)
        if len(self._noted) > self._options.noted_max:
            message_id = self._noted.first_to_go()
            if message_id in self._passed:
                self._lose(message_id, elapsed_ms)  # what is after a gap is not complete
            else:
                self._forget_missing(message_id)

    def note_sync(self, message_id: str) -> None:
        """The ID of a sync message without a sender: messages that name it do not wait for it."""
        if message_id in self._sync_ids:
            return
        self._sync_ids[message_id] = None
        self._place += 1
        self._turn.put(SYNC + message_id, pb.Forgone(place=self._place))
        if len(self._sync_ids) > self._options.sync_ids_max:
            oldest, _ = self._sync_ids.popitem(last=False)
            self._turn.delete(SYNC + oldest)

    def _miss(
        self, entry: HistoryEntry, elapsed_ms: int, member: Member, named_in: str = ""
    ) -> None:
        message_id, options = entry.message_id, self._options
        self._noted.discard(message_id)
        if (missing := self._missing.get(message_id)) is not None:
            self.learn_author(entry)
            if not missing.member.account:  # a stranger, who could have invented it
                missing.member, missing.named_in = member, named_in
            if options.on_lost is OnLost.DELIVER:
                missing.lost_ms = elapsed_ms + options.lost_after_ms
                self._set_due(message_id, missing)
            return
        if message_id in self._lost:  # for others, or under `OnLost.HOLD`
            self._forget_lost(message_id)
        missing = _Missing(
            _within_bounds(entry),
            member,
            named_in,
            elapsed_ms + options.lost_after_ms,
            elapsed_ms + options.fetch_retry_ms,
        )
        self._missing[message_id] = missing
        self._to_fetch[message_id] = None
        self._set_due(message_id, missing)

    def _set_due(self, message_id: str, missing: _Missing) -> None:
        heappush(self._due, (missing.due_ms, message_id))
        if len(self._due) > 2 * len(self._missing) + 64:  # mostly of messages that arrived
            self._due = [(each.due_ms, key) for key, each in self._missing.items()]
            heapify(self._due)

    # ---- release

    def take_dependents(self, cause: str, *, is_lost: bool = False) -> list[Arrived]:
        """The messages whose last unmet cause was this one; they wait no longer."""
        ready = []
        for message_id in self._dependents.pop(cause, ()):
            arrived = self._waiting[message_id]
            if is_lost:
                arrived.gap = (*arrived.gap, cause)
            arrived.unmet.discard(cause)
            if not arrived.unmet:
                ready.append(self._remove(message_id))
        return ready

    def met_as_sync(self, message_id: str) -> list[Arrived]:
        """A missing message is a sync message: what waits for it and has no sender does so no longer.

        Returns the messages whose last unmet cause it was.
        """
        if message_id not in self._missing:
            return []
        self.note_sync(message_id)
        waiting = self._dependents.get(message_id, {})
        ready = []
        for dependent in [each for each in waiting if not self._waiting[each].message.sender_id]:
            del waiting[dependent]
            arrived = self._waiting[dependent]
            arrived.unmet.discard(message_id)
            if not arrived.unmet:
                ready.append(self._remove(dependent))
        if not waiting:
            self._dependents.pop(message_id, None)
            self._forget_missing(message_id)
        return ready

    def take_after_gap(self, message_id: str, elapsed_ms: int) -> Arrived:
        """A waiting message, to be delivered although causes of it are unmet: they are its gap."""
        arrived = self._remove(message_id)
        for cause in sorted(arrived.unmet):
            arrived.gap = (*arrived.gap, cause)
            self._leave(cause, message_id)
            if cause in self._missing and cause not in self._dependents:
                self._note(cause, elapsed_ms)
        arrived.unmet.clear()
        return arrived

    def _leave(self, cause: str, message_id: str) -> None:
        """This message no longer waits for this cause."""
        others = self._dependents[cause]
        del others[message_id]
        if not others:
            del self._dependents[cause]

    def drop(self, message_id: str, elapsed_ms: int) -> None:
        """Forget a waiting message. Messages that depend on it miss it from now on."""
        arrived = self._remove(message_id)
        for cause in arrived.unmet:
            self._leave(cause, message_id)
            if cause in self._missing and cause not in self._dependents:
                if cause in self._passed:
                    self._note(cause, elapsed_ms)
                else:
                    self._forget_missing(cause)
        if message_id in self._dependents:
            hint, sender_id = arrived.retrieval_hint, arrived.message.sender_id
            self._miss(HistoryEntry(message_id, hint, sender_id), elapsed_ms, arrived.member)
            # Not at once: it would displace another one, which would be asked for and displace it.
            self._to_fetch.pop(message_id, None)

    def _forget_missing(self, message_id: str) -> None:
        """The message is not missing any more."""
        self._missing.pop(message_id, None)
        self._noted.discard(message_id)
        self._to_fetch.pop(message_id, None)

    def overflow(self) -> str | None:
        """The message to give way at the bounds."""
        options = self._options
        for shares, is_full in (
            (self._shares, len(self._waiting) > options.waiting_max),
            (self._byte_shares, self._bytes > options.waiting_bytes_max),
            (self._cause_shares, len(self._missing) - len(self._noted) > options.missing_max),
        ):
            if is_full:
                return shares.first_to_go()
        return None

    def _remove(self, message_id: str) -> Arrived:
        arrived = self._waiting.pop(message_id)
        self._bytes -= len(arrived.frame)
        self._uncount(message_id)
        self._turn.delete(WAITING + message_id)
        return arrived

    # ---- the sweep

    def lose(self, message_id: str, reason: str, elapsed_ms: int) -> bool:
        """No source has this missing message; its dependents are still to be released. False: it is not missing."""
        if message_id not in self._missing:
            return False
        self._lose(message_id, elapsed_ms, reason)
        return True

    def sweep(self, elapsed_ms: int) -> list[Arrived]:
        """Ask again for what is missing and lost. Returns messages that have waited for long enough: what was
        missing is their gap. They wait no longer."""
        options = self._options
        ready = self._take_impatient(elapsed_ms)
        due = self._due
        while due and due[0][0] <= elapsed_ms:
            due_ms, message_id = heappop(due)
            missing = self._missing.get(message_id)
            if missing is None or due_ms != missing.due_ms:
                continue  # it arrived since
            if missing.lost_ms <= elapsed_ms:
                self._lose(message_id, elapsed_ms)
                continue
            self._to_fetch[message_id] = None
            pause_ms = options.fetch_retry_ms << min(missing.attempts, 32)
            missing.attempts += 1
            missing.fetch_ms = elapsed_ms + min(pause_ms, options.fetch_retry_ms_max)
            heappush(due, (missing.due_ms, message_id))
        self._retry_lost(elapsed_ms)
        return ready

    def _take_impatient(self, elapsed_ms: int) -> list[Arrived]:
        ready, deadlines = [], self._deadlines
        while deadlines and deadlines[0][0] <= elapsed_ms:
            deadline_ms, message_id = heappop(deadlines)
            arrived = self._waiting.get(message_id)
            if arrived is None or self._deadline_ms(arrived) != deadline_ms:
                continue
            for cause in sorted(arrived.unmet & self._missing.keys()):
                arrived.gap = (*arrived.gap, cause)
                arrived.unmet.discard(cause)
                self._leave(cause, message_id)
            if not arrived.unmet:
                ready.append(self._remove(message_id))
        return ready

    def _retry_lost(self, elapsed_ms: int) -> None:
        count = 0
        due = self._lost_due
        while due and due[0][0] <= elapsed_ms and count < self._options.fetches_per_effect:
            due_ms, message_id = heappop(due)
            lost = self._lost.get(message_id)
            if lost is None or lost.fetch_ms != due_ms:
                continue
            count += 1
            self._to_fetch[message_id] = None
            lost.attempts += 1
            self._schedule_lost(message_id, lost, elapsed_ms)

    def _schedule_lost(self, message_id: str, lost: _LostId, elapsed_ms: int) -> None:
        lost.fetch_ms = elapsed_ms + (self._options.lost_retry_ms << min(lost.attempts, 32))
        heappush(self._lost_due, (lost.fetch_ms, message_id))
        if len(self._lost_due) > 2 * len(self._lost) + 64:  # mostly of messages that arrived
            self._lost_due = [(each.fetch_ms, key) for key, each in self._lost.items()]
            heapify(self._lost_due)

    def knots(self, elapsed_ms: int) -> list[str]:
        """Messages that wait for each other in a circle, or behind one, in log order.

        Nothing that they depend on is missing, so nothing can arrive that would release them.
        """
        if elapsed_ms < self._knots_ms or self._options.on_lost is OnLost.HOLD:
            return []
        self._knots_ms = elapsed_ms + self._options.lost_after_ms
        hopeful = set(self._missing)
        found = list(hopeful)
        while found:
            for message_id in self._dependents.get(found.pop(), ()):
                if message_id not in hopeful:
                    hopeful.add(message_id)
                    found.append(message_id)
        deadline_ms = elapsed_ms - self._options.lost_after_ms
        stuck = [
            each
            for message_id, each in self._waiting.items()
            if message_id not in hopeful and (each.since_ms or 0) <= deadline_ms
        ]
        return [each.message.message_id for each in sorted(stuck, key=lambda each: each.order)]

    def fetches(self) -> list[Missing]:
        """What to ask for now, in effects of at most `fetches_per_effect` messages."""
        if not self._to_fetch:
            return []
        ids = list(self._to_fetch)
        self._to_fetch.clear()
        count = self._options.fetches_per_effect
        return [
            Missing(tuple(e for each in ids[start : start + count] for e in self._entries(each)))
            for start in range(0, len(ids), count)
        ]

    def _entries(self, message_id: str) -> list[HistoryEntry]:
        """One entry for each known hint, or one without."""
        known = self._missing.get(message_id) or self._lost[message_id]
        entry = known.entry
        hints = self._hints.of(message_id) or (entry.retrieval_hint,)
        return [HistoryEntry(message_id, hint, entry.sender_id) for hint in hints]

    def _lose(self, message_id: str, elapsed_ms: int, reason: str = "") -> None:
        missing = self._missing[message_id]
        entry, member = missing.entry, missing.member
        self._forget_missing(message_id)
        self._place += 1
        account = None if reason else member[:2]
        self._lost[message_id] = lost = _LostId(entry, self._place, account)
        self._schedule_lost(message_id, lost, elapsed_ms)
        self._save_lost(lost)
        self._turn.effects.append(Lost(message_id, reason))
        self._lost_shares.add(message_id, member)
        if len(self._lost) > self._options.lost_max:
            self._forget_lost(self._lost_shares.first_to_go())

    def named_by(self, message_id: str) -> Member:
        """The member whose message named this one that is missing, or lost; of a missing one, with that message."""
        if (missing := self._missing.get(message_id)) is not None:
            return missing.member.naming(missing.named_in)
        member = self._lost_shares.member(message_id)
        # A restart forgets who named what is lost. All of it together would wait behind the ghosts among it.
        return member if member != NOBODY else member.naming(self._lost[message_id].entry.sender_id)

    def _save_lost(self, lost: _LostId) -> None:
        entry = lost.entry
        record = pb.Forgone(
            place=lost.place,
            retrieval_hint=entry.retrieval_hint,
            sender_id=entry.sender_id,
        )
        self._turn.put(LOST + entry.message_id, record)

    # ---- restore

    def restore(self, saved: SavedState) -> None:
        """The saved state but for messages that wait; those follow with `wait`.

        Nothing says any more for whom a message was lost, so it counts against strangers.
        """
        for message_id, record in saved.lost.items():
            entry = HistoryEntry(message_id, record.retrieval_hint, record.sender_id)
            self._lost[message_id] = lost = _LostId(entry, record.place, NOBODY[:2])
            self._lost_shares.add(message_id, NOBODY)
            self._schedule_lost(message_id, lost, elapsed_ms=0)
        for message_id in saved.passed:
            self._passed.add(message_id, NOBODY)
        self._sync_ids.update(dict.fromkeys(saved.sync))
        kinds = (saved.waiting, saved.lost, saved.passed, saved.sync)
        self._place = max((each.place for kind in kinds for each in kind.values()), default=0)

    def restored(self, saved: SavedState) -> None:
        """All messages that wait are restored: what delivered ones skipped is missing as before."""
        known = (self._waiting, self._lost, self._missing)
        for message_id, record in saved.passed.items():
            entry = HistoryEntry(message_id, record.retrieval_hint, record.sender_id)
            self.learn_author(entry)
            if not any(message_id in each for each in known) and not self._is_logged(message_id):
                self._miss(entry, 0, NOBODY)
                self._note(message_id, 0)
