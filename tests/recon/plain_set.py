"""Sections 1 to 3 and 9 of docs/recon-protocol.md in plain Python: elements, keys, hashes."""

from __future__ import annotations

from collections.abc import Iterable

import blake3
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from tests.recon.plain_columns import Bound

Range = tuple[Bound, Bound]
Element = tuple[int, bytes]
START, END = (0, 0), (2**64 - 1, 2**64 - 1)
WORD = 2**64


def session_key(initiator_nonce: bytes, responder_nonce: bytes, interest: bytes) -> bytes:
    """Section 2.2."""
    material = initiator_nonce + responder_nonce + blake3.blake3(interest).digest(length=16)
    context = "sdstore recon v3 session key"
    return blake3.blake3(material, derive_key_context=context).digest(length=16)


def position(element: Element) -> Bound:
    """Where an element stands: its order and the head of its id."""
    return element[0], int.from_bytes(element[1][:8], "big")


class KeyedSet:
    """One side's elements under a session key."""

    def __init__(self, elements: Iterable[Element], key: bytes) -> None:
        self.elements = sorted(elements)
        # A message authentication code of two blocks: the last block of CBC from a zero vector.
        self._cipher = Cipher(algorithms.AES(key), modes.CBC(bytes(16)))

    def lanes(self, element: Element) -> tuple[int, int]:
        """Low and high of T."""
        order, raw = element
        words = order.to_bytes(16, "little")
        second = bytes(a ^ b for a, b in zip(raw[16:], words, strict=True))
        mac = self._cipher.encryptor().update(raw[:16] + second)[16:]
        return int.from_bytes(mac[:8], "little"), int.from_bytes(mac[8:], "little")

    def short_id(self, element: Element) -> bytes:
        """The first 6 bytes of T."""
        return self.lanes(element)[0].to_bytes(8, "little")[:6]

    def inside(self, span: Range) -> list[Element]:
        """The elements of a range."""
        lower, upper = span
        return [e for e in self.elements if lower <= position(e) and not _reaches(e, upper)]

    def summary(self, span: Range) -> tuple[bytes, int]:
        """(hash, count) of a range."""
        lanes = [self.lanes(element) for element in self.inside(span)]
        return mixed(sum(low for low, _ in lanes), sum(high for _, high in lanes), len(lanes))

    def total(self) -> tuple[int, bytes]:
        """(count, sum) of all elements."""
        lanes = [self.lanes(element) for element in self.elements]
        sums = (sum(column) % WORD for column in zip(*lanes, strict=True)) if lanes else (0, 0)
        return len(lanes), b"".join(each.to_bytes(8, "little") for each in sums)


def _reaches(element: Element, bound: Bound) -> bool:
    return bound != END and position(element) >= bound


def mixed(low: int, high: int, count: int) -> tuple[bytes, int]:
    """(hash, count) from the sums of both lanes."""
    a, b, c = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
    low, high = low % WORD, high % WORD
    m = (low ^ low >> 32) * a % WORD
    m ^= (high ^ high >> 32) * b % WORD
    m = (m + count * c) % WORD
    m = (m ^ m >> 32) * b % WORD
    m ^= m >> 32
    return m.to_bytes(8, "little")[:6], count
