"""Floods: a hundred thousand frames of an attacker, beside honest messages."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import pytest

from sdstore.sds import HistoryEntry, MemoryLog, Message, Participant, ParticipantOptions, encode
from sdstore.sds.effects import Broadcast, Deliver, Effect

CHANNEL = "flooded"
NOW_MS = 1_763_000_000_000
BYTES_PER_WAITING = 4_000
"""A waiting orphan of these tests in memory: its frame, its message, its place in the tables."""


class LogOnDisk(MemoryLog):
    """A log whose contents do not count as the participant's memory."""


def bytes_of(root: object) -> int:
    """The memory of everything that a participant refers to, but its log."""
    seen: set[int] = set()
    left: list[object] = [root]
    total = 0
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, (type, LogOnDisk)) or callable(each):
            continue
        seen.add(id(each))
        total += sys.getsizeof(each)
        if isinstance(each, dict):
            left += each.keys()
            left += each.values()
        elif isinstance(each, (list, tuple, set, frozenset)) or hasattr(each, "maxlen"):
            left += each  # type: ignore[operator]
        if hasattr(each, "__dict__"):
            left.append(vars(each))
        for slot in getattr(type(each), "__slots__", ()):
            left.append(getattr(each, slot, None))
    return total


def delivered(effects: Iterable[Effect]) -> list[Deliver]:
    return [each for each in effects if isinstance(each, Deliver)]


def flood(orphans_count: int) -> None:
    """An honest pair talks while an attacker sends messages whose causes nobody has."""
    options = ParticipantOptions(bloom=None, sync_ms=0, waiting_max=512)
    ada = Participant(CHANNEL, "ada", options=options, log=LogOnDisk())
    bob = Participant(CHANNEL, "bob", options=options, log=LogOnDisk())
    before = bytes_of(bob)
    honest = heard = 0
    for number in range(orphans_count):
        causes = (HistoryEntry(f"nothing {number}", b"hint", "eve"),)
        sender = f"eve {number % 7}"
        orphan = Message(f"orphan {number}", CHANNEL, sender, NOW_MS, causes, content=b"spam")
        effects = bob.receive(encode(orphan), NOW_MS)
        if number % 100 == 0:
            for sent in ada.send(b"%d" % number, NOW_MS):
                if isinstance(sent, Broadcast):
                    honest += 1
                    effects += bob.receive(sent.frame, NOW_MS)
        for each in delivered(effects):
            heard += each.message.sender_id == "ada"
            bob.confirm(each.number)
        assert bob.status.waiting <= options.waiting_max
        assert bob.status.lost <= options.lost_max
        assert heard == honest  # honest messages go on at once
    bound = options.waiting_max * BYTES_PER_WAITING + options.lost_max * 2_000 + (4 << 20)
    assert bytes_of(bob) - before < bound


def test_3_000_orphans_hold_nothing_up_and_fill_no_memory() -> None:
    flood(3_000)


@pytest.mark.slow
def test_100_000_orphans_hold_nothing_up_and_fill_no_memory() -> None:
    flood(100_000)
