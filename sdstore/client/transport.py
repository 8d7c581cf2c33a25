"""Reconciliation over HTTP, for the driver of a session (`sdstore.sync.driver.Transport`).

Bodies are opaque here. They are compressed if both sides support it (zstd, RFC 9659), because most
bytes of frames are repeated bloom filters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import httpx
import zstandard

from sdstore.client.exchange import CONNECT_TIMEOUT_S, network_reason
from sdstore.errors import StoreError, error_of_reply, is_web_page, not_a_store
from sdstore.sync.report import SyncCode, SyncError, misbehaved

PROTOBUF = "application/x-protobuf"
REQUEST_TIMEOUT_S = 60.0  # a reply of 8 MiB at 140 KiB/s
REPLY_BYTES_MAX = 8 << 20  # as a node of ours answers
COMPRESS_BYTES_MIN = 1_024  # below this the header costs more than compression saves
PARTS_FREE = 64
PART_BYTES_MIN = 512
"""Of a reply, on average, beyond the first 64 parts: a chunk of one byte takes as long to read as one of 8 KiB."""

ERROR_BODY_BYTES_MAX = 4_096  # enough of a problem document to quote
# A node refuses a body that compresses better than this as a bomb, above the free size.
UNPACK_FACTOR = 200
UNPACKED_FREE_BYTES = 2 << 20

INSTANCE_HEADER = "sds-instance"
"""The header with the ID of a node's data directory: in its requests to other stores, and in its replies
to `GET /v1/recon/interests`, to the first request of a session and to `GET /v1/relay`."""

OWN_URL = "this URL leads to this node itself, or to one that runs on a copy of its data directory"

BUSY_STATUS = frozenset(
    {
        httpx.codes.REQUEST_TIMEOUT,
        httpx.codes.TOO_MANY_REQUESTS,
        httpx.codes.SERVICE_UNAVAILABLE,
        httpx.codes.INSUFFICIENT_STORAGE,
    }
)


class Answer(NamedTuple):
    """The answer to a call: `headers` by names in lower case, the body as it was sent."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Calls(Protocol):
    """HTTP calls to one store. `where`: its host and port, for messages."""

    where: str

    async def call(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes | None,
        bytes_max: int,
    ) -> Answer:
        """One call; a body beyond `bytes_max` is the peer's fault.

        Raises SyncError, httpx.HTTPError, OSError, ValueError.
        """


class HttpxCalls:
    """Calls by an httpx client, which has the base URL and the credentials, and follows no redirects."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.where = http.base_url.netloc.decode()
        self._http = http

    async def call(
        self,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes | None,
        bytes_max: int,
    ) -> Answer:
        """See `Calls`."""
        timeout = httpx.Timeout(REQUEST_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        async with self._http.stream(
            method, path, content=body, headers=headers, timeout=timeout
        ) as response:
            raw, parts_left = bytearray(), PARTS_FREE
            async for chunk in response.aiter_raw():
                raw += chunk
                parts_left -= 1
                if len(raw) > bytes_max:
                    raise misbehaved(f"a reply larger than {bytes_max} bytes")
                if len(raw) < PART_BYTES_MIN * -parts_left:
                    raise misbehaved("a reply in too many small chunks")
            return Answer(response.status_code, response.headers, bytes(raw))


class HttpTransport:
    """A store over HTTP. Calls raise `SyncError`.

    `own_instance`: this node's instance ID; a server that answers with it is this node. `delay_s` gives
    the pause after failed attempt number n, from 1, or None to give up; without it nothing is repeated.
    """

    def __init__(
        self,
        calls: Calls,
        *,
        reply_bytes_max: int = REPLY_BYTES_MAX,
        own_instance: str | None = None,
        delay_s: Callable[[int, StoreError], float | None] = lambda *_: None,
    ) -> None:
        self.bytes_up = 0
        self.bytes_down = 0
        self._calls = calls
        self._reply_bytes_max = reply_bytes_max
        self._reads_zstd = False
        self._own_instance = own_instance
        self._delay_s = delay_s

    async def recon(self, request: bytes) -> bytes:
        """POST /v1/recon. A store is a set, so the call can be repeated."""
        attempt = 1
        while True:
            failed = await self._attempt(request)
            if isinstance(failed, bytes):
                return failed
            delay_s = self._delay_s(attempt, failed)
            if delay_s is None:
                raise sync_error(failed)
            await asyncio.sleep(delay_s)
            attempt += 1

    async def _attempt(self, body: bytes) -> bytes | StoreError:
        """The answer, or why there was none."""
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                return await self._send(body)
        except StoreError as error:
            return error
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            reason = network_reason(error)
            return StoreError("unreachable", 0, f"{self._calls.where}: {reason}")

    async def _send(self, body: bytes) -> bytes:
        headers = {"accept": PROTOBUF, "accept-encoding": "zstd", "content-type": PROTOBUF}
        if self._own_instance is not None:
            headers[INSTANCE_HEADER] = self._own_instance
        if self._reads_zstd and len(body) >= COMPRESS_BYTES_MIN:
            packed = zstandard.compress(body)
            if len(body) <= max(UNPACKED_FREE_BYTES, UNPACK_FACTOR * len(packed)):
                body = packed
                headers["content-encoding"] = "zstd"
        self.bytes_up += len(body)
        answer = await self._calls.call("POST", "v1/recon", headers, body, self._reply_bytes_max)
        self.bytes_down += len(answer.body)
        self._reads_zstd = "zstd" in answer.headers.get("accept-encoding", "")
        if answer.headers.get(INSTANCE_HEADER) == self._own_instance is not None:
            raise SyncError(SyncCode.PEER_URL_REFUSED, OWN_URL)
        quoted = answer.body[:ERROR_BODY_BYTES_MAX]
        if answer.status != httpx.codes.OK:
            raise error_of_reply(answer.status, answer.headers, quoted)
        if is_web_page(answer.headers):
            raise not_a_store(answer.status, answer.headers, quoted)
        return self._decoded(answer.body, answer.headers.get("content-encoding", "identity"))

    def _decoded(self, raw: bytes, encoding: str) -> bytes:
        if encoding == "identity":
            return raw
        if encoding != "zstd":
            raise misbehaved(f"a reply in {encoding}, which this node did not request")
        with zstandard.ZstdDecompressor().stream_reader(raw) as reader:
            try:
                plain = reader.read(self._reply_bytes_max + 1)
            except zstandard.ZstdError as error:
                raise misbehaved(f"a damaged reply ({error})") from None
        if len(plain) > self._reply_bytes_max:
            raise misbehaved(f"a reply larger than {self._reply_bytes_max} bytes")
        return plain


def sync_error(error: StoreError) -> SyncError:
    """How a session ends by a failed call: the store is busy, fails, refuses, or is not a store."""
    status = error.status
    if not status or error.code == "not_a_store":
        return SyncError(SyncCode.PEER_UNREACHABLE, error.detail)
    text = f"HTTP {status}: {error.detail}"
    if status in BUSY_STATUS:
        return SyncError(SyncCode.OVERLOADED, text)
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        return SyncError(SyncCode.FORBIDDEN, text)
    if httpx.codes.is_server_error(status):
        return SyncError(SyncCode.PEER_UNREACHABLE, text)
    return misbehaved(text)
