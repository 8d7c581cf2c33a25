"""Shared by both transports: httpx settings, bounds on answers, errors of the network."""

import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httpx

from sdstore.client.calls import Call
from sdstore.client.errors import StoreError, malformed_reply
from sdstore.client.replies import Reply
from sdstore.client.retry import Retry

REPLY_BYTES_MAX = 16 * 1024 * 1024
"""Twice the largest answer of this node's software."""

CONNECT_TIMEOUT_S = 5.0
"""A node that takes longer counts as down."""

EMPTY_PAGES_MAX = 1_000
"""Pages without an item in a row. Pages are empty where the node has lost the content of all that they
name: at most 1,000 messages each, a million in all."""


@dataclass(frozen=True, slots=True)
class Options:
    """Timeouts, retries and bounds of a client.

    `timeout_s` bounds each wait for the network, `deadline_s` a whole exchange and `reply_bytes_max`
    the size of an answer; `retry` governs repeats after transient errors.
    """

    timeout_s: float = 30.0
    deadline_s: float = 120.0
    reply_bytes_max: int = REPLY_BYTES_MAX
    retry: Retry = field(default_factory=Retry)

    @property
    def timeout(self) -> httpx.Timeout:
        """`timeout_s` for httpx."""
        return httpx.Timeout(self.timeout_s, connect=min(self.timeout_s, CONNECT_TIMEOUT_S))

    def delay_s(self, call: Call[object], attempt: int, error: StoreError) -> float | None:
        """The pause before the next attempt; None to give up."""
        return self.retry.delay_s(attempt, error) if call.is_repeatable else None


def base_headers(token: str | None) -> dict[str, str]:
    """Headers of every request. They forbid compressed answers, whose size would be unbounded."""
    headers = {"accept-encoding": "identity"}
    if token is not None:
        headers["authorization"] = f"Bearer {token}"
    return headers


class BoundedBody:
    """A body as it arrives, with a bound on size and time."""

    def __init__(self, options: Options, now_s: float) -> None:
        self._bytes_max = options.reply_bytes_max
        self._deadline_s = now_s + options.deadline_s
        self._chunks: list[bytes] = []
        self._bytes = 0

    def feed(self, chunk: bytes, now_s: float) -> None:
        """Add a chunk that arrived at `now_s` (monotonic)."""
        self._bytes += len(chunk)
        if self._bytes > self._bytes_max:
            detail = f"the answer is larger than {self._bytes_max} bytes"
            raise StoreError("reply_too_large", 0, detail)
        if now_s > self._deadline_s:
            raise StoreError("timeout", 0, "the answer did not end before the deadline")
        self._chunks.append(chunk)

    def reply(self, response: httpx.Response) -> Reply:
        """The complete answer."""
        if response.headers.get("content-encoding", "identity") != "identity":
            raise malformed_reply("the answer is compressed", response.status_code)
        return Reply(response.status_code, response.headers, b"".join(self._chunks))


@contextmanager
def network_errors() -> Iterator[None]:
    """Turn httpx's errors into `StoreError`."""
    try:
        yield
    except httpx.TimeoutException as error:
        raise StoreError("timeout", 0, network_reason(error)) from error
    except httpx.TransportError as error:
        raise StoreError("unreachable", 0, network_reason(error)) from error


def checked_url(url: str) -> str:
    """`url`, if it is one that a store can have. Raises `ValueError`."""
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        httpx.URL(url)
        url.encode()
    except (ValueError, httpx.InvalidURL):
        is_good = False
    if not is_good or "?" in url or "#" in url:
        raise ValueError(
            f"{without_password(url)} is not a URL of the form http://HOST[:PORT] or https://HOST[:PORT]"
        )
    return url


def without_password(url: str) -> str:
    """`url` without a user name and password, for people and files."""
    scheme, separator, rest = url.partition("//")
    authority, slash, path = rest.partition("/")
    return f"{scheme}{separator}{authority.rpartition('@')[2]}{slash}{path}"


def next_cursor(before: str | None, after: str | None) -> str | None:
    """`after`; an error if it equals `before`, because then the paging would never end."""
    if after is not None and after == before:
        raise malformed_reply("the node returned the same cursor twice")
    return after


class EmptyPages:
    """Counts empty pages in a row, because the cursors of a node that always has another never repeat."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, items_count: int) -> None:
        """A page with so many items came; an error if too many pages in a row had none."""
        self._count = 0 if items_count else self._count + 1
        if self._count > EMPTY_PAGES_MAX:
            raise malformed_reply(f"the node returned {self._count} empty pages in a row")


def network_reason(error: BaseException) -> str:
    """Why a call failed, in the system's own words: httpx names some errors only in their causes."""
    if isinstance(error, httpx.ConnectTimeout):
        return "no connection in time"
    if isinstance(error, httpx.TimeoutException | TimeoutError):
        return "no answer in time"
    reason, cause = error, error.__cause__ or error.__context__
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            reason = cause
        cause = cause.__cause__ or cause.__context__
    if isinstance(reason, ssl.SSLCertVerificationError):
        return f"the certificate is not trusted: {reason.verify_message}"
    if isinstance(reason, ssl.SSLError) and reason.reason == "WRONG_VERSION_NUMBER":
        return "the server does not speak TLS: is this the URL of an http server?"
    if isinstance(reason, OSError) and not isinstance(reason, ssl.SSLError | socket.gaierror):
        return os.strerror(reason.errno) if reason.errno else str(reason)
    if isinstance(error, httpx.RemoteProtocolError) and "without sending a response" in str(error):
        return "the server closed the connection without an answer: is this the URL of an https server?"
    return str(reason) or type(reason).__name__
