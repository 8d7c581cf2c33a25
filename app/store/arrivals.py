"""The arrival chain: what tells a database from one that went back in time, or went another way.

Entries and published claims are numbered by counters of their own, and each row stores a running sum
over all rows numbered up to it. The sum is keyed with a secret of the database, so that nobody who
publishes can choose it, and covers number and element, so that order counts. A `Token` is a number
and the sum there. Two databases agree on a token exactly if they share their history up to its number,
but for an accident of one in 2^64.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from app.entries import Token, Watermark

_KEY_CONTEXT = "sdstore arrival chain v1"
_BLOCK_BYTES = 16
_WORD = np.dtype("<u8")

ROWS_ONE_BY_ONE = 4
"""Fewer rows cost less one by one: numpy takes 20 µs for however few."""


def watermark_of(row: Sequence[int]) -> Watermark:
    """The watermark in a row of (sequence number, sum, claim number, sum)."""
    seq, entry_sum, claim_no, claim_sum = row
    return Watermark(Token(seq, entry_sum), Token(claim_no, claim_sum))


def goes_on_from(read: Watermark, sums_at: Sequence[int]) -> bool:
    """Whether a database's history up to `read` is the one that was read, by its row of sums there."""
    there = watermark_of(sums_at)
    return (
        read.entries.number <= there.entries.number
        and read.claims.number <= there.claims.number
        and (read.entries.sum, read.claims.sum) == (there.entries.sum, there.claims.sum)
    )


def last_of(before: Token, numbers: Sequence[int], sums: Sequence[int]) -> Token:
    """Where the chain is after rows with these numbers and sums; `before` if there are none."""
    return Token(numbers[-1], sums[-1]) if numbers else before


class ArrivalChain:
    """Computes the sums of one database. Use one instance per thread."""

    def __init__(self, secret: bytes) -> None:
        key = blake3(secret, derive_key_context=_KEY_CONTEXT).digest(length=_BLOCK_BYTES)
        # ECB is the block function itself here, the building block of a CBC-MAC.
        self._encrypt = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update  # noqa: S305

    def sums(self, before: int, numbers: Sequence[int], elements: Sequence[bytes]) -> list[int]:
        """The sums of consecutive rows (elements of 32 bytes) behind the sum `before`, signed.

        A row adds the first 64 bits of AES-128 CBC-MAC over its number and its element, three blocks.
        """
        count = len(numbers)
        if count <= ROWS_ONE_BY_ONE:
            terms_of_few = map(self._term, numbers, elements)
            return [_signed(each) for each in accumulate(terms_of_few, initial=before)][1:]
        words = np.frombuffer(b"".join(elements), dtype=_WORD).reshape(count, 4)
        blocks = np.zeros((count, 2), dtype=_WORD)
        blocks[:, 0] = numbers
        for half in (words[:, :2], words[:, 2:]):
            blocks = self._encrypted(blocks) ^ half
        terms = self._encrypted(blocks)[:, 0]
        # Arrays of unsigned numbers wrap around in silence.
        sums = np.cumsum(terms) + np.array([before], dtype=np.int64).view(_WORD)
        found: list[int] = sums.view(np.int64).tolist()
        return found

    def _term(self, number: int, element: bytes) -> int:
        block = self._encrypt(number.to_bytes(_BLOCK_BYTES, "little"))
        for half in (element[:_BLOCK_BYTES], element[_BLOCK_BYTES:]):
            chained = int.from_bytes(block, "little") ^ int.from_bytes(half, "little")
            block = self._encrypt(chained.to_bytes(_BLOCK_BYTES, "little"))
        return int.from_bytes(block[:8], "little")

    def _encrypted(self, blocks: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return np.frombuffer(self._encrypt(blocks.tobytes()), dtype=_WORD).reshape(-1, 2)


def _signed(value: int) -> int:
    """The low 64 bits of `value` as BIGINT columns hold them."""
    return ((value + 2**63) & (2**64 - 1)) - 2**63
