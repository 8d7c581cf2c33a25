"""Bodies and parameters as values, or a problem that says what is wrong with them.

Two bytes of a body can ask for a hundred bytes of memory and a microsecond, so what a body holds is
counted before it is parsed, and one fault is enough to refuse it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from pydantic import BaseModel, TypeAdapter, ValidationError

from app.errors import Code, Problem

_Model = TypeVar("_Model", bound=BaseModel)
_Wire = TypeVar("_Wire", bound=Message)
_FIELD_BYTES_MIN = 2
"""A tag, and a length or a value."""

_THREAD_BYTES_MIN = 256 * 1024
"""Counting the fields of so many bytes takes some milliseconds: it is done beside the loop."""

_FAULTS_SHOWN_MAX = 20
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def read_json(adapter: TypeAdapter[_Model], body: bytes) -> _Model:
    """A JSON body; `empty_body`, `invalid_body`."""
    _check_there(body)
    try:
        return adapter.validate_json(body)
    except ValidationError as error:
        if (count := error.error_count()) > _FAULTS_SHOWN_MAX:
            # A document for each of a million faults would take seconds.
            raise Problem(Code.INVALID_BODY, f"the body has {count} faults") from None
        fault = error.errors(include_url=False)[0]
        name = ".".join(map(str, fault["loc"])) or "the body"
        raise Problem(Code.INVALID_BODY, f"{name}: {fault['msg']}") from None


async def read_protobuf(kind: type[_Wire], body: bytes, fields_max: int) -> _Wire:
    """A protobuf body of up to `fields_max` fields, those of nested messages included.

    `empty_body`, `invalid_body`, `too_many_items`.
    """
    _check_there(body)
    await check_fields(kind, body, fields_max)
    try:
        return kind.FromString(body)
    except DecodeError:
        raise Problem(Code.INVALID_BODY, f"the body is not a {kind.DESCRIPTOR.name}") from None


async def check_fields(kind: type[Message], body: bytes, fields_max: int) -> None:
    """`too_many_items` where a body of protobuf holds more than `fields_max` fields."""
    if len(body) <= fields_max * _FIELD_BYTES_MIN:
        return
    if len(body) > _THREAD_BYTES_MIN:
        count = await asyncio.to_thread(count_fields, kind, body, fields_max)
    else:
        count = count_fields(kind, body, fields_max)
    if count > fields_max:
        raise Problem(Code.TOO_MANY_ITEMS, f"the body holds more than {fields_max} fields")


def count_fields(kind: type[Message], body: bytes, most: int) -> int:  # noqa: C901 - one hot loop
    """How many fields an encoded message holds, nested ones too; stops behind `most`.

    A walk over tags and lengths, 0.5 us a field. Of what is not protobuf it counts up to the fault.
    """
    table: Mapping[int, Any] = _nested(kind.DESCRIPTOR)
    at, end, count = 0, len(body), 0
    outer: list[tuple[int, Mapping[int, Any]]] = []
    try:
        while True:
            while at < end and count <= most:
                count += 1
                tag = body[at]
                at += 1
                if tag >= 0x80:
                    tag, at = _varint(body, at - 1)
                wire_type = tag & 7
                if wire_type == _BYTES:
                    size = body[at]
                    at += 1
                    if size >= 0x80:
                        size, at = _varint(body, at - 1)
                    nested = table.get(tag)
                    if nested is None:
                        at += size
                    else:
                        outer.append((end, table))
                        end, table = min(end, at + size), nested
                elif wire_type == _VARINT:
                    while body[at] >= 0x80:
                        at += 1
                    at += 1
                elif wire_type == _FIXED64:
                    at += 8
                elif wire_type == _FIXED32:
                    at += 4
            if not outer or count > most:
                return count
            at = max(at, end)
            end, table = outer.pop()
    except IndexError:
        return count


@cache
def _nested(descriptor: Descriptor) -> Mapping[int, Any]:
    """The tags of fields that hold messages, each with the same of that message."""
    return {
        field.number << 3 | _BYTES: _nested(field.message_type)
        for field in descriptor.fields
        if field.message_type is not None
    }


def _varint(body: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while body[at] >= 0x80 and shift < 64:
        value |= (body[at] & 0x7F) << shift
        shift += 7
        at += 1
    return value | body[at] << shift, at + 1


def _check_there(body: bytes) -> None:
    if not body:
        raise Problem(Code.EMPTY_BODY, "this request has a body")
