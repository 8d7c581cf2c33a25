"""The errors that this library raises to its callers: their base, a missing extra, the misuse of a participant, a
failed call of a store.

Bytes from others never raise: they are counted instead.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from types import UnionType
from typing import Any


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


DETAIL_CHARS_MAX = 500
"""Length of the quotation from an answer that is not a problem document."""

_ELSEWHERE = frozenset({301, 302, 303, 307, 308, HTTPStatus.NETWORK_AUTHENTICATION_REQUIRED})
"""Answers of captive portals: redirects, and RFC 6585's own status."""

_TITLE = re.compile(rb"<title[^>]*>([^<]{1,400})", re.IGNORECASE)


class StoreError(SdstoreError):
    """A failed call: the node refused it, or gave no valid answer.

    `code` is stable: the node's own code, `http_STATUS` for an answer without one, or
    `unreachable`, `timeout`, `reply_too_large`, `malformed_reply`, `digest_mismatch`, `not_a_store`
    (a redirect or a web page: a captive portal or a proxy answered, or the URL is not a store's).
    `status` is the HTTP status, 0 without an answer; `problem` is the problem document, empty without
    one; `retry_after_s` is the pause that the node asks for.
    """

    def __init__(
        self,
        code: str,
        status: int,
        detail: str,
        problem: Mapping[str, Any] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(code, detail)
        self.status = status
        self.problem: Mapping[str, Any] = problem or {}
        self.retry_after_s = retry_after_s


def malformed_reply(detail: str, status: int = 200) -> StoreError:
    """The error for an answer that breaks the contract."""
    return StoreError("malformed_reply", status, detail)


def error_of_reply(status: int, headers: Mapping[str, str], body: bytes) -> StoreError:
    """The error for an answer with a status other than 2xx, from a node or a proxy."""
    if status in _ELSEWHERE:
        return not_a_store(status, headers, body)
    document = _json_object(body)
    code = document.get("code")
    detail = document.get("detail") or document.get("title")
    if is_web_page(headers):
        detail = f"the answer is a web page{_title(body)}, not one of a node"
    if not isinstance(detail, str):
        detail = body[: DETAIL_CHARS_MAX * 4].decode(errors="replace")[:DETAIL_CHARS_MAX]
    return StoreError(
        code if isinstance(code, str) and code else f"http_{status}",
        status,
        detail,
        document,
        _seconds(headers.get("retry-after", "")),
    )


def is_web_page(headers: Mapping[str, str]) -> bool:
    """Whether an answer is HTML, which no node sends to a client."""
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    return media_type in ("text/html", "application/xhtml+xml")


def not_a_store(status: int, headers: Mapping[str, str], body: bytes = b"") -> StoreError:
    """The error for a redirect or a web page in place of a node's answer."""
    location = headers.get("location", "")[:DETAIL_CHARS_MAX]
    what = f"a redirect to {location}" if location else f"a web page{_title(body)}"
    detail = f"the answer is {what}: is this a captive portal, a proxy, or a wrong URL?"
    return StoreError("not_a_store", status, detail)


def _title(page: bytes) -> str:
    found = _TITLE.search(page)
    text = found[1].decode(errors="replace").strip()[:100] if found else ""
    return f' "{"".join(filter(str.isprintable, text))}"' if text else ""


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _seconds(retry_after: str) -> float | None:
    # Retry-After can also be a date; the client's own back-off is better than a remote clock.
    return float(retry_after) if retry_after.isdecimal() and retry_after.isascii() else None
