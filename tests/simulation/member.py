"""A channel of honest participants and one hostile member, without a store: a function of a seed.

The hostile member hears every frame and sends what it likes, under any name, to whom it likes. Everything
is shorter than by default by a factor of six or so. A world either loses frames or has forged copies of honest
messages: a copy that comes first and whose original never comes cannot be told from an original.

In ordered worlds all members are indexers, the hostile one too. She forges copies of indexers' messages and names
ghosts in a chain of her own; she neither forks it nor writes new messages under other indexers' names, which nobody can
hold against. Frames are not lost, and her flood reaches everybody: there is no store to get from what an honest indexer
names, and repairs of hundreds of messages that one member has take longer than a world.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

from sdstore.ordering import Roles
from sdstore.participant import ChannelOrder
from sdstore.sds import (
    SHA256_CONTENT,
    SHA256_MESSAGE,
    Broadcast,
    Deliver,
    Effect,
    HistoryEntry,
    Kind,
    MemoryLog,
    Message,
    Participant,
    ParticipantOptions,
    Publish,
    RepairOptions,
    Save,
    decode,
    encode,
)
from tests.simulation.laws import BrokenLawError, law

CHANNEL = "member"
START_MS = 1_763_000_000_000
TICK_MS = 4_000
TALK_MS = 120_000
SETTLE_MS = 900_000
CALM_MS = 600_000
"""Without a hostile member a world settles in this time: repairs of lost messages included."""

AMPLIFICATION_MAX = 270
"""Bytes that all honest members together send more, for each byte of the hostile one."""

HOSTILE = "mallory the indexer"

NOISE_FRAMES = 60
"""What a world sends more or less because its sync messages come at other times."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens in a world."""

    seed: int
    count: int
    options: ParticipantOptions
    loss: float
    delay_ms: int
    attacks: int
    restarts: int


def plan_of(seed: int) -> Plan:
    """The plan of a seed."""
    random = Random(f"member {seed}")
    is_lossy = random.random() < 0.5
    options = ParticipantOptions(
        id_scheme=random.choice([SHA256_MESSAGE, SHA256_MESSAGE, SHA256_CONTENT]),
        bloom=None if random.random() < 0.3 else ParticipantOptions().bloom,
        bloom_capacity=random.choice([200, 200, 10_000]),
        lost_after_ms=60_000,
        lost_retry_ms=60_000,
        fetch_retry_ms=5_000,
        fetch_retry_ms_max=30_000,
        resend_ms=10_000,
        resend_possibly_ms=20_000,
        resend_ms_max=60_000,
        sync_ms=10_000,
        sync_ms_max=60_000,
        waiting_max=random.choice([15, 15, 4_096]),
        noted_max=random.choice([200, 1_000]),
        repair=RepairOptions(t_min_ms=5_000, t_max_ms=20_000, answers_per_requester=6),
    )
    return Plan(
        seed,
        random.choice([2, 3, 3, 4]),
        options,
        random.uniform(0.05, 0.3) if is_lossy else 0.0,
        random.choice([500, 5_000, 20_000]),
        random.randint(1, 8),
        random.choice([0, 0, 1, 4]),
    )


def ordered_plan_of(seed: int) -> Plan:
    """The same in ordered mode."""
    plan = plan_of(seed)
    indexers = (HOSTILE, *(f"p{number}" for number in range(max(plan.count, 2))))
    options = replace(
        plan.options,
        id_scheme=SHA256_MESSAGE,
        bloom=None,
        ordered=True,
        indexers=indexers,
        waiting_max=4_096,
        repair=replace(plan.options.repair, answers_per_requester=1_000),
    )
    return replace(
        plan, options=options, count=len(indexers) - 1, loss=0.0, attacks=plan.attacks + 4
    )


class Member:
    """An honest participant with its log."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.log = MemoryLog()
        options = replace(world.plan.options, seed=f"{name} {world.plan.seed}".encode())
        self.participant = Participant(CHANNEL, name, options=options, log=self.log)
        self.state: dict[str, bytes] = {}
        self.ghosts_requested = 0
        self.delivered: dict[str, tuple[Message, int]] = {}
        """By ID: the message that counts, and when its author's own one was delivered first."""
        self.known: set[str] = set()
        """Those of whom something was delivered with all its causes; the others share one account."""
        self.order = ChannelOrder(self.log, Roles(indexers=options.indexers))

    def restart(self) -> None:
        options = self.participant.options
        self.participant = Participant.restore(
            CHANNEL, self.name, self.state, self.log, options=options
        )

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Save):
                self._save(effect)
            elif isinstance(effect, Broadcast):
                self.world.broadcast(self, effect)
                if effect.kind is Kind.CONTENT and self.log.frame(effect.message_id):
                    self._put_in_order(effect.message_id)
            elif isinstance(effect, Publish):
                self.carry_out(self.participant.stored(effect.message_id))
            elif isinstance(effect, Deliver):
                self._take(effect)
                self.carry_out(self.participant.confirm(effect.number))

    def _save(self, save: Save) -> None:
        for key, value in save.changes:
            if value is None:
                self.state.pop(key, None)
            else:
                self.state[key] = value

    def _take(self, effect: Deliver) -> None:
        message = effect.message
        self._put_in_order(message.message_id)
        is_genuine = self.world.is_genuine(message)
        is_known = message.sender_id in self.known - self.world.abused
        if not self.world.plan.loss and is_known and is_genuine:
            skipped = self.world.honest.keys() & {*effect.after_gap}
            law(not skipped, f"{message.content.decode()!r} comes before its causes")
        _, at_ms = self.delivered.get(message.message_id, (message, 0))
        if not at_ms and is_genuine:
            at_ms = self.world.now_ms
        self.delivered[message.message_id] = message, at_ms
        if not effect.after_gap:
            self.known.add(message.sender_id)

    def _put_in_order(self, message_id: str) -> None:
        if self.world.plan.options.ordered:
            before = self.order.ordering.confirmed
            self.order.add(message_id)
            after = self.order.ordering.confirmed
            law(after[: len(before)] == before, f"{self.name} takes back what it confirmed")

    def logged(self) -> list[Message]:
        """Its log, in log order."""
        places = self.log.newest(len(self.log), 2**63)
        frames = (self.log.frame(each.entry.message_id) or b"" for each in places)
        return [_bare(decode(frame)[0]) for frame in frames]


def _bare(message: Message) -> Message:
    return replace(message, bloom_filter=b"", repair_request=())


class World:
    """Runs a plan, with or without the hostile member."""

    def __init__(self, plan: Plan, *, is_hostile: bool = True) -> None:
        self.plan = plan
        self.random = Random(plan.seed)
        self.now_ms = START_MS
        self.honest: dict[str, tuple[Message, int]] = {}
        """By ID: every honest message with content, and when it was sent."""
        self.abused: set[str] = set()
        """Names under which the hostile member wrote messages of her own: those count against that name."""
        self.honest_bytes = self.hostile_bytes = self.frame_bytes_max = 0
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._count = 0
        self._overheard: list[Message] = []
        self._said: set[bytes] = set()
        self.members = [Member(self, f"p{number}") for number in range(plan.count)]
        talk = Random(f"talk {plan.seed}")
        for number in range(talk.randint(4, 24)):
            self._at(talk.randint(0, TALK_MS), lambda n=number: self._say(talk, n))
        for member in self.members:
            for at_ms in range(talk.randint(0, TICK_MS), SETTLE_MS, TICK_MS):
                self._at(at_ms, lambda m=member: m.carry_out(m.participant.tick(self.now_ms)))
        for _ in range(plan.restarts):
            self._at(talk.randint(0, TALK_MS + 60_000), talk.choice(self.members).restart)
        if plan.options.ordered:  # two rounds confirm what was said before
            for number in range(3 * plan.count):
                member, pause_ms = self.members[number % plan.count], CALM_MS + 25_000 * number
                self._at(pause_ms, lambda m=member, n=number: self._say_as(m, f"calm {n}".encode()))
        if is_hostile:
            self._attacker = Attacker(Random(f"attack {plan.seed}"), plan)
            for _ in range(plan.attacks):
                self._at(self._attacker.random.randint(0, TALK_MS + 20_000), self._attack)
            if plan.options.ordered:
                return
            self._at(TALK_MS + 100, lambda: self._attack(self._attacker.references))
            self._at(TALK_MS + 21_000, lambda: self._attack(self._attacker.sync_ids))

    def _at(self, pause_ms: int, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now_ms + pause_ms, self._count, act))

    def run(self) -> None:
        """All events of the world."""
        while self._events:
            self.now_ms, _, act = heapq.heappop(self._events)
            act()

    def _say(self, talk: Random, number: int) -> None:
        member = talk.choice(self.members)
        self._say_as(member, f"{number} of {member.name}".encode())

    def _say_as(self, member: Member, text: bytes) -> None:
        self._said.add(text)
        member.carry_out(member.participant.send(text, self.now_ms))

    def is_genuine(self, message: Message) -> bool:
        """Whether this is an honest message as its author sent it, as far as its ID proves."""
        if message.message_id not in self.honest:
            return False
        honest, _ = self.honest[message.message_id]
        if self.plan.options.id_scheme is SHA256_CONTENT:
            return message.content == honest.content
        return _bare(message) == honest

    def broadcast(self, sender: Member, effect: Broadcast) -> None:
        """To all other members; the hostile one hears everything."""
        self.honest_bytes += len(effect.frame)
        self.frame_bytes_max = max(self.frame_bytes_max, len(effect.frame))
        message = decode(effect.frame)[0]
        asked = (each.message_id for each in message.repair_request)
        sender.ghosts_requested += sum(each.startswith("!ghost") for each in asked)
        if message.content in self._said and message.sender_id == sender.name:
            self.honest.setdefault(message.message_id, (_bare(message), self.now_ms))
        self._overheard.append(message)
        for member in self.members:
            if member is not sender and self.random.random() >= self._loss:
                delay_ms = self.random.randint(1, self.plan.delay_ms)
                self._fly(member, effect.frame, delay_ms)

    @property
    def _loss(self) -> float:
        return self.plan.loss if self.now_ms < START_MS + TALK_MS + 60_000 else 0.0

    def _fly(self, member: Member, frame: bytes, delay_ms: int) -> None:
        self._at(
            delay_ms,
            lambda: member.carry_out(member.participant.receive(frame, self.now_ms)),
        )

    def _attack(self, make: Callable[[list[Message]], list[Message]] | None = None) -> None:
        attacker = self._attacker
        if make is None:
            make = attacker.random.choice(attacker.kinds)
        victims = [each for each in self.members if attacker.random.random() < 0.7]
        if self.plan.options.ordered and make == attacker.flood:
            victims = self.members
        for message in make(self._overheard):
            frame = encode(message)
            self.hostile_bytes += len(frame)
            if message.message_id.startswith("hostile"):
                self.abused.add(message.sender_id)
            for member in victims or self.members:
                self._fly(member, frame, attacker.random.randint(0, 100))


class Attacker:
    """Makes the frames of an attack."""

    def __init__(self, random: Random, plan: Plan) -> None:
        self.random = random
        self._names = [f"p{number}" for number in range(plan.count)]
        self._made = 0
        self.kinds = [
            self.ghosts, self.sync_ghosts, self.references, self.flood, self.flood, self.requests,
            self.sync_ids,
        ]  # fmt: skip
        self._chain: tuple[HistoryEntry, ...] = ()
        if plan.options.ordered:
            self.kinds = [self.flood, self.copies, self.histories, self.chain, self.senders]
        elif not plan.loss:
            self.kinds += [self.copies, self.copies, self.histories, self.histories]

    def _id(self) -> str:
        self._made += 1
        return f"hostile {self._made} {self.random.random()}"

    def _message(self, sender: str, history: tuple[HistoryEntry, ...], text: bytes) -> Message:
        return Message(self._id(), CHANNEL, sender, START_MS, history, b"", (), text)

    def _name(self) -> str:
        return self.random.choice(["mallory", self._id(), *self._names])

    def _ghosts(self, count: int) -> tuple[HistoryEntry, ...]:
        """IDs that sort before those of honest messages."""
        author = self.random.choice(["", *self._names])
        return tuple(HistoryEntry(f"!ghost {self._id()}", b"", author) for _ in range(count))

    def _victims(self, overheard: list[Message]) -> list[Message]:
        content = [each for each in overheard[-30:] if each.content]
        return self.random.sample(content, min(len(content), 3))

    def ghosts(self, _: list[Message]) -> list[Message]:
        return [self._message(self._name(), self._ghosts(self.random.choice([1, 30, 256])), b"x")]

    def sync_ghosts(self, _: list[Message]) -> list[Message]:
        count = self.random.randint(1, 3)
        return [self._message(self._name(), self._ghosts(128), b"") for _ in range(count)]

    def references(self, overheard: list[Message]) -> list[Message]:
        """Names of messages without their authors, from as many as it takes to displace heads."""
        content = [each for each in overheard if each.content][-10:]
        named = tuple(HistoryEntry(each.message_id) for each in content)
        made = [self._message("mallory", named, b"x") for _ in range(3)]
        newest = max((each.lamport_timestamp or 0 for each in content), default=START_MS)
        return [replace(each, lamport_timestamp=newest + 1) for each in made]

    def flood(self, _: list[Message]) -> list[Message]:
        return [self._message(self._id(), self._ghosts(1), b"x") for _ in range(40)]

    def requests(self, overheard: list[Message]) -> list[Message]:
        wanted = [HistoryEntry(each.message_id, b"", "p0") for each in self._victims(overheard)]
        asked = (*wanted, *self._ghosts(3))
        return [replace(self._message(self._name(), (), b""), repair_request=asked)]

    def sync_ids(self, overheard: list[Message]) -> list[Message]:
        content = [each for each in overheard if each.content][-20:]
        sender = self.random.choice(["", self._name()])
        return [Message(each.message_id, CHANNEL, sender, START_MS) for each in content]

    def chain(self, _: list[Message]) -> list[Message]:
        """The hostile indexer's own, with ghosts."""
        message = self._message(HOSTILE, (*self._chain, *self._ghosts(1)), b"x")
        self._chain = (HistoryEntry(message.message_id, b"", HOSTILE),)
        return [message]

    def senders(self, overheard: list[Message]) -> list[Message]:
        return [replace(each, sender_id=HOSTILE) for each in self._victims(overheard)]

    def copies(self, overheard: list[Message]) -> list[Message]:
        return [replace(each, content=b"forged") for each in self._victims(overheard)]

    def histories(self, overheard: list[Message]) -> list[Message]:
        count = self.random.choice([1, 256])
        return [
            replace(each, causal_history=self._ghosts(count)) for each in self._victims(overheard)
        ]


def requests_max(world: World) -> int:
    """How often a member may ask for what was invented: all invented names share an account."""
    plan = world.plan
    repair = plan.options.repair
    assert repair is not None
    accounts = 1 + len(world.abused & {"mallory", *(each.name for each in world.members)})
    windows = SETTLE_MS // repair.t_max_ms + 1 + plan.restarts
    return repair.answers_per_requester * accounts * windows


def check(seed: int) -> None:
    """Run the world of a seed; raises `BrokenLawError` if a law is broken."""
    plan = plan_of(seed)
    world = World(plan)
    world.run()
    orders = set()
    for member in world.members:
        logged = {each.message_id: each for each in member.logged()}
        orders.add(tuple(each for each in logged if each in world.honest))
        for message_id, (message, at_ms) in world.honest.items():
            name = f"{message.content.decode()!r} at {member.name}"
            law(message_id in logged, f"{name} is lost")
            law(world.is_genuine(logged[message_id]), f"{name} is replaced")
            if message.sender_id == member.name:
                continue
            law(message_id in member.delivered, f"{name} is hidden")
            found, delivered_ms = member.delivered[message_id]
            law(world.is_genuine(found), f"{name} is hidden by {found}")
            delay_ms = delivered_ms - at_ms
            law(delay_ms <= CALM_MS, f"{name} comes after {delay_ms / 1000:.0f} s")
        law(member.ghosts_requested <= requests_max(world), f"{member.name} asks for all ghosts")
    law(len(orders) == 1, "honest logs differ")
    quiet = World(plan, is_hostile=False)
    quiet.run()
    more = world.honest_bytes - quiet.honest_bytes
    law(
        more <= AMPLIFICATION_MAX * world.hostile_bytes + NOISE_FRAMES * world.frame_bytes_max,
        f"{world.hostile_bytes} hostile bytes cost {more}",
    )


def check_order(seed: int) -> None:
    """Run the ordered world of a seed; raises `BrokenLawError` if a law is broken."""
    plan = ordered_plan_of(seed)
    world = World(plan)
    world.run()
    orders = sorted((each.order.ordering.confirmed for each in world.members), key=len)
    for shorter, longer in pairwise(orders):
        law(longer[: len(shorter)] == shorter, "two honest readers confirm different orders")
    for member in world.members:
        law(not member.order.ordering.breaches, f"{member.order.ordering.breaches}")
        confirmed = {*member.order.ordering.confirmed}
        for message_id, (message, at_ms) in world.honest.items():
            is_early = at_ms < START_MS + TALK_MS
            name = f"{message.content.decode()!r} at {member.name}"
            law(not is_early or message_id in confirmed, f"{name} is not confirmed")


def wrong_in(seed: int, *, is_ordered: bool = False) -> str:
    """Empty, or what is wrong in the world of a seed."""
    try:
        (check_order if is_ordered else check)(seed)
    except BrokenLawError as broken:
        return str(broken)
    except Exception as error:  # noqa: BLE001 (whatever is raised belongs to the seed)
        return f"{type(error).__name__}: {error}"
    return ""
