"""The stored form of frames: a large bloom filter is stored as its difference from an earlier one.

A js-waku frame has 19 kB; 98 % of it is a bloom filter that differs from the previous one by ten
bits. Such a frame is stored as its other bytes and the changed bytes of its filter, against a
*reference*: the whole filter of an earlier frame of the channel, which has a row of its own. The
code compares bytes and knows no filter format. Frames stay lossless; smaller ones are stored whole.

The difference grows with the distance from the reference. A frame gets a new reference when its
difference would be larger than the average so far, the reference included: from there the average
would rise. With ten changed bits a message that is one reference in some 35 messages and 1.1 kB a
frame (1.7 kB of the file with the row of the log and its indexes), for about 15 µs to pack and 10 µs
to unpack.

This module does no I/O.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

FILTER_BYTES_MIN = 1_024
"""Smaller filters are stored with their frame: a reference would save less than its row costs."""

FILTER_BYTES_MAX = 65_536
"""Positions in a filter have 16 bits. Larger filters are stored with their frame."""

REFERENCES_MAX = 4
"""References of a channel that a frame is compared with, 10 µs each. Participants whose filters
rolled over at other times need references of their own."""

_SOUGHT_BYTES = 64  # few enough for a search without preparation

_USUAL_FRAMES_COUNT = 35
"""Frames per reference with js-waku's filters; assumed of references that were read from a file."""

_HEADER = struct.Struct("<IH")  # where the filter begins in the frame; the number of changed bytes
_POSITION = np.dtype("<u2")


class PackedFrame(NamedTuple):
    """The columns of a stored frame. `reference_no` is None for a frame that is stored whole."""

    reference_no: int | None
    data: bytes


class _Reference:
    """A filter that others are compared with, and what the frames against it cost so far."""

    def __init__(self, number: int, bloom_filter: bytes, *, is_used: bool) -> None:
        self.number = number
        self.bytes = np.frombuffer(bloom_filter, np.uint8)
        # At the best time for a new reference the differences cost as much as the reference.
        self.cost_bytes = 2 * len(bloom_filter) if is_used else len(bloom_filter)
        self.frames_count = _USUAL_FRAMES_COUNT if is_used else 1


class FilterPacker:
    """The references of one channel, newest use last."""

    def __init__(self) -> None:
        self._references: list[_Reference] = []

    def add_reference(self, number: int, bloom_filter: bytes, *, is_used: bool) -> None:
        """Use a stored filter as a reference from now on; the least recently used one is dropped.

        `is_used`: frames are stored against it already.
        """
        self._references.append(_Reference(number, bloom_filter, is_used=is_used))
        del self._references[:-REFERENCES_MAX]

    def pack(self, frame: bytes, bloom_filter: bytes) -> PackedFrame | None:
        """The stored form of a frame with this filter; None if the filter must become a reference.

        The caller then gives it a number, stores it, calls `add_reference` and packs again.
        """
        if not FILTER_BYTES_MIN <= len(bloom_filter) <= FILTER_BYTES_MAX:
            return PackedFrame(None, frame)
        start = _place(bloom_filter, frame)
        if start < 0:
            return PackedFrame(None, frame)
        wanted = np.frombuffer(bloom_filter, np.uint8)
        for index in range(len(self._references) - 1, -1, -1):
            reference = self._references[index]
            if len(reference.bytes) != len(wanted):
                continue
            positions = np.flatnonzero(reference.bytes != wanted)
            delta_bytes = 3 * len(positions)
            if delta_bytes * reference.frames_count > reference.cost_bytes:
                continue
            reference.cost_bytes += delta_bytes
            reference.frames_count += 1
            self._references.append(self._references.pop(index))
            data = b"".join(
                (
                    _HEADER.pack(start, len(positions)),
                    positions.astype(_POSITION).tobytes(),
                    wanted[positions].tobytes(),
                    frame[:start],
                    frame[start + len(bloom_filter) :],
                )
            )
            return PackedFrame(reference.number, data)
        return None


def _place(bloom_filter: bytes, frame: bytes) -> int:
    """`frame.find(bloom_filter)` for a twentieth of the time: `find` studies what it looks for first."""
    start = frame.find(bloom_filter[:_SOUGHT_BYTES])
    if start < 0 or frame.startswith(bloom_filter, start):
        return start
    return frame.find(bloom_filter)


def unpack(data: bytes, reference: bytes) -> bytes:
    """The frame of a `PackedFrame` against this reference; ValueError if the data are damaged."""
    try:
        start, count = _HEADER.unpack_from(data)
        positions = np.frombuffer(data, _POSITION, count, _HEADER.size)
        values_start = _HEADER.size + positions.nbytes
        bloom_filter = np.frombuffer(reference, np.uint8).copy()
        bloom_filter[positions] = np.frombuffer(data, np.uint8, count, values_start)
    except (struct.error, IndexError) as error:
        raise ValueError(f"the stored form of a frame is damaged: {error}") from error
    rest = data[values_start + count :]
    return rest[:start] + bloom_filter.tobytes() + rest[start:]
