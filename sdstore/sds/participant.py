"""An SDS participant of one channel: frames, content and time in, effects out. No I/O, no clock.

Rules, one per line (the specification's words; tests/sds/specification.md names the test of each):

- sending: the Lamport clock becomes max(now, clock + 1); the message refers to the newest messages and
  the heads of the log; it carries the bloom filter as it was before; it enters the log, and the
  table of our messages, as unacknowledged;
- receiving: first the acknowledgements of our messages are reviewed; then a message with content
  enters the filter; it is delivered if its causes are met, and waits otherwise;
- delivering: the clock becomes max(clock, timestamp), the message enters the log, and messages that
  waited for it alone are delivered at once, in log order: (Lamport timestamp, message ID as bytes);
- a sync message is reviewed like any other, shows what is missing, and is forgotten;
- an ephemeral message is passed on, and nothing else;
- `tick` broadcasts unacknowledged messages again, asks for missing ones, gives up on lost ones, and
  sends sync messages.

Theory of operation. Every method returns the effects of its call, in the order in which to carry them
out. A `Save` comes first and holds the changes of the state; what is appended to the log is written in
the same transaction. Nothing is broadcast or delivered before it is saved, so a crash between two effects
repeats effects and loses none. What the participant knows is in three places:

- the log: every message sent or delivered, with the numbers of the deliveries;
- the state: messages that wait, our messages and their acknowledgement, lost IDs, old heads, the clock,
  and the last confirmed delivery;
- memory: all else (bloom filter, newest heads, missing IDs, time-outs), which `restore` makes anew from both.

Deliveries have numbers 1, 2, 3 and so on. At most `deliveries_max` are with the application and not
confirmed; later ones wait in the log. A restored participant delivers again what was not confirmed, with
the same numbers, so an application that stores the number with its work handles each message once.

Causal order: a message is delivered after all causes that it names, except those that are lost, which it
then carries in `after_gap`. Log order equals causal order as long as timestamps grow along references.
A timestamp that is more than `clock_ahead_ms` ahead does not move our clock; such a message is delivered
and logged as it was sent, and our messages refer to it as long as no other does, so that whoever lacks it
learns of it. Log order differs from causal order there.

Time. `now_ms` is wall-clock time, and enters Lamport timestamps only. Time-outs count the time between
calls, which is never negative and at most `clock_step_max_ms`: a clock that is set back stops no
time-out, and one that is set forward does not end them all.

No method raises for bytes of others. What is ignored is counted by reason in `ignored`. Arguments of a
wrong type raise `WrongTypeError`, and change nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from heapq import heapify, heappop, heappush
from typing import cast

from sdstore.errors import LocalProtocolError, WrongTypeError
from sdstore.sds.bloom import BloomFilter
from sdstore.sds.clock import Clock, SyncTimer
from sdstore.sds.codec import decode, encode
from sdstore.sds.effects import (
    Broadcast,
    Deliver,
    Effect,
    Ephemeral,
    Publish,
    Rejected,
    Status,
)
from sdstore.sds.incoming import Arrived, Incoming
from sdstore.sds.log import LogEntry, MemoryLog, ParticipantLog
from sdstore.sds.messages import (
    ID_LENGTH_MAX,
    copied,
    keep_for_application,
    refusal,
    set_field,
)
from sdstore.sds.model import (
    LAMPORT_MAX,
    Dialect,
    HistoryEntry,
    Kind,
    Message,
    MessageError,
    Rank,
    rank,
)
from sdstore.sds.options import OnLost, ParticipantOptions
from sdstore.sds.outgoing import Outgoing, SentState
from sdstore.sds.references import HINT_BYTES_MAX, Hints, References, fingerprint
from sdstore.sds.repair import Repair
from sdstore.sds.restoring import RESTORED_COUNT, last_number, load_incoming, load_references
from sdstore.sds.shares import Member
from sdstore.sds.state import OWNER, PROGRESS, UNPUBLISHED, WAITING, SavedState, Turn, read_state
from sdstore.wire import participant_pb2 as pb

FRAME_BYTES_MAX = 1 << 20
"""The largest frame, received or sent: the bound of a store."""

TAKEN_BYTES_MAX = 8 << 20
"""Frames that `take_staged` takes at once, or that are delivered from the log at once: they are in memory
together. The rest follows with the next call."""

AUTHORS_MAX = 4_096
"""Senders known by a message that was delivered with all its causes, 0.3 MB. Later ones stay strangers."""

REPAIRS_READ_MAX = 16
"""Entries read of a received repair request; the specification allows three."""

_REPAIR_DIALECTS = frozenset({Dialect.V2, Dialect.NIM})

_LOOKS_LIKE_ENTRY = "\x0a\x12\x1a"
"""Version 1 cannot name IDs that begin so: readers would take them for entries of version 2."""


class Participant:
    """See the module. One participant writes a log and a state at a time."""

    def __init__(
        self,
        channel_id: str,
        sender_id: str,
        *,
        options: ParticipantOptions | None = None,
        log: ParticipantLog | None = None,
        state: Mapping[str, bytes] | None = None,
    ) -> None:
        """A new participant, or with `state` the same as `restore`. Its log may have messages.

        `sender_id` can be empty, as in versions 1 and 2; then its own messages are recognised by ID.
        Raises `LocalProtocolError` for IDs that no message can hold, and for an ordered participant
        without a sender (`bad_option`).
        """
        for name, value in (("channel_id", channel_id), ("sender_id", sender_id)):
            if not isinstance(value, str):
                raise WrongTypeError(name, value, "str")
        try:
            encode(Message("id", channel_id, sender_id, 1))
        except MessageError as error:
            raise LocalProtocolError(error.code, error.detail) from error
        self.channel_id = channel_id
        self.sender_id = sender_id
        self.options = options or ParticipantOptions()
        if self.options.ordered and not sender_id:
            raise LocalProtocolError("bad_option", "`ordered` needs a sender, and the ID is empty")
        self.log: ParticipantLog = MemoryLog() if log is None else log
        self.ignored: Counter[str] = Counter()
        self._turn = Turn()
        self._authors: set[int] = set()  # hashes of IDs, which can be long
        self._path = ""  # of the frame that is received now
        self._hints = Hints(self.options)
        self._references = References(self.options, self._hints, sender_id, self._turn)
        self._outgoing = Outgoing(self.options, self._turn)
        self._incoming = Incoming(self.options, self._turn, self._is_logged, self._hints)
        self._sync = SyncTimer(self.options, channel_id, sender_id)
        self._repair = None
        if self.options.repair is not None:
            self._repair = Repair(sender_id, self.options.repair)
        self._bloom = self._new_bloom()
        self._wire_sender = "" if self.options.dialect is Dialect.V1 else sender_id
        self._clock = Clock(self.options)
        self._progress = pb.Progress()  # written with every `Save`: made once
        self._confirmed = 0
        self._delivered = 0  # the last number that was handed to the application
        self._number = 0  # the last number in the log
        self._counts = (0, 0, 0, 0)  # of the last `Status`
        self._has_owner = False
        self._ready: list[Arrived] = []  # restored, to be delivered with the first call
        self._saved_heads: Mapping[str, pb.Head] = {}  # until the first call
        self._unpublished: LogEntry | None = None  # in ordered mode
        self._publish_ms = 0  # when to publish it again
        self._load(read_state(state or {}, channel_id, sender_id))

    @classmethod
    def restore(
        cls,
        channel_id: str,
        sender_id: str,
        state: Mapping[str, bytes],
        log: ParticipantLog,
        *,
        options: ParticipantOptions | None = None,
    ) -> Participant:
        """The participant that wrote `state` and `log`.

        The next call that gives a time also returns the deliveries that were not confirmed, and the
        status if anything is missing, waiting, lost or unacknowledged. If the log has more or less than
        the state expects, because only one of them was copied back, the participant continues from
        both. Raises `LocalProtocolError` with the codes of `state.read_state`.
        """
        return cls(channel_id, sender_id, options=options, log=log, state=state)

    @property
    def status(self) -> Status:
        """The state of the channel for people."""
        return Status(*self._incoming.counts(), self._outgoing.unacknowledged_count)

    @property
    def lamport_timestamp(self) -> int:
        """The Lamport clock, in its unit; it starts with the first call that gives a time."""
        return self._clock.lamport

    def sent_state(self, message_id: str) -> SentState | None:
        """Whether others, and a store, have a message of ours. `None`: not among the newest sent."""
        return self._outgoing.state(message_id)

    @property
    def unpublished_id(self) -> str | None:
        """In ordered mode, our message that no store took or refused yet; `None`: the next can be sent."""
        return None if self._unpublished is None else self._unpublished.message.message_id

    @property
    def store_status(self) -> Status:
        """`status` with `unstored`, `refused` and `undelivered`, for a participant that uses stores."""
        return replace(
            self.status,
            unstored=self._outgoing.unstored_count + (self._unpublished is not None),
            refused=self._outgoing.rejected_count,
            undelivered=self._number - self._delivered,
        )

    # ---- sending

    def send(
        self,
        content: bytes,
        now_ms: int,
        retrieval_hint: bytes | None = None,
        ephemeral: bool = False,
    ) -> list[Effect]:
        """Broadcast content to the channel. The `Broadcast` effect has the message ID.

        In ordered mode the effect is `Publish`: the message enters the log and is broadcast once a store
        has it (`stored`), because a message that the order holds cannot be taken back. Until then no
        other one can be sent (`unpublished`).

        Raises `LocalProtocolError`, and sends nothing: `empty_content`, `frame_too_large`,
        `message_id_taken` (a scheme that hashes the content alone, and content that was sent before),
        `retrieval_hint_too_long`, `lamport_exhausted`, or a code of `MessageError` if the dialect cannot
        express the message. `wrong_type`, which is a `TypeError` too, for what is not bytes.
        """
        # What is logged is named by later messages: a wrong value in it would spoil all of those.
        content, hint = _bytes("content", content), _bytes("retrieval_hint", retrieval_hint or b"")
        if not content:
            raise LocalProtocolError("empty_content", "a message needs content")
        if len(hint) > HINT_BYTES_MAX:
            raise LocalProtocolError(
                "retrieval_hint_too_long",
                f"the hint has {len(hint):,} bytes; the maximum is {HINT_BYTES_MAX}",
            )
        self._begin(now_ms)
        if ephemeral:
            return self._send_ephemeral(content, now_ms)
        lamport = self._clock.next_lamport()
        if self._unpublished is not None:
            detail = f"no store has accepted or refused {self.unpublished_id!r} yet; send again after `stored` or `rejected`"
            raise LocalProtocolError("unpublished", detail)
        message = self._message("", lamport, content)
        message_id = self.options.id_scheme.make(message)
        if self._is_logged(message_id) or self._incoming.waits(message_id):
            raise LocalProtocolError("message_id_taken", f"the log already has {message_id!r}")
        set_field(message, "message_id", message_id)
        frame = self._encode(message)
        keep_for_application(message)
        self._clock.lamport = lamport
        if hint:
            self._hints.learn(message_id, hint, is_ours=True)
        entry = LogEntry(message, frame, 0, hint)
        if self.options.ordered:
            self._unpublished = entry
            self._turn.put(UNPUBLISHED, pb.Waiting(frame=frame, retrieval_hint=hint))
            self._publish()
        else:
            self._log_own(entry)
        return self._finish()

    def _publish(self) -> None:
        if (entry := self._unpublished) is not None:
            self._publish_ms = self._clock.elapsed_ms + self.options.resend_ms
            self._turn.effects.append(Publish(entry.frame, entry.message.message_id))

    def _log_own(self, entry: LogEntry) -> None:
        message_id = entry.message.message_id
        self._append(entry)
        self._add_to_bloom(message_id)
        self._outgoing.add(message_id, self._clock.elapsed_ms)
        self._incoming.arrive(message_id)
        self._turn.effects.append(Broadcast(entry.frame, message_id, Kind.CONTENT))
        self._sync.broadcast(self._clock.elapsed_ms)

    def _published(self, message_id: str) -> bool:
        """A store has the unpublished message; False if this is another one."""
        entry = self._unpublished
        if entry is None or entry.message.message_id != message_id:
            return False
        self._unpublished = None
        self._turn.delete(UNPUBLISHED)
        self._log_own(entry)
        self._deliver_all(self._incoming.take_dependents(message_id))
        return True

    def _send_ephemeral(self, content: bytes, now_ms: int) -> list[Effect]:
        message_id = self._sync.unique_id("ephemeral", now_ms, content)
        message = Message(
            message_id, self.channel_id, self._wire_sender, None, (), b"", (), content
        )
        frame = self._encode(message)
        self._turn.effects.append(Broadcast(frame, message_id, Kind.EPHEMERAL))
        return self._finish()

    def _message(self, message_id: str, lamport: int, content: bytes) -> Message:
        history = self._references.causal_history(is_sync=not content)
        if self.options.dialect is Dialect.V1:
            history = tuple(
                HistoryEntry(entry.message_id)
                for entry in history
                if entry.message_id[0] not in _LOOKS_LIKE_ENTRY
            )
        # Not a copy: the message is encoded before the filter changes, and loses it then.
        bloom = b"" if self._bloom is None else cast("bytes", self._bloom.view())
        repairs: tuple[HistoryEntry, ...] = ()
        if self._repair is not None and self.options.dialect in _REPAIR_DIALECTS:
            repairs = self._repair.requests(self._clock.elapsed_ms)
        return Message(
            message_id,
            self.channel_id,
            self._wire_sender,
            lamport,
            history,
            bloom,
            repairs,
            content,
        )

    def _encode(self, message: Message) -> bytes:
        try:
            frame = encode(message, self.options.dialect)
        except MessageError as error:
            raise LocalProtocolError(error.code, error.detail) from error
        if len(frame) > FRAME_BYTES_MAX:
            raise LocalProtocolError(
                "frame_too_large",
                f"the frame has {len(frame):,} bytes; the maximum is {FRAME_BYTES_MAX:,}",
            )
        return frame

    # ---- receiving

    def receive(
        self, frame: bytes, now_ms: int, retrieval_hint: bytes | None = None, path: str = ""
    ) -> list[Effect]:
        """A frame from the transport, a store or another participant. Any bytes will do.

        `path`: the way it came, if there are several: each has its share of what can wait, and `Deliver` names it.
        """
        self._path = path
        frame, hint = _bytes("frame", frame), _bytes("retrieval_hint", retrieval_hint or b"")
        self._begin(now_ms)
        if len(frame) > FRAME_BYTES_MAX:
            self.ignored["frame_too_large"] += 1
            return self._finish()
        try:
            message, _ = decode(frame)
        except MessageError as error:
            self.ignored[error.code] += 1
        else:
            self._take(message, frame, hint)
        return self._finish()

    def take_staged(self, now_ms: int, count: int) -> list[Effect]:
        """Receive some messages that a backfill staged in the log, in log order.

        At most `count`, and no more after `TAKEN_BYTES_MAX` bytes of frames. An empty list: nothing is
        staged, or no more messages can wait for their causes now.
        """
        self._begin(now_ms)
        self._path = ""
        taken = []
        taken_bytes = 0
        for staged in self.log.staged(count):
            if not self._incoming.has_room or taken_bytes >= TAKEN_BYTES_MAX:
                break
            message = copied(staged.message)  # `_take` changes it, and this one is the log's
            self._take(message, staged.frame, staged.retrieval_hint)
            taken.append(staged.message.message_id)
            taken_bytes += len(staged.frame)
        if taken:
            self.log.unstage(taken)
            self._turn.must_save = True
        return self._finish()

    def _take(self, message: Message, frame: bytes, hint: bytes) -> None:
        if (reason := refusal(message, self.channel_id, self.options)) is not None:
            self.ignored[reason] += 1
            return
        if len(hint) > HINT_BYTES_MAX:
            hint = b""  # else our next messages, which name it, are too large for every store
        is_own = self._is_own(message)
        if message.lamport_timestamp is None:
            if is_own:
                self.ignored["own"] += 1
            else:
                self._turn.effects.append(Ephemeral(message))
            return
        if not is_own:
            self._review(message)
        keep_for_application(message)
        for entry in message.causal_history:
            if entry.retrieval_hint:
                self._hints.learn(entry.message_id, entry.retrieval_hint)
            self._incoming.learn_author(entry)
        if self._repair is not None:
            member = self._member(message).naming(message.message_id)
            self._repair.named(message.causal_history, member, self._clock.elapsed_ms)
        if message.content:
            self._take_content(message, frame, hint, is_own=is_own)
        else:
            self._take_sync(message, is_own=is_own)

    def _is_own(self, message: Message) -> bool:
        """By sender if the message has one; senderless messages by ID."""
        if message.sender_id:
            return message.sender_id == self.sender_id
        return message.message_id in self._outgoing or self._sync.is_ours(message.message_id)

    def _review(self, message: Message) -> None:
        self._outgoing.review_history(message.causal_history)
        self._outgoing.review_filter(message, self._clock.elapsed_ms)
        if self._repair is not None:
            self._repair.heard(message.sender_id)
            if message.repair_request:
                requests = [
                    entry
                    for entry in message.repair_request[:REPAIRS_READ_MAX]
                    if max(len(entry.message_id), len(entry.sender_id)) <= ID_LENGTH_MAX
                ]
                elapsed_ms = self._clock.elapsed_ms
                self._repair.requested(message.sender_id, requests, self._has, elapsed_ms)

    def _has(self, message_id: str) -> bool:
        return self._incoming.waits(message_id) or self._is_logged(message_id)

    def _take_content(self, message: Message, frame: bytes, hint: bytes, *, is_own: bool) -> None:
        message_id = message.message_id
        if hint:
            self._hints.learn(message_id, hint, is_ours=True)
        hint, member = hint or self._hints.best(message_id), self._member(message)
        arrived = Arrived(message, frame, hint, Rank.UNKNOWN, member)
        if is_own and self._is_unpublished(message) and self._published(message_id):
            self._outgoing.store(message_id, self._clock.elapsed_ms)
        elif (waiting := self._incoming.waiting(message_id)) is not None:
            self._take_copy_of_waiting(arrived, waiting, is_own=is_own)
        elif self._is_logged(message_id):
            self._take_copy_of_logged(arrived, is_own=is_own)
        else:
            # Also a message of our own that the log lacks: it was lost with a file.
            arrived.rank = rank(message)
            self._take_new(arrived)
            if not is_own:
                self._sync.content_arrived(message.sender_id, self._clock.elapsed_ms)

    def _is_unpublished(self, message: Message) -> bool:
        entry = self._unpublished
        return entry is not None and fingerprint(entry.message) == fingerprint(message)

    def _take_sync(self, message: Message, *, is_own: bool) -> None:
        if is_own:
            self.ignored["own"] += 1
            return
        if not message.sender_id:  # version 1, which names such IDs as causes
            self._incoming.note_sync(message.message_id)
        self._incoming.note(message, self._clock.elapsed_ms, self._member(message))
        if self._references.are_named(message.causal_history):
            self._sync.sync_arrived(self._clock.elapsed_ms)

    def _take_copy_of_waiting(self, copy: Arrived, waiting: Arrived, *, is_own: bool) -> None:
        """Of two messages with one ID the one of the higher rank waits.

        Of equal ranks it is the first, unless both have one content and the second lacks fewer causes: the
        first can be a copy with causes that do not exist.
        """
        if fingerprint(copy.message) == fingerprint(waiting.message):
            self._count_duplicate(copy.message.message_id, is_own=is_own)
            return
        copy.rank = rank(copy.message)
        is_better = copy.rank > waiting.rank
        if copy.rank == waiting.rank and copy.message.content == waiting.message.content:
            self._incoming.causes(copy)
            is_better = len(copy.unmet) < len(waiting.unmet)
        if not is_better:
            self.ignored["variant"] += 1
            return
        copy.since_ms, copy.supersedes = waiting.since_ms, waiting.supersedes
        copy.unmet, copy.gap = set(), ()
        self._incoming.drop(copy.message.message_id, self._clock.elapsed_ms)
        self._take_new(copy)

    def _take_copy_of_logged(self, copy: Arrived, *, is_own: bool) -> None:
        """A message of a lower rank is superseded; else the first one stays, whatever this one holds."""
        message_id = copy.message.message_id
        known, logged = self._references.recent.get(message_id), None
        if known is None:
            logged = self._logged(message_id)
            known = None if logged is None else fingerprint(logged)
        if known == fingerprint(copy.message):
            self._count_duplicate(copy.message.message_id, is_own=is_own)
            return
        copy.rank = rank(copy.message)
        if copy.rank is not Rank.UNKNOWN and not is_own:
            logged = logged or self._logged(message_id)
            if logged is None or (not self._is_own(logged) and rank(logged) < copy.rank):
                copy.supersedes = True
                self._take_new(copy)
                return
        self.ignored["variant"] += 1

    def _count_duplicate(self, message_id: str, *, is_own: bool) -> None:
        self.ignored["own" if is_own else "duplicate"] += 1
        if self._repair is not None:  # a forged copy ends no repair
            self._repair.received(message_id)

    def _logged(self, message_id: str) -> Message | None:
        frame = self.log.frame(message_id)
        return None if frame is None else decode(frame)[0]

    def _take_new(self, arrived: Arrived) -> None:
        message_id = arrived.message.message_id
        if self._repair is not None:
            self._repair.received(message_id)
        self._add_to_bloom(message_id)
        self._incoming.arrive(message_id)
        if not self._incoming.causes(arrived):
            self._incoming.wait(arrived, self._clock.elapsed_ms)
            self._make_room()
            return
        self._deliver(arrived)
        if dependents := self._incoming.take_dependents(message_id):
            self._deliver_all(dependents)

    def _member(self, message: Message) -> Member:
        """Whom a message counts against, and what it names."""
        sender_id = message.sender_id
        return Member(self._path, sender_id if hash(sender_id) in self._authors else "", sender_id)

    def _make_room(self) -> None:
        """Keep the bounds of waiting."""
        elapsed_ms = self._clock.elapsed_ms
        while (message_id := self._incoming.overflow()) is not None:
            if self.options.on_lost is OnLost.DELIVER:
                self._deliver_all([self._incoming.take_after_gap(message_id, elapsed_ms)])
            else:
                self._incoming.drop(message_id, elapsed_ms)

    # ---- delivering

    def _deliver_all(self, ready: list[Arrived]) -> None:
        """Deliver messages whose causes are met, and those that waited for them alone."""
        queue = [(*each.order, each) for each in ready]  # IDs differ, so no two places are equal
        heapify(queue)
        while queue:
            arrived = heappop(queue)[-1]
            self._deliver(arrived)
            for each in self._incoming.take_dependents(arrived.message.message_id):
                heappush(queue, (*each.order, each))

    def _deliver(self, arrived: Arrived) -> None:
        message = arrived.message
        gap = arrived.gap
        if gap:
            # A lost cause can have arrived while the message waited for another one.
            gap = tuple(cause for cause in gap if not self._is_logged(cause))
            for cause in gap:
                self._incoming.passed(cause, arrived.member)
        is_reached = self._clock.received(message.lamport_timestamp or 0)
        is_late, supersedes = self._incoming.is_late(message.message_id), arrived.supersedes
        is_head = True  # also if it is late: what named it can have named no author
        if supersedes:
            is_head = self._supersede(message)
        self._number += 1
        number, hint = self._number, arrived.retrieval_hint
        if not gap and len(self._authors) < AUTHORS_MAX:
            self._meet(message.sender_id)
        entry = LogEntry(message, arrived.frame, number, hint, gap, is_late, supersedes)
        self._append(entry, is_head=is_head, is_reached=is_reached)
        if number == self._delivered + 1 <= self._confirmed + self.options.deliveries_max:
            self._delivered = number
            self._turn.effects.append(
                Deliver(
                    number, message, gap, is_late, arrived.rank, supersedes, arrived.member.path
                )
            )

    def _meet(self, sender_id: str) -> None:
        author = hash(sender_id)
        if sender_id and author not in self._authors:
            self._authors.add(author)
            self._incoming.meet(sender_id)

    def _supersede(self, message: Message) -> bool:
        """Undo what the logged message with this ID did to our references; whether it was a head."""
        was_head = self._references.superseded(message.message_id)
        old = self._logged(message.message_id)
        if old is not None:
            named = {entry.message_id for entry in message.causal_history}
            for entry in old.causal_history:
                cause = None if entry.message_id in named else self._logged(entry.message_id)
                if cause is not None and cause.message_id != message.message_id:
                    self._references.is_head_again(cause, self._hints.best(entry.message_id))
        return was_head

    def confirm(self, number: int) -> list[Effect]:
        """The application has taken all deliveries up to `number`. Confirming again changes nothing.

        Raises `LocalProtocolError` for a number that no delivery has (`unknown_delivery`; 0 is allowed,
        and confirms nothing), and for what is not a number (`wrong_type`).
        """
        if not isinstance(number, int):
            raise WrongTypeError("number", number, "int")
        if not 0 <= number <= self._number:
            raise LocalProtocolError(
                "unknown_delivery",
                f"delivery {number} is confirmed; deliveries have numbers from 1 to {self._number}",
            )
        if number > self._confirmed:
            self._confirmed = number
            self._delivered = max(self._delivered, number)
            self._turn.must_save = True
        return self._finish()

    def _redeliver(self) -> None:
        """Hand out what waits in the log, up to the bound of unconfirmed deliveries.

        No more follow in this call after `TAKEN_BYTES_MAX` bytes of frames; the next call continues.
        """
        room = TAKEN_BYTES_MAX
        while self._delivered < self._number:
            last = min(self._number, self._confirmed + self.options.deliveries_max)
            if last <= self._delivered:
                return
            entries = self.log.deliveries(self._delivered, last - self._delivered)
            first = entries[0].number if entries else self._number + 1
            if first > last:  # the log lost numbers: nobody can confirm them
                if self._delivered > self._confirmed:
                    return
                self._confirmed = self._delivered = first - 1
                self._turn.must_save = True
            for entry in entries:
                if entry.number > last:
                    break
                if room <= 0:
                    return
                room -= len(entry.frame)
                self._delivered = entry.number
                message = copied(entry.message)  # with all that its frame has
                keep_for_application(message)
                self._turn.effects.append(
                    Deliver(
                        entry.number,
                        message,
                        entry.after_gap,
                        entry.is_late,
                        rank(message),
                        entry.supersedes,
                    )
                )

    def stored(self, message_id: str, retrieval_hint: bytes | None = None) -> list[Effect]:
        """A store has our message, perhaps under this hint: the next broadcast of it has time.

        Raises `LocalProtocolError` (`wrong_type`).
        """
        _check_id(message_id)
        if retrieval_hint:
            hint = _bytes("retrieval_hint", retrieval_hint)
            self._hints.learn(message_id, hint, is_ours=True)
        self._published(message_id)
        self._outgoing.store(message_id, self._clock.elapsed_ms)
        return self._finish()

    def rejected(self, message_id: str, code: str, detail: str = "") -> list[Effect]:
        """Every store refused our message: our next messages do not name it, and it is not broadcast again.

        Call it only when no store is left that might take the message. In ordered mode it is void: it
        never enters the log. Unknown IDs change nothing. Raises `LocalProtocolError` (`wrong_type`).
        """
        _check_id(message_id)
        if self.unpublished_id == message_id:
            self._unpublished = None
            self._turn.delete(UNPUBLISHED)
            self._turn.effects.append(Rejected(message_id, code, detail))
        elif self._outgoing.reject(message_id):
            self._forget(message_id)
            self._turn.effects.append(Rejected(message_id, code, detail))
        return self._finish()

    def _forget(self, message_id: str) -> None:
        if (frame := self.log.frame(message_id)) is not None:
            message, _ = decode(frame)
            causes = (self.log.frame(each.message_id) for each in message.causal_history)
            self._references.forget(message, [decode(each)[0] for each in causes if each])

    def unobtainable(self, message_id: str, reason: str) -> list[Effect]:
        """A store says why it lacks a missing message: "refused", "withheld", or "met_as_sync".

        It is lost at once (`Lost` with the reason), and what waits for it is delivered after a gap. Call it
        only when no source is left to ask, the transport included: others may have got it there. It is
        delivered late if it arrives after all. A sync message is no cause of messages without a
        sender, so those do not wait for it and have no gap. Unknown IDs change nothing. Raises
        `LocalProtocolError` (`wrong_type`).
        """
        _check_id(message_id)
        elapsed_ms = self._clock.elapsed_ms
        if reason == "met_as_sync":
            self._deliver_all(self._incoming.met_as_sync(message_id))
        elif (
            self._incoming.lose(message_id, reason, elapsed_ms)
            and self.options.on_lost is OnLost.DELIVER
        ):
            self._deliver_all(self._incoming.take_dependents(message_id, is_lost=True))
        return self._finish()

    def change_indexers(self, indexers: tuple[str, ...], unnamed: Iterable[str]) -> list[Effect]:
        """In ordered mode, from now on these are the indexers (`ParticipantOptions.indexers`).

        `unnamed`: messages of the log that they have to name, because those before them count no longer, and the
        message at which they begin. Call it after the first call with a time. Restore the participant with these
        `indexers` in its options.
        """
        self.options = replace(self.options, indexers=indexers)
        self._references.use(self.options)
        for message_id in unnamed:
            message = self._logged(message_id)
            if message is not None and message_id != self._references.own_newest_id:
                self._references.is_head_again(message, self._hints.best(message_id))
        return self._finish()

    # ---- the sweeps

    def tick(self, now_ms: int) -> list[Effect]:
        """Do what is due. Call it about once a second; a rarer call delays what is due until then."""
        self._begin(now_ms)
        if self._publish_ms <= self._clock.elapsed_ms:
            self._publish()
        for message_id in self._outgoing.due(self._clock.elapsed_ms):
            frame = self.log.frame(message_id)
            if frame is None:
                self._outgoing.give_up(message_id)  # the log lost it
            else:
                self._turn.effects.append(Broadcast(frame, message_id, Kind.CONTENT))
        self._sweep_incoming()
        if self._repair is not None:
            for message_id in self._repair.answers(self._clock.elapsed_ms):
                frame = self.log.frame(message_id)
                if (waiting := self._incoming.waiting(message_id)) is not None:
                    frame = waiting.frame
                if frame is not None:
                    self._turn.effects.append(Broadcast(frame, message_id, Kind.CONTENT))
        self._sync_if_due(now_ms)
        return self._finish()

    def _sync_if_due(self, now_ms: int) -> None:
        if self._sync.is_due(self._clock.elapsed_ms):
            self._sync.sync_sent(self._clock.elapsed_ms)
            is_empty = not self._references.recent and self._incoming.has_none_waiting
            if not is_empty or self.options.sync_when_empty or self._is_request_due():
                self._send_sync(now_ms)
        elif self._is_request_due():
            self._send_sync(now_ms, is_request=True)

    def _sweep_incoming(self) -> None:
        elapsed_ms = self._clock.elapsed_ms
        self._deliver_all(self._incoming.sweep(elapsed_ms))
        for message_id in self._incoming.knots(elapsed_ms):
            if self._incoming.waits(message_id):
                self._deliver_all([self._incoming.take_after_gap(message_id, elapsed_ms)])

    def _is_request_due(self) -> bool:
        if not self.options.sync_ms or self._repair is None:
            return False
        due_ms = self._repair.request_due_ms
        is_expressible = self.options.dialect in _REPAIR_DIALECTS
        return is_expressible and due_ms is not None and due_ms <= self._clock.elapsed_ms

    def _send_sync(self, now_ms: int, *, is_request: bool = False) -> None:
        """`is_request`: a frame that only asks for repairs carries no filter, which is most of a frame."""
        if self._clock.is_exhausted:
            return
        lamport = self._clock.next_lamport()
        message_id = self._sync.unique_id("sync", now_ms)
        message = self._message(message_id, lamport, b"")
        if is_request:
            if not message.repair_request:
                return  # it is put off
            set_field(message, "bloom_filter", b"")
        frame = self._encode(message)
        self._clock.lamport = lamport
        self._turn.effects.append(Broadcast(frame, message_id, Kind.SYNC))

    # ---- every call

    def _begin(self, now_ms: int) -> None:
        """Every method with a time starts here."""
        if not isinstance(now_ms, int):
            raise WrongTypeError("now_ms", now_ms, "int")
        if self._clock.is_started:
            self._clock.advance(now_ms)
            return
        newest = self.log.newest(1, self._clock.bound(now_ms) + 1)
        self._clock.start(now_ms, newest[-1].lamport_timestamp if newest else 0)
        load_references(
            self._references,
            self._saved_heads,
            self.log,
            self._outgoing,
            self._turn,
            clock=self._clock.lamport,
            history_size=self.options.history_size,
            is_ordered=self.options.ordered,
        )
        self._saved_heads = {}
        ready, self._ready = self._ready, []
        for arrived in ready:
            self._turn.delete(WAITING + arrived.message.message_id)
        self._deliver_all(ready)
        self._make_room()  # with other options, or forgotten lost IDs, more can be missing than before

    # ---- log, filter, state

    def _is_logged(self, message_id: str) -> bool:
        return message_id in self._references.recent or self.log.contains(message_id)

    def _append(self, entry: LogEntry, *, is_head: bool = True, is_reached: bool = True) -> None:
        self.log.append(entry)
        self._turn.must_save = True
        self._references.logged(
            entry.message,
            entry.retrieval_hint,
            is_head=is_head,
            is_reached=is_reached,
            gap=entry.after_gap,
        )

    def _new_bloom(self) -> BloomFilter | None:
        options = self.options
        if options.bloom is None:
            return None
        return BloomFilter(options.bloom_capacity, options.bloom_error_rate, options.bloom)

    def _add_to_bloom(self, message_id: str) -> None:
        if (bloom := self._bloom) is not None:
            bloom.add(message_id)
            if bloom.is_full:
                bloom.roll_over()

    def _fill_bloom(self) -> None:
        """The newest messages of the log, and those that wait: what we would not ask for again."""
        if self._bloom is None:
            return
        waiting = self._incoming.waiting_ids()
        count = max(self._bloom.kept_count - len(waiting), 0)
        newest = self.log.newest(count, LAMPORT_MAX) if count else ()
        self._bloom.rebuild([*(each.entry.message_id for each in newest), *waiting])

    def _finish(self) -> list[Effect]:
        """The effects of this call, `Save` first, `Status` last."""
        turn, incoming = self._turn, self._incoming
        if self._delivered < self._number:
            self._redeliver()
        for missing in incoming.fetches():
            turn.effects.append(missing)
            if self._repair is not None:
                for entry in missing.entries:
                    member = incoming.named_by(entry.message_id)
                    self._repair.want(entry, self._clock.elapsed_ms, member)
        effects = turn.effects
        counts = (*incoming.counts(), self._outgoing.unacknowledged_count)
        if counts != self._counts:
            self._counts = counts
            effects.append(Status(*counts))
        if turn.changes or turn.must_save:
            if not self._has_owner:
                self._has_owner = True
                turn.put(OWNER, pb.Owner(channel_id=self.channel_id, sender_id=self.sender_id))
            progress = self._progress
            progress.lamport_timestamp = self._clock.lamport
            progress.confirmed = self._confirmed
            progress.sent_count = self._outgoing.sent_count
            turn.put(PROGRESS, progress)
            effects.insert(0, turn.take_save())
        turn.effects = []
        return effects

    # ---- restore

    def _load(self, saved: SavedState) -> None:
        """Continue from a saved state and the log, of which either may be behind the other."""
        self._has_owner = saved.has_owner
        self._clock.lamport = saved.progress.lamport_timestamp
        self._confirmed = self._delivered = saved.progress.confirmed
        self._number = last_number(self.log, self._confirmed)
        self._outgoing.sent_count = saved.progress.sent_count
        for message_id, sent in saved.sent.items():
            self._outgoing.restore(message_id, sent, self._clock.elapsed_ms)
        for each in self.log.deliveries(max(self._number - RESTORED_COUNT, 0), RESTORED_COUNT):
            if not each.after_gap:
                self._authors.add(hash(each.message.sender_id))
        self._ready = load_incoming(saved, self._incoming, self.log, self._turn, self._member)
        self._saved_heads = saved.heads
        if saved.unpublished is not None:
            self._load_unpublished(saved.unpublished)
        self._fill_bloom()

    def _load_unpublished(self, saved: pb.Waiting) -> None:
        message, _ = decode(saved.frame)
        if self.log.contains(message.message_id):
            self._turn.delete(UNPUBLISHED)
        else:
            keep_for_application(message)
            self._unpublished = LogEntry(message, saved.frame, 0, saved.retrieval_hint)


def _bytes(name: str, value: bytes) -> bytes:
    """Bytes-like values as bytes."""
    if type(value) is bytes:
        return value
    try:
        return bytes(memoryview(value))  # `bytes` alone makes zeros of a number
    except TypeError:
        raise WrongTypeError(name, value, "bytes") from None


def _check_id(message_id: str) -> None:
    if not isinstance(message_id, str):
        raise WrongTypeError("message_id", message_id, "str")
