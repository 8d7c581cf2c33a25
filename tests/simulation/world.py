"""A world of participants in one process: clocks, disks, a network, a store, and their faults.

Everything that happens is a function of the schedule, which is a function of its seed: there is one source
of randomness and one virtual clock. The participants are the real ones. What they must not do is in
`laws.py`.

A world has two phases. In the first, anything can fail. In the second, nothing fails, and the world runs
until everything that the participants promise has happened, or until `SETTLE_MS_MAX`.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

from sdstore.sds import Dialect, Kind, Message, MessageError, decode, entry_digest
from sdstore.sds.effects import (
    Acknowledged,
    Broadcast,
    Deliver,
    Effect,
    GaveUp,
    Lost,
    Missing,
    Save,
    Status,
)
from sdstore.sds.log import LogEntry, MemoryLog, Staged
from sdstore.sds.participant import Participant
from tests.simulation.hostile import Attacker
from tests.simulation.laws import BrokenLawError, Ledger, causes, unsettled
from tests.simulation.schedule import CHANNEL, PeerPlan, Schedule

START_MS = 1_763_000_000_000
SETTLE_MS_MAX = 90 * 60_000
SETTLE_CHECK_MS = 15_000


class SimLog(MemoryLog):
    """The log of a running participant. `pending`: what the next `Save` writes."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[LogEntry | tuple[str, ...]] = []
        self.ids: dict[str, LogEntry] = {}
        self.last_number = 0

    def append(self, entry: LogEntry) -> None:
        message_id = entry.message.message_id
        if self.contains(message_id) and not entry.supersedes:
            raise BrokenLawError(f"appended a message that the log has: {message_id}")
        if entry.number:
            if entry.number != self.last_number + 1:
                raise BrokenLawError(f"delivery {entry.number} follows {self.last_number}")
            self.last_number = entry.number
        super().append(entry)
        self.ids[message_id] = entry
        self.pending.append(entry)

    def unstage(self, message_ids: Sequence[str]) -> None:
        ids = tuple(message_ids)
        super().unstage(ids)
        self.pending.append(ids)


@dataclass
class Disk:
    """What survives a crash."""

    state: dict[str, bytes] = field(default_factory=dict)
    entries: dict[str, LogEntry] = field(default_factory=dict)
    staged: dict[str, Staged] = field(default_factory=dict)

    def write(self, changes: Iterable[tuple[str, bytes | None]], log: SimLog) -> None:
        """One transaction: the changes of the state, and the rows of the log."""
        for key, value in changes:
            if value is None:
                self.state.pop(key, None)
            else:
                self.state[key] = value
        for row in log.pending:
            if isinstance(row, LogEntry):
                self.entries.pop(row.message.message_id, None)  # the new one is the last
                self.entries[row.message.message_id] = row
            else:
                for message_id in row:
                    self.staged.pop(message_id, None)
        log.pending.clear()

    def open_log(self) -> SimLog:
        log = SimLog()
        for entry in self.entries.values():
            log.last_number = entry.number - 1 if entry.number else log.last_number
            log.append(entry)
        log.pending.clear()
        log.stage(list(self.staged.values()), ())
        return log


class Peer:
    """A participant with its disk, its clock and its application."""

    def __init__(self, world: World, plan: PeerPlan) -> None:
        self.world, self.plan, self.name = world, plan, plan.name
        self.disk = Disk()
        self.log = SimLog()
        self.participant: Participant | None = None
        self.is_destroyed = False
        self.offset_ms = plan.offset_ms
        self.ledger = Ledger(plan)
        self.call_count = 0
        self._queue: deque[tuple[int, Effect]] = deque()
        self._is_carrying_out = False
        self.start()

    @property
    def now_ms(self) -> int:
        return self.world.now_ms + self.offset_ms

    # --- life -----------------------------------------------------------------------------------
    def start(self) -> None:
        """Start, or start again with what the disk has."""
        if self.is_destroyed or self.participant is not None:
            return
        self.log = self.disk.open_log()
        if self.disk.state:
            self.participant = Participant.restore(
                CHANNEL, self.name, dict(self.disk.state), self.log, options=self.plan.options
            )
        else:
            self.participant = Participant(
                CHANNEL, self.name, options=self.plan.options, log=self.log
            )
        self.ledger.restarted(self.log)
        self.world.note(self, "starts")
        if self.plan.confirms_at_start:
            self.confirm(self.ledger.last_number)

    def crash(self) -> None:
        """Stop between two steps; the rest of the effects does not happen."""
        self.world.note(self, "crashes")
        self.participant = None
        self._queue.clear()
        self.ledger.crashed()
        if not self.is_destroyed:
            self.world.after(self.world.random.randint(1, 60_000), self.start)

    def crash_if_running(self) -> None:
        if self.participant is not None and self.world.is_faulty:
            self.crash()

    def destroy(self) -> None:
        """Leave for ever, with the disk."""
        self.is_destroyed = True
        if self.participant is not None:
            self.crash()

    # --- the participant's methods ----------------------------------------------------------------
    def send(self, content: bytes, *, is_ephemeral: bool) -> None:
        hint = self.world.hint_of(content) if self.plan.knows_own_hints else None
        self.call(
            "send",
            lambda it: it.send(content, self.now_ms, retrieval_hint=hint, ephemeral=is_ephemeral),
        )

    def receive(self, frame: bytes, hint: bytes | None) -> None:
        if self.participant is not None:
            self.ledger.receives(frame)
        self.call("receive", lambda it: it.receive(frame, self.now_ms, retrieval_hint=hint))

    def tick(self) -> None:
        self.call("tick", lambda it: it.tick(self.now_ms))

    def confirm(self, number: int | None = None) -> None:
        """The application has all deliveries up to this one; the newest of this run if not given."""
        number = self.ledger.handed_number if number is None else number
        if number > self.ledger.confirming and self.participant is not None:
            self.ledger.confirms(self.call_count + 1, number)
            self.call("confirm", lambda it: it.confirm(number))

    def stored(self, message_id: str) -> None:
        self.call("stored", lambda it: it.stored(message_id))

    def take_staged(self) -> bool:
        """Feed some staged messages; whether there may be more to take now."""
        taken: list[Effect] = []

        def take(it: Participant) -> list[Effect]:
            taken.extend(it.take_staged(self.now_ms, self.world.random.randint(1, 20)))
            return taken

        for each in self.log.staged(20) if self.participant is not None else ():
            self.ledger.receives(each.frame)
        self.call("take_staged", take)
        return bool(taken) and self.participant is not None

    def call(self, what: str, ask: Callable[[Participant], list[Effect]]) -> None:
        """Ask the participant; carry out the effects now, or together with later ones."""
        if self.participant is None:
            return
        self.call_count += 1
        rows_before = len(self.log.pending)
        effects = ask(self.participant)
        self.world.note(self, what, effects)
        self.ledger.asked(what, self, effects, self.log.pending[rows_before:])
        self._queue.extend((self.call_count, each) for each in effects)
        if self.plan.combines and self.world.random.random() < 0.7:
            self.world.after(100, self.carry_out)
        else:
            self.carry_out()

    # --- the executor -----------------------------------------------------------------------------
    def carry_out(self) -> None:
        """Carry out what waits, in order, and perhaps stop in the middle."""
        if self._is_carrying_out:
            return
        self._is_carrying_out = True
        while self._queue and self.participant is not None:
            steps = self._steps()
            stop = self.world.crash_point(len(steps))
            for number, step in enumerate(steps):
                if number == stop:
                    break
                if isinstance(step, list):
                    self._write(step)
                else:
                    self._carry_out_one(step)
            if stop is not None:
                self.crash()
        self._is_carrying_out = False

    def _steps(self) -> list[list[tuple[int, Save]] | Effect]:
        """The effects as steps: each `Save` alone, or all together before the others."""
        queued = list(self._queue)
        self._queue.clear()
        saves = [(call, each) for call, each in queued if isinstance(each, Save)]
        if self.plan.combines:
            others = [each for _, each in queued if not isinstance(each, Save)]
            return [saves, *others] if saves else list(others)
        return [[(call, each)] if isinstance(each, Save) else each for call, each in queued]

    def _write(self, saves: list[tuple[int, Save]]) -> None:
        self.disk.write([change for _, save in saves for change in save.changes], self.log)
        self.ledger.saved(saves[-1][0])

    def _carry_out_one(self, effect: Effect) -> None:
        world = self.world
        match effect:
            case Broadcast():
                self.ledger.broadcasts(self, effect)
                world.broadcast(self, effect)
            case Deliver():
                self.ledger.delivers(self, effect)
                if self.plan.confirm_ms == 0:
                    self.confirm()
                else:
                    world.after(world.random.randint(0, self.plan.confirm_ms), self.confirm)
            case Missing():
                world.fetch(self, effect)
            case Acknowledged() | GaveUp() | Lost() | Status():
                pass
            case _:
                pass


class Store:
    """A store node: content frames by ID and by hint."""

    def __init__(self) -> None:
        self.is_up = True
        self.frames: dict[str, list[bytes]] = {}
        self.hints: dict[bytes, str] = {}

    def keep(self, frame: bytes, hint: bytes) -> None:
        message, _ = decode(frame)
        variants = self.frames.setdefault(message.message_id, [])
        if frame not in variants:
            variants.append(frame)
        self.hints[hint] = message.message_id


class World:
    """See the module."""

    def __init__(self, schedule: Schedule, trace: Callable[[str], None] | None = None) -> None:
        self.schedule = schedule
        self.random = Random(schedule.seed)
        self.now_ms = START_MS
        self.is_faulty = True
        self.messages: dict[str, Message] = {}
        """Every content message of the participants."""
        self.forged: dict[str, set[str]] = {}
        """The causes of the attacker's messages."""
        self._trace = trace
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._side_of: dict[str, int] = {}
        self.store = Store() if schedule.has_store else None
        self.peers = [Peer(self, plan) for plan in schedule.peers]
        self.attacker = Attacker(self.random, CHANNEL) if schedule.attacks else None
        self._plan_faults()

    # --- time -------------------------------------------------------------------------------------
    def after(self, pause_ms: int, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_ms + pause_ms, next(self._numbers), act))

    def run_until(self, at_ms: int) -> None:
        while self._events and self._events[0][0] <= at_ms:
            self.now_ms, _, act = heapq.heappop(self._events)
            act()
        self.now_ms = at_ms

    def run(self) -> None:
        """Both phases; raises `BrokenLawError` if a law is broken."""
        self.run_until(START_MS + self.schedule.faulty_ms)
        self._heal()
        ends = self.now_ms + SETTLE_MS_MAX
        while left := unsettled(self):
            if self.now_ms >= ends:
                raise BrokenLawError("does not settle: " + "; ".join(left[:8]))
            self.run_until(self.now_ms + SETTLE_CHECK_MS)

    def _heal(self) -> None:
        self.is_faulty = False
        self._side_of = {}
        if self.store is not None:
            self.store.is_up = True
        self.note(None, "faults end")
        for peer in self.peers:
            peer.start()
            if self.schedule.backfills_at_the_end:
                self.after(self.random.randint(0, 60_000), lambda peer=peer: self.backfill(peer))

    # --- faults -----------------------------------------------------------------------------------
    def _plan_faults(self) -> None:
        plan, random = self.schedule, self.random

        def at_random(count: int, act: Callable[[], None]) -> None:
            for _ in range(count):
                self.after(random.randint(0, plan.faulty_ms), act)

        for number in range(plan.messages_count):
            self.after(random.randint(0, plan.faulty_ms), lambda n=number: self._say(n))
        for peer in self.peers:
            self._keep_ticking(peer)
            if peer.plan.destroyed_at_ms:
                self.after(peer.plan.destroyed_at_ms, peer.destroy)
        at_random(plan.crashes_count, lambda: self._somebody().crash_if_running())
        at_random(plan.jumps_count, self._jump)
        at_random(plan.partitions_count, self._part)
        at_random(plan.outages_count, self._outage)
        at_random(plan.backfills_count, lambda: self.backfill(self._somebody()))
        at_random(plan.attacks_count, self._attack)

    def _somebody(self) -> Peer:
        return self.random.choice(self.peers)

    def _say(self, number: int) -> None:
        peer = self.random.choices(self.peers, [each.plan.talks for each in self.peers])[0]
        if peer.participant is not None:
            text = b"%d by %s" % (number, peer.name.encode())
            is_ephemeral = self.random.random() < self.schedule.ephemeral
            if is_ephemeral and peer.plan.options.dialect is Dialect.NIM:
                return  # it has no ephemeral messages
            peer.send(text, is_ephemeral=is_ephemeral)

    def _keep_ticking(self, peer: Peer) -> None:
        def tick() -> None:
            peer.tick()
            self.after(peer.plan.tick_ms, tick)

        self.after(self.random.randint(0, peer.plan.tick_ms), tick)

    def _jump(self) -> None:
        if self.is_faulty:
            peer = self._somebody()
            peer.offset_ms += self.random.choice(self.schedule.jumps_ms)
            self.note(peer, f"clock jumps to offset {peer.offset_ms / 1000:,.0f} s")

    def _part(self) -> None:
        if self.is_faulty:
            self._side_of = {peer.name: self.random.randint(0, 1) for peer in self.peers}
            self.note(None, f"partition {self._side_of}")
            self.after(self.random.randint(1_000, self.schedule.partition_ms), self._side_of.clear)

    def _outage(self) -> None:
        store = self.store
        if store is not None and self.is_faulty:
            store.is_up = False

            def end() -> None:
                store.is_up = True

            self.after(self.random.randint(1_000, self.schedule.partition_ms), end)

    def _attack(self) -> None:
        if self.attacker is not None and self.is_faulty:
            victims = [each for each in self.peers if self.random.random() < 0.6]
            for frame in self.attacker.frames():
                with contextlib.suppress(MessageError):
                    forged, _ = decode(frame)
                    self.forged.setdefault(forged.message_id, set()).update(causes(forged))
                for peer in victims:
                    self._fly(peer, frame, None)
                if self.store is not None and self.random.random() < 0.3:
                    self._publish(None, frame)

    def crash_point(self, steps_count: int) -> int | None:
        """After how many steps a peer stops; mostly `None`."""
        if self.is_faulty and self.random.random() < self.schedule.crash_in_effects:
            return self.random.randint(0, steps_count)
        return None

    # --- the network --------------------------------------------------------------------------------
    def hint_of(self, content: bytes) -> bytes:
        """A retrieval hint: here the transport names a message by its content."""
        return b"hint of " + content

    def broadcast(self, sender: Peer, effect: Broadcast) -> None:
        """To everybody, and to the store."""
        if self.attacker is not None:
            self.attacker.overhears(effect.frame)
        echoes = self.random.random() < self.schedule.echo
        for peer in self.peers:
            if (peer is not sender or echoes) and self._are_together(sender, peer):
                self._fly(peer, effect.frame, self._hint(effect.frame))
        if self.store is not None and sender.plan.uses_store and not self._is_lost():
            self.after(self._delay_ms(), lambda: self._publish(sender, effect.frame))

    def _hint(self, frame: bytes) -> bytes | None:
        if not self.schedule.has_hints:
            return None
        return self.hint_of(decode(frame)[0].content)

    def _are_together(self, one: Peer, other: Peer) -> bool:
        return self._side_of.get(one.name) == self._side_of.get(other.name)

    def _is_lost(self) -> bool:
        return self.is_faulty and self.random.random() < self.schedule.loss

    def _delay_ms(self) -> int:
        return self.random.randint(1, self.schedule.delay_ms if self.is_faulty else 200)

    def _fly(self, receiver: Peer, frame: bytes, hint: bytes | None) -> None:
        copies = 2 if self.is_faulty and self.random.random() < self.schedule.repeat else 1
        for _ in range(copies):
            if not self._is_lost():
                self.after(self._delay_ms(), lambda: receiver.receive(frame, hint))

    # --- the store ----------------------------------------------------------------------------------
    def _publish(self, sender: Peer | None, frame: bytes) -> None:
        store = self.store
        if store is None or not store.is_up:
            return
        try:
            message, _ = decode(frame)
        except MessageError:
            return
        if message.kind is Kind.CONTENT and message.channel_id == CHANNEL:
            store.keep(frame, self.hint_of(message.content))
            if sender is not None and not self._is_lost():
                self.after(self._delay_ms(), lambda: sender.stored(message.message_id))
        if self.schedule.store_relays:
            for peer in self.peers:
                if peer is not sender and peer.plan.uses_store:
                    self._fly(peer, frame, self._hint(frame))

    def fetch(self, asker: Peer, missing: Missing) -> None:
        """Ask the store: by hint, else by ID; sometimes it sends what comes before, too."""
        if self.store is None or not asker.plan.uses_store or self._is_lost():
            return
        self.after(self._delay_ms(), lambda: self._answer(asker, missing))

    def _answer(self, asker: Peer, missing: Missing) -> None:
        store = self.store
        if store is None or not store.is_up:
            return
        wanted: list[str] = []
        for entry in missing.entries:
            by_hint = store.hints.get(entry.retrieval_hint)
            wanted.append(by_hint if by_hint is not None else entry.message_id)
        found = [frame for message_id in wanted for frame in store.frames.get(message_id, ())]
        for frame in found:
            self._fly(asker, frame, self._hint(frame))

    def backfill(self, peer: Peer) -> None:
        """Stage everything that the store has and the log lacks; then feed it."""
        store = self.store
        if store is None or not store.is_up or peer.participant is None or not peer.plan.uses_store:
            return
        lacking = [
            _staged(frames[0])
            for message_id, frames in store.frames.items()
            if not peer.log.contains(message_id)
        ]
        self.note(peer, f"backfills {len(lacking)}")
        peer.log.stage(lacking, ())
        peer.disk.staged |= {each.message.message_id: each for each in lacking}
        self._feed(peer)

    def _feed(self, peer: Peer) -> None:
        while peer.take_staged():
            pass
        if peer.participant is not None and peer.log.staged(1):
            self.after(5_000, lambda: self._feed(peer))

    # --- the trace ----------------------------------------------------------------------------------
    def note(self, peer: Peer | None, what: str, effects: Iterable[Effect] = ()) -> None:
        """Write down what happens, if anybody reads it."""
        if self._trace is None:
            return
        at_s = (self.now_ms - START_MS) / 1000
        name = peer.name if peer else "world"
        self._trace(f"{at_s:10.3f} {name:5} {what}")
        for effect in effects:
            self._trace(f"{'':16} {effect}")


def _staged(frame: bytes) -> Staged:
    message, _ = decode(frame)
    return Staged(message, frame, entry_digest(message), b"")
