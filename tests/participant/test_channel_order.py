"""Participants in ordered mode give their applications prefixes that never contradict each other."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import pairwise, permutations

import pytest

from sdstore.ordering import BreachKind, OrderingError, Roles
from sdstore.participant import ChannelOrder, ParticipantFile
from sdstore.sds import (
    Broadcast,
    Deliver,
    Effect,
    HistoryEntry,
    Kind,
    LogEntry,
    MemoryLog,
    Message,
    Missing,
    ParticipantOptions,
    decode,
    encode,
)
from sdstore.sds.model import message_id_layout
from tests.support.participants import CHANNEL, NOON_MS, Device, of

ORDERED = ParticipantOptions(bloom=None, sync_ms=5_000, ordered=True)
SEEDS = range(12)


class Member(Device):
    """A participant and an application that shows the order of the channel."""

    def __init__(self, name: str, roles: Roles, options: ParticipantOptions = ORDERED) -> None:
        super().__init__(name, replace(options, indexers=tuple(roles.indexers)))
        self.roles = roles
        self.out: list[bytes] = []
        self.shown: list[str] = []
        self.channel_order = ChannelOrder(self.log, roles)

    def carry_out(self, effects: list[Effect]) -> list[Effect]:
        for effect in effects:
            if isinstance(effect, Broadcast):
                self.out.append(effect.frame)
                if effect.kind is Kind.CONTENT:
                    self.show(effect.message_id)
            elif isinstance(effect, Deliver):
                self.show(effect.message.message_id)
        return super().carry_out(effects)

    def show(self, message_id: str) -> None:
        """An application that takes back what was rewound and prints what is new."""
        ordering = self.channel_order.ordering
        was = self.shown
        change = self.channel_order.add(message_id)
        kept = len(was) - change.rewound
        self.shown = was[:kept] + ordering.page(kept, len(ordering))
        assert len(self.shown) == len(was) + change.placed
        assert self.shown == ordering.confirmed + ordering.tail

    def crash(self) -> None:
        """Start again with what the program saved."""
        super().crash()
        self.channel_order = ChannelOrder(self.log, self.roles, self.channel_order.saved)
        while self.channel_order.load():
            pass
        ordering = self.channel_order.ordering
        assert ordering.confirmed + ordering.tail == self.shown


@dataclass
class World:
    """Members on a network that loses, repeats and reorders; a store has what was broadcast."""

    seed: int
    members: list[Member]
    loss: float
    inboxes: dict[str, list[bytes]] = field(default_factory=dict)
    store: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.inboxes = {each.name: [] for each in self.members}

    def spread(self) -> None:
        for member in self.members:
            for frame in member.out:
                self.store.setdefault(decode(frame)[0].message_id, frame)
                for name, inbox in self.inboxes.items():
                    if name != member.name and self.random.random() >= self.loss:
                        inbox += [frame] * self.random.choice([1, 1, 2])
            member.out.clear()

    def step(self) -> None:
        member = self.random.choice(self.members)
        act = self.random.random()
        inbox = self.inboxes[member.name]
        if act < 0.3:
            member.say(f"{member.name}{len(self.store)}")
        elif act < 0.85 and inbox:
            frame = inbox.pop(self.random.randrange(len(inbox)))
            effects = member.hear(frame)
            for missing in of(Missing, effects):
                if self.random.random() >= self.loss:
                    found = [self.store.get(entry.message_id) for entry in missing.entries]
                    inbox += [each for each in found if each is not None]
        elif act < 0.97:
            member.wait(10, step_s=5)
        else:
            member.crash()
        self.spread()
        self.check()

    def check(self) -> None:
        """Of two confirmed prefixes, one begins with the other."""
        by_length = sorted(
            (each.channel_order.ordering.confirmed for each in self.members), key=len
        )
        for shorter, longer in pairwise(by_length):
            assert longer[: len(shorter)] == shorter, f"seed {self.seed}"

    def settle(self, *talkers: Member) -> None:
        """Some members talk in turn, and everything arrives."""
        self.loss = 0.0
        for talker in talkers:
            talker.say(f"{talker.name}{len(self.store)}")
            self.spread()
            for member in self.members:
                self.inboxes[member.name].clear()
                member.hear(*self.store.values())
            self.spread()
            self.check()


@pytest.mark.parametrize("seed", SEEDS)
def test_confirmed_prefixes_agree_and_grow_through_loss_reordering_and_restarts(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"m{number}" for number in range(rng.randint(3, 5))]
    indexers = names if rng.random() < 0.5 else names[:3]
    members = [Member(name, Roles(indexers=indexers)) for name in names]
    world = World(seed, members, loss=rng.choice([0.0, 0.2, 0.5]))
    for _ in range(150):
        world.step()
    before = len(members[0].channel_order.ordering.confirmed)
    turns = [each for _ in range(4) for each in members]
    world.settle(*turns)
    orders = [each.channel_order.ordering for each in members]
    assert not [each.breaches for each in orders if each.breaches], f"seed {seed}"
    assert len({tuple(each.confirmed) for each in orders}) == 1, f"seed {seed}"
    assert len(orders[0].confirmed) >= before + len(members)
    assert len(orders[0]) == len(members[0].log)
    assert all(not each.waiting for each in orders)


def three(*options: ParticipantOptions) -> World:
    roles = Roles(indexers=("ada", "bob", "cyn"))
    names = ("ada", "bob", "cyn")
    members = [Member(*each) for each in zip(names, [roles] * 3, options, strict=True)]
    return World(0, members, loss=0.0)


def test_an_indexer_outside_of_the_mode_is_named_and_nothing_more_is_confirmed() -> None:
    world = three(ORDERED, ORDERED, replace(ORDERED, ordered=False))
    ada, bob, cyn = world.members
    world.settle(cyn, ada, bob, ada)
    confirmed = ada.channel_order.ordering.confirmed
    assert confirmed
    world.settle(cyn)  # it names the newest two, which are by the others
    world.settle(*[ada, bob, cyn] * 4)
    for member in world.members:
        breach = member.channel_order.ordering.breaches[0]
        assert (breach.kind, breach.sender_id) == (BreachKind.FORK, "cyn")
        assert member.channel_order.ordering.confirmed == confirmed
        assert len(member.channel_order.ordering) == len(member.log)  # still ordered, tentatively


def test_a_forged_message_with_an_early_timestamp_takes_nothing_back_at_a_restart() -> None:
    world = three(ORDERED, ORDERED, ORDERED)
    confirmed = confirmed_of(world)[0]
    ada = world.members[0]
    forged = Message("forged", CHANNEL, "bob", 1, content=b"x")
    ada.hear(encode(forged))
    assert ada.channel_order.ordering.confirmed == confirmed
    again = ChannelOrder(ada.log, ada.roles, ada.channel_order.saved)
    while again.load():
        pass
    assert again.ordering.confirmed == confirmed
    assert again.ordering.breaches == ada.channel_order.ordering.breaches
    with pytest.raises(OrderingError, match="other_roles"):
        ChannelOrder(ada.log, Roles(indexers=("ada",)), again.saved)


def by_hand(message_id: str, sender_id: str, *causes: str) -> bytes:
    history = tuple(HistoryEntry(cause, b"", "dora") for cause in causes)
    return encode(Message(message_id, CHANNEL, sender_id, NOON_MS, history, content=b"by hand"))


def confirmed_of(world: World) -> list[list[str]]:
    """What each member confirms after all have talked for a while."""
    world.settle(*world.members * 4)
    return [each.channel_order.ordering.confirmed for each in world.members]


def test_a_member_that_names_a_message_that_never_existed_stops_nothing() -> None:
    world = three(ORDERED, ORDERED, ORDERED)
    assert len(confirmed_of(world)[0]) > 5
    for member in world.members:
        member.hear(by_hand("m0", "mallory", "ghost"), by_hand("m1", "mallory", "m0"))
        member.wait(400)
    confirmed = confirmed_of(world)
    assert {"m0", "m1"} < set(confirmed[0])
    assert len(confirmed[0]) > 20
    assert confirmed[0] == confirmed[1] == confirmed[2]


def test_a_ghost_that_turns_up_late_at_one_reader_enters_when_an_indexer_names_it() -> None:
    world = three(ORDERED, ORDERED, ORDERED)
    ada, bob, cyn = world.members
    for member in (ada, bob):
        member.hear(by_hand("m0", "mallory", "late"))
        member.wait(400)
    cyn.hear(by_hand("m0", "mallory", "late"), by_hand("late", "mallory"))
    world.settle(ada)  # names m0, and has not seen the other one
    world.settle(*[cyn, ada, bob] * 3)
    world.store["m0"], world.store["late"] = by_hand("m0", "mallory", "late"), by_hand("late", "m")
    confirmed = confirmed_of(world)
    assert confirmed[0] == confirmed[1] == confirmed[2]
    assert {"m0", "late"} < set(confirmed[0])
    assert confirmed[0].index("m0") < confirmed[0].index("late")


def test_an_indexer_that_names_a_ghost_stops_its_own_messages_alone() -> None:
    world = three(ORDERED, ORDERED, ORDERED)
    confirmed_of(world)
    ada, bob, _ = world.members
    lie = by_hand("lie", "cyn", "ghost")
    for member in (ada, bob):
        member.hear(lie)
        member.wait(400)
    before = len(ada.channel_order.ordering.confirmed)
    world.members, world.inboxes = [ada, bob], {"ada": [], "bob": []}
    confirmed = confirmed_of(world)
    assert len(confirmed[0]) > before + 5
    assert ada.channel_order.ordering.waiting == ["lie"]
    assert ada.channel_order.ordering.missing == ["ghost"]


def test_copies_of_a_member_s_message_with_other_causes_change_no_order() -> None:
    # js-waku's IDs are the hash of the content alone, so anybody can make a copy with other causes.
    world = three(ORDERED, ORDERED, ORDERED)
    ada, bob, cyn = world.members
    first = ada.say("first")
    cyn.hear(first)
    bob.hear(first)
    copies = by_hand("w0", "dora"), by_hand("w0", "dora", decode(first)[0].message_id)
    ada.hear(*copies, by_hand("w1", "dora", "w0"))
    bob.hear(*reversed(copies), by_hand("w1", "dora", "w0"))
    cyn.hear(by_hand("w0", "mallory", "w1"), by_hand("w1", "dora"))
    cyn.wait(400)
    confirmed = confirmed_of(world)
    assert confirmed[0] == confirmed[1] == confirmed[2]
    assert {"w0", "w1"} < set(confirmed[0])
    assert len(confirmed[0]) > 8
    assert not ada.channel_order.ordering.breaches


@pytest.mark.parametrize("arrival", [*permutations(range(4))])
def test_copies_of_an_indexer_s_message_that_its_id_disproves_change_nothing_in_any_arrival(
    arrival: tuple[int, ...],
) -> None:
    world = three(ORDERED, ORDERED, ORDERED)
    ada, bob, cyn = world.members
    before = len(confirmed_of(world)[0])
    message = decode(ada.say("true"))[0]
    ada.out.clear()
    copies = [
        message,
        replace(message, causal_history=(HistoryEntry("ghost", b"", "dora"),)),
        replace(message, sender_id="mallory"),
        replace(message, content=message_id_layout(message)),
    ]
    for at in arrival:
        bob.hear(encode(copies[at]))
        bob.wait(400)
        world.settle(bob, cyn)  # they go on, and name no copy
    world.store[message.message_id] = encode(message)
    confirmed = confirmed_of(world)
    assert confirmed[0] == confirmed[1] == confirmed[2]
    assert message.message_id in confirmed[0]
    assert len(confirmed[0]) > before + 12
    for member in world.members:
        ordering = member.channel_order.ordering
        assert (ordering.breaches, ordering.waiting) == ([], [])
        member.crash()
        assert member.channel_order.ordering.confirmed == confirmed[0]


def test_a_copy_that_its_id_disproves_and_a_liar_who_names_it_stop_no_other_indexer() -> None:
    world = three(ORDERED, ORDERED, ORDERED)
    before = len(confirmed_of(world)[0])
    ada, bob, _ = world.members
    copy, lie = by_hand("0" * 64, "bob"), by_hand("lie", "cyn", "0" * 64)
    for member in (ada, bob):
        member.hear(copy, lie)
        member.wait(400)
    world.members, world.inboxes = [ada, bob], {"ada": [], "bob": []}
    confirmed = confirmed_of(world)
    assert len(confirmed[0]) > before + 5
    assert ada.channel_order.ordering.missing == ["0" * 64]


def test_a_log_is_loaded_in_slices_whatever_its_timestamps() -> None:
    rng, log, cause = random.Random(1), MemoryLog(), ""
    for number in range(6_000):
        sender = "ab"[number % 2]
        lamport = 7 if number < 5_000 else rng.randint(0, 2**63 - 1)
        history = tuple(HistoryEntry(each) for each in (cause, f"{number - 2}") if each >= "0")
        message = Message(f"{number}", CHANNEL, sender, lamport, history, content=b"x")
        log.append(LogEntry(message, encode(message), number + 1))
        cause = f"{number}"
    order = ChannelOrder(log, Roles(indexers=["a", "b"]))
    slices = 1
    while order.load():
        slices += 1
        assert not order.ordering.breaches
    assert slices >= 13
    assert order.ordering.confirmed + order.ordering.tail == [f"{each}" for each in range(6_000)]
    assert not order.load()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_kill_between_the_log_and_what_is_saved_takes_nothing_back(
    seed: int, tmp_path: object
) -> None:
    rng = random.Random(seed)
    world = three(ORDERED, ORDERED, ORDERED)
    world.settle(*rng.choices(world.members, k=20))
    frames = [*world.store.values()]
    if rng.random() < 0.7:  # bob forks, and both messages of the fork wait for the same one
        own = [decode(each)[0] for each in frames]
        last = [each.message_id for each in own if each.sender_id == "bob"][-1:]
        frames[12:12] = [by_hand("fork", "bob", *last, own[-1].message_id)]
    path, roles = f"{tmp_path}/order.db", world.members[0].roles
    reader = replace(ORDERED, indexers=tuple(roles.indexers), lost_after_ms=1_000)
    with ParticipantFile(path) as file:
        dora = file.participant(CHANNEL, "dora", reader)
        live, saved, shown, now_ms = ChannelOrder(dora.log, roles), b"", [""][:0], NOON_MS
        for frame in frames:
            now_ms += 5_000
            effects = dora.receive(frame, now_ms) + dora.tick(now_ms)
            while effects:
                file.save(CHANNEL, effects)
                delivered = of(Deliver, effects)
                for each in delivered:
                    # Killed here: the log has the message, and `saved` does not.
                    again = ChannelOrder(dora.log, roles, saved)
                    while again.load():
                        pass
                    assert again.ordering.confirmed[: len(shown)] == shown
                    live.add(each.message.message_id)
                    saved, shown = live.saved, live.ordering.confirmed
                    if not (live.ordering.breaches or again.ordering.breaches):
                        assert again.ordering.confirmed[: len(shown)] == shown
                effects = dora.confirm(delivered[-1].number) if delivered else []
        assert shown
