"""Crafted sets that unkeyed summaries cannot tell apart, and that ours does.

An attacker who can publish gives some messages to one store and others to the second, such that
the sums and the counts agree although an honest message (the victim) is at one of them only. The
stores are honest; each attack runs from messages to the two stores' own conclusion.
"""

from __future__ import annotations

import numpy as np
import pytest

from recon.elements import order_of_lamport
from sdstore.sds.model import Message
from tests.recon.attack import weak
from tests.recon.attack.ktree import Lanes, Plan, collide
from tests.recon.attack.messages import POISON_LAMPORT, digest_rows, digests, message, victim
from tests.recon.attack.weak import Combine, Digests, Element
from tests.recon.attack.xor import colliding_pairs
from tests.support.recon_session import HonestPeer, Session, header, view_of

PLAN_96 = Plan(bits=96, depth=7, leaf_bits=11, list_bits=13)
PLAN_128 = Plan(bits=128, depth=9, leaf_bits=11, list_bits=14)
PLAN_192 = Plan(bits=192, depth=12, leaf_bits=11, list_bits=16)
KEY, OTHER_KEY = b"k" * 32, b"o" * 32
FILLER = 2**60  # number of the message that balances the victim in the count
SESSIONS = 5  # session keys that each poison is tried on

Sides = tuple[set[Element], set[Element]]


def elements(messages: list[Message]) -> set[Element]:
    order = order_of_lamport(POISON_LAMPORT)
    return {(order, row.tobytes()) for row in digest_rows(messages)}


def honest_traffic() -> set[Element]:
    """The common messages of both stores: 2,000 of other authors, before and after the poison."""
    source = np.random.default_rng(1)
    lamports = POISON_LAMPORT + source.integers(-5_000, 5_000, 2_000)
    return {(order_of_lamport(lamport), source.bytes(32)) for lamport in lamports.tolist()}


def stores(for_a: list[int], for_b: list[int]) -> Sides:
    """The two stores after the attack: A also has the victim, B the filler."""
    common = honest_traffic()
    ours = common | elements([victim(), *map(message, for_a)])
    theirs = common | elements([message(FILLER), *map(message, for_b)])
    assert len(ours) == len(theirs)
    return ours, theirs


def xor_poison() -> Sides:
    pairs = 300
    firsts, seconds = digests(range(pairs)), digests(range(pairs, 2 * pairs))
    offset = weak.xor_256(digest_rows([victim(), message(FILLER)]))
    chosen = colliding_pairs(firsts, seconds, offset)
    return stores(chosen, [pairs + each for each in chosen])


def sum_poison(plan: Plan, key: bytes | None = None) -> Sides:
    """Sets with equal sums; under `key` where the attacker knows one."""

    def hashes(rows: Digests) -> Lanes:
        return weak.lanes(rows if key is None else weak.keyed_digests(rows, key), plan.bits)

    honest, filler = hashes(digest_rows([victim(), message(FILLER)]))

    def leaf(number: int) -> Lanes:
        first = number << plan.leaf_bits
        rows = hashes(digests(range(first, first + (1 << plan.leaf_bits))))
        return rows + (honest - filler) if number == 0 else rows

    choices = collide(plan, leaf)
    assert choices is not None
    numbers = [(leaf_no << plan.leaf_bits) + nth for leaf_no, nth in enumerate(choices)]
    return stores(numbers[0::2], numbers[1::2])


def assert_victim_is_hidden(sides: Sides, combine: Combine) -> None:
    """The stores find an honest difference elsewhere, call the rest equal and are content."""
    ours, theirs = sides
    assert elements([victim()]) <= ours - theirs
    assert weak.reconcile(ours, theirs, combine) == set()
    late = (order_of_lamport(POISON_LAMPORT + 9_000), b"l" * 32)
    assert weak.reconcile(ours | {late}, theirs, combine) == {late}


def assert_ours_tells_them_apart(sides: Sides) -> None:
    """All differences are found and fetched, under every one of several session keys."""
    ours, theirs = sides
    for number in range(SESSIONS):
        under = header(number)
        peer = HonestPeer(view_of(theirs, under))
        outcome = Session(view_of(ours, under), under, peer, seed=number).run()
        assert outcome.end is None
        assert outcome.have == ours - theirs
        assert outcome.accepted == theirs - ours


def test_xor_elimination_hides_a_message_from_xor_256_but_not_from_ours() -> None:
    sides = xor_poison()
    assert_victim_is_hidden(sides, weak.xor_256)
    assert_ours_tells_them_apart(sides)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(PLAN_96, id="96 bits"),
        pytest.param(PLAN_128, id="128 bits", marks=pytest.mark.soak),
        pytest.param(PLAN_192, id="192 bits", marks=pytest.mark.soak),
    ],
)
def test_the_k_tree_hides_a_message_from_unkeyed_sums_but_not_from_ours(plan: Plan) -> None:
    sides = sum_poison(plan)
    assert_victim_is_hidden(sides, weak.sum_of(plan.bits))
    assert_ours_tells_them_apart(sides)


def test_poison_made_for_one_session_key_is_worthless_under_another() -> None:
    sides = sum_poison(PLAN_96, KEY)
    ours, theirs = sides
    assert_victim_is_hidden(sides, weak.keyed(weak.sum_of(96), KEY))
    found = weak.reconcile(ours, theirs, weak.keyed(weak.sum_of(96), OTHER_KEY))
    assert found == ours ^ theirs
    assert_ours_tells_them_apart(sides)
