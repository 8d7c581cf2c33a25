"""The error of a participant's caller. Bytes from others never raise: they are counted instead."""

from __future__ import annotations

from sdstore.errors import SdstoreError


class LocalProtocolError(SdstoreError, ValueError):
    """This program misused a participant, or gave it a state that cannot be restored.

    `code` is stable and meant for programs, `detail` for people.
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class WrongTypeError(LocalProtocolError, TypeError):
    """An argument has a type that the method does not take; its code is `wrong_type`."""

    def __init__(self, name: str, value: object, wanted: str) -> None:
        super().__init__("wrong_type", f"{name} is of type {type(value).__name__}, not {wanted}")
