"""Bodies and parameters as values, or a problem that says what is wrong with them."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message
from pydantic import BaseModel, TypeAdapter, ValidationError

from app.errors import Code, Problem

_Model = TypeVar("_Model", bound=BaseModel)
_Wire = TypeVar("_Wire", bound=Message)


def read_json(adapter: TypeAdapter[_Model], body: bytes) -> _Model:
    """A JSON body; `empty_body`, `invalid_body`."""
    _check_there(body)
    try:
        return adapter.validate_json(body)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        name = ".".join(map(str, fault["loc"])) or "the body"
        raise Problem(Code.INVALID_BODY, f"{name}: {fault['msg']}") from None


def read_protobuf(kind: type[_Wire], body: bytes) -> _Wire:
    """A protobuf body; `empty_body`, `invalid_body`."""
    _check_there(body)
    try:
        return kind.FromString(body)
    except DecodeError:
        raise Problem(Code.INVALID_BODY, f"the body is not a {kind.DESCRIPTOR.name}") from None


def _check_there(body: bytes) -> None:
    if not body:
        raise Problem(Code.EMPTY_BODY, "this request has a body")
