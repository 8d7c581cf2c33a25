"""Frames as schema revisions before 0009 stored them; only migrations read them.

A large frame was compressed with another frame of its channel as zstd's dictionary, which could itself be
compressed against a third. `frame_references` held a second copy of every frame that others needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from typing import NamedTuple

from zstandard import (
    DICT_TYPE_RAWCONTENT,
    ZstdCompressionDict,
    ZstdDecompressor,
    ZstdError,
    frame_content_size,
)

from sdstore.sds.model import frame_hash

RAW, BUILT_IN, REFERENCE = 0, 1, 2
"""Codecs; `REFERENCE` is zstd with the frame numbered `reference_no`."""

_REFERENCE_BYTES_MAX = 128 * 1024
_DEPTH_MAX = 4  # a mended frame that others needed could itself need two others
_DECOMPRESSORS_MAX = 256  # 50 MB

CopyRow = tuple[int, int, int | None, bytes]
"""Sequence number, codec, reference number, data."""

ReadCopies = Callable[[str, Sequence[int]], Iterable[CopyRow]]
"""The rows with these sequence numbers in `frames` or in `frame_references`."""


class FormerFrame(NamedTuple):
    """The columns of a stored frame, with the length and hash that its message's row gives."""

    seq: int
    frame_bytes: int
    frame_hash: bytes
    codec: int | None
    reference_no: int | None
    data: bytes | None


class FormerFrames:
    """Reads frames; tries every combination of copies where one is damaged."""

    def __init__(self, read_copies: ReadCopies) -> None:
        self._read_copies = read_copies
        self._built_in = ZstdDecompressor(
            dict_data=ZstdCompressionDict(files(__package__).joinpath("frames.zdict").read_bytes())
        )
        self._decompressors: OrderedDict[int, ZstdDecompressor] = OrderedDict()

    def read(self, stored: Sequence[FormerFrame]) -> dict[int, bytes]:
        """The frames that can be read, by sequence number."""
        found: dict[int, bytes] = {}
        for each in stored:
            frame = self._frame(each)
            if frame is not None:
                found[each.seq] = frame
        return found

    def _frame(self, stored: FormerFrame) -> bytes | None:
        copies: list[CopyRow] = []
        if stored.codec is not None and stored.data is not None:
            copies = [(stored.seq, stored.codec, stored.reference_no, stored.data)]
        for is_last_try in (False, True):
            if is_last_try:
                copies = self._copies(stored.seq)
            for _, codec, reference_no, data in copies:
                for reference in self._decompressors_of(reference_no, every=is_last_try):
                    frame = self._decoded(codec, reference, data, stored.frame_bytes)
                    if frame is not None and frame_hash(frame) == stored.frame_hash:
                        return frame
        return None

    def _copies(self, seq: int) -> list[CopyRow]:
        rows: list[CopyRow] = []
        for table in ("frame_references", "frames"):
            rows += self._read_copies(table, [seq])
        return list(dict.fromkeys(rows))

    def _decompressors_of(
        self, reference_no: int | None, *, every: bool
    ) -> Iterable[ZstdDecompressor | None]:
        if reference_no is None:
            return [None]
        if not every and reference_no in self._decompressors:
            self._decompressors.move_to_end(reference_no)
            return [self._decompressors[reference_no]]
        made = [_with_dictionary(each) for each in self._contents(reference_no, _DEPTH_MAX)]
        if made:
            self._decompressors[reference_no] = made[0]
            if len(self._decompressors) > _DECOMPRESSORS_MAX:
                self._decompressors.popitem(last=False)
        return made if every else made[:1]

    def _contents(self, seq: int, depth: int) -> list[bytes]:
        """All contents that the copies of a reference give, proved or not."""
        found: dict[bytes, None] = {}
        for _, codec, reference_no, data in self._copies(seq) if depth else ():
            bases: list[ZstdDecompressor | None] = [None]
            if reference_no is not None:
                bases = [_with_dictionary(each) for each in self._contents(reference_no, depth - 1)]
            for base in bases:
                content = self._decoded(codec, base, data, _REFERENCE_BYTES_MAX)
                if content is not None:
                    found[content] = None
        return list(found)

    def _decoded(
        self, codec: int, reference: ZstdDecompressor | None, data: bytes, bytes_max: int
    ) -> bytes | None:
        if codec == RAW:
            return data if len(data) <= bytes_max else None
        decompressor = self._built_in if codec == BUILT_IN else reference
        try:
            if decompressor is None or not 0 <= frame_content_size(data) <= bytes_max:
                return None
            return decompressor.decompress(data)
        except ZstdError:
            return None


def _with_dictionary(content: bytes) -> ZstdDecompressor:
    dictionary = ZstdCompressionDict(content, dict_type=DICT_TYPE_RAWCONTENT)
    return ZstdDecompressor(dict_data=dictionary)
