"""The attack kit breaks fingerprints without a key, and fails on ours."""

from __future__ import annotations

import blake3
import numpy as np
import pytest

from recon.hashing import ElementHasher
from recon.ranges import ALL_ORDERS, WHOLE
from recon.session import SessionHeader, SessionKey
from tests.recon.attack_kit import Words, negated, sum_collision, xor_collision
from tests.recon.test_sync import crowd
from tests.support.recon_talk import Element, index_of, reconcile

ORDER = 7


def digests(number: int, count: int) -> np.ndarray:
    """Ids u8[count, 32] of messages that an author made up: list `number`."""
    raw = blake3.blake3(b"list %d" % number).digest(length=32 * count)
    return np.frombuffer(raw, np.uint8).reshape(count, 32)


def elements_of(ids: list[bytes]) -> set[Element]:
    return {(ORDER, element_id) for element_id in ids}


def weak_sum(elements: set[Element], bits: int) -> tuple[int, int]:
    """The fingerprint of a weakened variant: ids added mod 2^bits, and the count."""
    total = sum(int.from_bytes(element_id, "little") for _, element_id in elements)
    return total % (1 << bits), len(elements)


def weak_xor(elements: set[Element]) -> tuple[int, int]:
    """The same with XOR over all 256 bits."""
    total = 0
    for _, element_id in elements:
        total ^= int.from_bytes(element_id, "little")
    return total, len(elements)


def check_ours_tells_apart(x: set[Element], y: set[Element]) -> None:
    """Two honest nodes that were given x and y, beside what both hold, find every difference."""
    common = set(crowd(1, 300, 20))
    for number in range(5):
        key = SessionHeader(bytes([number]) * 16, b"r" * 16, b"").key()
        views = [index_of(s | common).view(key, None, ALL_ORDERS) for s in (x, y)]
        assert views[0].summary(WHOLE) != views[1].summary(WHOLE)
    out = reconcile(x | common, y | common)
    assert (out.have, out.need) == (x, y)


def poison(bits: int, levels: int) -> tuple[set[Element], set[Element]]:
    """Disjoint sets of 2^levels / 2 elements each with equal sums of `bits` bits."""
    words = -(-bits // 64)
    size = 1 << bits // (levels + 1)
    half = 1 << (levels - 1)

    def list_of(number: int) -> Words:
        values = digests(number, size).view("<u8")[:, :words].astype(np.uint64)
        if bits % 64:
            values[:, -1] &= np.uint64((1 << bits % 64) - 1)
        return values if number < half else negated(values, bits)

    places = sum_collision(list_of, bits, levels).tolist()
    ids = [digests(number, size)[place].tobytes() for number, place in enumerate(places)]
    return elements_of(ids[:half]), elements_of(ids[half:])


def test_xor_of_whole_ids_falls_to_linear_algebra_in_milliseconds() -> None:
    ids = [row.tobytes() for row in digests(0, 260)]
    x, y = xor_collision([int.from_bytes(i, "little") for i in ids], 256)
    ours, theirs = (elements_of([ids[place] for place in places]) for places in (x, y))
    assert ours != theirs
    assert weak_xor(ours) == weak_xor(theirs)
    check_ours_tells_apart(ours, theirs)


def check_sum(bits: int, levels: int) -> None:
    ours, theirs = poison(bits, levels)
    assert not ours & theirs
    assert weak_sum(ours, bits) == weak_sum(theirs, bits)
    check_ours_tells_apart(ours, theirs)


def test_a_sum_of_96_bits_falls_to_the_k_tree() -> None:
    check_sum(96, 7)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("bits", "levels"), [(128, 7), (192, 11)])
def test_longer_sums_fall_too(bits: int, levels: int) -> None:
    check_sum(bits, levels)


def test_poison_made_for_one_session_key_is_harmless_under_the_next() -> None:
    """Even an author who learned a session's key can only disturb that session."""
    bits, levels = 96, 7
    size, half = 1 << bits // (levels + 1), 1 << (levels - 1)
    known, fresh = SessionKey(b"k" * 16), SessionKey(b"f" * 16)

    def list_of(number: int, key: SessionKey = known) -> Words:
        orders = np.full(size, ORDER, np.uint64)
        low, high = ElementHasher(key).lanes(orders, digests(number, size))
        values = np.stack((low, high & np.uint64(0xFFFFFFFF)), axis=1)
        return values if number < half else negated(values, bits)

    places = sum_collision(list_of, bits, levels).tolist()

    def total(key: SessionKey) -> int:
        chosen = (list_of(number, key)[place].tolist() for number, place in enumerate(places))
        return sum(low + (high << 64) for low, high in chosen) % (1 << bits)

    assert total(known) == 0
    assert total(fresh) != 0
