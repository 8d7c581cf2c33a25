"""The participant delivers in causal order, each message once, whatever the order of arrival."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from sdstore.sds import (
    Deliver,
    HistoryEntry,
    Message,
    Missing,
    ParticipantOptions,
    Status,
    decode,
    encode,
)
from tests.support.participants import CHANNEL, Device, of


def written(message_id: str, lamport: int, *causes: str, sender: str = "ada") -> bytes:
    """The frame of a message written by hand; its content is its ID."""
    history = tuple(HistoryEntry(cause) for cause in causes)
    return encode(
        Message(message_id, CHANNEL, sender, lamport, history, content=message_id.encode())
    )


def test_a_conversation() -> None:
    ada, bob = Device("ada"), Device("bob")
    hello = ada.say("hello")
    bob.hear(hello)
    reply = bob.say("hello ada")
    ada.hear(reply)
    assert bob.texts == ["hello"]
    assert ada.texts == ["hello ada"]
    assert ada.order == bob.order == ["hello", "hello ada"]
    message, _ = decode(reply)
    assert [entry.message_id for entry in message.causal_history] == [decode(hello)[0].message_id]
    assert str(ada.participant.status) == "all synced"


def test_a_message_waits_for_its_cause_and_names_it_as_missing() -> None:
    ada, bob = Device("ada"), Device("bob")
    first, second = ada.say("first"), ada.say("second")
    effects = bob.hear(second)
    assert bob.texts == []
    assert [e.message_id for e in of(Missing, effects)[0].entries] == [decode(first)[0].message_id]
    assert of(Status, effects)[-1] == Status(missing=1, waiting=1)
    effects = bob.hear(first)
    assert bob.texts == ["first", "second"]
    assert [each.number for each in bob.delivered] == [1, 2]
    assert of(Status, effects)[-1] == Status()


def test_every_order_of_arrival_of_a_chain_gives_the_chain() -> None:
    ada = Device("ada")
    frames = [ada.say(str(number)) for number in range(5)]
    for order in permutations(frames):
        bob = Device("bob")
        bob.hear(*order)
        assert bob.texts == ["0", "1", "2", "3", "4"]


def test_a_buffered_cause_is_not_a_met_cause() -> None:
    # m3 names only m2, which waits for m1. js-waku delivers m3 before m2 here.
    m1, m2, m3 = written("m1", 1), written("m2", 2, "m1"), written("m3", 3, "m2")
    bob = Device("bob")
    bob.hear(m2, m3)
    assert bob.texts == []
    bob.hear(m1)
    assert bob.texts == ["m1", "m2", "m3"]


def test_what_one_arrival_releases_is_delivered_in_log_order() -> None:
    root = written("root", 1)
    frames = [
        written("b", 5, "root"), written("a", 5, "root"), written("z", 4, "root"),
        written("B", 5, "root"), written("é", 5, "root"),
    ]  # fmt: skip
    bob = Device("bob")
    bob.hear(*frames)
    assert bob.texts == []
    bob.hear(root)
    # Ties by the bytes of the ID: "B" < "a" < "b" < "é".
    assert bob.texts == ["root", "z", "B", "a", "b", "é"]
    assert bob.order == bob.texts


def test_duplicates_are_delivered_once_and_counted() -> None:
    m1, m2 = written("m1", 1), written("m2", 2, "m1")
    bob = Device("bob")
    bob.hear(m2, m2, m1, m1, m2)
    assert bob.texts == ["m1", "m2"]
    assert bob.participant.ignored["duplicate"] == 3


def test_concurrent_messages_are_all_named_by_the_next_one() -> None:
    bob = Device("bob")
    bob.hear(*(written(f"m{number}", number, sender=f"s{number}") for number in range(1, 7)))
    message, _ = decode(bob.say("all of you"))
    assert [entry.message_id for entry in message.causal_history] == [f"m{n}" for n in range(1, 7)]
    message, _ = decode(bob.say("and again"))
    assert len(message.causal_history) == 2  # now there is one head, which is among the newest


def test_heads_beyond_the_bound_have_their_turn_in_later_messages() -> None:
    bob = Device("bob", ParticipantOptions(bloom=None, sync_ms=0, history_max=4))
    ids = [f"m{number:02}" for number in range(20)]
    bob.hear(*(written(each, n, sender=each) for n, each in enumerate(ids, start=1)))
    named = set()
    for number in range(10):
        message, _ = decode(bob.say(str(number)))
        assert len(message.causal_history) <= 4
        named.update(entry.message_id for entry in message.causal_history)
    assert named >= set(ids)


def test_a_flood_of_heads_far_ahead_of_our_clock_displaces_itself() -> None:
    bob = Device("bob", ParticipantOptions(bloom=None, sync_ms=0, heads_max=20))
    honest = [f"m{number}" for number in range(4)]
    bob.hear(*(written(each, n, sender=each) for n, each in enumerate(honest, start=1)))
    for number in range(200):
        bob.hear(written(f"far{number}", 2**62 + number, sender="eve"))
    message, _ = decode(bob.say("answer"))
    assert [entry.message_id for entry in message.causal_history][:4] == honest
    assert len(message.causal_history) == 10


def test_a_message_of_our_own_is_ignored_when_it_comes_back() -> None:
    ada = Device("ada")
    frame = ada.say("hello")
    effects = ada.hear(frame)
    assert effects == []
    assert ada.participant.ignored["own"] == 1


def test_a_participant_whose_file_was_lost_takes_in_its_own_messages_again() -> None:
    ada = Device("ada")
    frames = [ada.say("one"), ada.say("two")]
    reinstalled = Device("ada")
    reinstalled.hear(*reversed(frames))
    assert reinstalled.texts == ["one", "two"]
    assert reinstalled.order == ["one", "two"]


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, tuple[str, ...]]]:
    """Messages whose causes come before them; equal timestamps occur."""
    messages: list[tuple[str, int, tuple[str, ...]]] = []
    for number in range(draw(st.integers(1, 12))):
        causes = draw(st.lists(st.sampled_from(messages), max_size=3)) if messages else []
        lamport = max((cause[1] for cause in causes), default=0) + draw(st.integers(1, 2))
        messages.append((f"m{number}", lamport, tuple({cause[0] for cause in causes})))
    return messages


@settings(max_examples=150, deadline=None)
@given(histories(), st.randoms(use_true_random=False), st.data())
def test_no_order_of_arrival_breaks_causal_order_or_delivers_twice(
    history: list[tuple[str, int, tuple[str, ...]]], random: object, data: st.DataObject
) -> None:
    frames = [written(each, lamport, *causes) for each, lamport, causes in history]
    arrivals = data.draw(st.permutations(frames + frames[: len(frames) // 2]))
    crash_at = data.draw(st.integers(0, len(arrivals)))
    bob = Device("bob")
    for number, frame in enumerate(arrivals):
        if number == crash_at:
            bob.crash()
        bob.hear(frame)
    causes_of = {each: causes for each, _, causes in history}
    seen: set[str] = set()
    for delivery in bob.delivered:
        message_id = delivery.message.message_id
        assert message_id not in seen
        assert seen.issuperset(causes_of[message_id])
        seen.add(message_id)
    assert seen == set(causes_of)
    assert bob.order == [
        each for each, _, _ in sorted(history, key=lambda m: (m[1], m[0].encode()))
    ]
    assert [each.number for each in of(Deliver, bob.effects)] == list(range(1, len(history) + 1))
