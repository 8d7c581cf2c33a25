"""One hostile member of the channel, which may send any frame under any name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sdstore.sds import (
    Broadcast,
    HistoryEntry,
    Message,
    ParticipantOptions,
    decode,
    encode,
)
from tests.support.participants import CHANNEL, NOON_MS, Device, of

QUIET = ParticipantOptions(bloom=None, sync_ms=0)


def id_of(frame: bytes) -> str:
    return decode(frame)[0].message_id


def changed(frame: bytes, **fields: object) -> bytes:
    """A copy of the message in a frame with other fields."""
    return encode(replace(decode(frame)[0], **fields))  # type: ignore[arg-type]


def ghosts(count: int, sender: str = "ada", start: int = 0) -> tuple[HistoryEntry, ...]:
    """References to messages that do not exist."""
    return tuple(HistoryEntry(f"ghost {start + n}", b"", sender) for n in range(count))


def written(message_id: str, sender: str, *history: HistoryEntry, content: bytes = b"x") -> bytes:
    return encode(Message(message_id, CHANNEL, sender, NOON_MS, history, content=content))


# ---- references without an author, and sync messages under the ID of content


@pytest.mark.parametrize("names_again", [b"content", b""], ids=["content", "sync"])
@pytest.mark.parametrize("pause_s", [5, 400], ids=["missing", "lost"])
def test_an_author_that_is_named_later_is_asked_for_the_message(
    pause_s: int, names_again: bytes
) -> None:
    bob = Device("bob", ParticipantOptions(bloom=None))
    bob.hear(written("m2", "carol", HistoryEntry("m1")))
    assert not any(requests(bob.wait(pause_s)))
    bob.hear(written("m3", "carol", HistoryEntry("m1", b"", "ada"), content=names_again))
    assert HistoryEntry("m1", b"", "ada") in requests(bob.wait(150))


def requests(effects: list[object]) -> list[HistoryEntry]:
    frames = [each.frame for each in of(Broadcast, effects)]  # type: ignore[arg-type]
    return [entry for frame in frames for entry in decode(frame)[0].repair_request]


def test_a_lost_message_keeps_its_author_over_a_restart() -> None:
    bob = Device("bob", ParticipantOptions(bloom=None))
    bob.hear(written("m2", "carol", HistoryEntry("m1")))
    bob.wait(400)
    bob.hear(written("m3", "carol", HistoryEntry("m1", b"", "ada")))
    bob.crash()
    assert HistoryEntry("m1", b"", "ada") in requests(bob.wait(800))


def test_a_reference_without_the_author_leaves_a_message_a_head() -> None:
    bob = Device("bob")
    bob.hear(written("m1", "ada"))
    for number in range(5):
        bob.hear(written(f"n{number}", "carol", HistoryEntry("m1")))
    named = decode(bob.say("mine"))[0].causal_history
    assert HistoryEntry("m1", b"", "ada") in named
    assert "m1" not in {each.message_id for each in decode(bob.say("again"))[0].causal_history}


def test_a_sync_message_under_the_id_of_content_hides_nothing() -> None:
    ada, bob = Device("ada"), Device("bob")
    newest = ada.say("newest")
    for sender in ("mallory", ""):
        bob.hear(encode(Message(id_of(newest), CHANNEL, sender, NOON_MS)))
    named = HistoryEntry(id_of(newest), b"", "ada")
    bob.hear(encode(Message("sync", CHANNEL, "carol", NOON_MS, (named,))))
    assert not bob.status.is_synced
    assert bob.status.missing == 1
