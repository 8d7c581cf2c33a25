"""Who gives way at a bound: those who take most, and of equals those who came last."""

from __future__ import annotations

from sdstore.sds.shares import Member, Shares


def test_of_two_paths_with_as_much_the_one_that_came_last_gives_way() -> None:
    shares = Shares()
    shares.add("honest", Member("friends", "ada", "ada"))
    shares.add("flood", Member("store", "mallory", "mallory"))
    assert shares.first_to_go() == "flood"


def test_the_oldest_of_the_one_with_most_goes_first_in_cost_and_not_in_number() -> None:
    shares = Shares()
    for number in range(3):
        shares.add(f"small {number}", Member("", "ada", "ada"))
    for number in range(2):
        shares.add(f"large {number}", Member("", "bob", "bob"), 1_000)
    assert shares.first_to_go() == "large 0"


def test_who_takes_most_is_known_after_thousands_have_come_and_gone() -> None:
    shares = Shares()
    for number in range(5):
        shares.add(f"first {number}", Member("", "", "ada"))
    for number in range(5_000):
        shares.add(f"{number}", Member("", "", f"m{number % 7}"))
        if number >= 20:
            shares.discard(f"{number - 20}")
    assert shares.first_to_go() == "first 0"
    for number in range(3):
        shares.discard(f"first {number}")
    assert shares.member(shares.first_to_go()).source.startswith("m")


def test_memory_stays_bounded_while_messages_come_and_go() -> None:
    shares = Shares()
    mallory = Member("", "", "mallory")
    shares.add("first", mallory)
    for _ in range(2_000):
        shares.add("next", mallory)
        shares.discard("next")
    assert len(shares._heaps["", ""]) < 100
