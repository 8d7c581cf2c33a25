"""JSON and protobuf: the form of a reply, the form of a body, and bodies as values.

Two bytes of a body can cost a hundred bytes of memory and a microsecond, so the fields of a body
are counted before it is parsed, and the first fault refuses it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from pydantic import BaseModel, ValidationError

from app.errors import Code, Problem, fault_text
from app.server.limits import Limits

if TYPE_CHECKING:
    from app.http.call import Call

_Model = TypeVar("_Model", bound=BaseModel)
_Wire = TypeVar("_Wire", bound=Message)

_FIELD_BYTES_MIN = 2
"""A tag, and a length or a value."""

_THREAD_BYTES_MIN = 256 * 1024
"""Counting the fields of so many bytes takes milliseconds: a thread does it."""

_FAULTS_SHOWN_MAX = 20
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class Form(Enum):
    """The two forms of most bodies and replies, and those of some routes."""

    JSON = b"application/json"
    PROTOBUF = b"application/x-protobuf"
    NDJSON = b"application/x-ndjson"
    OCTETS = b"application/octet-stream"
    EVENTS = b"text/event-stream"
    HTML = b"text/html"
    TEXT = b"text/plain"


@lru_cache(maxsize=512)
def answer_form(accept: bytes | None) -> Form:
    """The form that an Accept header prefers; JSON by default.

    RFC 9110 section 12.5.1: the most specific range that matches a type gives its quality.
    Raises `not_acceptable` if both forms have quality 0.
    """
    if not accept:
        return Form.JSON
    ranges = _ranges(accept.decode("latin-1"))
    json, protobuf = (
        _quality(ranges, "application/json"),
        _quality(ranges, "application/x-protobuf"),
    )
    if not json and not protobuf:
        raise Problem(Code.NOT_ACCEPTABLE, "answers are application/json or application/x-protobuf")
    return Form.PROTOBUF if protobuf > json else Form.JSON


@lru_cache(maxsize=512)
def body_form(content_type: bytes | None, *accepted: Form) -> Form:
    """The form of a body by its Content-Type; `unsupported_media_type` if it is not `accepted`."""
    media_type = (content_type or b"").partition(b";")[0].strip().lower()
    for form in accepted:
        if media_type == form.value or (form is Form.NDJSON and media_type == b"application/jsonl"):
            return form
    names = ", ".join(form.value.decode() for form in accepted)
    raise Problem(
        Code.UNSUPPORTED_MEDIA_TYPE,
        f"Content-Type must be one of {names}",
        headers={"Accept": names},
    )


def _ranges(accept: str) -> dict[str, float]:
    ranges: dict[str, float] = {}
    for part in accept.lower().split(","):
        media_range, *parameters = (piece.strip() for piece in part.split(";"))
        ranges[media_range] = next(map(_q, filter(_is_quality, parameters)), 1.0)
    return ranges


def _is_quality(parameter: str) -> bool:
    return parameter.startswith("q=")


def _q(parameter: str) -> float:
    try:
        return min(1.0, max(0.0, float(parameter[2:])))
    except ValueError:
        return 0.0


def _quality(ranges: dict[str, float], media_type: str) -> float:
    for media_range in (media_type, "application/*", "*/*"):
        if media_range in ranges:
            return ranges[media_range]
    return 0.0


@dataclass(frozen=True, slots=True)
class TwoFormBody(Generic[_Model, _Wire]):
    """A body in JSON or in protobuf; `fields_max` bounds the fields of the protobuf form."""

    json: type[_Model]
    protobuf: type[_Wire]
    fields_max: Callable[[Limits], int]

    async def read(self, call: Call) -> _Model | _Wire:
        """The body by its Content-Type; `empty_body`, `invalid_body`, `too_many_items`."""
        form = body_form(call.headers.get(b"content-type"), Form.JSON, Form.PROTOBUF)
        if form is Form.JSON:
            return read_json(self.json, call.body)
        return await read_protobuf(self.protobuf, call.body, self.fields_max(call.node.limits))


def read_json(model: type[_Model], body: bytes) -> _Model:
    """A JSON body; `empty_body`, `invalid_body`."""
    _check_not_empty(body)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        if (count := error.error_count()) > _FAULTS_SHOWN_MAX:
            # To describe each of a million faults would take seconds.
            raise Problem(Code.INVALID_BODY, f"the body has {count} faults") from None
        fault = error.errors(include_url=False)[0]
        if fault["type"] == "json_invalid":
            why = f"the body is not JSON: {fault['ctx']['error']}"
            raise Problem(Code.INVALID_BODY, why) from None
        name = ".".join(map(str, fault["loc"])) or "the body"
        raise Problem(Code.INVALID_BODY, f"{name}: {fault_text(fault)}") from None


async def read_protobuf(kind: type[_Wire], body: bytes, fields_max: int) -> _Wire:
    """A protobuf body of up to `fields_max` fields, those of nested messages included.

    `empty_body`, `invalid_body`, `too_many_items`.
    """
    _check_not_empty(body)
    await check_fields(kind, body, fields_max)
    try:
        return kind.FromString(body)
    except DecodeError:
        raise Problem(Code.INVALID_BODY, f"the body is not a {kind.DESCRIPTOR.name}") from None


async def check_fields(kind: type[Message], body: bytes, fields_max: int) -> None:
    """Raise `too_many_items` if a protobuf body holds more than `fields_max` fields."""
    if len(body) <= fields_max * _FIELD_BYTES_MIN:
        return
    if len(body) > _THREAD_BYTES_MIN:
        count = await asyncio.to_thread(count_fields, kind, body, fields_max)
    else:
        count = count_fields(kind, body, fields_max)
    if count > fields_max:
        raise Problem(Code.TOO_MANY_ITEMS, f"the body holds more than {fields_max} fields")


def count_fields(kind: type[Message], body: bytes, most: int) -> int:  # noqa: C901 - one hot loop
    """The number of fields in an encoded message and its nested messages; stops after `most`.

    Walks over tags and lengths, 0.5 us a field. In bytes that are not protobuf it stops at the fault.
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
    """The tags of the fields that hold messages, each with the same mapping of that message."""
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


def _check_not_empty(body: bytes) -> None:
    if not body:
        raise Problem(Code.EMPTY_BODY, "this request needs a body")
