"""Bodies: bounded while they arrive and while they are unpacked, and read under a deadline."""

from __future__ import annotations

import asyncio
import gzip
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from app.errors import Code, Problem
from app.http.admission import Bodies, Body
from app.http.call import Receive
from app.server.limits import DEFAULT_LIMITS, Limits
from app.server.sharing import Sharing

MAX = 1_000
SKIPPABLE = b"\x50\x2a\x4d\x18\x02\0\0\0ab"


class Sender:
    """The receiving side of ASGI over given chunks; `sent_bytes` is what was taken."""

    def __init__(self, chunks: Sequence[bytes], *, hangs_up: bool = False) -> None:
        self._chunks = list(chunks)
        self._hangs_up = hangs_up
        self.sent_bytes = 0

    async def __call__(self) -> dict[str, Any]:
        if not self._chunks:
            return {"type": "http.disconnect"}
        chunk = self._chunks.pop(0)
        self.sent_bytes += len(chunk)
        more = bool(self._chunks) or self._hangs_up
        return {"type": "http.request", "body": chunk, "more_body": more}


def read_body(
    receive: Receive,
    named: dict[bytes, bytes],
    limits: Limits = DEFAULT_LIMITS,
    bytes_max: int = MAX,
) -> Body:
    share = Sharing(limits).bodies

    async def reading() -> Body:
        body = await Bodies(share, limits).read(receive, named, bytes_max, "caller")
        if body.holding is not None:
            body.holding.release()
        return body

    try:
        return asyncio.run(reading())
    finally:
        assert share.free_units == limits.bodies_bytes_max


def read(sender: Sender, **headers: bytes) -> bytes:
    named = {name.replace("_", "-").encode(): value for name, value in headers.items()}
    body = read_body(sender, named)
    assert body.sent_bytes == sender.sent_bytes
    return body.content


def refusal(sender: Sender, **headers: bytes) -> Problem:
    with pytest.raises(Problem) as caught:
        read(sender, **headers)
    return caught.value


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=6))
def test_a_body_is_its_chunks_or_too_large(chunks: list[bytes]) -> None:
    whole = b"".join(chunks)
    if len(whole) <= MAX:
        assert read(Sender(chunks)) == whole
    else:
        assert refusal(Sender(chunks)).code is Code.BODY_TOO_LARGE


@pytest.mark.parametrize("length", [0, 1, MAX])
def test_packed_bodies_are_unpacked(length: int) -> None:
    plain = bytes(length)
    assert read(Sender([gzip.compress(plain)]), content_encoding=b"gzip") == plain
    assert read(Sender([zstandard.compress(plain)]), content_encoding=b"ZSTD") == plain
    assert read(Sender([plain]), content_encoding=b"identity") == plain


@pytest.mark.parametrize("plain_bytes", [MAX + 1, 1_000_000])
def test_a_bomb_is_refused_as_too_large(plain_bytes: int) -> None:
    bomb = bytes(plain_bytes)
    packed = gzip.compress(bomb), zstandard.compress(bomb)
    for body, encoding in zip(packed, (b"gzip", b"zstd"), strict=True):
        # A bomb that is itself too large proves nothing.
        if len(body) <= MAX:
            assert refusal(Sender([body]), content_encoding=encoding).code is Code.BODY_TOO_LARGE


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (gzip.compress(bytes(100), mtime=0)[:-9], b"gzip"),
        (b"no gzip", b"gzip"),
        (zstandard.compress(bytes(100))[:-3], b"zstd"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(b"abc"), b"zstd"),
        (b"no zstd", b"zstd"),
        (b"", b"zstd"),
        # Of several members or frames none is dropped in silence.
        (gzip.compress(b"one", mtime=0) + gzip.compress(b"two", mtime=0), b"gzip"),
        (gzip.compress(b"", mtime=0) + gzip.compress(b"two", mtime=0), b"gzip"),
        (zstandard.compress(b"one") + zstandard.compress(b"two"), b"zstd"),
        (zstandard.compress(b"") + zstandard.compress(b""), b"zstd"),
        (SKIPPABLE + zstandard.compress(b""), b"zstd"),
    ],
)
def test_damaged_packing_is_an_invalid_body(body: bytes, encoding: bytes) -> None:
    assert refusal(Sender([body]), content_encoding=encoding).code is Code.INVALID_BODY


def test_an_unknown_packing_names_the_known_ones() -> None:
    problem = refusal(Sender([b"x"]), content_encoding=b"br")
    assert problem.code is Code.UNSUPPORTED_MEDIA_TYPE
    assert problem.headers == {"Accept-Encoding": "gzip, zstd"}


def test_a_large_body_unpacks_to_so_many_times_what_was_sent_and_no_more() -> None:
    limits = DEFAULT_LIMITS
    plain = bytes(limits.unpacked_free_bytes + 1)
    for packed, encoding in ((gzip.compress(plain), b"gzip"), (zstandard.compress(plain), b"zstd")):
        with pytest.raises(Problem) as caught:
            read_body(Sender([packed]), {b"content-encoding": encoding}, bytes_max=2 * len(plain))
        assert caught.value.code is Code.BODY_TOO_LARGE
        assert "send it uncompressed" in caught.value.detail
    for content in (plain[:-1], random.Random(1).randbytes(100_000) * 25):
        packed = zstandard.compress(content)
        read = read_body(Sender([packed]), {b"content-encoding": b"zstd"}, bytes_max=2 * len(plain))
        assert read.content == content


def test_two_packed_bodies_that_wait_for_each_other_end_at_once() -> None:
    limits = replace(DEFAULT_LIMITS, bodies_bytes_max=12_000, body_free_bytes=0)
    share = Sharing(limits).bodies
    plain = random.Random(1).randbytes(4_000)
    packed = zstandard.compress(plain)
    named = {b"content-encoding": b"zstd", b"content-length": b"%d" % len(packed)}

    async def reading(caller: str) -> bytes | Code:
        sender = Sender([packed])

        async def later() -> dict[str, Any]:
            await asyncio.sleep(0.01)
            return await sender()

        try:
            body = await Bodies(share, limits).read(later, named, 8_000, caller)
        except Problem as problem:
            return problem.code
        assert body.holding is not None
        await asyncio.sleep(0.01)
        body.holding.release()
        return body.content

    async def both() -> list[bytes | Code]:
        async with asyncio.timeout(60):
            return await asyncio.gather(reading("a"), reading("b"), reading("c"))

    # Each holds a third, and needs as much again.
    answers = asyncio.run(both())
    assert answers.count(plain) >= 1
    assert set(answers) <= {plain, Code.OVERLOADED}
    assert share.free_units == limits.bodies_bytes_max
