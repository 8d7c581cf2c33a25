"""What our messages can refer to: the newest messages, the heads, and retrieval hints.

The causal history of a message holds the newest `history_size` messages of the log, and the heads: the
logged messages that no logged message refers to with their sender. With the newest alone, a message that was written at
the same time as others can be referred to by nobody; whoever misses it would never know.

After a restart the heads are found among the newest messages of the log. A head that may be older than
those is saved in the state.

In ordered mode (`ParticipantOptions.ordered`) the order of a channel reads our messages: rule 5 of
`sdstore.ordering`. A content message names our own previous one, first, and then every message that our view
lacks, and these are the heads. Our view is what our messages name, and what other indexers' messages
name that are in it. An indexer's message is named only if the log has everything that its view contains: it
may name what nobody can get, which stops its own messages and then ours too.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Iterable
from heapq import nsmallest

from sdstore.sds.model import Dialect, HistoryEntry, Message, is_disproved
from sdstore.sds.options import ParticipantOptions
from sdstore.sds.state import HEAD, Turn
from sdstore.wire import participant_pb2 as pb

RECENT_MAX = 8_192
"""Logged IDs remembered to spare questions to the log, 1 MB: the span over which messages arrive out of
order, or again."""

HEADS_UNSAVED_COUNT = 128
"""Logged messages after which a head is saved; until then a restart finds it among the newest messages."""

ORDERED_HEADS_MAX = 20_000
"""`heads_max` in ordered mode, 6 MB: a message that is forgotten never enters the order through us. Whoever comes
back names 255 of them with each message of its own."""

PARTIAL_MAX = 1_000
"""Indexers' messages remembered whose view the log lacks a part of, and copies that their IDs disprove. The oldest is forgotten, and never named."""

HINT_BYTES_MAX = 256
"""Longer hints of others are not remembered. It is the bound of a store; Waku's hints have 32 bytes."""


class Hints:
    """Retrieval hints by message ID, those learned from our transport first."""

    def __init__(self, options: ParticipantOptions) -> None:
        self._ids_max = options.hints_max
        self._per_message_max = options.hints_per_message
        self._hints: OrderedDict[str, tuple[bytes, ...]] = OrderedDict()

    def learn(self, message_id: str, hint: bytes, *, is_ours: bool = False) -> None:
        """A hint from our transport (`is_ours`), or from somebody's causal history."""
        known = self._hints.get(message_id, ())
        if hint in known or len(hint) > HINT_BYTES_MAX:
            return
        hints = (hint, *known) if is_ours else (*known, hint)
        self._hints[message_id] = hints[: self._per_message_max]
        if len(self._hints) > self._ids_max:
            self._hints.popitem(last=False)

    def of(self, message_id: str) -> tuple[bytes, ...]:
        """The known hints, the best first."""
        return self._hints.get(message_id, ())

    def best(self, message_id: str) -> bytes:
        """One hint, empty if unknown."""
        hints = self._hints.get(message_id)
        return hints[0] if hints else b""


def fingerprint(message: Message) -> int:
    """Equal for copies of a message; different, but for 1 in 2^64, for others with the same ID."""
    sender_id, lamport = message.sender_id, message.lamport_timestamp
    return hash((sender_id, lamport, message.content, message.causal_history))


_Place = tuple[int, bytes, HistoryEntry]


class References:
    """The newest messages among those whose Lamport timestamp our clock has reached, and the heads."""

    def __init__(
        self, options: ParticipantOptions, hints: Hints, sender_id: str, turn: Turn
    ) -> None:
        self._options = options
        self._hints = hints
        self._sender_id = sender_id
        self._turn = turn
        self._own_newest: _Place | None = None  # in ordered mode
        # In ordered mode: indexers' messages, and those of their causes that are missing or partial. A copy that
        # its ID disproves lacks the message of that ID.
        self._partial: OrderedDict[str, tuple[Message, _Place, set[str]]] = OrderedDict()
        self._newest: list[_Place] = []
        self._heads: dict[str, _Place] = {}
        self._saved_heads: set[str] = set()
        self._young: deque[str] = deque()  # the last `HEADS_UNSAVED_COUNT` logged messages
        self._next_head = 0  # where the next sync message continues with the heads
        self.recent: OrderedDict[str, int] = OrderedDict()  # IDs, and fingerprints of the messages

    def logged(
        self,
        message: Message,
        hint: bytes,
        *,
        is_head: bool = True,
        is_reached: bool = True,
        gap: Iterable[str] = (),
    ) -> None:
        """A message of the log. `is_head`: no logged message refers to it; `is_reached`: our clock
        followed its timestamp; `gap`: those of its causes that the log lacks."""
        message_id, recent, heads = message.message_id, self.recent, self._heads
        recent[message_id] = fingerprint(message)
        if len(recent) > RECENT_MAX:
            recent.popitem(last=False)
        place = (
            message.lamport_timestamp or 0,
            message_id.encode(),
            HistoryEntry(message_id, hint, message.sender_id),
        )
        if is_reached:
            self._reach(place)
        if self._options.ordered:
            self._logged_in_order(message, place, gap)
            is_head = message_id in heads
        else:
            self._name(message)
            if is_head:
                heads[message_id] = place
        if is_head:
            if not is_reached or (self._newest and place < self._newest[0]):
                self._save(place)  # many messages of the log can be newer
            if len(heads) > self._heads_max:
                self._drop_heads()
        self._grow_old(message_id)

    def superseded(self, message_id: str) -> bool:
        """Forget a logged message, because another one takes its place; whether it was a head."""
        self._newest = [place for place in self._newest if _id(place) != message_id]
        self._unsave(message_id)
        self._partial.pop(message_id, None)
        return self._heads.pop(message_id, None) is not None

    def is_head_again(self, message: Message, hint: bytes) -> None:
        """The logged message that named this one is gone."""
        self.restore(message, hint)
        self._turn.put(HEAD + message.message_id, pb.Head(retrieval_hint=hint))
        if len(self._heads) > self._heads_max:
            self._drop_heads()

    def use(self, options: ParticipantOptions) -> None:
        """Other options: of messages logged from now on."""
        self._options = options

    @property
    def own_newest_id(self) -> str | None:
        """In ordered mode our last message, which the next one names first."""
        return None if self._own_newest is None else _id(self._own_newest)

    @property
    def _heads_max(self) -> int:
        heads_max = self._options.heads_max
        return max(heads_max, ORDERED_HEADS_MAX) if self._options.ordered else heads_max

    def _name(self, message: Message) -> None:
        """Messages that a message names are no longer heads."""
        for entry in message.causal_history:
            head = self._heads.get(entry.message_id)
            if head is not None and (entry.sender_id or not self._can_name_author(head)):
                del self._heads[entry.message_id]
                self._unsave(entry.message_id)

    def _logged_in_order(self, message: Message, place: _Place, gap: Iterable[str]) -> None:
        """A message of the log in ordered mode: a head is what our view lacks and our next message can name."""
        open_ = [(message, place, set(gap))]
        while open_:
            message, place, lacks = open_.pop()
            is_own = message.sender_id == self._sender_id
            if is_disproved(message):  # the order ignores it, and waits for the message of this ID
                self._put_partial(message, place, {message.message_id})
                continue
            if message.sender_id in self._options.indexers and not is_own:
                lacks |= {e.message_id for e in message.causal_history if self._is_partial(e)}
                if lacks:
                    self._put_partial(message, place, lacks)
                    continue
                self._name(message)
            if is_own:
                self._name(message)
            else:
                self._heads[message.message_id] = place
            for message_id in [e for e, p in self._partial.items() if message.message_id in p[2]]:
                partial = self._partial[message_id]
                partial[2].remove(message.message_id)
                if not partial[2]:
                    del self._partial[message_id]
                    open_.append(partial)

    def _put_partial(self, message: Message, place: _Place, lacks: set[str]) -> None:
        self._partial[message.message_id] = message, place, lacks
        if len(self._partial) > PARTIAL_MAX:
            self._partial.popitem(last=False)

    def _is_partial(self, entry: HistoryEntry) -> bool:
        return entry.message_id in self._partial

    def _can_name_author(self, head: _Place) -> bool:
        """Whether our next message says more of a head than its ID: without an author, nobody repairs it."""
        return bool(head[2].sender_id) and self._options.dialect is not Dialect.V1

    def _reach(self, place: _Place) -> None:
        if self._options.ordered and place[2].sender_id == self._sender_id:
            self._own(place)
        newest = self._newest
        if newest and place < newest[-1]:
            insort(newest, place, key=_order)
        else:
            newest.append(place)
        if len(newest) > self._options.history_size:
            del newest[0]

    def _grow_old(self, message_id: str) -> None:
        """One more message is logged: a head that has waited for long is saved."""
        young = self._young
        young.append(message_id)
        if len(young) > HEADS_UNSAVED_COUNT and (old := self._heads.get(young.popleft())):
            self._save(old)

    def restore(self, message: Message, hint: bytes) -> None:
        """A saved head, which the log has. The newest messages of the log follow with `logged`."""
        message_id = message.message_id
        place = (
            message.lamport_timestamp or 0,
            message_id.encode(),
            HistoryEntry(message_id, hint, message.sender_id),
        )
        self._heads[message_id] = place
        self._saved_heads.add(message_id)

    def _save(self, head: _Place) -> None:
        message_id = _id(head)
        if message_id not in self._saved_heads:
            self._saved_heads.add(message_id)
            self._turn.put(HEAD + message_id, pb.Head(retrieval_hint=head[2].retrieval_hint))

    def _unsave(self, message_id: str) -> None:
        if message_id in self._saved_heads:
            self._saved_heads.remove(message_id)
            self._turn.delete(HEAD + message_id)

    def sent_before(self, message_id: str, lamport: int) -> None:
        """The last content message that we sent before a restart; the log can have lost it."""
        if self._options.ordered:
            entry = HistoryEntry(message_id, b"", self._sender_id)
            self._own((lamport, message_id.encode(), entry))

    def _own(self, place: _Place) -> None:
        """The newest of our own counts, also one that comes back from others after a loss of the log."""
        if self._own_newest is None or self._own_newest[:2] < place[:2]:
            self._own_newest = place

    def forget(self, rejected: Message, causes: Iterable[Message]) -> None:
        """Never name this message of ours again. Its logged `causes` are heads instead: nobody else may
        name them."""
        message_id = rejected.message_id
        self._newest = [place for place in self._newest if _id(place) != message_id]
        if self._heads.pop(message_id, None):
            self._unsave(message_id)
        for cause in causes:
            self.restore(cause, self._hints.best(cause.message_id))
            self._turn.put(HEAD + cause.message_id, pb.Head())

    def _drop_heads(self) -> None:
        """Forget a tenth of the heads: those beyond our clock first, then the oldest. A tenth at once,
        because the search for one of them takes as long."""
        reached = self._newest[-1][0] if self._newest else 0
        in_turn = sorted(self._heads.items(), key=lambda head: (head[1][0] <= reached, head[1][:2]))
        for message_id, _ in in_turn[: len(in_turn) // 10 + 1]:
            del self._heads[message_id]
            self._unsave(message_id)

    def are_named(self, history: Iterable[HistoryEntry]) -> bool:
        """Whether a causal history names all our heads."""
        return self._heads.keys() <= {entry.message_id for entry in history}

    def causal_history(self, *, is_sync: bool = False) -> tuple[HistoryEntry, ...]:
        """The entries for our next message, in log order; our own previous message first in ordered mode, then
        all heads, as many as a history can hold.

        Every head has its turn. Content becomes the successor of the heads that it names, so it names the
        oldest ones. A sync message does not, so it names those after the ones of the last sync message.
        """
        heads, newest = self._heads, self._newest
        own = self._own_newest
        if self._options.ordered and not is_sync:
            room = self._options.history_read_max - 1
            chosen = [] if own is None else [own]
            chosen += nsmallest(room, heads.values(), key=_order)
            return tuple(self._entry(place[2]) for place in chosen)
        room = self._options.history_max - len(newest)
        if not heads or (len(heads) == 1 and newest and next(iter(heads)) == _id(newest[-1])):
            chosen = newest
        else:
            named = {_id(place) for place in newest}
            others = [place for message_id, place in heads.items() if message_id not in named]
            if is_sync and len(others) > room:
                others.sort(key=_order)
                start = self._next_head % len(others)
                turn = (others + others)[start : start + room]
                self._next_head = start + room
            else:
                turn = nsmallest(room, others, key=_order)
            chosen = sorted(turn + newest, key=_order)
        return tuple(self._entry(place[2]) for place in chosen)

    def _entry(self, entry: HistoryEntry) -> HistoryEntry:
        if entry.retrieval_hint or not (hint := self._hints.best(entry.message_id)):
            return entry
        return HistoryEntry(entry.message_id, hint, entry.sender_id)


def _order(place: _Place) -> tuple[int, bytes]:
    return place[:2]


def _id(place: _Place) -> str:
    return place[2].message_id
