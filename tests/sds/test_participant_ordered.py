"""In ordered mode each content message names the sender's own previous one, and all that its view lacks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sdstore.sds import (
    Broadcast,
    Dialect,
    HistoryEntry,
    Kind,
    LocalProtocolError,
    MemoryLog,
    Message,
    Participant,
    ParticipantOptions,
    Publish,
    decode,
    encode,
)
from sdstore.sds.references import PARTIAL_MAX
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


def test_what_another_indexer_names_needs_no_naming_by_us() -> None:
    ada = Device("ada", replace(ORDERED, indexers=("ada", "bob")))
    first = id_of(ada.say("first"))
    ada.hear(*others(5, first))
    assert history_of(ada.say("second")) == [first, "b4"]


def by(message_id: str, sender_id: str, *causes: HistoryEntry) -> bytes:
    number = len(message_id) + NOON_MS
    return encode(Message(message_id, CHANNEL, sender_id, number, causes, content=b"x"))


def test_a_message_is_named_without_a_cause_that_is_lost_and_the_cause_when_it_arrives() -> None:
    ada = Device("ada", replace(ORDERED, indexers=("ada", "bob")))
    first = id_of(ada.say("first"))
    ada.hear(by("x", "dora", HistoryEntry("ghost", b"", "eve")))
    ada.wait(400)
    second = ada.say("second")
    assert history_of(second) == [first, "x"]
    ada.hear(by("ghost", "eve"))
    assert history_of(ada.say("third")) == [id_of(second), "ghost"]


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


def test_without_the_mode_a_message_names_the_newest_ones_alone() -> None:
    ada = Device("ada", replace(ORDERED, ordered=False))
    ada.hear(*others(5, id_of(ada.say("first"))))
    assert history_of(ada.say("second")) == ["b3", "b4"]


def test_our_previous_message_is_named_once_with_its_sender_and_its_hint() -> None:
    ada = Participant(CHANNEL, "ada", options=ORDERED)
    (first,) = of(Publish, ada.send(b"first", NOON_MS, b"hint"))
    ada.stored(first.message_id)
    (sent,) = of(Publish, ada.send(b"second", NOON_MS))
    (entry,) = decode(sent.frame)[0].causal_history
    assert (entry.sender_id, entry.retrieval_hint) == ("ada", b"hint")


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


def test_a_message_that_the_log_lost_is_still_named() -> None:
    ada = Device("ada", ORDERED)
    first = id_of(ada.say("first"))
    restored = Participant.restore(CHANNEL, "ada", ada.state, MemoryLog(), options=ORDERED)
    (sent,) = of(Publish, restored.send(b"second", NOON_MS))
    assert history_of(sent.frame) == [first]


def test_a_log_whose_state_was_lost_shows_the_last_message() -> None:
    ada = Device("ada", ORDERED)
    first = id_of(ada.say("first"))
    ada.hear(*others(5, first))
    restored = Participant(CHANNEL, "ada", options=ORDERED, log=ada.log)
    (sent,) = of(Publish, restored.send(b"second", NOON_MS + 100))
    assert history_of(sent.frame)[0] == first


def test_our_messages_that_come_back_after_a_loss_are_named() -> None:
    ada, again = Device("ada", ORDERED), Device("ada", ORDERED)
    frames = [ada.say(text) for text in ("first", "second", "third")]
    again.hear(*reversed(frames))
    again.hear(*others(5, id_of(frames[-1])))
    assert history_of(again.say("fourth"))[0] == id_of(frames[-1])


def test_a_message_in_our_name_far_in_the_future_does_not_take_the_place_of_ours() -> None:
    ada = Device("ada", ORDERED)
    first = id_of(ada.say("first"))
    ada.hear(encode(Message("forged", CHANNEL, "ada", NOON_MS * 2, content=b"x")))
    assert history_of(ada.say("second"))[0] == first


def test_a_dialect_that_names_no_senders_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="bad_option"):
        replace(ORDERED, dialect=Dialect.V1)


def test_a_participant_without_a_sender_cannot_be_ordered() -> None:
    with pytest.raises(LocalProtocolError, match="bad_option"):
        Participant(CHANNEL, "", options=ORDERED)


def test_an_answer_that_is_faster_than_the_store_leaves_our_message_neither_missing_nor_lost() -> (
    None
):
    ada = Device("ada", ORDERED)
    ada.has_store = False
    (published,) = of(Publish, ada.carry_out(ada.participant.send(b"first", NOON_MS)))
    ada.hear(*others(1, published.message_id))
    assert ada.texts == []
    ada.carry_out(ada.participant.stored(published.message_id))
    ada.wait(400)
    assert ada.texts == ["b"]
    assert (ada.status.missing, ada.status.lost) == (0, 0)


def test_of_too_many_indexers_messages_with_ghosts_the_oldest_is_never_named() -> None:
    ada = Device("ada", replace(ORDERED, indexers=("ada", "bob"), deliveries_max=10_000))
    ada.say("first")
    for number in range(PARTIAL_MAX + 1):
        ada.hear(by(f"b{number}", "bob", HistoryEntry(f"ghost{number}", b"", "eve")))
    ada.wait(400, step_s=50)
    ada.hear(*(by(f"ghost{number}", "eve") for number in range(3)))
    assert {"b1", "b2"} == {each for each in history_of(ada.say("second")) if each[0] == "b"}
