"""The stored form of frames: lossless, compressed, in tables that scans never touch.

A large frame is compressed against a *reference*: an earlier frame of its channel, from which it
hardly differs (a bloom filter gains ten bits a message). A small one is compressed with a
dictionary that is part of this package. docs/decisions/0003 says how damaged rows are recovered.

This module does no I/O. `FrameUnpacker.unpack` is a generator that asks for the rows it needs and is
sent them, so that a node's event loop, its writer's thread and a Spark task can use it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Generator, Iterable, Mapping, Sequence
from enum import IntEnum
from importlib.resources import files
from typing import NamedTuple, Protocol

from zstandard import (
    DICT_TYPE_RAWCONTENT,
    ZstdCompressionDict,
    ZstdCompressor,
    ZstdDecompressor,
    ZstdError,
    frame_content_size,
)

from sdstore.sds.digest import frame_hash

REFERENCE_BYTES_MIN = 4 * 1024
"""Smaller frames have no filter; loading a dictionary of their own would cost more than it saves."""

REFERENCE_BYTES_MAX = 128 * 1024
"""A filter of 64 KiB and a long history; bounds what one reference costs a cache."""

DICTIONARIES_BYTES_MAX = 64 * 1024 * 1024
"""References ready for reading: some 200 conversations at once."""

FRAMES_PER_STEP = 64
"""Frames unpacked at a time: all references that they need are in memory together."""

FRAMES_ONE_BY_ONE = 32
"""Up to here small frames are compressed one after the other: one call for all costs 60 µs more."""

_BUILT_IN = ZstdCompressionDict(files(__package__).joinpath("frames.zdict").read_bytes())
_LEVEL = 3
_SMALL_LEVEL = 1  # 0.3 % larger than level 3 for frames of 300 bytes, in 60 % of the time
_REFERENCE_LEVEL = 1  # the same size as higher levels where nearly all is one long match
_DECOMPRESSOR_BYTES = 160 * 1024  # zstd's own state
_DEPTH_MAX = 2  # a frame, its reference, the base of that
_RECOVERY_DEPTH_MAX = 4  # a mended frame that had dependents can itself need two others

_log = logging.getLogger(__name__)

DAMAGES_TOLD_MAX = 1_000
"""Lines of the log: repeated reads of damaged frames must not fill the disk."""


class Codec(IntEnum):
    """The encoding of a frame's data. The numbers are stored; they never change."""

    RAW = 0
    BUILT_IN = 1
    """zstd with the dictionary of this package, `frames.zdict`, which never changes either."""
    REFERENCE = 2
    """zstd with the frame `reference_no` as raw content of the dictionary."""


class StoredFrame(NamedTuple):
    """The columns of a frame; `reference_no` is the sequence number of the reference."""

    codec: int
    reference_no: int | None
    data: bytes


class Packed(Protocol):
    """The stored columns of a frame, with the length and hash that its message's row gives.

    The codec is None if the frame has no row.
    """

    @property
    def seq(self) -> int: ...
    @property
    def frame_bytes(self) -> int: ...
    @property
    def frame_hash(self) -> bytes: ...
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
    codec: int | None
    reference_no: int | None
    data: bytes | None


class Ask(NamedTuple):
    """Rows that the unpacker needs: of `frame_references`, or of `frames` itself."""

    seqs: list[int]
    of_references: bool = True


FrameRow = tuple[int, int, int | None, bytes]
"""Sequence number, codec, reference number, data."""


class FramePacker:
    """Compresses; belongs to one thread."""

    def __init__(self) -> None:
        self._compressor = _compressor(_BUILT_IN, _LEVEL)
        self._fast_compressor = _compressor(_BUILT_IN, _SMALL_LEVEL)

    def pack(self, frame: bytes) -> StoredFrame:
        """A frame by itself."""
        return _smaller(frame, self._compressor.compress(frame))

    def pack_small(self, frames: Sequence[bytes]) -> list[StoredFrame]:
        """Small frames: many of them in one call, during which other threads run."""
        if len(frames) <= FRAMES_ONE_BY_ONE:
            return [_smaller(frame, self._fast_compressor.compress(frame)) for frame in frames]
        packed = self._fast_compressor.multi_compress_to_buffer(list(frames))
        return [_smaller(frame, packed[n].tobytes()) for n, frame in enumerate(frames)]


class Reference:
    """A frame that others are compressed against; belongs to one thread."""

    def __init__(self, seq: int, frame: bytes) -> None:
        self.seq = seq
        self.frame = frame
        self._compressor = _compressor(_raw_content(frame), _REFERENCE_LEVEL)

    def pack(self, frame: bytes) -> StoredFrame:
        """`frame` as what differs from this one."""
        data = self._compressor.compress(frame)
        if len(data) < len(frame):
            return StoredFrame(Codec.REFERENCE, self.seq, data)
        return StoredFrame(Codec.RAW, None, frame)


class FrameUnpacker:
    """Gives frames back byte for byte, each proved by its hash; belongs to one thread.

    References have two copies, one in `frames` and one in `frame_references`. The second is read
    first; only if the result is wrong, every combination of copies is tried. Damage is logged, unless the
    unpacker `is_silent`, because another one has logged it.
    """

    def __init__(self, *, is_silent: bool = False) -> None:
        self._is_silent = is_silent
        self._built_in = ZstdDecompressor(dict_data=_BUILT_IN)
        self._references: OrderedDict[int, _Dictionary] = OrderedDict()
        self._references_bytes = 0
        self._damages_told: set[int] = set()

    def unpack(self, frames: Sequence[Packed]) -> Generator[Ask, list[FrameRow], dict[int, bytes]]:
        """The frames by sequence number, without those that no copy gives back."""
        found: dict[int, bytes] = {}
        for start in range(0, len(frames), FRAMES_PER_STEP):
            yield from self._unpack_step(frames[start : start + FRAMES_PER_STEP], found)
        return found

    def unpack_at_hand(self, packed: Packed) -> bytes | None:
        """One frame, if that needs no query: the hot path of reading."""
        return self._proved(packed, self._references)

    def forget_references(self) -> None:
        """Drop the cached references, so that reads verify those in the database."""
        self._references.clear()
        self._references_bytes = 0

    # ---- as long as everything is well

    def _unpack_step(
        self, frames: Sequence[Packed], found: dict[int, bytes]
    ) -> Generator[Ask, list[FrameRow], None]:
        references = yield from self._fetch(frame.reference_no for frame in frames)
        damaged: list[Packed] = []
        for packed in frames:
            frame = self._proved(packed, references)
            if frame is None:
                damaged.append(packed)
            else:
                found[packed.seq] = frame
        for packed in damaged:
            recovered = yield from self._recover(packed, references)
            if recovered is not None:
                found[packed.seq] = recovered

    def _fetch(
        self, numbers: Iterable[int | None]
    ) -> Generator[Ask, list[FrameRow], dict[int, _Dictionary]]:
        """References, without those that have no row. Fetches the bases that they need."""
        # Kept in this dictionary: another reader could push them out of the cache between two answers.
        ready: dict[int, _Dictionary] = {}
        rows: list[FrameRow] = []
        wanted = {number for number in numbers if number is not None}
        for _ in range(_DEPTH_MAX):
            wanted = {number for number in wanted if not self._is_taken(number, ready)}
            if not wanted:
                break
            rows = [*(yield Ask(sorted(wanted))), *rows]
            wanted = {row[2] for row in rows if row[2] is not None} - {row[0] for row in rows}
        for seq, codec, reference_no, data in rows:
            content = self._decoded(codec, ready.get(reference_no or 0), data, REFERENCE_BYTES_MAX)
            if content is not None:
                ready[seq] = self._keep(seq, content)
        return ready

    def _is_taken(self, seq: int, ready: dict[int, _Dictionary]) -> bool:
        if seq in self._references:
            self._references.move_to_end(seq)
            ready[seq] = self._references[seq]
        return seq in ready

    def _keep(self, seq: int, content: bytes) -> _Dictionary:
        if (old := self._references.pop(seq, None)) is not None:
            self._references_bytes -= old.bytes
        kept = self._references[seq] = _Dictionary(content)
        self._references_bytes += kept.bytes
        while self._references_bytes > DICTIONARIES_BYTES_MAX:
            _, oldest = self._references.popitem(last=False)
            self._references_bytes -= oldest.bytes
        return kept

    def _proved(self, packed: Packed, references: Mapping[int, _Dictionary]) -> bytes | None:
        if packed.codec is None or packed.data is None:
            return None
        dictionary = references.get(packed.reference_no or 0)
        frame = self._decoded(packed.codec, dictionary, packed.data, packed.frame_bytes)
        return frame if frame is not None and frame_hash(frame) == packed.frame_hash else None

    def _decoded(
        self, codec: int, dictionary: _Dictionary | None, data: bytes, bytes_max: int
    ) -> bytes | None:
        """The content of `data`, None if it cannot be read; never more than `bytes_max`."""
        if codec == Codec.RAW:
            return data if len(data) <= bytes_max else None
        decompressor = self._built_in if codec == Codec.BUILT_IN else None
        if codec == Codec.REFERENCE and dictionary is not None:
            decompressor = dictionary.decompressor
        if decompressor is None:
            return None
        try:
            is_fitting = 0 <= frame_content_size(data) <= bytes_max
            return decompressor.decompress(data) if is_fitting else None
        except ZstdError:
            return None

    # ---- where something is damaged

    def _recover(
        self, packed: Packed, references: dict[int, _Dictionary]
    ) -> Generator[Ask, list[FrameRow], bytes | None]:
        """Try every copy of the frame with every copy of its reference."""
        # Another frame's recovery may have found the right reference meanwhile.
        frame = self._proved(packed, references)
        if frame is not None:
            return frame
        rows = yield from self._copies(packed.seq)
        for _, codec, reference_no, data in rows:
            contents = yield from self.contents(reference_no, _RECOVERY_DEPTH_MAX)
            for content in contents or [b""]:
                dictionary = _Dictionary(content)
                frame = self._decoded(codec, dictionary, data, packed.frame_bytes)
                if frame is not None and frame_hash(frame) == packed.frame_hash:
                    if reference_no is not None:
                        references[reference_no] = self._keep(reference_no, content)
                    self._tell("a copy of frame %d or of its reference is damaged", packed.seq)
                    return frame
        self._tell("frame %d is damaged", packed.seq)
        return None

    def _tell(self, damage: str, seq: int) -> None:
        """Log damage, once for each frame; `sdstore check --deep` lists all."""
        if self._is_silent:
            return
        if seq not in self._damages_told and len(self._damages_told) < DAMAGES_TOLD_MAX:
            self._damages_told.add(seq)
            _log.error(damage, seq)

    def contents(
        self, seq: int | None, depth: int = _RECOVERY_DEPTH_MAX
    ) -> Generator[Ask, list[FrameRow], list[bytes]]:
        """All contents that the copies of a reference can give, proved or not."""
        if seq is None or not depth:
            return []
        found: dict[bytes, None] = {}
        for _, codec, reference_no, data in (yield from self._copies(seq)):
            bases = yield from self.contents(reference_no, depth - 1)
            for base in bases or [b""]:
                content = self._decoded(codec, _Dictionary(base), data, REFERENCE_BYTES_MAX)
                if content is not None:
                    found[content] = None
        return list(found)

    @staticmethod
    def _copies(seq: int) -> Generator[Ask, list[FrameRow], list[FrameRow]]:
        second = yield Ask([seq])
        first = yield Ask([seq], of_references=False)
        return list(dict.fromkeys([*second, *first]))


class _Dictionary:
    """A reference ready for decompression."""

    def __init__(self, content: bytes) -> None:
        self.decompressor = ZstdDecompressor(dict_data=_raw_content(content))
        self.bytes = len(content) + _DECOMPRESSOR_BYTES


def _smaller(frame: bytes, data: bytes) -> StoredFrame:
    if len(data) < len(frame):
        return StoredFrame(Codec.BUILT_IN, None, data)
    return StoredFrame(Codec.RAW, None, frame)


def is_referable(frame: bytes) -> bool:
    """Whether a frame is compressed against references and can be one."""
    return REFERENCE_BYTES_MIN <= len(frame) <= REFERENCE_BYTES_MAX


def _raw_content(frame: bytes) -> ZstdCompressionDict:
    return ZstdCompressionDict(frame, dict_type=DICT_TYPE_RAWCONTENT)


def _compressor(dictionary: ZstdCompressionDict, level: int) -> ZstdCompressor:
    # The row names the dictionary, so the data need not; unpacking checks the content size first.
    return ZstdCompressor(level, dict_data=dictionary, write_content_size=True, write_dict_id=False)
