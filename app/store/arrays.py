"""PostgreSQL's binary array format, written for whole columns at once.

A driver adapts an array value by value, in Python, which costs more than the insertion itself.
The format is that of `array_recv` (PostgreSQL, src/backend/utils/adt/arrayfuncs.c): number of
dimensions, a flag for nulls, the elements' type, the dimension's length and lower bound; then each
element as its length in bytes (-1: null) and its bytes, all numbers big-endian.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from struct import Struct
from typing import Any, NamedTuple, cast

import numpy as np
from psycopg.adapt import Dumper
from psycopg.pq import Format
from sqlalchemy import BigInteger, Integer, LargeBinary, SmallInteger, Text
from sqlalchemy.types import TypeEngine

_HEADER = Struct(">iiIii")
_LENGTH = Struct(">i").pack
_NULL = _LENGTH(-1)

_INTEGERS: dict[type[TypeEngine[Any]], tuple[int, int]] = {
    SmallInteger: (21, 2),
    Integer: (23, 4),
    BigInteger: (20, 8),
}
"""Column type -> (type number on the wire, bytes)."""
_TEXT_OID, _BYTES_OID = 25, 17


class BinaryArray(NamedTuple):
    """An array as it goes over the wire; the statement's cast names its type."""

    data: bytes


class BinaryArrayDumper(Dumper):
    """Passes a `BinaryArray` on."""

    format = Format.BINARY

    def dump(self, obj: BinaryArray) -> bytes:
        """See `Dumper`."""
        return obj.data


def array_of(kind: TypeEngine[Any], values: Sequence[Any]) -> BinaryArray:
    """The array of a column's values."""
    if integer := _INTEGERS.get(type(kind)):
        oid, width = integer
        return _array(oid, len(values), _integers(values, width))
    if isinstance(kind, Text):
        return _array(_TEXT_OID, len(values), _sized(_texts(values)))
    if isinstance(kind, LargeBinary):
        return _array(_BYTES_OID, len(values), _sized(values))
    raise TypeError(f"no array of {kind!r}")


def wire_text(value: str) -> bytes | None:
    """UTF-8, or null for a text with U+0000: no stored text holds one, and null equals none."""
    return None if "\0" in value else value.encode()


def _array(oid: int, count: int, elements: bytes) -> BinaryArray:
    return BinaryArray(_HEADER.pack(1, 1, oid, count, 1) + elements)


def _integers(values: Sequence[int | None], width: int) -> bytes:
    if None in values:
        return _sized([v if v is None else v.to_bytes(width, "big", signed=True) for v in values])
    rows = np.empty(len(values), [("length", ">i4"), ("value", f">i{width}")])
    rows["length"] = width
    rows["value"] = values
    return rows.tobytes()


def _texts(values: Sequence[str]) -> Sequence[bytes | None]:
    return [wire_text(v) for v in values] if "\0" in "".join(values) else [*map(str.encode, values)]


def _sized(values: Sequence[bytes | None]) -> bytes:
    if None in values:
        return b"".join([_NULL if v is None else _LENGTH(len(v)) + v for v in values])
    present = cast("Sequence[bytes]", values)
    lengths = [*map(len, present)]
    if len(set(lengths)) == 1:
        return _of_one_length(present, lengths[0])
    return b"".join(chain.from_iterable(zip(map(_LENGTH, lengths), present, strict=True)))


def _of_one_length(values: Sequence[bytes], length: int) -> bytes:
    rows = np.empty(len(values), [("length", ">i4"), ("value", f"V{length}")])
    rows["length"] = length
    rows["value"] = np.frombuffer(b"".join(values), f"V{length}") if length else b""
    return rows.tobytes()
