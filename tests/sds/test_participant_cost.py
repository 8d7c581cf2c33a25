"""What a message costs does not grow: questions to the log, lookups in filters, and memory."""

from __future__ import annotations

import pytest

from sdstore.sds import (
    HistoryEntry,
    MemoryLog,
    Message,
    Participant,
    ParticipantOptions,
    Save,
    decode,
    encode,
)
from sdstore.sds.bloom import BloomFilter, ReceivedFilter, hash_pair, read_filter
from tests.support.participants import CHANNEL, NOON_MS, Device, of


class CountingLog(MemoryLog):
    """Counts questions."""

    def __init__(self) -> None:
        super().__init__()
        self.questions: list[str] = []

    def contains(self, message_id: str) -> bool:
        self.questions.append("contains")
        return super().contains(message_id)

    def newest(self, count: int, before_lamport: int):  # type: ignore[no-untyped-def]
        self.questions.append("newest")
        return super().newest(count, before_lamport)

    def frame(self, message_id: str) -> bytes | None:
        self.questions.append("frame")
        return super().frame(message_id)


def test_a_new_message_asks_the_log_once() -> None:
    ada = Device("ada")
    log = CountingLog()
    bob = Participant(CHANNEL, "bob", options=ParticipantOptions(bloom=None), log=log)
    frames = [ada.say(str(number)) for number in range(300)]
    bob.receive(frames[0], NOON_MS)
    log.questions.clear()
    for frame in frames[1:]:
        bob.receive(frame, NOON_MS)
    assert log.questions == ["contains"] * 299
    log.questions.clear()
    for number in range(100):
        bob.send(str(number).encode(), NOON_MS)
    assert log.questions == ["contains"] * 100
    log.questions.clear()
    for frame in frames:  # copies of recent messages
        bob.receive(frame, NOON_MS)
    assert log.questions == []
    assert bob.ignored["duplicate"] == 300


def test_a_filter_is_asked_for_a_bounded_number_of_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ada = Device("ada")
    for number in range(1_000):
        ada.say(str(number))
    lookups = []
    contains = ReceivedFilter.contains
    monkeypatch.setattr(
        ReceivedFilter, "contains", lambda *args: lookups.append(1) or contains(*args)
    )
    bloom = BloomFilter().to_bytes()
    ada.hear(encode(Message("s", CHANNEL, "bob", NOON_MS, (HistoryEntry("x"),), bloom)))
    assert len(lookups) == ada.options.reviewed_per_filter


def test_our_filter_holds_what_we_have_and_not_the_message_that_carries_it() -> None:
    options = ParticipantOptions(sync_ms=0)
    bob = Device("bob", options)
    bob.hear(encode(Message("m1", CHANNEL, "ada", 1, content=b"x")))
    bob.hear(encode(Message("waits", CHANNEL, "ada", 9, (HistoryEntry("m8"),), content=b"x")))
    held = ["m1", "waits", decode(bob.say("own"))[0].message_id]
    for text in ("next", "after a restart"):
        message, _ = decode(bob.say(text))
        expected = BloomFilter()
        expected.rebuild(held)
        assert message.bloom_filter == expected.to_bytes()
        held.append(message.message_id)
        bob.crash()


def test_our_filter_rolls_over_and_keeps_the_newest() -> None:
    options = ParticipantOptions(sync_ms=0, bloom_capacity=50)
    bob = Device("bob", options)
    ids = [decode(bob.say(str(number)))[0].message_id for number in range(220)]
    message, _ = decode(bob.say("last"))
    assert message.bloom_filter == expected_words(ids, capacity=50)
    found = read_filter(message.bloom_filter, capacity=50)
    assert found is not None
    assert all(found.contains(hash_pair(each)) for each in ids[-25:])


def expected_words(ids: list[str], capacity: int) -> bytes:
    """The rule of roll-over, written plainly."""
    held: list[str] = []
    for number, message_id in enumerate(ids, start=1):
        held.append(message_id)
        if len(held) >= capacity:
            held = ids[number - capacity // 2 : number]
    bloom = BloomFilter(capacity=capacity)
    bloom.rebuild(held)
    return bloom.to_bytes()


def test_a_message_costs_small_records_whatever_the_log_holds() -> None:
    ada, bob = Device("ada"), Device("bob")
    for number in range(300):
        bob.hear(ada.say(str(number)))
    sizes = [sum(len(value or b"") for _, value in each.changes) for each in of(Save, ada.effects)]
    assert max(sizes[1:]) <= 60
    assert max(sizes[-50:]) <= max(sizes[1:51]) + 4
