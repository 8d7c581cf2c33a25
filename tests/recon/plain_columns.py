"""Section 4 of docs/recon-protocol.md in plain Python: columns, read and written."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

Bound = tuple[int, int]
HEAD_BYTES = (0, 1, 2, 8)


class Reader:
    """Reads a column from its front; `end` when it must be used up."""

    def __init__(self, raw: bytes) -> None:
        self._raw, self._at = raw, 0

    def take(self, size: int) -> bytes:
        """The next bytes."""
        self._at += size
        assert self._at <= len(self._raw), "a column is too short"
        return self._raw[self._at - size : self._at]

    def end(self) -> None:
        """Nothing may be left."""
        assert self._at == len(self._raw), "a column is too long"

    def varint(self) -> int:
        """One number."""
        value = shift = 0
        while True:
            (byte,) = self.take(1)
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def counts(self, size: int) -> list[int]:
        """Sums of zigzag steps."""
        steps = (self.varint() for _ in range(size))
        return list(accumulate(step >> 1 if step % 2 == 0 else -(step + 1 >> 1) for step in steps))

    def kinds(self, size: int) -> list[int]:
        """Two bits each."""
        raw = self.take(-(-size // 4))
        return [raw[n // 4] >> 2 * (n % 4) & 3 for n in range(size)]

    def bounds(self, size: int) -> list[Bound]:
        """(step, head) of each bound."""
        if not size:
            return []
        shifts = self.take(-(-size // 16))
        steps = [self.varint() << shifts[n // 16] for n in range(size)]
        classes = self.kinds(size) if self.take(1) == b"\1" else [0] * size
        heads = [0] * size
        for wanted in (1, 2, 3):
            for n in (n for n in range(size) if classes[n] == wanted):
                heads[n] = int.from_bytes(self.take(HEAD_BYTES[wanted]).ljust(8, b"\0"), "big")
        return list(zip(steps, heads, strict=True))


def pack_varint(value: int) -> bytes:
    """One number."""
    groups = []
    while value >= 0x80:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])


def pack_counts(counts: Sequence[int]) -> bytes:
    """Zigzag steps."""
    steps = [after - before for before, after in pairwise((0, *counts))]
    return b"".join(pack_varint(2 * step if step >= 0 else -2 * step - 1) for step in steps)


def pack_kinds(kinds: Sequence[int]) -> bytes:
    """Two bits each."""
    out = bytearray(-(-len(kinds) // 4))
    for n, kind in enumerate(kinds):
        out[n // 4] |= kind << 2 * (n % 4)
    return bytes(out)


def pack_bounds(steps: Sequence[int], heads: Sequence[int]) -> bytes:
    """Shifts, shifted steps, heads by class."""
    if not steps:
        return b""
    blocks = [steps[n : n + 16] for n in range(0, len(steps), 16)]
    shifts = [min((_zero_bits(step) for step in block if step), default=0) for block in blocks]
    out = bytes(shifts) + b"".join(pack_varint(s >> shifts[n // 16]) for n, s in enumerate(steps))
    if not any(heads):
        return out + b"\0"
    raws = [head.to_bytes(8, "big") for head in heads]
    classes = [next(c for c in range(4) if not any(raw[HEAD_BYTES[c] :])) for raw in raws]
    out += b"\1" + pack_kinds(classes)
    for wanted in (1, 2, 3):
        out += b"".join(
            r[: HEAD_BYTES[c]] for r, c in zip(raws, classes, strict=True) if c == wanted
        )
    return out


def _zero_bits(number: int) -> int:
    return (number & -number).bit_length() - 1
