"""Indexers vote while content is not confirmed, so an ordered chat that falls silent is confirmed to its end."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from sdstore.ordering import Roles
from sdstore.participant import ChannelOrder
from sdstore.participant.channelorder import VOTES_MAX, Voting, vote_of
from sdstore.sds import Broadcast, Deliver, Effect, Kind, ParticipantOptions
from tests.support.participants import Device

ORDERED = ParticipantOptions(bloom=None, sync_ms=0, ordered=True, deliveries_max=100_000)
NAMES = ("ada", "bob", "cyn", "dan", "eve")


class Store:
    """What a store has, in arrival order."""

    def __init__(self) -> None:
        self.frames: dict[bytes, None] = {}
        self.is_up = True

    def reconcile(self, other: Store) -> None:
        if self.is_up and other.is_up:
            self.frames |= dict.fromkeys(other.frames.keys() - self.frames.keys())
            other.frames |= dict.fromkeys(self.frames.keys() - other.frames.keys())


class Member(Device):
    """An indexer with its order, which follows the first store that is up."""

    def __init__(self, name: str, stores: list[Store], indexers: tuple[str, ...] = NAMES) -> None:
        super().__init__(name, replace(ORDERED, indexers=indexers))
        self.stores = stores
        self.roles = Roles(indexers=indexers)
        self.channel_order = ChannelOrder(self.log, self.roles)
        self.voting = Voting(name)
        self.votes_count = 0
        self.taken: dict[int, int] = {}  # of each store
        self.is_here = True

    @property
    def store(self) -> Store:
        return next(each for each in self.stores if each.is_up)

    def carry_out(self, effects: list[Effect]) -> list[Effect]:
        for effect in effects:
            if isinstance(effect, Broadcast) and effect.kind is Kind.CONTENT:
                self.store.frames[effect.frame] = None
                self.channel_order.add(effect.message_id)
        found = super().carry_out(effects)
        for effect in effects:
            if isinstance(effect, Deliver):
                self.channel_order.add(effect.message.message_id)
        return found

    def step(self) -> None:
        """A second passes: take what the store has, tick, vote."""
        self.now_ms += 1_000
        if not self.is_here:
            return
        store = self.store
        frames = list(store.frames)[self.taken.get(id(store), 0) :]
        self.taken[id(store)] = len(store.frames)
        self.hear(*frames)
        self.carry_out(self.participant.tick(self.now_ms))
        if self.voting.is_due(self.channel_order, self.now_ms):
            self.votes_count += 1
            self.carry_out(self.participant.send(vote_of(self.name, self.now_ms), self.now_ms))

    def crash(self) -> None:
        super().crash()
        self.channel_order = ChannelOrder(self.log, self.roles, self.channel_order.saved)
        while self.channel_order.load():
            pass
        self.voting = Voting(self.name)

    @property
    def confirmed(self) -> list[str]:
        return self.channel_order.ordering.confirmed

    @property
    def open_texts(self) -> list[bytes]:
        """Content that is not confirmed."""
        tail = map(self.channel_order.message, self.channel_order.ordering.tail)
        return [each.content for each in tail if not each.is_vote]


class Chat:
    """Five members on two stores that reconcile every second."""

    def __init__(self, names: tuple[str, ...] = NAMES) -> None:
        stores = [Store(), Store()]
        self.stores = stores
        self.members = [
            Member(name, stores if at % 2 else stores[::-1], names) for at, name in enumerate(names)
        ]
        self.spoken_count = 0

    @property
    def here(self) -> list[Member]:
        return [each for each in self.members if each.is_here]

    def speak(self, member: Member) -> None:
        self.spoken_count += 1
        member.say(f"{member.name} {self.spoken_count}")

    def wait(self, seconds: int) -> None:
        for _ in range(seconds):
            for each in self.members:
                each.step()
            self.stores[0].reconcile(self.stores[1])

    def check_confirmed(self) -> None:
        """Everybody who is here has confirmed all content, in one order."""
        first = self.here[0].confirmed
        for each in self.here:
            assert each.open_texts == []
            texts_count = sum(not each.channel_order.message(e).is_vote for e in each.confirmed)
            assert texts_count == self.spoken_count
            common = min(len(first), len(each.confirmed))
            assert each.confirmed[:common] == first[:common]


@pytest.mark.parametrize("names", [NAMES[:1], NAMES[:2], NAMES[:3], NAMES, tuple("abcdefghi")])
def test_a_single_message_is_confirmed_within_a_minute_and_then_all_are_silent(
    names: tuple[str, ...],
) -> None:
    chat = Chat(names)
    chat.speak(chat.members[-1])
    chat.wait(60)
    chat.check_confirmed()
    counts = [each.votes_count for each in chat.members]
    assert max(counts) <= 2, "one after the other"
    chat.wait(600)
    assert [each.votes_count for each in chat.members] == counts


def test_messages_of_all_at_once_are_confirmed_within_a_minute() -> None:
    chat = Chat()
    for _ in range(3):
        for each in chat.members:
            chat.speak(each)
    chat.wait(60)
    chat.check_confirmed()


def test_without_a_majority_votes_end_until_an_indexer_returns() -> None:
    chat = Chat()
    ada, bob, cyn = chat.members[:3]
    for each in chat.members[2:]:
        each.is_here = False
    chat.speak(ada)
    chat.wait(3_600)
    counts = ada.votes_count, bob.votes_count
    assert ada.open_texts
    assert 1 <= max(counts) <= 2 * VOTES_MAX, (
        "each after content, and after each that is heard anew"
    )
    chat.wait(3_600)
    assert (ada.votes_count, bob.votes_count) == counts
    cyn.is_here = True
    chat.wait(60)
    chat.check_confirmed()


def test_an_indexer_that_votes_lets_others_keep_silent() -> None:
    chat = Chat(("server", "ada", "bob"))
    chat.speak(chat.members[1])
    chat.wait(60)
    assert sum(each.votes_count for each in chat.members) <= 4


@pytest.mark.parametrize(
    ("seed", "absent_count"),
    [(0, 60), (1, 60)]
    + [pytest.param(seed, 60, marks=pytest.mark.slow) for seed in range(2, 8)]
    + [pytest.param(8, 5_000, marks=pytest.mark.slow)],
)
def test_an_ordered_chat_with_kills_and_absences_is_confirmed_within_a_minute_of_the_last_word(
    seed: int, absent_count: int
) -> None:
    rng = random.Random(seed)
    chat = Chat()
    dan, eve = chat.members[3:]
    for number in range(40):
        chat.speak(rng.choice(chat.here))
        if number % 8 == 3:
            rng.choice(chat.here).crash()
        if number % 10 == 5:
            chat.stores[number % 20 // 10].is_up = False
        chat.wait(rng.randint(0, 3))
        for store in chat.stores:
            store.is_up = True
    eve.is_here = False  # for good
    dan.is_here = False
    for number in range(absent_count):
        chat.speak(rng.choice(chat.here))
        if number % 4 == 0:
            chat.wait(1)
    dan.is_here = True
    chat.speak(dan)
    chat.wait(60)
    chat.check_confirmed()

    before = [(each.confirmed, each.votes_count) for each in chat.here]
    chat.wait(1_200 if absent_count < 1_000 else 4 * 3_600)  # an idle evening
    assert [(each.confirmed, each.votes_count) for each in chat.here] == before
    for each in chat.here:
        each.crash()
    chat.wait(600)
    assert [(each.confirmed, each.votes_count) for each in chat.here] == before
