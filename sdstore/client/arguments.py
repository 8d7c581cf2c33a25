"""Checks of arguments from the application, before they reach code that works with them."""

import reprlib
from types import UnionType

from sdstore.sds.errors import LocalProtocolError


def check_argument(name: str, value: object, kind: type | UnionType, wanted: str) -> None:
    """Raises `LocalProtocolError` (`bad_argument`) for a value that is not of a type."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise bad_argument(name, value, wanted)


def bad_argument(name: str, value: object, wanted: str) -> LocalProtocolError:
    """The error for a value that is not `wanted`."""
    detail = f"{name} is {reprlib.repr(value)}, and must be {wanted}"
    return LocalProtocolError("bad_argument", detail)
