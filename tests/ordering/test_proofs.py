"""An ordering that begins with the proof of another one confirms the same, whatever arrives first."""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace

import pytest

from sdstore.ordering import BreachKind, Ordering, Roles
from tests.ordering.graphs import Sent, graph, random_graph

SECONDS = 4
CHAIN = graph("a0, b0: a0, c0: b0, a1: c0 a0, b1: a1 b0, c1: b1 c0, a2: c1 a1, b2: a2 b1")


def with_lies(sent: list[Sent], rng: random.Random) -> list[Sent]:
    """Some messages again with fewer causes or under new IDs: variants and forks."""
    lies = []
    for each in rng.sample(sent, rng.randint(0, 3)):
        name = each.message_id if rng.random() < 0.5 else f"{each.sender_id}lie{len(lies)}"
        lies.append(Sent(name, each.sender_id, each.causes[: rng.randint(0, len(each.causes))]))
    return sent + lies


def check(seed: int) -> None:
    """Restart at a random point, with the messages in another order."""
    rng = random.Random(seed)
    count = rng.choice([1, 3, 4, 5])
    sent = random_graph(
        rng, count + rng.choice([0, 2]), rng.randint(10, 60), rng.choice([0.6, 0.9])
    )
    roles = Roles(indexers=tuple("abcde"[:count]))
    sent = with_lies(sent, rng)
    arrival = sorted(sent, key=lambda each: rng.random() + 0.08 * sent.index(each))
    stop = rng.randint(1, len(arrival))
    live = Ordering(roles)
    first: dict[str, Sent] = {}  # a log keeps the first message of an ID
    for each in arrival[:stop]:
        live.add(*each)
        first.setdefault(each.message_id, each)
    again = Ordering(roles, live.proof)
    for each in rng.sample(list(first.values()), len(first)):
        again.add(*each)
    shown, none_waited = live.confirmed, not live.waiting
    assert again.confirmed == shown
    for each in arrival[stop:]:
        live.add(*each)
        again.add(*each)
        assert again.confirmed[: len(shown)] == shown == live.confirmed[: len(shown)]
        # Of two messages of a fork that both waited, either can be the first to enter.
        if none_waited or not live.breaches:
            assert again.confirmed == live.confirmed
            assert bool(again.breaches) == bool(live.breaches)
        if not live.breaches:
            assert again.tail == live.tail


def test_a_restart_at_any_point_equals_no_restart_with_forks_and_variants_too() -> None:
    seed = int(os.environ.get("SDSTORE_SEED", random.SystemRandom().randrange(1 << 32)))
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        try:
            check(seed)
        except AssertionError as error:
            error.add_note(f"replay with SDSTORE_SEED={seed}")
            raise
        seed += 1


def test_a_message_forged_with_an_early_timestamp_takes_nothing_back() -> None:
    live = Ordering(Roles(indexers=("a", "b", "c")))
    forged = Sent("forged", "a", ())
    for each in (*CHAIN, forged):
        live.add(*each)
    assert len(live.confirmed) == 6
    assert [each.kind for each in live.breaches] == [BreachKind.FORK]
    again = Ordering(live.roles, live.proof)
    for each in (forged, *CHAIN):
        again.add(*each)
    assert again.confirmed == live.confirmed
    assert again.breaches[0] == live.breaches[0]


def test_an_ordering_that_lacks_a_message_of_the_proof_names_it_and_confirms_nothing() -> None:
    live = Ordering(Roles(indexers=("a", "b", "c")))
    for each in CHAIN:
        live.add(*each)
    again = Ordering(live.roles, live.proof)
    for each in CHAIN[:3] + CHAIN[4:]:
        again.add(*each)
    assert (again.confirmed, again.missing) == ([], ["a1"])
    assert again.add(*CHAIN[3]).confirmed == tuple(live.confirmed)
    assert again.tail == live.tail


@pytest.mark.parametrize("indexers", ["abcd", "ab"])
def test_messages_that_confirm_something_else_than_the_proof_says_are_a_breach(
    indexers: str,
) -> None:
    live = Ordering(Roles(indexers=("a", "b", "c")))
    for each in CHAIN:
        live.add(*each)
    again = Ordering(Roles(indexers=tuple(indexers)), live.proof)
    for each in CHAIN:
        again.add(*each)
    assert BreachKind.PROOF in [each.kind for each in again.breaches]


def test_a_proof_of_changed_roles_begins_at_the_change() -> None:
    live = Ordering(Roles(indexers=("a", "b", "c")))
    for each in (*CHAIN, *graph("a3: b2 a2, b3: a3 b2")):
        live.add(*each)
    roles = Roles(indexers=("a", "b"))
    changed = live.with_roles(roles, "c0")
    assert len(changed.confirmed) > 3
    again = live.with_roles(roles, "c0", replace(changed.proof))
    assert (again.confirmed, again.breaches) == (changed.confirmed, [])
