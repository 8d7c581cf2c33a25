"""How frames lie in the database: their own room, out of the way of scans."""

from __future__ import annotations

from enum import IntEnum

from app.errors import Code, Problem


class Codec(IntEnum):
    """How the data of a frame is to be read. The numbers are stored; they never change."""

    RAW = 0


def pack(frame: bytes) -> tuple[int, int | None, bytes]:
    """(codec, reference number, data) of a frame."""
    return Codec.RAW, None, frame


def unpack(codec: int, _reference_no: int | None, data: bytes) -> bytes:
    """The frame, byte for byte."""
    if codec != Codec.RAW:
        raise Problem(Code.INTERNAL_ERROR, f"no codec {codec}")
    return data
