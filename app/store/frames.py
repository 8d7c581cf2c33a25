"""The stored form of frames: lossless, compressed, in tables that scans never touch.

A frame without a bloom filter, or with a small one, is compressed with a dictionary that is part of
this package. The filter of any other frame is stored as its difference from a *reference*, a filter
in a row of its own, and the rest is compressed as a small frame (`sdstore.sds.framecodec`;
docs/decisions/0003). So a damaged row of `frames` costs its own message, and a damaged reference costs
filters, never content.

This module does no I/O. `FrameUnpacker.unpack` is a generator that asks for the references it needs and
is sent them, so that a node's event loop, its writer's thread and a Spark task can use it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Mapping, Sequence
from enum import IntEnum
from importlib.resources import files
from typing import NamedTuple, Protocol

from zstandard import (
    ZstdCompressionDict,
    ZstdCompressor,
    ZstdDecompressor,
    ZstdError,
    frame_content_size,
)

from sdstore.sds.codec import MessageError, decode
from sdstore.sds.digest import entry_digest, frame_hash
from sdstore.sds.framecodec import FILTER_BYTES_MAX, Split, read_difference

REFERENCES_BYTES_MAX = 16 * 1024 * 1024
"""References ready for reading: some 850 filters of js-waku."""

FRAMES_PER_STEP = 64
"""Frames unpacked at a time: all references that they need are in memory together."""

FRAMES_ONE_BY_ONE = 32
"""Up to here frames are compressed one after the other: one call for all costs 60 µs more."""

_BUILT_IN = ZstdCompressionDict(files(__package__).joinpath("frames.zdict").read_bytes())
_LEVEL = 1  # 0.3 % larger than level 3 for frames of 300 bytes, in 60 % of the time


class Codec(IntEnum):
    """The encoding of a frame's data. The numbers are stored; they never change.

    2 was that of revisions before 0009, which compressed frames against others.
    """

    RAW = 0
    BUILT_IN = 1
    """zstd with the dictionary of this package, `frames.zdict`, which never changes either."""
    DIFFERENCE = 3
    """The difference of the filter from the reference `reference_no`, then the rest as in `FILTER_LOST`."""
    FILTER_LOST = 4
    """A frame whose filter could not be read: the rest, as in `BUILT_IN` and with zstd's checksum."""


# Comparing with members of an enumeration costs a tenth of the reading of a small frame.
_RAW_NO, _BUILT_IN_NO, _DIFFERENCE_NO, _FILTER_LOST_NO = map(int, Codec)


class StoredFrame(NamedTuple):
    """The columns of a frame."""

    codec: int
    reference_no: int | None
    data: bytes


class Packed(Protocol):
    """The stored columns of a frame, with the length, hash and digest that its message's row gives.

    The codec is None if the frame has no row.
    """

    @property
    def seq(self) -> int: ...
    @property
    def frame_bytes(self) -> int: ...
    @property
    def frame_hash(self) -> bytes: ...
    @property
    def digest(self) -> bytes: ...
    @property
    def codec(self) -> int | None: ...
    @property
    def reference_no(self) -> int | None: ...
    @property
    def data(self) -> bytes | None: ...


class PackedFrame(NamedTuple):
    """A `Packed` by itself."""

    seq: int
    frame_bytes: int
    frame_hash: bytes
    digest: bytes
    codec: int | None
    reference_no: int | None
    data: bytes | None


class Unpacked(NamedTuple):
    """Frames by sequence number. A frame in neither dictionary has *lost content*.

    `whole`: those with the hash of their message's row. `without_filter`: frames whose filter cannot be
    read, each proved by its entry's digest.
    """

    whole: dict[int, bytes]
    without_filter: dict[int, bytes]


ReferenceRow = tuple[int, bytes]
"""Reference number, data."""

Unpacking = Generator[list[int], list[ReferenceRow], Unpacked]
"""Yields the numbers of references, is sent their rows, and returns the frames."""


class FramePacker:
    """Compresses; belongs to one thread."""

    def __init__(self) -> None:
        self._compressor = _compressor(_BUILT_IN, has_checksum=False)
        self._rest_compressor = _compressor(_BUILT_IN, has_checksum=True)
        self._reference_compressor = _compressor(None, has_checksum=True)

    def pack_whole(self, frames: Sequence[bytes]) -> list[StoredFrame]:
        """Frames by themselves: many of them in one call, during which other threads run."""
        if len(frames) <= FRAMES_ONE_BY_ONE:
            return [_smaller(frame, self._compressor.compress(frame)) for frame in frames]
        packed = self._compressor.multi_compress_to_buffer(list(frames))
        return [_smaller(frame, packed[n].tobytes()) for n, frame in enumerate(frames)]

    def pack_difference(self, parts: Split, reference_no: int, difference: bytes) -> StoredFrame:
        """A frame whose filter is stored as a difference."""
        data = difference + self._rest_compressor.compress(parts.rest)
        return StoredFrame(Codec.DIFFERENCE, reference_no, data)

    def pack_reference(self, bloom_filter: bytes) -> bytes:
        """The data of a reference."""
        return self._reference_compressor.compress(bloom_filter)


class FrameUnpacker:
    """Gives frames back byte for byte; belongs to one thread."""

    def __init__(self) -> None:
        self._decompressor = ZstdDecompressor(dict_data=_BUILT_IN)
        self._references: OrderedDict[int, bytes] = OrderedDict()
        self._references_bytes = 0

    def unpack_at_hand(self, packed: Packed) -> bytes | None:
        """One frame, if that needs no query: the hot path of reading."""
        return self._proved(packed, self._references, {})

    def unpack(
        self, frames: Sequence[Packed], known: Mapping[bytes, bytes] | None = None
    ) -> Unpacking:
        """The frames that can be read.

        `known` are frames by hash: comparing with them is cheaper than hashing.
        """
        found = Unpacked({}, {})
        for start in range(0, len(frames), FRAMES_PER_STEP):
            yield from self._unpack_step(
                frames[start : start + FRAMES_PER_STEP], known or {}, found
            )
        return found

    def forget_references(self) -> None:
        """Drop the cached references, so that reads verify those in the database."""
        self._references.clear()
        self._references_bytes = 0

    def _unpack_step(
        self, frames: Sequence[Packed], known: Mapping[bytes, bytes], found: Unpacked
    ) -> Generator[list[int], list[ReferenceRow], None]:
        # Kept in this dictionary: another reader could push them out of the cache between two answers.
        references: dict[int, bytes] = {}
        wanted = {each.reference_no for each in frames if each.reference_no is not None}
        for number in wanted & self._references.keys():
            self._references.move_to_end(number)
            references[number] = self._references[number]
        doubted = self._take(frames, references, known, found) if references else list(frames)
        if not doubted:
            return
        # Also those in memory: after a failover of the database they can be of another history.
        numbers = {each.reference_no for each in doubted if each.reference_no is not None}
        if numbers:
            references = self._read((yield sorted(numbers)))
        for packed in self._take(doubted, references, known, found):
            rest = self._rest_of(packed)
            if rest is not None:
                found.without_filter[packed.seq] = rest

    def _take(
        self,
        frames: Sequence[Packed],
        references: Mapping[int, bytes],
        known: Mapping[bytes, bytes],
        found: Unpacked,
    ) -> list[Packed]:
        """Unpack frames; returns those that are wrong."""
        wrong: list[Packed] = []
        for packed in frames:
            frame = self._proved(packed, references, known)
            if frame is None:
                wrong.append(packed)
            else:
                found.whole[packed.seq] = frame
        return wrong

    def _read(self, rows: Sequence[ReferenceRow]) -> dict[int, bytes]:
        references: dict[int, bytes] = {}
        for number, data in rows:
            if (old := self._references.pop(number, None)) is not None:
                self._references_bytes -= len(old)
            bloom_filter = reference_filter(data)
            if bloom_filter is None:
                continue
            references[number] = self._references[number] = bloom_filter
            self._references_bytes += len(bloom_filter)
            while self._references_bytes > REFERENCES_BYTES_MAX:
                _, oldest = self._references.popitem(last=False)
                self._references_bytes -= len(oldest)
        return references

    def _proved(
        self, packed: Packed, references: Mapping[int, bytes], known: Mapping[bytes, bytes]
    ) -> bytes | None:
        codec, data = packed.codec, packed.data
        if codec is None or data is None:
            return None
        if codec in (_BUILT_IN_NO, _FILTER_LOST_NO):
            frame = self._decompressed(data, packed.frame_bytes)
        elif codec == _RAW_NO:
            frame = data
        elif codec == _DIFFERENCE_NO:
            reference = references.get(packed.reference_no or 0)
            frame = None if reference is None else self._joined(data, reference, packed.frame_bytes)
        else:
            return None
        if frame is None:
            return None
        same = known.get(packed.frame_hash) if known else None
        is_right = frame_hash(frame) == packed.frame_hash if same is None else frame == same
        return frame if is_right else None

    def _joined(self, data: bytes, reference: bytes, bytes_max: int) -> bytes | None:
        try:
            difference = read_difference(data)
            rest = self._decompressed(data[difference.end :], bytes_max)
            return None if rest is None else difference.applied(rest, reference)
        except ValueError:
            return None

    def _decompressed(self, data: bytes, bytes_max: int) -> bytes | None:
        """None for damaged data; never more than `bytes_max`."""
        try:
            is_fitting = 0 <= frame_content_size(data) <= bytes_max
            return self._decompressor.decompress(data) if is_fitting else None
        except ZstdError:
            return None

    def _rest_of(self, packed: Packed) -> bytes | None:
        """A frame without its filter, if it has the entry's digest."""
        if packed.codec != Codec.DIFFERENCE or packed.data is None:
            return None
        try:
            stored = rest_data(packed.data)
            rest = self._decompressed(stored, packed.frame_bytes)
            return rest if rest and entry_digest(decode(rest)[0]) == packed.digest else None
        except (ValueError, MessageError):
            return None


def rest_data(data: bytes) -> bytes:
    """The data for `Codec.FILTER_LOST` in those of `Codec.DIFFERENCE`. Raises ValueError."""
    return data[read_difference(data).end :]


def reference_filter(data: bytes) -> bytes | None:
    """The filter of a reference; None if its row is damaged, which zstd's checksum shows."""
    try:
        is_fitting = 0 <= frame_content_size(data) <= FILTER_BYTES_MAX
        return ZstdDecompressor().decompress(data) if is_fitting else None
    except ZstdError:
        return None


def _smaller(frame: bytes, data: bytes) -> StoredFrame:
    if len(data) < len(frame):
        return StoredFrame(Codec.BUILT_IN, None, data)
    return StoredFrame(Codec.RAW, None, frame)


def _compressor(dictionary: ZstdCompressionDict | None, *, has_checksum: bool) -> ZstdCompressor:
    # The codec names the dictionary, so the data need not; unpacking checks the content size first.
    return ZstdCompressor(
        _LEVEL,
        dict_data=dictionary,
        write_content_size=True,
        write_dict_id=False,
        write_checksum=has_checksum,
    )
