"""In ordered mode each content message names the sender's own previous one, and all that its view lacks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sdstore.sds import (
    Broadcast,
    HistoryEntry,
    Kind,
    Message,
    ParticipantOptions,
    decode,
    encode,
)
from tests.support.participants import CHANNEL, NOON_MS, Device, of

ORDERED = ParticipantOptions(bloom=None, sync_ms=0, ordered=True)


def id_of(frame: bytes) -> str:
    return decode(frame)[0].message_id


def history_of(frame: bytes) -> list[str]:
    return [entry.message_id for entry in decode(frame)[0].causal_history]


def others(count: int, after: str) -> list[bytes]:
    """A chain of messages of somebody else, after ours."""
    frames, cause, author = [], after, "ada"
    for number in range(count):
        history = (HistoryEntry(cause, b"", author),)
        cause, author = f"b{number}", "bob"
        lamport = NOON_MS + 1 + number
        frames.append(encode(Message(cause, CHANNEL, "bob", lamport, history, content=b"b")))
    return frames


def test_a_message_names_our_previous_one_first_although_others_have_answered_it() -> None:
    ada = Device("ada", ORDERED)
    first = ada.say("first")
    ada.hear(*others(5, id_of(first)))
    assert history_of(ada.say("second")) == [id_of(first), "b0", "b1", "b2", "b3", "b4"]
    assert len(history_of(ada.say("third"))) == 1


def by(message_id: str, sender_id: str, *causes: HistoryEntry) -> bytes:
    number = len(message_id) + NOON_MS
    return encode(Message(message_id, CHANNEL, sender_id, number, causes, content=b"x"))


def test_an_indexer_that_names_a_ghost_is_not_named_until_the_ghost_arrives() -> None:
    ada = Device("ada", replace(ORDERED, indexers=("ada", "bob", "cyn")))
    first = id_of(ada.say("first"))
    ghost, lie = HistoryEntry("ghost", b"", "eve"), HistoryEntry("b0", b"", "bob")
    ada.hear(by("b0", "bob", ghost), by("b10", "bob", lie), by("c10", "cyn", lie), by("d", "dora"))
    ada.wait(400)
    second = id_of(ada.say("second"))
    assert history_of(ada.log.frame(second) or b"") == [first, "d"]
    ada.crash()
    assert history_of(ada.say("third")) == [second]
    ada.hear(by("ghost", "eve"))
    assert history_of(ada.say("fourth"))[1:] == ["b10", "c10"]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_an_indexer_that_was_away_for_thousands_of_messages_names_all_of_them_in_turn(
    is_restarted: bool,
) -> None:
    ada = Device("ada", replace(ORDERED, deliveries_max=10_000))
    named = {id_of(ada.say("first"))}
    messages = others(2_000, *named)
    ada.hear(*messages)
    if is_restarted:
        ada.crash()
    for _ in range(8):
        history = history_of(ada.say("back"))
        assert len(history) <= 256
        named.update(history)
    assert {f"b{number}" for number in range(2_000)} <= named


def test_a_sync_message_is_not_ordered_and_does_not_name_it() -> None:
    ada = Device("ada", replace(ORDERED, sync_ms=1_000))
    ada.hear(*others(5, id_of(ada.say("first"))))
    sync = next(each for each in of(Broadcast, ada.wait(5)) if each.kind is Kind.SYNC)
    assert history_of(sync.frame) == [f"b{number}" for number in range(5)]


@pytest.mark.parametrize("count", [5, 400])
def test_a_restarted_participant_names_its_last_message_however_old(count: int) -> None:
    ada = Device("ada", replace(ORDERED, sent_max=1))
    ada.say("first")
    second = id_of(ada.say("second"))
    ada.hear(*others(count, second))
    ada.crash()
    assert history_of(ada.say("third"))[0] == second


def test_a_message_in_our_name_far_in_the_future_does_not_take_the_place_of_ours() -> None:
    ada = Device("ada", ORDERED)
    first = id_of(ada.say("first"))
    ada.hear(encode(Message("forged", CHANNEL, "ada", NOON_MS * 2, content=b"x")))
    assert history_of(ada.say("second"))[0] == first
