"""How a session reaches its peer over HTTP.

The driver needs two calls (`sdstore.sync.exchange.Transport`). Bodies are opaque here; they are compressed on the way where both
sides know how (zstd, RFC 9659), because the frames in them are mostly bloom filters that repeat.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import zstandard

from app.errors import Code, Problem
from app.federation.address import resolve
from app.limits import DEFAULT_LIMITS, Limits

PROTOBUF = "application/x-protobuf"
CONNECT_TIMEOUT_S = 5.0  # a peer that needs longer is down
REQUEST_TIMEOUT_S = 60.0  # a reply of 8 MiB at 140 KiB/s
UNPACKED_FREE_BYTES = DEFAULT_LIMITS.unpacked_free_bytes
UNPACK_FACTOR = DEFAULT_LIMITS.unpack_factor_max
COMPRESS_BYTES_MIN = 1_024  # below it a header costs what is saved
ERROR_BODY_BYTES_MAX = 4_096  # enough of a problem document to quote

_BUSY = {
    httpx.codes.REQUEST_TIMEOUT,
    httpx.codes.TOO_MANY_REQUESTS,
    httpx.codes.SERVICE_UNAVAILABLE,
    httpx.codes.INSUFFICIENT_STORAGE,
}

INSTANCE_HEADER = "sds-instance"
"""Names the data directory behind a node in the answer to `GET /v1/recon/interests`."""

OWN_URL = "this URL leads to this node itself, or to one that runs on a copy of its data directory"


class HttpTransport:
    """A peer over HTTP; `client` is bound to the peer's checked address. Calls raise Problem."""

    def __init__(
        self, client: httpx.AsyncClient, limits: Limits, own_instance: str | None = None
    ) -> None:
        """`own_instance`: what a server must not call itself, or it is this very node."""
        self.bytes_up = 0
        self.bytes_down = 0
        self._client = client
        self._reply_bytes_max = limits.recon_reply_bytes_max
        self._peer_reads_zstd = False
        self._own_instance = own_instance

    async def interest(self) -> bytes:
        """GET /v1/recon/interests."""
        return await self._exchange("GET", "v1/recon/interests", None)

    async def recon(self, request: bytes) -> bytes:
        """POST /v1/recon."""
        return await self._exchange("POST", "v1/recon", request)

    async def _exchange(self, method: str, path: str, body: bytes | None) -> bytes:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                return await self._send(method, path, body)
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            detail = str(error) or type(error).__name__
            raise Problem(
                Code.PEER_UNREACHABLE, f"{self._client.base_url.netloc.decode()}: {detail}"
            ) from None

    async def _send(self, method: str, path: str, body: bytes | None) -> bytes:
        headers: dict[str, str] = {}
        if body is not None:
            headers["content-type"] = PROTOBUF
            if self._peer_reads_zstd and len(body) >= COMPRESS_BYTES_MIN:
                packed = zstandard.compress(body)
                # A body that packs to almost nothing looks like a bomb, and is refused as one.
                if len(body) <= max(UNPACKED_FREE_BYTES, UNPACK_FACTOR * len(packed)):
                    body = packed
                    headers["content-encoding"] = "zstd"
            self.bytes_up += len(body)
        async with self._client.stream(method, path, content=body, headers=headers) as response:
            self._peer_reads_zstd = "zstd" in response.headers.get("accept-encoding", "")
            if response.headers.get(INSTANCE_HEADER) == self._own_instance is not None:
                raise Problem(Code.PEER_URL_REFUSED, OWN_URL)
            if response.status_code != httpx.codes.OK:
                raise _refusal(response, await self._read(response, ERROR_BODY_BYTES_MAX))
            raw = await self._read(response, self._reply_bytes_max)
            return self._decoded(raw, response.headers.get("content-encoding", "identity"))

    async def _read(self, response: httpx.Response, bytes_max: int) -> bytes:
        raw = bytearray()
        async for chunk in response.aiter_raw():
            self.bytes_down += len(chunk)
            raw += chunk
            if len(raw) > bytes_max:
                raise _misbehaved(f"a reply beyond {bytes_max} bytes")
        return bytes(raw)

    def _decoded(self, raw: bytes, encoding: str) -> bytes:
        if encoding == "identity":
            return raw
        if encoding != "zstd":
            raise _misbehaved(f"a reply in {encoding}, which was not asked for")
        with zstandard.ZstdDecompressor().stream_reader(raw) as reader:
            try:
                plain = reader.read(self._reply_bytes_max + 1)
            except zstandard.ZstdError as error:
                raise _misbehaved(f"a damaged reply ({error})") from None
        if len(plain) > self._reply_bytes_max:
            raise _misbehaved(f"a reply beyond {self._reply_bytes_max} bytes")
        return plain


@asynccontextmanager
async def open_http_transport(
    url: httpx.URL, limits: Limits, *, private_allowed: bool, own_instance: str | None = None
) -> AsyncIterator[HttpTransport]:
    """A transport to the peer at `url`, on connections to the one address that was checked.

    Where `own_instance` answers, each call raises Problem(PEER_URL_REFUSED).
    """
    pinned = await resolve(url, private_allowed=private_allowed)

    async def send_to_pinned(request: httpx.Request) -> None:
        request.headers["host"] = pinned.host_header
        request.extensions["sni_hostname"] = pinned.tls_name

    async with httpx.AsyncClient(
        base_url=pinned.base_url,
        headers={"accept": PROTOBUF, "accept-encoding": "zstd"},
        timeout=httpx.Timeout(REQUEST_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        follow_redirects=False,
        trust_env=False,
        event_hooks={"request": [send_to_pinned]},
    ) as client:
        yield HttpTransport(client, limits, own_instance)


def _refusal(response: httpx.Response, body: bytes) -> Problem:
    """What an answer other than 200 means: the peer is busy, fails, refuses, or is no store."""
    text = f"HTTP {response.status_code}: {body[:200].decode('utf-8', 'replace')}"
    if response.status_code in _BUSY:
        return Problem(Code.OVERLOADED, text)
    if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        return Problem(Code.FORBIDDEN, text)
    if response.is_server_error:
        return Problem(Code.PEER_UNREACHABLE, text)
    return _misbehaved(text)


def _misbehaved(detail: str) -> Problem:
    return Problem(Code.PEER_MISBEHAVED, detail)
