"""The error of a participant's caller. Bytes from others never raise: they are counted instead."""

from __future__ import annotations

import reprlib
from types import UnionType

from sdstore.errors import SdstoreError


class LocalProtocolError(SdstoreError, ValueError):
    """This program misused a participant, or gave it a state that cannot be restored."""


class WrongTypeError(LocalProtocolError, TypeError):
    """An argument has a type that the method does not take; its code is `wrong_type`."""

    def __init__(self, name: str, value: object, wanted: str) -> None:
        super().__init__("wrong_type", f"{name} is of type {type(value).__name__}, not {wanted}")


def check_argument(name: str, value: object, kind: type | UnionType, wanted: str) -> None:
    """Raises `LocalProtocolError` (`bad_argument`) for a value that is not of a type."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise bad_argument(name, value, wanted)


def bad_argument(name: str, value: object, wanted: str) -> LocalProtocolError:
    """The error for a value that is not `wanted`."""
    detail = f"{name} is {reprlib.repr(value)}, and must be {wanted}"
    return LocalProtocolError("bad_argument", detail)
