"""The base of the errors that this library raises to its callers, and the error of a missing extra."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager


class SdstoreError(Exception):
    """Base class of the errors of `sdstore`: of a store, a driver, a participant's file, an order, or a message.

    `code` is stable and meant for programs, `detail` for people.
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class MissingExtraError(ModuleNotFoundError):
    """A module of an extra is not there; the text says what to install."""


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Around imports. Raises MissingExtraError for a module of the extra `name` that is not there."""
    try:
        yield
    except ModuleNotFoundError as error:
        if not _has_module(name, error.name or ""):
            raise
        raise MissingExtraError(f"{error}; {how_to_install(name)}", name=error.name) from error


def how_to_install(name: str) -> str:
    """The end of an error about a missing module of the extra `name`; no package index has sdstore."""
    return f"it comes with the extra `{name}`: in a checkout of sdstore, pip install '.[{name}]' or make setup"


def _has_module(name: str, module: str) -> bool:
    """Whether the extra requires a distribution that is called as `module` is."""
    from importlib.metadata import requires  # noqa: PLC0415 - for this error only

    distribution = re.escape(module.partition(".")[0].replace("_", "-"))
    pattern = re.compile(rf"{distribution}\b(?!-).*; .*extra == '{name}'")
    return any(map(pattern.match, requires("sdstore") or ()))
