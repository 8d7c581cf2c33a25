"""Reading request bodies: bounded as they arrive and as they are decompressed, under one deadline.

The bytes of all bodies in flight take units of one share. A body takes its units before it is read; a
client without units waits with its bytes in the network. The first bytes of each request are free, so
that a single message never waits for large bodies.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Mapping
from io import BytesIO
from typing import NamedTuple

import zstandard

from app.errors import Code, Problem
from app.http.call import Receive
from app.server.limits import Limits
from app.server.sharing import Holding, Share

# The rest of a refused body is not read; the connection cannot be used again.
_CLOSE = {"Connection": "close"}
_ZSTD_EMPTY_BYTES_MAX = 7
"""An empty block and a checksum, behind the header of a zstd frame without content."""

_DEFLATE_FACTOR_MAX = 1_032
"""The maximum ratio of a deflate stream."""

_GROWTH = 1 << 20
"""The minimum increment of units for a body without a declared length."""

_THREAD_BYTES_MIN = 256 * 1024
"""Decompressing this much takes a millisecond, so a thread does it."""


class ClientGoneError(Exception):
    """The client hung up before its body was complete; there is no one left to answer."""


class Body(NamedTuple):
    """A complete body, decompressed; the bytes sent; its units of memory."""

    content: bytes
    sent_bytes: int
    holding: Holding | None = None


class Bodies:
    """Reads the bodies of all requests of a process."""

    def __init__(self, share: Share, limits: Limits) -> None:
        self._share = share
        self._limits = limits

    async def read(
        self, receive: Receive, headers: Mapping[bytes, bytes], bytes_max: int, caller: str
    ) -> Body:
        """A complete body. Release its `holding` when the request is over.

        Raises `body_too_large` as soon as it exceeds `bytes_max` (compressed or decompressed),
        `request_timeout` if it is late, `overloaded` if no memory becomes free in time,
        `unsupported_media_type` for an unknown Content-Encoding.
        """
        declared = headers.get(b"content-length")
        # The server has checked that the header contains digits.
        declared_bytes = 0 if declared is None else int(declared)
        if declared_bytes > bytes_max:
            raise _too_large(bytes_max)
        arriving = _Arriving(self._share, caller, self._limits)
        try:
            content = await arriving.read(receive, declared_bytes, bytes_max)
            sent_bytes = len(content)
            encoding = headers.get(b"content-encoding")
            if encoding is not None:
                content = await self._unpack(arriving, content, encoding.lower(), bytes_max)
        except BaseException:
            arriving.release()
            raise
        return Body(content, sent_bytes, arriving.holding)

    async def _unpack(
        self, arriving: _Arriving, body: bytes, encoding: bytes, bytes_max: int
    ) -> bytes:
        if encoding == b"identity":
            return body
        packing = _PACKINGS.get(encoding)
        if packing is None:
            raise Problem(
                Code.UNSUPPORTED_MEDIA_TYPE,
                "Content-Encoding must be gzip, zstd or identity",
                headers={"Accept-Encoding": "gzip, zstd"},
            )
        try:
            size = packing.size(body)
            if size > bytes_max:
                raise _too_large(bytes_max)
            factor = self._limits.unpack_factor_max
            if size > max(self._limits.unpacked_free_bytes, factor * len(body)):
                raise Problem(
                    Code.BODY_TOO_LARGE,
                    f"the body is {size} bytes compressed to {len(body)}; the maximum ratio is "
                    f"{factor}: send it uncompressed",
                )
            await arriving.make_room(len(body) + size)
            if size < _THREAD_BYTES_MIN:
                content = packing.unpack(body, size)
            else:
                content = await asyncio.to_thread(packing.unpack, body, size)
        except (zlib.error, zstandard.ZstdError) as error:
            raise Problem(
                Code.INVALID_BODY, f"the body is not {encoding.decode()}: {error}"
            ) from None
        arriving.shrink(len(content))
        return content


class _Arriving:
    """One arriving body, and the units it holds."""

    def __init__(self, share: Share, caller: str, limits: Limits) -> None:
        self.holding: Holding | None = None
        self._share = share
        self._caller = caller
        self._limits = limits
        self._arrived_bytes = 0
        self._deadline: asyncio.Timeout | None = None
        self._is_cut = False

    async def read(self, receive: Receive, declared_bytes: int, bytes_max: int) -> bytes:
        try:
            async with asyncio.timeout(self._limits.body_read_timeout_s) as self._deadline:
                await self.make_room(declared_bytes)
                return await self._collect(receive, bytes_max)
        except TimeoutError:
            why = (
                "the body stalled while others waited for room"
                if self._is_cut
                else f"the body took longer than {self._limits.body_read_timeout_s} s"
            )
            raise Problem(Code.REQUEST_TIMEOUT, why, headers=_CLOSE) from None
        finally:
            self._deadline = None
            if self.holding is not None:
                # From now on the delay is this node's, not the client's.
                self._share.forget(self.holding)

    async def _collect(self, receive: Receive, bytes_max: int) -> bytes:
        message = await receive()
        first: bytes = message.get("body", b"")
        # Grows in place, and its value is not a copy: a body is in memory once.
        body = BytesIO()
        while message["type"] == "http.request":
            chunk = message.get("body", b"")
            self._arrived_bytes += len(chunk)
            if self._arrived_bytes > bytes_max:
                raise _too_large(bytes_max)
            if not message.get("more_body", False):
                if len(first) == self._arrived_bytes:
                    return first
                body.write(chunk)
                return body.getvalue()
            body.write(chunk)
            held_bytes = 0 if self.holding is None else self.holding.units
            if self._arrived_bytes > max(held_bytes, self._limits.body_free_bytes):
                await self.make_room(min(bytes_max, max(_GROWTH, 2 * self._arrived_bytes)))
            message = await receive()
        raise ClientGoneError

    async def make_room(self, wanted_bytes: int) -> None:
        """Hold units for this many bytes, less those that are free for each request."""
        if wanted_bytes <= self._limits.body_free_bytes:
            return
        if self.holding is None:
            holder = None if self._deadline is None else self
            self.holding = await self._share.take(self._caller, wanted_bytes, holder)
        elif wanted_bytes > self.holding.units:
            await self._share.grow(self.holding, wanted_bytes - self.holding.units)

    def shrink(self, bytes_count: int) -> None:
        if self.holding is not None:
            self.holding.resize(min(self.holding.units, bytes_count))

    def release(self) -> None:
        if self.holding is not None:
            self.holding.release()

    def moved_bytes(self) -> int:
        return self._arrived_bytes

    def cut(self) -> None:
        if self._deadline is not None:
            self._is_cut = True
            self._deadline.reschedule(asyncio.get_running_loop().time())


class _Packing(NamedTuple):
    """`size` reads the declared size of a body; `unpack` allocates no more than that."""

    size: Callable[[bytes], int]
    unpack: Callable[[bytes, int], bytes]


def _gzip_size(body: bytes) -> int:
    # RFC 1952: the last four bytes; the check of the stream includes them.
    size = int.from_bytes(body[-4:], "little")
    if size > _DEFLATE_FACTOR_MAX * len(body):
        raise zlib.error("it declares more bytes than its length allows")
    return size


def _gunzip(body: bytes, size: int) -> bytes:
    # 16 + 15: a gzip header and the largest window.
    stream = zlib.decompressobj(31)
    unpacked = stream.decompress(body, size + 1)
    if not stream.eof:
        raise zlib.error("its length differs from the declared one")
    # Only one member: millions of empty ones would waste time.
    if stream.unused_data:
        raise zlib.error("data follows its first member")
    return unpacked


def _zstd_size(body: bytes) -> int:
    size: int = zstandard.frame_content_size(body)
    if size < 0:
        raise zstandard.ZstdError("the frame does not declare its content size")
    # The library ignores data that follows an empty frame.
    behind_bytes = len(body) - zstandard.frame_header_size(body)
    if not size and behind_bytes > _ZSTD_EMPTY_BYTES_MAX:
        raise zstandard.ZstdError("data follows an empty frame")
    return size


def _unzstd(body: bytes, _size: int) -> bytes:
    return zstandard.ZstdDecompressor().decompress(body, allow_extra_data=False)


_PACKINGS: Mapping[bytes, _Packing] = {
    b"gzip": _Packing(_gzip_size, _gunzip),
    b"zstd": _Packing(_zstd_size, _unzstd),
}


def _too_large(bytes_max: int) -> Problem:
    return Problem(
        Code.BODY_TOO_LARGE, f"the body exceeds the maximum of {bytes_max} bytes", headers=_CLOSE
    )
