"""Frames without their bloom filters, and filters as differences from stored ones.

98 % of a js-waku frame of 19 kB is a bloom filter, which gains some bits with each message of the
channel. `split` takes the filter out of a frame and leaves the *rest*, a frame of the same message
without a filter; `join` puts it back, byte for byte. `difference` writes a filter as the bits that
differ from a *reference*, a filter that is stored by itself. `References` chooses the reference. A
reference holds no message, so damage to it, or erasing any message, costs no other message its content.

A difference is laid out as

    k + 128 * is_nim | place | bit count n | length of u | u | low bits

with varints but for the first byte. The filter's field begins at byte `place` of the rest. The gaps
between differing bits are Rice-coded: u has the gaps >> k in unary (zeros, then a one), the low bits are
the other k bits of each gap as one little-endian number, the first gap lowest; k is even. Random bits
take 2 to 5 % more than their entropy.

This module does no I/O.
"""

from __future__ import annotations

from functools import cache
from math import log2
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FILTER_BYTES_MIN = 1_024
"""Smaller filters stay in their frames: a reference would save less than its row costs."""

FILTER_BYTES_MAX = 65_536
"""Larger filters stay in their frames: js-waku's have 18,752 bytes, and one could fill a cache."""

REFERENCES_MAX = 64
"""References of a channel that a filter is compared with: one for each sender that has sent lately."""

_FILTER_NUMBERS = (12, 6)  # of nim's frames the second
_SPEC_ID_TAG = 0x12  # field 2 is the ID, in nim's frames the timestamp
_NIM_BIT = 0x80
_K_MAX = 16
_SAMPLE_WORDS = 64  # bits in a filter are spread evenly: these 4,096 tell near from far
_RENEWING_SHARE = 0.25  # a new reference then pays for itself with the fourth frame
_ONES = np.ones(_SAMPLE_WORDS, np.float32)
_BITS = np.array([1 << (7 - bit) for bit in range(8)], np.uint8)


class Split(NamedTuple):
    """A frame in two: its filter's field begins at byte `place` of the rest."""

    rest: bytes
    bloom_filter: bytes
    place: int
    is_nim: bool


def split(frame: bytes) -> Split | None:  # noqa: C901 - a call for each field would take twice the time
    """The rest of a frame and its filter. `None`: the frame must stay whole.

    The filter's field, number 6 in nim's frames and 12 in others, has to be there once, with the shortest
    tag and length. The filter has `FILTER_BYTES_MIN` to `FILTER_BYTES_MAX` bytes.
    """
    if len(frame) <= FILTER_BYTES_MIN:
        return None
    found: list[tuple[int, int, int, int]] = []  # number, start, start of the value, end
    is_nim = True
    at, end = 0, len(frame)
    try:
        while at < end:
            start = at
            tag = frame[at]
            at += 1
            if tag >= 0x80:
                tag, at = _read_varint(frame, start)
            if tag & 7 == 2:
                size = frame[at]
                if size < 0x80:
                    at += 1
                else:
                    size, at = _read_varint(frame, at)
                value, at = at, at + size
                is_nim &= tag != _SPEC_ID_TAG
            elif tag & 7 == 0:
                value, at = at, _read_varint(frame, at)[1]
            elif tag & 7 in (1, 5):
                value, at = at, at + (8 if tag & 7 == 1 else 4)
            else:
                return None  # groups
            if tag >> 3 in _FILTER_NUMBERS:
                found.append((tag >> 3, start, value, at))
    except (IndexError, ValueError):
        return None
    own = [each for each in found if each[0] == _FILTER_NUMBERS[is_nim]]
    if at != end or len(own) != 1:
        return None
    _, start, value, after = own[0]
    size = after - value
    is_usual = FILTER_BYTES_MIN <= size <= FILTER_BYTES_MAX
    if not is_usual or frame[start:value] != _header(size, is_nim):
        return None
    return Split(frame[:start] + frame[after:], frame[value:after], start, is_nim)


def join(rest: bytes, bloom_filter: bytes, place: int, *, is_nim: bool) -> bytes:
    """The frame that was split."""
    header = _header(len(bloom_filter), is_nim)
    return b"".join((rest[:place], header, bloom_filter, rest[place:]))


def difference(parts: Split, reference: bytes) -> bytes:
    """The filter as its difference from a reference of the same length, with its place in the rest."""
    old = np.frombuffer(reference, np.uint8)
    changed = np.frombuffer(parts.bloom_filter, np.uint8) ^ old
    places = (changed != 0).nonzero()[0]
    bits = np.unpackbits(changed[places]).view(np.bool_).nonzero()[0]
    count = len(bits)
    head = (_varint(parts.place), _varint(count))
    if not count:
        return b"".join((_first(0, parts.is_nim), *head, b"\0"))
    positions = places[bits >> 3]
    positions <<= 3
    bits &= 7
    positions += bits
    gaps = np.zeros(-(-count // 4) * 4, np.int64)  # a whole number of words for `_packed`
    used = gaps[:count]
    used[0] = positions[0]
    np.subtract(positions[1:], positions[:-1], out=used[1:])
    used[1:] -= 1
    # The best even k for gaps of this mean, if they are geometric.
    mean_bits = log2((int(positions[-1]) + 1) / count)
    k = min(2 * int((mean_bits + 0.57) / 2), _K_MAX)
    ends = (used >> k).cumsum()
    ends += _numbers(count)
    unary = np.zeros(int(ends[-1]) + 1, np.uint8)
    unary[ends] = 1
    coded = np.packbits(unary).tobytes()
    low = used.astype(np.uint8).tobytes() if k == 8 else _packed(gaps, k)[: (count * k + 7) // 8]
    return b"".join((_first(k, parts.is_nim), *head, _varint(len(coded)), coded, low))


class Difference(NamedTuple):
    """A difference as it was written: the bits, and where in the data it ends."""

    positions: NDArray[np.int64]
    place: int
    is_nim: bool
    end: int

    def applied(self, rest: bytes, reference: bytes) -> bytes:
        """The frame. Raises ValueError if this difference is not from that reference."""
        if len(self.positions) and int(self.positions[-1]) >= 8 * len(reference):
            raise ValueError("a difference has bits beyond its reference")
        frame = bytearray(join(rest, reference, self.place, is_nim=self.is_nim))
        start = len(frame) - len(reference) - len(rest) + self.place
        bloom_filter = np.frombuffer(frame, np.uint8, len(reference), start)
        places = self.positions >> 3
        masks = _BITS[self.positions & 7]
        bloom_filter[places] ^= masks
        # Of several bits in one byte that changed the last one alone: a third of the time of `xor.at`.
        again = (places[1:] == places[:-1]).nonzero()[0]
        for place, mask in zip(places[again].tolist(), masks[again].tolist(), strict=True):
            frame[start + place] ^= mask
        return bytes(frame)


def read_difference(data: bytes) -> Difference:
    """The difference at the start of `data`. Raises ValueError if it is damaged."""
    try:
        k, is_nim = data[0] & ~_NIM_BIT, data[0] >= _NIM_BIT
        place, at = _read_varint(data, 1)
        count, at = _read_varint(data, at)
        size, at = _read_varint(data, at)
    except IndexError:
        raise ValueError("a difference is cut off") from None
    low_at = at + size
    end = low_at + (count * k + 7) // 8
    if k > _K_MAX or k % 2 or count > 8 * size or end > len(data):
        raise ValueError("a difference is damaged")
    if not count:
        return Difference(np.empty(0, np.int64), place, is_nim, end)
    ends = np.unpackbits(np.frombuffer(data, np.uint8, size, at)).view(np.bool_).nonzero()[0]
    if len(ends) != count:
        raise ValueError("a difference is damaged")
    numbers = _numbers(count)
    # The gaps >> k up to the n-th one sum to ends[n] - n.
    positions = ends - numbers
    positions <<= k
    positions += numbers
    if k == 8:
        positions += np.frombuffer(data, np.uint8, count, low_at).cumsum(dtype=np.int64)
    elif k:
        positions += _unpacked(data[low_at:end], k, count).cumsum(dtype=np.int64)
    return Difference(positions, place, is_nim, end)


def _packed(values: NDArray[np.int64], k: int) -> bytes:
    """The low k bits of values, a multiple of four; the first value is in the lowest bits."""
    low = (values & (1 << k) - 1).view(np.uint64)
    words = (low.reshape(-1, 4) << _shifts(k)).sum(axis=1).astype("<u8", copy=False)
    packed: bytes = words.view(np.uint8).reshape(-1, 8)[:, : k // 2].tobytes()
    return packed


def _unpacked(data: bytes, k: int, count: int) -> NDArray[np.uint64]:
    words = np.zeros((-(-count // 4), 8), np.uint8)
    padded = data.ljust(len(words) * k // 2, b"\0")
    words[:, : k // 2] = np.frombuffer(padded, np.uint8).reshape(-1, k // 2)
    values = words.view("<u8") >> _shifts(k)
    values &= np.uint64((1 << k) - 1)
    return values.ravel()[:count]


@cache
def _shifts(k: int) -> NDArray[np.uint64]:
    return np.arange(4, dtype=np.uint64) * np.uint64(k)


_COUNTS = np.arange(4_096)


def _numbers(count: int) -> NDArray[np.int64]:
    """0 to count - 1."""
    return _COUNTS[:count] if count <= len(_COUNTS) else np.arange(count)


# ---- the choice of references


class References:
    """The references of one channel that its next filters are compared with.

    A filter is compared with the nearest one. That is the one for its sender where the senders' filters
    hold different IDs, and one for all where they hold the same. It is renewed when the differences from
    it have cost as many bytes as it did.
    """

    def __init__(self) -> None:
        self._filters: list[bytes] = []
        self._sizes: list[int] = []
        self._numbers: list[int] = []
        self._spent_bytes: list[int] = []
        self._used_at: list[int] = []
        self._uses = 0
        self._samples = np.zeros((REFERENCES_MAX, _SAMPLE_WORDS), np.uint64)

    @property
    def numbers(self) -> frozenset[int]:
        """Those that are chosen from."""
        return frozenset(self._numbers)

    @property
    def memory_bytes(self) -> int:
        """Approximate memory."""
        return self._samples.nbytes + sum(self._sizes)

    def add(self, number: int, bloom_filter: bytes, *, is_new: bool = True) -> None:
        """One more, in place of the least recently used one. Of an old one half of the use is assumed."""
        row = len(self._filters)
        if row == REFERENCES_MAX:
            row = self._used_at.index(min(self._used_at))
        else:
            self._filters.append(b"")
            for column in (self._sizes, self._numbers, self._spent_bytes, self._used_at):
                column.append(0)
        self._filters[row] = bloom_filter
        self._sizes[row] = len(bloom_filter)
        self._numbers[row] = number
        self._spent_bytes[row] = 0 if is_new else len(bloom_filter) // 2
        self._samples[row] = _sample(bloom_filter)
        self._use(row)

    def difference(self, parts: Split) -> tuple[int, bytes] | None:
        """The number of the reference, and the difference. `None`: make this filter a reference, from
        which its own difference is empty."""
        row = self._nearest(parts.bloom_filter)
        if row is None:
            return None
        found = difference(parts, self._filters[row])
        size = len(parts.bloom_filter)
        if len(found) > size * _RENEWING_SHARE or self._spent_bytes[row] + len(found) > size:
            return None
        self._spent_bytes[row] += len(found)
        self._use(row)
        return self._numbers[row], found

    def _use(self, row: int) -> None:
        self._uses += 1
        self._used_at[row] = self._uses

    def _nearest(self, bloom_filter: bytes) -> int | None:
        size = len(bloom_filter)
        rows = [row for row, each in enumerate(self._sizes) if each == size]
        if len(rows) < 2:
            return rows[0] if rows else None
        samples = (
            self._samples[rows] if len(rows) < len(self._filters) else self._samples[: len(rows)]
        )
        counts = np.bitwise_count(samples ^ _sample(bloom_filter))
        return rows[int((counts.astype(np.float32) @ _ONES).argmin())]


def _sample(bloom_filter: bytes) -> NDArray[np.uint64]:
    words = np.frombuffer(bloom_filter, np.uint64, len(bloom_filter) // 8)
    return words[:: len(words) // _SAMPLE_WORDS][:_SAMPLE_WORDS]


# ---- protobuf


def _header(size: int, is_nim: bool) -> bytes:
    return bytes((_FILTER_NUMBERS[is_nim] << 3 | 2,)) + _varint(size)


def _first(k: int, is_nim: bool) -> bytes:
    return bytes((k | _NIM_BIT if is_nim else k,))


def _varint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    found = bytearray()
    while value >= 0x80:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A varint and the place after it. Raises IndexError at the end of the data, ValueError."""
    value = shift = 0
    while (byte := data[at]) >= 0x80:
        value |= (byte & 0x7F) << shift
        shift += 7
        at += 1
        if shift > 63:
            raise ValueError("a varint has more than 10 bytes")
    return value | byte << shift, at + 1
