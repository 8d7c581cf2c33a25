"""What a message costs does not grow: questions to the log, lookups in filters, and memory."""

from __future__ import annotations

from sdstore.sds import (
    MemoryLog,
    Participant,
    ParticipantOptions,
    Save,
)
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


def test_a_message_costs_small_records_whatever_the_log_holds() -> None:
    ada, bob = Device("ada"), Device("bob")
    for number in range(300):
        bob.hear(ada.say(str(number)))
    sizes = [sum(len(value or b"") for _, value in each.changes) for each in of(Save, ada.effects)]
    assert max(sizes[1:]) <= 60
    assert max(sizes[-50:]) <= max(sizes[1:51]) + 4
