"""Frames whose filters are stored as differences come back whole, wherever the filter begins."""

from __future__ import annotations

import random

import pytest

from sdstore.participant.filterdelta import FILTER_BYTES_MIN, FilterPacker, unpack


@pytest.mark.parametrize("size", [FILTER_BYTES_MIN, 18_752])
@pytest.mark.parametrize("kind", ["random", "empty", "sparse", "periodic"])
@pytest.mark.parametrize("decoy", ["none", "start", "nearly whole"])
def test_a_packed_frame_comes_back_whole(size: int, kind: str, decoy: str) -> None:
    """Decoys: bytes before the filter that begin as it does."""
    rng = random.Random(f"{size} {kind} {decoy}")
    reference = {
        "random": rng.randbytes(size),
        "empty": bytes(size),
        "sparse": bytes(size - 1) + b"\1",
        "periodic": (b"ab" * size)[:size],
    }[kind]
    bloom_filter = bytearray(reference)
    for _ in range(10):
        bloom_filter[rng.randrange(100, size)] ^= 1 << rng.randrange(8)
    before = {"none": b"", "start": bloom_filter[:80], "nearly whole": bloom_filter[:-1]}[decoy]
    frame = b"".join((rng.randbytes(50), before, bloom_filter, rng.randbytes(50)))
    packer = FilterPacker()
    assert packer.pack(frame, bytes(bloom_filter)) is None
    packer.add_reference(7, reference, is_used=False)
    packed = packer.pack(frame, bytes(bloom_filter))
    assert packed is not None
    assert packed.reference_no == 7
    assert len(packed.data) < len(frame) - size + 100
    assert unpack(packed.data, reference) == frame


def test_a_frame_without_the_filter_is_stored_whole() -> None:
    packer = FilterPacker()
    bloom_filter = random.Random(1).randbytes(2_000)
    frame = b"head" + bloom_filter[:-1] + b"?tail"
    assert packer.pack(frame, bloom_filter) == (None, frame)
