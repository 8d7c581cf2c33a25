"""One hostile member of the channel, which may send any frame under any name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sdstore.sds import (
    SHA256_CONTENT,
    Broadcast,
    HistoryEntry,
    Message,
    Missing,
    OnLost,
    ParticipantOptions,
    Rank,
    decode,
    encode,
    rank,
)
from tests.support.participants import CHANNEL, NOON_MS, Device, of


def hour_of_three(*hostile: bytes) -> int:
    """The bytes that three participants broadcast in an hour, the last member's frames first."""
    members = [Device(name, ParticipantOptions()) for name in ("ada", "bob", "carol")]
    first = members[0].say("hello")
    for member in members:
        member.hear(*([] if member is members[0] else [first]), *hostile)
    total = 0
    for _ in range(3_600):
        sent = [(member, of(Broadcast, member.wait(1))) for member in members]
        for member, broadcasts in sent:
            for each in broadcasts:
                total += len(each.frame)
                for other in members:
                    if other is not member:
                        other.carry_out(other.participant.receive(each.frame, other.now_ms))
    return total


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


# ---- copies of an honest message under its ID


JS_WAKU = replace(QUIET, id_scheme=SHA256_CONTENT)


@pytest.mark.parametrize("options", [QUIET, JS_WAKU], ids=["ours", "js-waku"])
def test_a_forged_copy_that_comes_first_is_marked_and_the_message_takes_its_place(
    options: ParticipantOptions,
) -> None:
    ada, bob = Device("ada", options), Device("bob", options)
    first = ada.say("first")
    frame = ada.say("hello")
    bob.hear(first, changed(frame, content=b"forged"))
    assert (bob.texts, bob.delivered[-1].rank) == (["first", "forged"], Rank.UNKNOWN)
    bob.hear(frame)
    assert (bob.texts[2:], bob.delivered[-1].supersedes) == (["hello"], True)
    assert bob.delivered[-1].rank is rank(decode(frame)[0]) > Rank.UNKNOWN
    assert bob.order == ada.order == ["first", "hello"]
    bob.hear(changed(frame, content=b"forged"), frame)
    assert (len(bob.delivered), bob.participant.ignored["variant"]) == (3, 1)
    bob.crash()
    bob.hear(changed(frame, content=b"forged again"))
    assert bob.order == ["first", "hello"]


def test_a_message_of_a_higher_rank_waits_in_the_place_of_a_forged_one() -> None:
    ada, bob = Device("ada"), Device("bob")
    first, second, third = ada.say("first"), ada.say("second"), ada.say("third")
    forged = changed(second, content=b"forged", causal_history=ghosts(3))
    bob.hear(third, forged, second)
    assert bob.texts == []
    bob.hear(changed(second, content=b"forged again", causal_history=()))
    bob.crash()
    bob.hear(first)
    assert (bob.texts, bob.status.is_synced) == (["first", "second", "third"], True)
    bob.wait(400)
    assert bob.status.lost == 0


def test_what_a_forged_message_named_becomes_no_more_heads_than_the_bound() -> None:
    ada, bob = Device("ada"), Device("bob", replace(QUIET, heads_max=20))
    before = [HistoryEntry(f"m{number}", b"", "carol") for number in range(60)]
    for number, each in enumerate(before):
        bob.hear(written(each.message_id, "carol", *before[max(number - 1, 0) : number]))
    frame = ada.say("hello")
    bob.hear(changed(frame, content=b"x", causal_history=tuple(before)), frame)
    assert 1 < len([key for key in bob.state if key.startswith("head/")]) <= 20


def test_lower_ranks_are_withheld_if_an_option_says_so() -> None:
    strict = replace(QUIET, rank_min=Rank.CONTENT)
    ada, bob = Device("ada"), Device("bob", strict)
    frame = ada.say("hello")
    bob.hear(changed(frame, content=b"forged"), written("m1", "carol"))
    assert (bob.texts, bob.participant.ignored["rank_too_low"]) == ([], 2)
    assert decode(bob.say("mine"))[0].causal_history == ()  # nothing is acknowledged
    bob.hear(frame)
    assert bob.texts == ["hello"]
    carol = Device("carol", replace(QUIET, rank_min=Rank.WHOLE))
    carol.hear(Device("dan", JS_WAKU).say("proves content alone"), frame)
    assert carol.texts == ["hello"]


@pytest.mark.parametrize("on_lost", list(OnLost))
@pytest.mark.parametrize("options", [QUIET, JS_WAKU], ids=["ours", "js-waku"])
def test_a_copy_with_invented_causes_delays_nothing(
    options: ParticipantOptions, on_lost: OnLost
) -> None:
    ada, bob = Device("ada", options), Device("bob", replace(options, on_lost=on_lost))
    frame = ada.say("hello")
    bob.hear(changed(frame, causal_history=ghosts(256)))
    assert (bob.texts, bob.status.missing) == ([], 256)
    bob.hear(frame)
    assert (bob.texts, bob.delivered[0].after_gap) == (["hello"], ())
    assert bob.status.is_synced
    bob.hear(changed(frame, causal_history=ghosts(256)))
    assert bob.status.is_synced


# ---- floods of names and of ghosts


def test_a_flood_under_invented_names_displaces_itself() -> None:
    ada, bob = Device("ada"), Device("bob")
    first, second = ada.say("first"), ada.say("second")
    bob.hear(second)
    for number in range(5_000):
        bob.hear(written(f"flood {number}", f"mallory {number}", *ghosts(1, start=number)))
    assert "second" not in bob.texts
    bob.hear(first)
    assert [text for text in bob.texts if text != "x"] == ["first", "second"]
    assert not any(each.after_gap for each in bob.delivered if each.message.sender_id == "ada")


def test_a_flood_under_invented_names_leaves_room_for_those_that_are_known() -> None:
    ada, bob = Device("ada"), Device("bob", replace(QUIET, waiting_max=100))
    bob.hear(ada.say("zero"))
    for number in range(200):
        bob.hear(written(f"flood {number}", f"mallory {number}", *ghosts(1, start=number)))
    frames = [ada.say(str(number)) for number in range(20)]
    bob.hear(*reversed(frames))
    assert [text for text in bob.texts if text != "x"] == ["zero", *map(str, range(20))]


def test_a_flood_on_one_path_leaves_what_comes_by_another() -> None:
    ada, bob = Device("ada"), Device("bob", replace(QUIET, waiting_max=100))
    frames = [ada.say(str(number)) for number in range(20)]
    for frame in reversed(frames[1:]):
        bob.carry_out(bob.participant.receive(frame, NOON_MS, path="friends"))
    for number in range(500):
        sender = f"mallory {number % 20}"
        each = written(f"flood {number}", sender, *ghosts(1, start=number))
        bob.carry_out(bob.participant.receive(each, NOON_MS, path="store"))
    bob.hear(frames[0])
    assert [text for text in bob.texts if text != "x"] == [*map(str, range(20))]


def test_few_messages_with_many_ghosts_displace_themselves() -> None:
    options = replace(QUIET, missing_max=1_000)
    ada, bob = Device("ada"), Device("bob", options)
    frames = [ada.say(str(number)) for number in range(20)]
    bob.hear(*reversed(frames[1:]))
    for number in range(10):
        bob.hear(written(f"m{number}", "mallory", *ghosts(256, start=256 * number)))
    bob.hear(frames[0])
    assert [text for text in bob.texts if text != "x"] == [*map(str, range(20))]


def test_ghosts_of_sync_messages_do_not_displace_what_another_names() -> None:
    bob = Device("bob")
    newest = HistoryEntry("newest", b"", "ada")
    bob.hear(encode(Message("sync", CHANNEL, "carol", NOON_MS, (newest,))))
    for number in range(8):
        history = ghosts(256, start=256 * number)
        bob.hear(encode(Message(f"s{number}", CHANNEL, "mallory", NOON_MS, history)))
    bob.effects.clear()
    bob.wait(15)
    named = {each.message_id for effect in of(Missing, bob.effects) for each in effect.entries}
    assert "newest" in named


def test_lost_ghosts_of_one_member_do_not_displace_what_another_named() -> None:
    bob = Device("bob", replace(QUIET, lost_max=100))
    bob.hear(written("m9", "carol"), written("m10", "carol", HistoryEntry("lost", b"", "ada")))
    bob.wait(310)
    bob.hear(written("m1", "mallory", *ghosts(256)))
    bob.effects.clear()
    bob.wait(1_000)
    named = {each.message_id for effect in of(Missing, bob.effects) for each in effect.entries}
    assert "lost" in named


def test_an_hour_with_256_invented_names_costs_two_megabytes() -> None:
    frame = written("m1", "mallory", *ghosts(256))
    quiet, loud = hour_of_three(), hour_of_three(frame)
    assert quiet < 1_000_000
    assert loud <= 2_000_000
    assert loud - quiet <= 270 * len(frame)


def far_ahead(number: int) -> bytes:
    return changed(written(f"m{number}", "mallory"), lamport_timestamp=2**62 + number)


@pytest.mark.parametrize(
    "before",
    [
        [written(f"m{n}", f"mallory {n}", *ghosts(1, start=n)) for n in range(200)],
        [far_ahead(n) for n in range(256)],
    ],
    ids=["delivered after gaps", "newest for ever"],
)
def test_a_restart_makes_no_invented_name_known_and_no_known_one_a_stranger(
    before: list[bytes],
) -> None:
    """No message of those names was delivered with all its causes, or theirs are the newest of the log."""
    ada, bob = Device("ada"), Device("bob", replace(QUIET, waiting_max=100))
    bob.hear(ada.say("zero"), *before, ada.say("one"))
    bob.wait(400)
    bob.crash()
    for number in range(200):
        bob.hear(written(f"flood {number}", f"mallory {number}", *ghosts(1, start=1_000 + number)))
    frames = [ada.say(str(number)) for number in range(20)]
    bob.hear(*reversed(frames))
    assert [text for text in bob.texts if text != "x"] == ["zero", "one", *map(str, range(20))]


@pytest.mark.parametrize("forger", ["mallory", "carol"], ids=["stranger", "honest name"])
@pytest.mark.parametrize("is_carol_known", [False, True], ids=["new", "known"])
def test_an_honest_request_waits_for_no_invented_ids_that_sort_before_it(
    forger: str, *, is_carol_known: bool
) -> None:
    """What one message names shares the requests of its account with what others name: one T_max until T_req, and
    two that it can be put off."""
    bob = Device("bob", ParticipantOptions(bloom=None))
    if is_carol_known:
        bob.hear(written("m0", "carol"))
    low = tuple(HistoryEntry(f"!{number}", b"", "ada") for number in range(256))
    bob.hear(written("m1", forger, *low))
    bob.wait(240)
    bob.hear(written("m2", "carol", HistoryEntry("~lost", b"", "ada")))
    assert "~lost" in {each.message_id for each in requests(bob.wait(3 * 120))}


def test_a_frame_that_only_asks_carries_no_filter() -> None:
    bob = Device("bob", ParticipantOptions())
    bob.hear(written("m2", "carol", *ghosts(3)))
    asking = [
        decode(each.frame)[0]
        for each in of(Broadcast, bob.wait(200))
        if decode(each.frame)[0].repair_request
    ]
    assert any(not each.bloom_filter for each in asking)
    assert max(len(encode(each)) for each in asking if not each.bloom_filter) < 1_000


def test_no_frame_is_broadcast_for_requests_that_are_put_off() -> None:
    bob = Device("bob", ParticipantOptions())
    bob.hear(written("m1", "mallory", *ghosts(200)))
    sent = [decode(each.frame)[0] for each in of(Broadcast, bob.wait(600))]
    assert len(sent) > 20
    assert all(each.bloom_filter or each.repair_request for each in sent)


def test_requests_for_what_one_member_named_are_bounded_in_frames_and_bytes() -> None:
    bob = Device("bob", ParticipantOptions(bloom=None))
    bob.hear(written("m1", "mallory", *ghosts(200)))
    bob.wait(120)
    for _ in range(5):
        asked = requests(bob.wait(120))
        assert 20 <= len(asked) <= 30
    bob.hear(*(written(f"n{n}", f"{n}", *ghosts(200, start=200 * n)) for n in range(2, 20)))
    bob.wait(120)
    assert len(requests(bob.wait(120))) <= 30  # of all strangers together
    eve = Device("eve", ParticipantOptions(bloom=None))
    long = tuple(HistoryEntry(f"{n}" * 1_000, b"", "ada" * 300) for n in range(10))
    eve.hear(written("m1", "mallory", *long))
    eve.wait(120)
    assert 1 <= len(requests(eve.wait(120))) <= 4


def test_without_sync_messages_nothing_is_broadcast_that_only_asks() -> None:
    bob = Device("bob", QUIET)
    bob.hear(written("m2", "carol", *ghosts(3)))
    assert of(Broadcast, bob.wait(150)) == []
    assert len(decode(bob.say("mine"))[0].repair_request) == 3


def test_a_request_is_read_up_to_a_bound_of_entries_and_of_lengths() -> None:
    bob = Device("bob", ParticipantOptions(bloom=None))
    ids = [f"m{number}" for number in range(18)]
    bob.hear(*(written(each, "ada") for each in ids))

    def asked(*entries: HistoryEntry) -> set[str]:
        request = Message("s", CHANNEL, "eve", NOON_MS, repair_request=entries)
        bob.hear(encode(request))
        sent = of(Broadcast, bob.wait(125))
        return {each.message_id for each in sent} & {*ids}

    assert asked(*(HistoryEntry(each, b"", "ada") for each in ids)) == {*ids[:16]}
    assert asked(HistoryEntry("m0", b"", "a" * 1_025)) == set()
    assert asked(HistoryEntry("m1", b"", "a" * 1_024)) == {"m1"}
