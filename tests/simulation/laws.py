"""What must hold, checked from outside: from frames, effects, the log and the disk.

Nothing here asks the participant for more than its log and its status, and causes are read from the
frames. A `Ledger` watches one participant through all its restarts; `unsettled` compares participants.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from sdstore.sds import Dialect, Kind, Message, MessageError, decode
from sdstore.sds.effects import (
    Acknowledged,
    Broadcast,
    Deliver,
    Effect,
    Ephemeral,
    GaveUp,
    Lost,
    Missing,
    Save,
    Status,
)
from sdstore.sds.log import LogEntry
from tests.simulation.schedule import CHANNEL, NEVER_MS, PeerPlan

if TYPE_CHECKING:
    from tests.simulation.world import Peer, SimLog, World


class BrokenLawError(AssertionError):
    """A law is broken."""


def law(holds: object, what: str) -> None:
    """Raise `BrokenLawError` unless it holds."""
    if not holds:
        raise BrokenLawError(what)


def causes(message: Message) -> set[str]:
    """The IDs that a message depends on; itself is none."""
    return {entry.message_id for entry in message.causal_history} - {message.message_id}


def for_application(message: Message) -> Message:
    """A message as applications and logs have it: without what is for participants."""
    return replace(message, bloom_filter=b"", repair_request=())


class Ledger:
    """What one participant was given and what it said, through all its restarts."""

    def __init__(self, plan: PeerPlan) -> None:
        self.plan = plan
        self.frames: dict[str, list[Message]] = defaultdict(list)
        """Every message that it was given, with its variants."""
        self.sync_ids: set[str] = set()
        self.sent: dict[str, bytes] = {}
        self.lamport_sent = -1
        self.now_max_ms = 0
        self.steps_ahead = 0
        self.delivered: dict[int, Deliver] = {}
        self.number_of: dict[str, int] = {}
        self.logged_number: dict[str, int] = {}
        self.superseded: set[int] = set()
        """Numbers whose message another one with its ID took the place of: they can stay away."""
        self.skipped: set[str] = set()
        """Every ID that any delivery names as a gap."""
        self.lost: set[str] = set()
        """What it ever said to be lost, also if a crash made it forget."""
        self._losing: list[tuple[int, str]] = []
        self._lost_on_disk: set[str] = set()
        self._awaited: set[str] = set()
        """What is lost for one sender and missing again, because another one's message waits for it."""
        self.acknowledged: set[str] = set()
        self.gave_up: set[str] = set()
        self.confirmed = 0
        """The number that a written `Save` includes."""
        self.confirming = 0
        """The number that the application confirmed, if the program goes on."""
        self._confirming: list[tuple[int, int]] = []
        self._next_number = 1
        self._status = Status()
        self._received: set[bytes] = set()
        self._receiving: Message | None = None
        self._inbox: dict[str, Message] = {}

    @property
    def last_number(self) -> int:
        """The newest delivery that the application has."""
        return max(self.delivered, default=0)

    @property
    def handed_number(self) -> int:
        """The newest delivery since the last start."""
        return self._next_number - 1

    # --- life -----------------------------------------------------------------------------------
    def restarted(self, log: SimLog) -> None:
        """Deliveries go on after the last one whose confirmation was written."""
        self._next_number = self.confirmed + 1
        self.confirming = self.confirmed
        self._status = Status()
        own = [each.message.lamport_timestamp or 0 for each in log.ids.values() if not each.number]
        self.lamport_sent = max(own, default=-1)

    def crashed(self) -> None:
        """What was not written is forgotten."""
        self._confirming.clear()
        self._losing.clear()
        self._inbox.clear()

    def saved(self, call: int) -> None:
        """A `Save` of this call was written, and with it all earlier calls."""
        while self._confirming and self._confirming[0][0] <= call:
            self.confirmed = max(self.confirmed, self._confirming.pop(0)[1])
        while self._losing and self._losing[0][0] <= call:
            self._lost_on_disk.add(self._losing.pop(0)[1])

    def confirms(self, call: int, number: int) -> None:
        self._confirming.append((call, number))
        self.confirming = number
        # After a restart the application may confirm what it has before it is delivered again.
        self._next_number = max(self._next_number, number + 1)

    # --- what goes in ---------------------------------------------------------------------------
    def receives(self, frame: bytes) -> None:
        self._receiving = None
        try:
            message, _ = decode(frame)
        except MessageError:
            return
        if message.channel_id != CHANNEL:
            return
        self._receiving = message
        self._received.add(frame)
        message = for_application(message)
        kind = message.kind
        if kind is Kind.SYNC:
            self.sync_ids.add(message.message_id)
        known = self.frames[message.message_id]
        if message not in known:
            known.append(message)

    # --- what comes out, before it is carried out -------------------------------------------------
    def asked(
        self,
        what: str,
        peer: Peer,
        effects: Sequence[Effect],
        rows: Sequence[LogEntry | tuple[str, ...]],
    ) -> None:
        """Look at what a call returned, and at what it appended to the log."""
        self.now_max_ms = max(self.now_max_ms, peer.now_ms)
        appended = [row for row in rows if isinstance(row, LogEntry)]
        for entry in appended:
            self._check_logged(peer, entry)
        self._check_save_comes_first(effects, appended)
        for effect in effects:
            self._note(peer, effect)
        if what != "tick":  # which asks for lost ones now and then
            lost = self._lost_on_disk | {message_id for _, message_id in self._losing}
            asked_for = (each.entries for each in effects if isinstance(each, Missing))
            named = {entry.message_id for entries in asked_for for entry in entries}
            self._awaited |= named & lost
        if what == "receive":
            received = [row for row in appended if row.number]
            self._check_order_of_cascade(received, is_cramped=peer.world.schedule.is_cramped)
            self._take_into_inbox(peer)
        self._check_inbox(peer)
        self._check_bounds(peer)

    def _note(self, peer: Peer, effect: Effect) -> None:
        match effect:
            case Acknowledged():
                law(effect.message_id in self.sent, f"acknowledged {effect}, which it never sent")
                if not peer.world.schedule.attacks:
                    others = (each for each in peer.world.peers if each is not peer)
                    is_true = any(effect.message_id in each.ledger.frames for each in others)
                    law(is_true, f"{effect}: nobody else has it")
                self.acknowledged.add(effect.message_id)
            case GaveUp():
                law(effect.message_id in self.sent, f"gave up {effect}, which it never sent")
                self.gave_up.add(effect.message_id)
            case Lost():
                law(not peer.log.contains(effect.message_id), f"{effect}, which the log has")
                self.lost.add(effect.message_id)
                self._awaited.discard(effect.message_id)
                self._losing.append((peer.call_count, effect.message_id))
            case Missing():
                for entry in effect.entries:
                    law(
                        not peer.log.contains(entry.message_id),
                        f"missing {entry.message_id}, which the log has",
                    )
            case Status():
                law(effect != self._status, f"{effect} did not change")
                self._status = effect
            case Broadcast():
                self._check_broadcast(peer, effect)
            case Ephemeral():
                given = self.frames.get(effect.message.message_id, ())
                law(effect.message in given, f"{effect} was never received")
            case _:
                pass

    def _check_logged(self, peer: Peer, entry: LogEntry) -> None:
        """A logged message was received or is our own, and is as its frame says."""
        message = entry.message
        law(message.kind is Kind.CONTENT, f"logged a {message.kind} message")
        in_frame = for_application(decode(entry.frame)[0])
        law(in_frame == message, f"{message.message_id} differs from its frame")
        if entry.supersedes:
            law(peer.world.schedule.attacks, "superseded without an attack")
            self.superseded.add(self.logged_number.get(message.message_id, 0))
        if entry.number:
            self.logged_number[message.message_id] = entry.number
            law(message in self.frames.get(message.message_id, ()), "logged what never came")
        for cause in entry.after_gap:
            law(cause in causes(message), f"the gap {cause} is no cause of {message.message_id}")
            logged = peer.log.ids.get(cause)
            is_gap = logged is None or logged.number > entry.number
            law(is_gap, f"the gap {cause} is in the log")
            self.skipped.add(cause)

    def _check_save_comes_first(self, effects: Sequence[Effect], appended: list[LogEntry]) -> None:
        """What is logged, delivered, sent or lost is written before anybody hears of it."""
        heard = (Deliver, Acknowledged, GaveUp, Lost)
        first = next((n for n, each in enumerate(effects) if isinstance(each, Save)), None)
        if appended:
            law(first is not None, "appended to the log without a Save")
        if first is None:
            first = len(effects)
        early = [each for each in effects[:first] if isinstance(each, heard)]
        if appended:
            law(not early, f"{early} before the Save")

    def _check_order_of_cascade(self, entries: list[LogEntry], *, is_cramped: bool) -> None:
        """What one message released follows in causal order; ties go by (Lamport, ID)."""
        left = {
            each.message.message_id: causes(each.message) - {*each.after_gap} for each in entries
        }
        places = {each.message.message_id: _place(each.message) for each in entries}
        for position, message_id in enumerate(places):
            needed = left.pop(message_id)
            law(not needed & left.keys(), f"{message_id} before its cause")
            if position == 0 or is_cramped:  # a message that gives way takes no turn
                continue
            for other, other_needs in left.items():
                is_ready = not other_needs & {*left, message_id}
                is_right = not is_ready or places[message_id] < places[other]
                law(is_right, f"{message_id} before {other}: the tie is reversed")

    def _take_into_inbox(self, peer: Peer) -> None:
        message = self._receiving
        if message is None or message.kind is not Kind.CONTENT:
            return
        if message.message_id in peer.world.messages and not peer.log.contains(message.message_id):
            self._inbox.setdefault(message.message_id, message)

    def _check_inbox(self, peer: Peer) -> None:
        """What was received and is not delivered lacks a cause."""
        schedule = peer.world.schedule
        if schedule.is_cramped or schedule.attacks:
            return
        for message_id in list(self._inbox):
            if peer.log.contains(message_id):
                del self._inbox[message_id]
                continue
            lacking = {
                cause
                for cause in causes(self._inbox[message_id])
                if not peer.log.contains(cause) and cause not in self.sync_ids
            }
            if not self.plan.holds:
                lost = self._lost_on_disk | {message_id for _, message_id in self._losing}
                lacking -= lost - self._inbox.keys() - self._awaited
            law(lacking, f"{message_id} waits although no cause is missing")

    def _check_broadcast(self, peer: Peer, effect: Broadcast) -> None:
        message, dialect = decode(effect.frame)
        law(message.message_id == effect.message_id, "a Broadcast names another message")
        law(message.kind is effect.kind, "a Broadcast names another kind")
        law(message.channel_id == CHANNEL, "a Broadcast into another channel")
        if effect.kind is Kind.CONTENT and message.message_id in self.sent:
            law(self.sent[message.message_id] == effect.frame, "a resend with other bytes")
            return
        logged = peer.log.ids.get(message.message_id)
        if effect.kind is Kind.CONTENT and (logged is None or logged.number):
            law(effect.frame in self._received, "a repair with other bytes than those received")
            is_logged = logged is None or logged.frame == effect.frame
            law(is_logged or peer.world.schedule.attacks, "a repair with a variant")
            return
        law(dialect is self.plan.options.dialect or not message.causal_history, "another dialect")
        law(
            message.sender_id
            == ("" if self.plan.options.dialect is Dialect.V1 else self.plan.name),
            "sent under another name",
        )
        law(len(message.repair_request) <= 3, "more than three repair requests")
        if effect.kind is Kind.EPHEMERAL:
            law(not message.causal_history and not message.bloom_filter, "an ephemeral with state")
            return
        self._check_references(peer, message)
        self._check_lamport(message)
        if effect.kind is Kind.CONTENT:
            sent = for_application(message)
            other = peer.world.messages.setdefault(message.message_id, sent)
            law(other == sent, f"two messages have the ID {message.message_id}")
            self.sent[message.message_id] = effect.frame
        else:
            law(message.message_id not in peer.world.messages, "a sync message has a content ID")

    def _check_references(self, peer: Peer, message: Message) -> None:
        """A history names the newest messages before it and heads: logged ones, each once."""
        options = self.plan.options
        named = [entry.message_id for entry in message.causal_history]
        law(len(set(named)) == len(named), "a history names a message twice")
        law(len(named) <= options.history_max, f"a history of {len(named)}")
        for message_id in named:
            law(peer.log.contains(message_id), f"a history names {message_id}, which the log lacks")
        lamport = message.lamport_timestamp or 0
        schedule = peer.world.schedule
        if schedule.clocks_differ or schedule.attacks:
            return  # a message beyond the bound of the clock is not among them
        newest = peer.log.newest(options.history_size, lamport)
        for reference in newest:
            if reference.entry.message_id == message.message_id:
                continue
            law(
                reference.entry.message_id in named,
                f"a history lacks {reference.entry.message_id}, one of the newest messages",
            )

    def _check_lamport(self, message: Message) -> None:
        """Timestamps grow, and others move them only within the bound."""
        options = self.plan.options
        lamport = message.lamport_timestamp or 0
        law(lamport > self.lamport_sent, f"timestamp {lamport} after {self.lamport_sent}")
        self.lamport_sent = lamport
        self.steps_ahead += 1
        bound = options.lamport_at(self.now_max_ms + options.clock_ahead_ms)
        law(
            lamport <= bound + self.steps_ahead + 1,
            f"timestamp {lamport} is {lamport - bound} beyond the bound",
        )

    def _check_bounds(self, peer: Peer) -> None:
        participant = peer.participant
        if participant is None:
            return
        status, options = participant.status, self.plan.options
        law(
            status == self._status, f"the status is {status!r}, and was said to be {self._status!r}"
        )
        law(status.waiting <= options.waiting_max, f"{status.waiting} wait")
        law(status.missing <= options.missing_max + options.noted_max, f"{status.missing} missing")
        law(status.lost <= options.lost_max, f"{status.lost} lost")

    # --- what comes out, when it is carried out ---------------------------------------------------
    def broadcasts(self, peer: Peer, effect: Broadcast) -> None:
        if effect.message_id in self.sent:
            law(effect.message_id in peer.disk.entries, "broadcast before it was written")

    def delivers(self, peer: Peer, effect: Deliver) -> None:
        """Numbers are consecutive, stable and written; causes come first."""
        number, message = effect.number, effect.message
        message_id = message.message_id
        written = peer.disk.entries.get(message_id)
        law(written is not None and written.number == number, f"delivery {number} is not written")
        while self._next_number != number and self._next_number in self.superseded:
            self._next_number += 1
        law(number == self._next_number, f"delivery {number}, not {self._next_number}")
        self._next_number += 1
        outside = number - self.confirming
        law(outside <= self.plan.options.deliveries_max, f"{outside} unconfirmed deliveries")
        before = self.delivered.get(number)
        if before is not None:
            law(before == effect, f"number {number} first was {before}, and then {effect}")
            return
        is_new = message_id not in self.number_of or effect.supersedes
        law(is_new, f"{message_id} is delivered twice")
        skipped = {*range(self.last_number + 1, number)} - self.superseded
        law(not skipped, f"delivery {number} skips {skipped}")
        for cause in causes(message):
            if cause in effect.after_gap:
                law(cause not in self.number_of, f"{cause} is no gap")
            elif cause == message_id:
                continue
            else:
                known = cause in self.number_of or cause in self.sent or cause in self.sync_ids
                law(known, f"{message_id} is delivered before its cause {cause}")
        was_skipped = any(message_id in each.after_gap for each in self.delivered.values())
        is_right = effect.is_late == was_skipped
        if peer.world.schedule.is_cramped:  # it may have forgotten that it skipped the message
            is_right |= was_skipped
        is_right |= effect.supersedes  # the message that it replaces was the late one
        law(is_right, f"is_late of {message_id} is {effect.is_late}")
        self.delivered[number] = effect
        self.number_of[message_id] = number


def _place(message: Message) -> tuple[int, bytes]:
    return message.lamport_timestamp or 0, message.message_id.encode()


# --- all participants together --------------------------------------------------------------------


def unsettled(world: World) -> list[str]:
    """What is still to happen before the world is as it must be in the end; empty: all is well."""
    return list(_open_matters(world))


def _open_matters(world: World) -> Iterator[str]:
    peers = [each for each in world.peers if not each.is_destroyed]
    named = before_or_at(world, [message_id for peer in peers for message_id in peer.log.ids])
    stored = world.store.frames.keys() if world.store is not None else {}.keys()
    held = {message_id for peer in peers for message_id in peer.log.ids} | (named & stored)
    for peer in peers:
        if peer.participant is None:
            yield f"{peer.name} is down"
            continue
        wanted = held
        if world.schedule.backfills_at_the_end and peer.plan.uses_store:
            wanted = held | stored
        yield from _own_matters(peer, peer.participant.status)
        yield from _gaps(world, peers, peer, wanted & world.messages.keys())


def _own_matters(peer: Peer, status: Status) -> Iterator[str]:
    """Everything sent is acknowledged or given up, everything delivered is confirmed, and nothing
    waits for longer than it may."""
    if status.unacknowledged:
        yield f"{peer.name} waits for {status.unacknowledged} acknowledgements"
    if peer.ledger.confirmed != peer.log.last_number:
        yield f"{peer.name} has {peer.log.last_number} deliveries, {peer.ledger.confirmed} confirmed"
    # At its bounds a participant forgets what it lost, and misses it again when it is named again.
    ends = peer.plan.options.lost_after_ms < NEVER_MS and not peer.world.schedule.is_cramped
    if ends and (status.missing or (status.waiting and not peer.plan.holds)):
        yield f"{peer.name} still waits: {status}"


def _gaps(world: World, peers: list[Peer], peer: Peer, wanted: set[str]) -> Iterator[str]:
    """A peer that says that it lacks nothing lacks nothing; others lack only what they cannot get."""
    assert peer.participant is not None
    status = peer.participant.status
    if world.schedule.is_cramped and peer.plan.holds:
        return  # what gives way is forgotten until it is named again
    is_clean = status.is_synced and not status.lost
    if world.schedule.is_cramped:  # it may have forgotten what it lost
        is_clean &= not (peer.ledger.lost | peer.ledger.skipped) - peer.log.ids.keys()
    for message_id in sorted(wanted - peer.log.ids.keys()):
        if is_clean:
            yield f"{peer.name} says {status}, and lacks {message_id[:8]}"
        elif _should_get(world, peers, peer, message_id):
            yield f"{peer.name} lacks {message_id[:8]} ({status})"


def _should_get(world: World, peers: list[Peer], peer: Peer, message_id: str) -> bool:
    """Whether the peer must have this message in the end.

    There are three reasons to lack it: it is lost or out of reach; it is not known, because only
    messages that are lost or out of reach name it; or it waits behind such a message, because this peer
    holds back what follows a loss, or takes nothing for lost.
    """
    log = peer.log.ids
    schedule = world.schedule
    gone = {
        each
        for each in world.messages.keys() - log.keys()
        if not _can_get(world, peers, peer, each)
    }
    if schedule.is_cramped or schedule.attacks:  # it may have forgotten what it lost
        gone |= (peer.ledger.lost | peer.ledger.skipped) - log.keys()
    waits = peer.plan.holds or peer.plan.options.lost_after_ms >= NEVER_MS
    return message_id not in before_or_at(world, gone) and not (
        waits and before_or_at(world, {message_id}) & gone
    )


def _can_get(world: World, peers: list[Peer], peer: Peer, message_id: str) -> bool:
    """Whether somebody that holds the message gives it to those who ask, and this peer can ask."""
    store = world.store
    if store is not None and peer.plan.uses_store and message_id in store.frames:
        return True
    if can_repair(world, peer):
        for other in peers:
            if other is not peer and other.log.contains(message_id) and can_repair(world, other):
                return True
    if world.schedule.attacks or world.schedule.is_cramped:
        return False
    return len(peers) == len(world.peers) == 2 and not any(
        message_id in other.ledger.gave_up for other in peers
    )


def can_repair(world: World, peer: Peer) -> bool:
    """Whether it asks for and answers repairs, which needs the names of authors."""
    if any(each.plan.options.dialect is Dialect.V1 for each in world.peers):
        return False
    return world.schedule.repairs and peer.plan.options.dialect in {Dialect.V2, Dialect.NIM}


def before_or_at(world: World, message_ids: Iterable[str]) -> set[str]:
    """These messages and all that come before them, as far as the world knows their causes."""
    found: set[str] = set()
    left = list(message_ids)
    while left:
        message_id = left.pop()
        if message_id not in found:
            found.add(message_id)
            left.extend(world.forged.get(message_id, ()))
            if (message := world.messages.get(message_id)) is not None:
                left.extend(causes(message))
    return found
