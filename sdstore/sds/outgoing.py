"""Our messages: which of them others have, and when to broadcast them again.

A message is unacknowledged, possibly acknowledged, acknowledged or given up:

- A received causal history that names it proves that its author has it: acknowledged.
- A received bloom filter that contains it makes it possibly acknowledged. Several distinct filters
  make it acknowledged when the probability that all of them contain it by chance is small enough.

That probability is computed from the filters as they are. A filter of m bits with a share f set
contains an ID that was never added with probability f^k. Two filters are not independent: they are
the same functions of nearly the same IDs, and what the first contains by chance, the second mostly
contains as well. If both have a share o of the first one's bits in common, the second one repeats the
first one's error with probability o^k. For equal filters this is 1, so the second proves nothing.
Errors that come from IDs with like steps (`ReceivedFilter.coincidence`) repeat in all filters, so they
bound the probability from below; and an ID of fewer than k bits is never acknowledged by filters.
A filter whose f^k is above `filter_fp_max` is (nearly) saturated and ignored.

A message that all stores refuse is rejected: it is not broadcast again, and can still be acknowledged by
those who got it by another way.

The table holds the newest `sent_max` messages, acknowledged or not. Frames stay in the log.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import islice

from sdstore.sds.bloom import Form, Pair, ReceivedFilter, hash_pair, read_filter
from sdstore.sds.effects import Acknowledged, GaveUp, PossiblyAcknowledged, StoredRemotely
from sdstore.sds.model import HistoryEntry, Message
from sdstore.sds.options import ParticipantOptions
from sdstore.sds.state import SENT, Turn
from sdstore.wire import participant_pb2 as pb

FILTERS_PER_MESSAGE = 3
"""Received filters kept for a possibly acknowledged message, to measure what they have in common. They
are shared by the messages that they contain."""

FILTERS_KEPT = 64
"""Received filters kept in all, 2.4 MB in the default size. Without a kept one to
compare with, the next filter adds no grounds, unless it is better alone."""


class Acknowledgement(enum.IntEnum):
    """What is known about the receipt of a message of ours. The numbers are saved."""

    UNACKNOWLEDGED = 0
    POSSIBLY = 1
    ACKNOWLEDGED = 2
    GIVEN_UP = 3


@dataclass(frozen=True, slots=True)
class SentState:
    """What is known about a message of ours. `is_stored`: a store said that it has the message;
    `is_rejected`: all stores refused it."""

    acknowledgement: Acknowledgement
    is_stored: bool
    is_rejected: bool = False


@dataclass(slots=True)
class _Sent:
    place: int
    acknowledgement: Acknowledgement = Acknowledgement.UNACKNOWLEDGED
    is_stored: bool = False
    is_rejected: bool = False
    attempts: int = 1
    due_ms: int = 0
    pair: Pair | None = None
    chance: float = 1.0  # that all filters that contained it did so by chance
    filters: tuple[int, ...] = ()  # keys of the last filters that contain it
    is_in_several: bool = False


@dataclass
class _Seen:
    sender_id: str
    message_id: str  # of the last message that brought it
    filter: ReceivedFilter

    @cached_property
    def bits(self) -> int:
        return int.from_bytes(self.filter.words)

    @cached_property
    def bits_set(self) -> int:
        return self.bits.bit_count()


class Outgoing:
    """See the module. Times are those of the participant's monotonic clock."""

    def __init__(self, options: ParticipantOptions, turn: Turn) -> None:
        self._options = options
        self._turn = turn
        self._sent: OrderedDict[str, _Sent] = OrderedDict()
        self._active: OrderedDict[str, _Sent] = OrderedDict()
        self._unstored: set[str] = set()  # not acknowledged, also given up
        self._rejected: set[str] = set()  # of the active ones
        self._due: list[tuple[int, int, str]] = []
        self._seen: OrderedDict[int, _Seen] = OrderedDict()
        self._seen_count = 0
        self._record = pb.Sent()  # made once, written for each message
        self.sent_count = 0

    @property
    def unacknowledged_count(self) -> int:
        """Messages that are neither acknowledged nor given up nor rejected."""
        return len(self._active) - len(self._rejected)

    @property
    def unstored_count(self) -> int:
        """Unacknowledged messages that no store has yet, also given up ones."""
        return len(self._unstored)

    @property
    def rejected_count(self) -> int:
        """Unacknowledged messages that all stores refused."""
        return len(self._rejected)

    @property
    def newest(self) -> str | None:
        """The ID of the last message of ours."""
        return next(reversed(self._sent), None)

    def __contains__(self, message_id: str) -> bool:
        """Whether this is one of the newest `sent_max` messages of ours."""
        return message_id in self._sent

    def state(self, message_id: str) -> SentState | None:
        """`None` for a message that is not one of the newest `sent_max`."""
        sent = self._sent.get(message_id)
        if sent is None:
            return None
        return SentState(sent.acknowledgement, sent.is_stored, sent.is_rejected)

    def is_rejected(self, message_id: str) -> bool:
        """Whether all stores refused this message of ours."""
        sent = self._sent.get(message_id)
        return sent is not None and sent.is_rejected

    def add(self, message_id: str, elapsed_ms: int) -> None:
        """A message that is broadcast now for the first time."""
        self.sent_count += 1
        sent = _Sent(self.sent_count)
        self._sent[message_id] = self._active[message_id] = sent
        self._unstored.add(message_id)
        self._schedule(message_id, sent, elapsed_ms)
        self._save(message_id, sent)
        while len(self._sent) > self._options.sent_max:
            oldest_id, oldest = self._sent.popitem(last=False)
            was_active = self._end(oldest_id)
            self._unstored.discard(oldest_id)
            if was_active and not oldest.is_rejected:
                oldest.acknowledgement = Acknowledgement.GIVEN_UP
                self._turn.effects.append(GaveUp(oldest_id))
            self._turn.delete(SENT + oldest_id)

    def restore(self, message_id: str, saved: pb.Sent, elapsed_ms: int) -> None:
        """A message from the saved state, in the order of places."""
        sent = _Sent(saved.place, Acknowledgement(saved.acknowledgement), saved.is_stored)
        sent.is_rejected = saved.is_rejected
        sent.attempts = saved.attempts
        self._sent[message_id] = sent
        self.sent_count = max(self.sent_count, saved.place)
        if sent.acknowledgement <= Acknowledgement.POSSIBLY:
            self._active[message_id] = sent
            if sent.is_rejected:
                self._rejected.add(message_id)
                return
            self._schedule(message_id, sent, elapsed_ms)
        if not sent.is_stored and sent.acknowledgement is not Acknowledgement.ACKNOWLEDGED:
            self._unstored.add(message_id)

    def _end(self, message_id: str) -> bool:
        """The message is not active any more; whether it was."""
        self._rejected.discard(message_id)
        return self._active.pop(message_id, None) is not None

    # ---- review of acknowledgements

    def review_history(self, history: Iterable[HistoryEntry]) -> None:
        """Another participant's message names these as its causes."""
        if not self._active:
            return
        for entry in history:
            if (sent := self._active.get(entry.message_id)) is not None:
                self._acknowledge(entry.message_id, sent)

    def review_filter(self, message: Message, elapsed_ms: int) -> None:
        """Another participant's message may carry a filter."""
        data = message.bloom_filter
        if not data or not self._active:
            return
        options = self._options
        received = read_filter(data, options.bloom_capacity, options.bloom_error_rate)
        if received is None:
            return
        hits = [
            (message_id, sent)
            for message_id, sent in self._window()
            if received.contains(self._pair(message_id, sent, received.form))
        ]
        if not hits or received.false_positive_rate > options.filter_fp_max:
            return
        key, is_again = self._keep(message, received)
        if is_again:
            return
        repeats: dict[int, float] = {}  # how much of an earlier filter's error this one repeats
        for message_id, sent in hits:
            self._found_in(message_id, sent, key, repeats)
            if sent.chance <= options.acknowledged_fp_max and sent.is_in_several:
                self._acknowledge(message_id, sent)
            elif sent.acknowledgement is Acknowledgement.UNACKNOWLEDGED:
                sent.acknowledgement = Acknowledgement.POSSIBLY
                self._turn.effects.append(PossiblyAcknowledged(message_id))
                self._schedule(message_id, sent, elapsed_ms)
                self._save(message_id, sent)

    def _window(self) -> list[tuple[str, _Sent]]:
        """The active messages to look up now; those that waited longest if there are many."""
        count = self._options.reviewed_per_filter
        window = list(islice(self._active.items(), count))
        if len(self._active) > count:
            for message_id, _ in window:
                self._active.move_to_end(message_id)
        return window

    def _pair(self, message_id: str, sent: _Sent, form: Form) -> Pair:
        if form is not Form.JS:
            return hash_pair(message_id, form)
        if sent.pair is None:
            sent.pair = hash_pair(message_id, form)
        return sent.pair

    def _keep(self, message: Message, received: ReceivedFilter) -> tuple[int, bool]:
        """The key of a received filter, the same one if its sender repeats it; and whether this very
        message was the last one to bring it."""
        for key, seen in self._seen.items():
            if seen.sender_id == message.sender_id and seen.filter.words == received.words:
                is_again = seen.message_id == message.message_id
                seen.message_id = message.message_id
                return key, is_again
        self._seen_count += 1
        self._seen[self._seen_count] = _Seen(message.sender_id, message.message_id, received)
        if len(self._seen) > FILTERS_KEPT:
            self._seen.popitem(last=False)
        return self._seen_count, False

    def _found_in(self, message_id: str, sent: _Sent, key: int, repeats: dict[int, float]) -> None:
        """One more filter contains the message: what is the chance now that all of them are wrong?"""
        received = self._seen[key]
        rate = received.filter.false_positive_rate
        if key in sent.filters:
            return  # in a later message: no new grounds
        sent.is_in_several = bool(sent.filters)
        kept = [each for each in sent.filters if each in self._seen]
        if sent.chance <= self._options.acknowledged_fp_max:
            pass  # small enough without this one
        elif not kept:
            sent.chance = min(sent.chance, rate)  # nothing to compare with: the better one alone
        else:
            for each in kept:
                if each not in repeats:
                    repeats[each] = _repeats_error(self._seen[each], received)
            sent.chance = min(sent.chance * max(repeats[each] for each in kept), rate)
        # What does not come from the share of bits repeats in all filters, or is an ID of few bits.
        pair = self._pair(message_id, sent, received.filter.form)
        is_usual = received.filter.distinct_bits(pair) == received.filter.hash_count
        sent.chance = max(sent.chance, received.filter.coincidence if is_usual else 1.0)
        sent.filters = (*sent.filters, key)[-FILTERS_PER_MESSAGE:]

    def _acknowledge(self, message_id: str, sent: _Sent) -> None:
        self._end(message_id)
        self._unstored.discard(message_id)
        sent.acknowledgement = Acknowledgement.ACKNOWLEDGED
        sent.pair, sent.filters = None, ()
        self._turn.effects.append(Acknowledged(message_id))
        self._save(message_id, sent)

    def store(self, message_id: str, elapsed_ms: int) -> None:
        """A store has the message."""
        sent = self._sent.get(message_id)
        if sent is None or sent.is_stored:
            return
        sent.is_stored = True
        self._unstored.discard(message_id)
        self._turn.effects.append(StoredRemotely(message_id))
        if message_id in self._active:
            self._schedule(message_id, sent, elapsed_ms)
        self._save(message_id, sent)

    def reject(self, message_id: str) -> bool:
        """All stores refuse the message; False for one that is stored, rejected or unknown."""
        sent = self._sent.get(message_id)
        if sent is None or sent.is_stored or sent.is_rejected:
            return False
        sent.is_rejected = True
        if message_id in self._active:
            self._unstored.discard(message_id)
            self._rejected.add(message_id)
        self._save(message_id, sent)
        return True

    # ---- the sweep

    def due(self, elapsed_ms: int) -> Iterator[str]:
        """IDs to broadcast again now. Messages at the end of their attempts are given up on the way."""
        count = 0
        while (
            self._due and self._due[0][0] <= elapsed_ms and count < self._options.resends_per_tick
        ):
            due_ms, _, message_id = heappop(self._due)
            sent = self._active.get(message_id)
            if sent is None or sent.is_rejected or sent.due_ms != due_ms:
                continue  # acknowledged, rejected or scheduled anew since
            if sent.attempts >= self._options.attempts_max:
                self.give_up(message_id)
                continue
            count += 1
            sent.attempts += 1
            self._schedule(message_id, sent, elapsed_ms)
            self._save(message_id, sent)
            yield message_id

    def give_up(self, message_id: str) -> None:
        """Stop broadcasting the message."""
        self._end(message_id)
        sent = self._sent[message_id]
        sent.acknowledgement = Acknowledgement.GIVEN_UP
        self._turn.effects.append(GaveUp(message_id))
        self._save(message_id, sent)

    def _schedule(self, message_id: str, sent: _Sent, elapsed_ms: int) -> None:
        """The next broadcast: pauses double, and are longer where receipt is likely."""
        if sent.is_rejected:
            return
        options = self._options
        is_likely = sent.is_stored or sent.acknowledgement is Acknowledgement.POSSIBLY
        first_ms = options.resend_possibly_ms if is_likely else options.resend_ms
        pause_ms = min(first_ms << min(sent.attempts - 1, 32), options.resend_ms_max)
        sent.due_ms = elapsed_ms + pause_ms
        heappush(self._due, (sent.due_ms, sent.place, message_id))
        if len(self._due) > 2 * len(self._active) + 1_000:  # mostly of acknowledged messages
            self._due = [(each.due_ms, each.place, key) for key, each in self._active.items()]
            heapify(self._due)

    def _save(self, message_id: str, sent: _Sent) -> None:
        record = self._record
        record.place = sent.place
        record.acknowledgement = sent.acknowledgement
        record.is_stored = sent.is_stored
        record.is_rejected = sent.is_rejected
        record.attempts = sent.attempts
        self._turn.put(SENT + message_id, record)


def _repeats_error(first: _Seen, second: _Seen) -> float:
    """The probability that `second` contains by chance an ID that `first` contains by chance."""
    one, other = first.filter, second.filter
    if (one.form, one.bit_count) != (other.form, other.bit_count):
        return other.false_positive_rate  # other hashes, or other remainders: independent
    common = (first.bits & second.bits).bit_count() / first.bits_set  # a filter that hit has bits
    return float(common ** min(one.hash_count, other.hash_count))
