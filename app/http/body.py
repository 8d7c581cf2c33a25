"""Reading request bodies: counted as they arrive, under one deadline, never unpacked unbounded."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import zstandard

from app.errors import Code, Problem

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
# The rest of a refused body is not read; the connection cannot be used again.
_CLOSE = {"Connection": "close"}
_ZSTD_EMPTY_BYTES_MAX = 7
"""An empty block and a checksum, behind the header of a zstd frame without content."""


class ClientGoneError(Exception):
    """The client hung up before its body was there; nobody is left to answer."""


async def read_body(
    receive: Receive, headers: Mapping[bytes, bytes], bytes_max: int, timeout_s: float
) -> tuple[bytes, int]:
    """The whole body, decompressed, and how many bytes of it were sent.

    `body_too_large` as soon as `bytes_max` is passed (packed or unpacked), `request_timeout` when
    `timeout_s` is over, `unsupported_media_type` for an unknown Content-Encoding.
    """
    _check_declared_length(headers.get(b"content-length"), bytes_max)
    try:
        async with asyncio.timeout(timeout_s):
            body = await _collect(receive, bytes_max)
    except TimeoutError:
        raise Problem(
            Code.REQUEST_TIMEOUT, f"the body took longer than {timeout_s} s", headers=_CLOSE
        ) from None
    encoding = headers.get(b"content-encoding")
    unpacked = body if encoding is None else _unpack(body, encoding.lower(), bytes_max)
    return unpacked, len(body)


def _check_declared_length(declared: bytes | None, bytes_max: int) -> None:
    # The server has checked that the header holds digits.
    if declared is not None and int(declared) > bytes_max:
        raise _too_large(bytes_max)


async def _collect(receive: Receive, bytes_max: int) -> bytes:
    message = await receive()
    chunks: list[bytes] = []
    total_bytes = 0
    while message["type"] == "http.request":
        chunk = message.get("body", b"")
        total_bytes += len(chunk)
        if total_bytes > bytes_max:
            raise _too_large(bytes_max)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunk if len(chunks) == 1 else b"".join(chunks)
        message = await receive()
    raise ClientGoneError


def _unpack(body: bytes, encoding: bytes, bytes_max: int) -> bytes:
    unpack = _UNPACKERS.get(encoding)
    if unpack is None:
        raise Problem(
            Code.UNSUPPORTED_MEDIA_TYPE,
            "Content-Encoding is gzip, zstd or identity",
            headers={"Accept-Encoding": "gzip, zstd"},
        )
    try:
        return unpack(body, bytes_max)
    except (zlib.error, zstandard.ZstdError) as error:
        raise Problem(Code.INVALID_BODY, f"the body is not {encoding.decode()}: {error}") from None


def _gunzip(body: bytes, bytes_max: int) -> bytes:
    # 16 + 15: a gzip header and the largest window.
    stream = zlib.decompressobj(31)
    unpacked = stream.decompress(body, bytes_max + 1)
    if len(unpacked) > bytes_max:
        raise _too_large(bytes_max)
    if not stream.eof:
        raise zlib.error("it ends early")
    # One member alone: millions of empty ones would be work for nothing.
    if stream.unused_data:
        raise zlib.error("more follows behind its first member")
    return unpacked


def _unzstd(body: bytes, bytes_max: int) -> bytes:
    # The declared size is all that is ever allocated.
    declared_bytes = zstandard.frame_content_size(body)
    if declared_bytes > bytes_max:
        raise _too_large(bytes_max)
    if declared_bytes < 0:
        raise zstandard.ZstdError("the frame does not declare its content size")
    # Of a frame without content the library does not look at what follows.
    behind_bytes = len(body) - zstandard.frame_header_size(body)
    if not declared_bytes and behind_bytes > _ZSTD_EMPTY_BYTES_MAX:
        raise zstandard.ZstdError("more follows behind an empty frame")
    return zstandard.ZstdDecompressor().decompress(body, allow_extra_data=False)


_UNPACKERS: Mapping[bytes, Callable[[bytes, int], bytes]] = {
    b"identity": lambda body, _bytes_max: body,
    b"gzip": _gunzip,
    b"zstd": _unzstd,
}


def _too_large(bytes_max: int) -> Problem:
    return Problem(
        Code.BODY_TOO_LARGE, f"this request takes up to {bytes_max} bytes", headers=_CLOSE
    )
