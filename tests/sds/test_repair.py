"""SDS-R: who asks for a missing message and when, who answers and when, and the bounds of both."""

import hashlib
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from sdstore.errors import LocalProtocolError
from sdstore.sds.model import HistoryEntry
from sdstore.sds.repair import Repair, RepairOptions
from sdstore.sds.shares import Member
from tests.support.sds_vectors import load

START = 1_763_000_000_000
T_MIN, T_MAX = 30_000, 120_000
NOTHING: Callable[[str], bool] = frozenset[str]().__contains__
EVERYTHING: Callable[[str], bool] = lambda _: True  # noqa: E731


def entry(message_id: str, author: str = "alice") -> HistoryEntry:
    return HistoryEntry(message_id, b"hint", author)


def h(text: str) -> int:
    """js-waku's hash, written anew."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16)


def drain(repair: Repair, until_ms: int) -> list[tuple[int, str]]:
    """Every request until a time, with its time, when a message is sent at once."""
    found = []
    while (due_ms := repair.request_due_ms) is not None and due_ms <= until_ms:
        found += [(due_ms, each.message_id) for each in repair.requests(due_ms)]
    return found


# ---- times


def recorded_times(key: str) -> list[tuple[str, str, int, int]]:
    """(participant, message, clock, time) of every request or answer that js-waku queued."""
    found = []
    for scenario in load("js_waku_two_participants")["scenarios"]:
        for step in scenario["steps"]:
            for who, effect in step.get("effects", {}).items():
                found += [
                    (who, event[f"repair_{key}_queued"], step["clock_ms"], event[name])
                    for event in effect["events"]
                    if f"repair_{key}_queued" in event
                    for name in event
                    if name.startswith("t_re")
                ]
    return found


def test_t_req_is_that_of_js_waku_in_every_recorded_conversation() -> None:
    times = recorded_times("request")
    assert times
    for who, message_id, clock_ms, t_req_ms in times:
        repair = Repair(who)
        repair.want(entry(message_id), clock_ms)
        assert repair.request_due_ms == t_req_ms


def test_t_resp_is_that_of_js_waku_in_every_recorded_conversation() -> None:
    authors = {
        step["frame"]["message_id"]: step["frame"]["sender_id"]
        for scenario in load("js_waku_two_participants")["scenarios"]
        for step in scenario["steps"]
        if step["op"] == "send"
    }
    times = recorded_times("response")
    assert times
    for who, message_id, clock_ms, t_resp_ms in times:
        repair = Repair(who)
        asked_for = entry(message_id, authors[message_id])
        repair.requested("somebody", [asked_for], EVERYTHING, clock_ms)
        assert repair.answer_due_ms == t_resp_ms


@pytest.mark.parametrize("groups", [1, 2, 7])
def test_times_and_groups_are_those_that_js_waku_computes(groups: int) -> None:
    recorded = load("js_waku_repair")
    assert (recorded["t_min_ms"], recorded["t_max_ms"]) == (T_MIN, T_MAX)
    vectors = [vector for vector in recorded["vectors"] if vector["groups"] == groups]
    assert len(vectors) >= 72
    for vector in vectors:
        repair = Repair(vector["participant"], RepairOptions(groups=groups))
        lost = entry(vector["message_id"], vector["author"])
        repair.want(lost, START)
        assert repair.request_due_ms == START + vector["t_req_ms"], vector
        repair.received(lost.message_id)
        repair.requested("somebody", [lost], EVERYTHING, START)
        expected_ms = START + vector["t_resp_ms"] if vector["in_group"] else None
        assert repair.answer_due_ms == expected_ms, vector


def test_the_times_follow_the_formulas() -> None:
    rng = random.Random(7)
    for number in range(300):
        me, author = f"me{rng.random()}", f"author{rng.random()}"
        message_id = f"message {number}"
        repair = Repair(me)
        repair.want(entry(message_id, author), START)
        wait_ms = T_MIN + h(me + message_id) % (T_MAX - T_MIN)
        assert repair.request_due_ms == START + wait_ms
        other = Repair(me)
        other.requested("bob", [entry(message_id, author)], EVERYTHING, START)
        assert other.answer_due_ms == START + (h(me) ^ h(author)) * h(message_id) % T_MAX


def test_the_author_answers_at_once() -> None:
    repair = Repair("alice")
    repair.requested("bob", [entry("m1", "alice")], EVERYTHING, START)
    assert repair.answers(START) == ["m1"]
    assert repair.answers(START + T_MAX) == []


# ---- asking


def test_nothing_is_asked_for_before_its_time() -> None:
    repair = Repair("me")
    repair.want(entry("m1"), START)
    due_ms = repair.request_due_ms
    assert due_ms is not None
    assert repair.requests(due_ms - 1) == ()
    assert repair.requests(due_ms) == (entry("m1"),)


def test_a_message_asks_for_at_most_three_those_with_the_lowest_times() -> None:
    repair = Repair("me")
    ids = [f"m{number}" for number in range(10)]
    for message_id in ids:
        repair.want(entry(message_id), START)
    expected = sorted(ids, key=lambda each: T_MIN + h("me" + each) % (T_MAX - T_MIN))
    now_ms = START + T_MAX
    asked = [[each.message_id for each in repair.requests(now_ms)] for _ in range(4)]
    assert asked == [expected[0:3], expected[3:6], expected[6:9], expected[9:]]


def test_a_request_is_repeated_at_other_times_until_its_attempts_are_used_up() -> None:
    repair = Repair("me")
    repair.want(entry("m1"), START)
    found = drain(repair, START + 24 * 3_600_000)
    assert len(found) == RepairOptions().requests_per_message
    times = [START, *(at for at, _ in found)]
    waits = [after - before for before, after in pairwise(times)]
    assert all(T_MIN <= wait < T_MAX for wait in waits)
    assert len(set(waits)) == len(waits)
    assert repair.wanted_count == 0


def test_a_message_that_arrives_is_not_asked_for() -> None:
    repair = Repair("me")
    repair.want(entry("m1"), START)
    repair.want(entry("m2"), START)
    repair.received("m1")
    assert {each.message_id for each in repair.requests(START + T_MAX)} == {"m2"}


def test_a_heard_request_postpones_ours_which_comes_if_the_answer_does_not() -> None:
    repair = Repair("me")
    repair.want(entry("m1"), START)
    first_ms = repair.request_due_ms
    assert first_ms is not None
    heard_ms = first_ms - 1
    repair.requested("bob", [entry("m1")], NOTHING, heard_ms)
    assert repair.requests(first_ms) == ()
    next_ms = repair.request_due_ms
    assert next_ms is not None
    assert heard_ms + T_MIN <= next_ms < heard_ms + T_MAX
    assert repair.requests(next_ms) == (entry("m1"),)


def test_endless_requests_of_others_do_not_silence_ours() -> None:
    repair = Repair("me")
    repair.want(entry("m1"), START)
    for now_ms in range(START, START + 600_000, 1_000):
        repair.requested("mallory", [entry("m1")], NOTHING, now_ms)
        if repair.requests(now_ms):
            break
    assert now_ms < START + (RepairOptions().postponements_max + 1) * T_MAX


@pytest.mark.parametrize(
    ("me", "author"), [("me", ""), ("", "alice"), ("", "")], ids=["author", "me", "both"]
)
def test_without_a_sender_nothing_is_asked_for_and_nothing_answered(me: str, author: str) -> None:
    repair = Repair(me)
    repair.want(entry("m1", author), START)
    repair.requested("bob", [entry("m2", author)], EVERYTHING, START)
    assert (repair.request_due_ms, repair.answer_due_ms) == (None, None)


def test_wanted_messages_are_bounded_and_room_is_used_again() -> None:
    options = RepairOptions(wanted_max=5)
    repair = Repair("me", options)
    for number in range(100):
        repair.want(entry(f"m{number}"), START)
    assert repair.wanted_count == 5
    repair.received("m0")
    repair.want(entry("m99"), START)
    asked = {message_id for _, message_id in drain(repair, START + T_MAX)}
    assert asked == {"m1", "m2", "m3", "m4", "m99"}


def test_what_many_members_named_is_asked_for_within_one_bound_for_all() -> None:
    repair = Repair("me", RepairOptions(answers_in_all=50))
    start_ms = START // T_MAX * T_MAX
    for number in range(200):
        repair.want(entry(f"m{number}"), start_ms, Member("", f"ada {number % 20}"))
    for window in (1, 2):
        due_ms = start_ms + window * T_MAX
        assert sum(len(repair.requests(due_ms)) for _ in range(100)) == 50


@pytest.mark.parametrize("account", ["", "mallory"], ids=["strangers", "member"])
def test_what_1_000_messages_name_is_asked_for_before_any_of_it_for_the_second_time(
    account: str,
) -> None:
    """999 messages of one account name one invented ID each, which sort before an honest one: 34 windows of T_max
    for 30 requests each, after the one of T_req."""
    repair = Repair("me")
    for number in range(999):
        repair.want(entry(f"!{number}"), 0, Member("", account, f"m{number}"))
    repair.want(entry("~"), 0, Member("", account, "honest"))
    found = (drain(repair, window * T_MAX) for window in range(1, 36))
    asked = [message_id for window in found for _, message_id in window]
    assert "~" in asked
    assert len(asked) >= 990


def test_what_others_name_again_counts_against_the_message_that_names_fewest() -> None:
    repair = Repair("me")
    many = [entry(f"!{number}") for number in range(255)] + [entry("~")]
    for each in many:
        repair.want(each, 0, Member("", "", "m1"))
    repair.named([entry("~")], Member("", "", "m2"), 1)
    asked = {message_id for _, message_id in drain(repair, 3 * T_MAX)}
    assert "~" in asked


# ---- answering


def test_only_messages_that_can_be_broadcast_are_answered() -> None:
    repair = Repair("me")
    repair.requested("bob", [entry("m1"), entry("m2")], frozenset({"m2"}).__contains__, START)
    assert repair.answers(START + T_MAX) == ["m2"]


def test_an_answer_by_another_cancels_ours() -> None:
    repair = Repair("me")
    repair.requested("bob", [entry("m1"), entry("m2")], EVERYTHING, START)
    repair.received("m1")
    assert repair.answers(START + T_MAX) == ["m2"]


def test_answers_come_in_the_order_of_their_times_and_a_few_at_a_time() -> None:
    repair = Repair("me", RepairOptions(answers_per_call=4))
    ids = [f"m{number}" for number in range(10)]
    repair.requested("bob", map(entry, ids), EVERYTHING, START)
    expected = sorted(ids, key=lambda each: (h("me") ^ h("alice")) * h(each) % T_MAX)
    batches = [repair.answers(START + T_MAX) for _ in range(4)]
    assert batches == [expected[:4], expected[4:8], expected[8:], []]


def test_one_requester_gets_a_bounded_number_of_answers_until_the_next_window() -> None:
    repair = Repair("me")
    per_requester = RepairOptions().answers_per_requester
    start_ms = START // T_MAX * T_MAX
    many = [entry(f"m{number}") for number in range(500)]
    repair.requested("mallory", many, EVERYTHING, start_ms)
    repair.requested("bob", many[-3:], EVERYTHING, start_ms)
    assert repair.pending_count == per_requester + 3
    repair.requested("mallory", many[100:200], EVERYTHING, start_ms + T_MAX - 1)
    assert repair.pending_count == per_requester + 3
    repair.requested("mallory", many[100:200], EVERYTHING, start_ms + T_MAX)
    assert repair.pending_count == 2 * per_requester + 3


def test_many_names_of_one_requester_get_a_bounded_number_of_answers() -> None:
    repair = Repair("me")
    start_ms = START // T_MAX * T_MAX
    answered = 0
    for number in range(1_000):
        repair.requested(f"mallory{number}", [entry(f"m{number}")], EVERYTHING, start_ms)
        answered += len(repair.answers(start_ms + T_MAX - 1))
    assert answered == RepairOptions().answers_in_all


# ---- response groups


@pytest.mark.parametrize(
    ("participants", "groups"), [(1, 1), (127, 1), (128, 2), (129, 2), (255, 2), (256, 3)]
)
def test_there_is_one_more_group_for_every_128_participants(participants: int, groups: int) -> None:
    repair = Repair("me")
    for number in range(participants - 1):
        repair.heard(f"p{number}")
        repair.heard(f"p{number}")
    repair.heard("")
    assert repair.group_count == groups


def test_the_number_of_groups_can_be_fixed() -> None:
    repair = Repair("me", RepairOptions(groups=4))
    for number in range(1_000):
        repair.heard(f"p{number}")
    assert repair.group_count == 4


def test_members_of_the_authors_group_answer_and_the_author_always_does() -> None:
    options = RepairOptions(groups=4, answers_per_requester=1_000)
    ids = [f"m{number}" for number in range(200)]
    for me in ("p1", "p2", "alice"):
        repair = Repair(me, options)
        repair.requested("bob", map(entry, ids), EVERYTHING, START)
        expected = {each for each in ids if h(me + each) % 4 == h("alice" + each) % 4}
        assert repair.pending_count == len(expected)
        assert (expected == set(ids)) == (me == "alice")
        answered: list[str] = []
        while batch := repair.answers(START + T_MAX):
            answered += batch
        assert set(answered) == expected


# ---- together


def test_twenty_participants_repair_one_lost_message_with_few_requests_and_answers() -> None:
    """Ten miss a message of alice, nine others have it; every frame reaches everybody."""
    names = [f"p{number}" for number in range(20)]
    repairs = {name: Repair(name) for name in names}
    missing = set(names[:10])
    for name in missing:
        repairs[name].want(entry("m1", "p19"), START)
    requests = answers = 0
    for now_ms in range(START, START + 4 * T_MAX, 500):
        for name in names:
            if asked := repairs[name].requests(now_ms):
                requests += 1
                for other in set(names) - {name}:
                    has = EVERYTHING if other not in missing else NOTHING
                    repairs[other].requested(name, asked, has, now_ms)
            if repairs[name].answers(now_ms):
                answers += 1
                missing.clear()
                for other in set(names) - {name}:
                    repairs[other].received("m1")
    assert not missing
    assert (requests, answers) == (1, 1)


@pytest.mark.parametrize(
    "options", [{"t_min_ms": 5, "t_max_ms": 5}, {"t_min_ms": -1}, {"groups": 0}], ids=str
)
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError, match="bad_option"):
        RepairOptions(**options)
