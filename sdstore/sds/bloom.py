"""Bloom filters of message IDs: our own, which a message carries, and those received.

An ID is hashed to a *pair* (A, B) of unsigned integers, whatever the filter's size. In a filter of m
bits and k hash functions the ID has the bits (A mod m + i · (B mod m)) mod m, for i from 0 to k - 1.
Bit b is bit (b mod 64) of word floor(b / 64). Two forms are in use:

| | `Form.JS` | `Form.NIM` |
|---|---|---|
| written by | js-waku | nim-sds |
| A, B | absolute values of the signed hashes of ID and ID + " b" | the same |
| hash | MurmurHash3 x86-32 over code points (`_murmur3_of_code_points`) | FarmHash Fingerprint64 |
| bytes | the words, each big-endian | a protobuf message with the words, each little-endian |
| m and k | those of capacity and error rate that all participants share | in the message |

The protobuf message of nim-sds has the fields 1 words (bytes), 2 capacity, 3 error rate in
millionths, 4 k, 5 m.
"""

from __future__ import annotations

import enum
import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import mmh3

from sdstore.errors import LocalProtocolError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


# ---- FarmHash

_K0 = 0xC3A5C85C97CB3127
_K1 = 0xB492B66FBE98F273
_K2 = 0x9AE16A3B2F90404F
_U64 = 0xFFFF_FFFF_FFFF_FFFF

_State = tuple[int, int, int, int, int, int, int]


def fingerprint64(data: bytes) -> int:
    """The hash of `data`, an unsigned 64-bit integer."""
    size = len(data)
    if size <= 16:
        return _up_to_16(data, size)
    if size > 64:
        return _above_64(data, size)
    mul = _K2 + size * 2
    a = _word(data, 0) * (_K1 if size <= 32 else _K2)
    b = _word(data, 8)
    c = _word(data, size - 8) * mul
    d = _word(data, size - 16) * _K2
    y = _rotate(a + b, 43) + _rotate(c, 30) + d
    z = _mix(y, a + _rotate(b + _K2, 18) + c, mul)
    if size <= 32:
        return z
    e, f = _word(data, 16) * mul, _word(data, 24)
    g, h = (y + _word(data, size - 32)) * mul, (z + _word(data, size - 24)) * mul
    return _mix(_rotate(e + f, 43) + _rotate(g, 30) + h, e + _rotate(f + a, 18) + g, mul)


def _up_to_16(data: bytes, size: int) -> int:
    mul = _K2 + size * 2
    if size >= 8:
        a, b = _word(data, 0) + _K2, _word(data, size - 8)
        return _mix(_rotate(b, 37) * mul + a, (_rotate(a, 25) + b) * mul, mul)
    if size >= 4:
        first, last = int.from_bytes(data[:4], "little"), int.from_bytes(data[-4:], "little")
        return _mix(size + (first << 3), last, mul)
    if size:
        y = data[0] + (data[size >> 1] << 8)
        z = size + (data[-1] << 2)
        return _shift_mix(y * _K2 ^ z * _K0) * _K2 & _U64
    return _K2


def _above_64(data: bytes, size: int) -> int:
    seed = 81
    x = seed * _K2 + _word(data, 0)
    y = seed * _K1 + 113
    state = (x, y, _shift_mix(y * _K2 + 113) * _K2, 0, 0, 0, 0)
    tail = (size - 1) & 63
    for at in range(0, size - 1 - tail, 64):
        state = _block(data, at, state, _K1, 1)
    x, y, z, v0, v1, w0, w1 = state
    w0 += tail
    v0 += w0
    w0 += v0
    mul = _K1 + ((z & 0xFF) << 1)
    # The last block is the last 64 bytes, which overlap the block before.
    x, y, z, v0, v1, w0, w1 = _block(data, size - 64, (x, y, z, v0, v1, w0, w1), mul, 9)
    return _mix(
        _mix(v0, w0, mul) + _shift_mix(y) * _K0 + z,
        _mix(v1, w1, mul) + x,
        mul,
    )


def _block(data: bytes, at: int, state: _State, mul: int, factor: int) -> _State:
    x, y, z, v0, v1, w0, w1 = state
    x = _rotate(x + y + v0 + _word(data, at + 8), 37) * mul
    y = _rotate(y + v1 + _word(data, at + 48), 42) * mul
    x = (x ^ w1 * factor) & _U64
    y = (y + v0 * factor + _word(data, at + 40)) & _U64
    z = _rotate(z + w0, 33) * mul & _U64
    v0, v1 = _weak(data, at, v1 * mul, x + w0)
    w0, w1 = _weak(data, at + 32, z + w1, y + _word(data, at + 16))
    return z, y, x, v0, v1, w0, w1


def _weak(data: bytes, at: int, a: int, b: int) -> tuple[int, int]:
    last = _word(data, at + 24)
    a += _word(data, at)
    b = _rotate(b + a + last, 21)
    c = a
    a += _word(data, at + 8) + _word(data, at + 16)
    return (a + last) & _U64, (b + _rotate(a, 44) + c) & _U64


def _word(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def _rotate(value: int, bits: int) -> int:
    value &= _U64
    return (value >> bits | value << (64 - bits)) & _U64


def _shift_mix(value: int) -> int:
    value &= _U64
    return value ^ value >> 47


def _mix(u: int, v: int, mul: int) -> int:
    a = _shift_mix((u ^ v) * mul)
    return _shift_mix((v ^ a) * mul) * mul & _U64


# ---- filters

CAPACITY = 10_000
"""IDs in a filter of js-waku and nim-sds. js-waku reads no other capacity."""

ERROR_RATE = 0.001
"""The false-positive rate that a filter with `CAPACITY` IDs must not exceed."""

KEPT_SHARE = 0.5
"""The share of the capacity that a filter keeps when it rolls over: the newest IDs.

A smaller share forgets IDs that are still awaited as acknowledgements; a larger one rolls over more
often. With one half, a filter always names the newest 5,000 IDs.
"""

ENTERED_SINGLY_MAX = 12
"""Added IDs that enter the words one by one, 2 µs each. More of them enter together, which takes 25 µs
and 0.05 µs for each."""

FILTER_BYTES_MAX = 65_536
"""Larger received filters are ignored. Ours has 18,752 bytes; counting the bits of this size takes
less than 0.1 ms."""

HASH_COUNT_MAX = 64
"""Received filters with more hash functions are ignored. The best number for an error rate of one in
a billion is 30."""

_BITS = tuple(1 << bit for bit in range(8))

Pair = tuple[int, int]


class Form(enum.Enum):
    """The hash and the bytes of a filter; see the module."""

    JS = "js"
    NIM = "nim"


def hash_pair(message_id: str, form: Form = Form.JS) -> Pair:
    """The pair (A, B) of an ID, each below 2^64."""
    if form is Form.NIM:
        data = message_id.encode()
        return _magnitude(fingerprint64(data)), _magnitude(fingerprint64(data + b" b"))
    if message_id.isascii():
        return abs(mmh3.hash(message_id)), abs(mmh3.hash(message_id + " b"))
    return (
        abs(_murmur3_of_code_points(message_id)),
        abs(_murmur3_of_code_points(message_id + " b")),
    )


class BloomFilter:
    """Our own filter: the newest IDs, at most `capacity`, in a constant number of bytes.

    When `is_full` holds, call `roll_over`. IDs are kept as pairs, 8 bytes each (16 in nim's form), and
    enter the words when the bytes are wanted.
    """

    def __init__(
        self, capacity: int = CAPACITY, error_rate: float = ERROR_RATE, form: Form = Form.JS
    ) -> None:
        if capacity < 1 or not 0 < error_rate < 1:
            raise LocalProtocolError(
                "bad_option",
                f"a bloom filter needs capacity >= 1 and 0 < error_rate < 1, not {capacity} "
                f"and {error_rate}",
            )
        self.capacity = capacity
        self.form = form
        self.bit_count, self.hash_count = filter_size(capacity, error_rate)
        self.kept_count = max(int(capacity * KEPT_SHARE), 1) if capacity > 1 else 0
        words_bytes = word_bytes(self.bit_count)
        self._head, self._tail, self._flip = b"", b"", 7
        if form is Form.NIM:
            self._head = b"\x0a" + _varint(words_bytes)
            self._tail = _nim_parameters(capacity, error_rate, self.hash_count, self.bit_count)
            self._flip = 0
        self._words = bytearray(words_bytes)
        self._pairs = array("Q" if form is Form.NIM else "I")  # A and B in turn
        self._entered = 0  # how much of `_pairs` is in the words

    def __len__(self) -> int:
        """The number of IDs in the filter."""
        return len(self._pairs) // 2

    @property
    def is_full(self) -> bool:
        """Whether the filter holds `capacity` IDs: call `roll_over` now."""
        return len(self._pairs) >= 2 * self.capacity

    def add(self, message_id: str) -> None:
        """Add an ID, also one that the filter contains; then it counts twice."""
        self._pairs.extend(hash_pair(message_id, self.form))

    def roll_over(self) -> None:
        """Forget all IDs but those that were added last, `kept_count` of them."""
        self._forget(len(self) - self.kept_count)

    def rebuild(self, message_ids: Iterable[str]) -> None:
        """Forget all IDs and add these, each of them once."""
        self._forget(len(self))
        for message_id in message_ids:
            self.add(message_id)

    def _forget(self, count: int) -> None:
        """Forget the IDs that were added first; the others enter the words again."""
        del self._pairs[: 2 * count]
        self._words[:] = bytes(len(self._words))
        self._entered = 0

    def to_bytes(self) -> bytes:
        """The filter as a message carries it. It takes 0.3 ms after a roll-over, else some µs."""
        return bytes(self.view())

    def view(self) -> bytes | bytearray:
        """The same bytes, not copied: they change with the next call of another method."""
        if self._entered < len(self._pairs):
            self._enter()
        if self.form is Form.JS:
            return self._words
        return b"".join((self._head, self._words, self._tail))

    def _enter(self) -> None:
        """Set the bits of the IDs that were added since the last call."""
        pairs = self._pairs[self._entered :]
        self._entered = len(self._pairs)
        if len(pairs) > 2 * ENTERED_SINGLY_MAX:
            self._enter_at_once(pairs)
            return
        words, flip, m, hash_count = self._words, self._flip, self.bit_count, self.hash_count
        for at in range(0, len(pairs), 2):
            first, step = pairs[at] % m, pairs[at + 1] % m or m
            for bit in range(first, first + hash_count * step, step):
                bit %= m
                # Byte b / 8 of little-endian words is byte b / 8 xor 7 of big-endian ones.
                words[bit >> 3 ^ flip] |= _BITS[bit & 7]

    def _enter_at_once(self, pairs: array[int]) -> None:
        import numpy as np  # noqa: PLC0415 - messages alone do not need it, and it takes 0.1 s

        first, step = (np.asarray(pairs).reshape(-1, 2) % self.bit_count).astype(np.int64).T
        bits = (first + step * np.arange(self.hash_count)[:, None]) % self.bit_count
        is_set = np.zeros(8 * len(self._words), np.bool_)
        is_set[bits.ravel()] = True
        words = np.packbits(is_set, bitorder="little").reshape(-1, 8)
        own = np.frombuffer(self._words, np.uint8).reshape(-1, 8)
        own |= words[:, ::-1] if self._flip else words


@dataclass(frozen=True)
class ReceivedFilter:
    """A filter of another participant. `words` has at least `bit_count` bits."""

    words: bytes
    bit_count: int
    hash_count: int
    form: Form

    @cached_property
    def fill(self) -> float:
        """The share of bits that are set, 0 to 1."""
        return min(int.from_bytes(self.words).bit_count() / self.bit_count, 1.0)

    @cached_property
    def false_positive_rate(self) -> float:
        """The probability that the filter contains an ID that was never added: 1 if all bits are set."""
        return self.fill**self.hash_count

    @cached_property
    def coincidence(self) -> float:
        """The probability that one of the IDs in the filter covers the bits of an ID that was never added.

        The bits of an ID are m-th parts of a circle at equal steps. An ID with the same step or the
        opposite one, 2/m of all, and a start at most k steps away shares bits with it. This sums over
        all offsets, with the other bits set by chance; it is within a factor of two of what random IDs
        show for 15 to 15,000 bits an ID. Such an error repeats in every filter with both IDs.
        """
        if self.fill >= 1.0:
            return 1.0
        count = -self.bit_count / self.hash_count * math.log(1.0 - self.fill)
        return min(3.0 * count / self.bit_count**2 / (1.0 - self.fill), 1.0)

    def distinct_bits(self, pair: Pair) -> int:
        """The number of bits of the ID with this pair: fewer than `hash_count` if its step divides the
        circle."""
        return min(self.hash_count, self.bit_count // math.gcd(pair[1], self.bit_count))

    def contains(self, pair: Pair) -> bool:
        """Whether the filter contains the ID with this `hash_pair` of the filter's form."""
        words, m = self.words, self.bit_count
        flip = 7 if self.form is Form.JS else 0
        bit, step = pair[0] % m, pair[1] % m
        for _ in range(self.hash_count):
            if not words[bit >> 3 ^ flip] >> (bit & 7) & 1:
                return False
            bit += step
            if bit >= m:
                bit -= m
        return True

    def contains_each(self, pairs: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """`contains` for every row of an array of pairs, shape (n, 2)."""
        import numpy as np  # noqa: PLC0415 - messages alone do not need it, and it takes 0.2 s

        m = np.uint64(self.bit_count)
        first, step = (pairs % m).T
        flip = np.uint64(7 if self.form is Form.JS else 0)
        words = np.frombuffer(self.words, np.uint8)
        found = np.ones(len(pairs), np.bool_)
        bits = first.copy()
        for _ in range(self.hash_count):
            byte = words[bits >> np.uint64(3) ^ flip]
            found &= (byte >> (bits & np.uint64(7)).astype(np.uint8) & 1).astype(np.bool_)
            bits += step
            bits %= m
        return found


def read_filter(
    data: bytes, capacity: int = CAPACITY, error_rate: float = ERROR_RATE
) -> ReceivedFilter | None:
    """The filter in a received message, or `None` if there is no filter that can be relied on.

    js-waku's form holds no parameters; `capacity` and `error_rate` are those of the channel. In nim's
    form they come from the sender and must agree with each other and with `FILTER_BYTES_MAX` and
    `HASH_COUNT_MAX`.
    """
    if len(data) > FILTER_BYTES_MAX:
        return None
    if data.startswith(b"\x0a"):
        found = _read_nim(data)
        if found is not None:
            return found
    bit_count, hash_count = filter_size(capacity, error_rate)
    if len(data) != word_bytes(bit_count):
        return None
    return ReceivedFilter(data, bit_count, hash_count, Form.JS)


def filter_size(capacity: int, error_rate: float) -> tuple[int, int]:
    """m and k of a filter: 150,000 bits and 10 hash functions for the default parameters."""
    bits_per_id = math.ceil(-math.log(error_rate) / math.log(2) ** 2)
    return capacity * bits_per_id, round(bits_per_id * math.log(2))


def word_bytes(bit_count: int) -> int:
    """The size of a filter's words; there is always at least one unused bit."""
    return (1 + bit_count // 64) * 8


# ---- nim's form


def _nim_parameters(capacity: int, error_rate: float, hash_count: int, bit_count: int) -> bytes:
    values = (capacity, round(error_rate * 1_000_000), hash_count, bit_count)
    return b"".join(
        bytes((number << 3,)) + _varint(value) for number, value in enumerate(values, start=2)
    )


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_nim(data: bytes) -> ReceivedFilter | None:
    """A filter in nim's form; `None` unless `data` is exactly the fields 1 to 5, in order."""
    at = 1
    values: list[int] = []
    words = b""
    try:
        size, at = _read_varint(data, at)
        words = data[at : at + size]
        at += size
        for number in range(2, 6):
            if data[at] != number << 3:
                return None
            value, at = _read_varint(data, at + 1)
            values.append(value)
    except IndexError:
        return None
    _, _, hash_count, bit_count = values
    is_sound = (
        at == len(data) and 1 <= hash_count <= HASH_COUNT_MAX and 1 <= bit_count <= 8 * len(words)
    )
    return ReceivedFilter(words, bit_count, hash_count, Form.NIM) if is_sound else None


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The varint at `at` and the place after it. Raises `IndexError` if it does not end."""
    value = shift = 0
    while shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise IndexError("a varint of more than 10 bytes")


# ---- hashes


def _magnitude(hashed: int) -> int:
    """The absolute value of an unsigned 64-bit integer read as a signed one."""
    return hashed if hashed < 2**63 else 2**64 - hashed


def _murmur3_of_code_points(text: str) -> int:
    """MurmurHash3 x86-32 as js-waku computes it, a signed 32-bit integer.

    js-waku hashes one number per code point where the algorithm has a byte: the first UTF-16 unit.
    Four of them form a block by shifts of 8 bits, so those above 0xFF overlap the next one. For ASCII
    this is the usual hash.
    """
    units = [
        point if (point := ord(character)) < 0x1_0000 else 0xD800 + (point - 0x1_0000 >> 10)
        for character in text
    ]
    hashed = 0
    for start in range(0, len(units), 4):
        units_of_block = units[start : start + 4]
        block = 0
        for unit in reversed(units_of_block):
            block = (block << 8 | unit) & 0xFFFF_FFFF
        block = _rotate32(block * 0xCC9E2D51 & 0xFFFF_FFFF, 15)
        hashed ^= block * 0x1B873593 & 0xFFFF_FFFF
        if len(units_of_block) == 4:
            hashed = _rotate32(hashed, 13) * 5 + 0xE6546B64 & 0xFFFF_FFFF
    hashed ^= len(units)
    hashed = (hashed ^ hashed >> 16) * 0x85EBCA6B & 0xFFFF_FFFF
    hashed = (hashed ^ hashed >> 13) * 0xC2B2AE35 & 0xFFFF_FFFF
    hashed ^= hashed >> 16
    return hashed if hashed < 2**31 else hashed - 2**32


def _rotate32(value: int, bits: int) -> int:
    return (value << bits | value >> (32 - bits)) & 0xFFFF_FFFF
