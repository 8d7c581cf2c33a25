"""The client's only error type, made from problem documents (RFC 9457) and other answers."""

import json
import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from sdstore.errors import SdstoreError

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
