"""Marks: a responder's place in arrival order, and views over what arrived after one or before one.

Once two sets were proved equal, all that can differ later arrived after that proof, on one side or the
other. A mark names the moment of the proof on one side. It is opaque to the other side, which keeps it
and gives it back; so the side that made it keeps nothing, and any of its processes can read it.

A mark has two numbers, of the last entry and the last claim at that moment, sealed together with a check
of the interest: nobody else can read them, and a forged mark fails before anything is read for it. Eight
bytes behind them authenticate everything that must be the same when the mark comes back: the sums of the
arrival chains there, the interest, the policy, and the sums of the interest's elements up to there. So a
mark fails if the history was rolled back, if an element was lost, or if the rules changed.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import NamedTuple

import blake3
import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from recon.agreement import SessionKey
from recon.elements import I64, U8, U64, Mask
from recon.index import Columns, RangeIndex
from recon.limits import ID_BYTES
from recon.view import View

MARK_BYTES = 24  # of this implementation's marks: a forger has one try in 2^96
MOMENT_BYTES = 16
"""A moment at which elements may be retired: the last entry's number and the clock, opaque for the other side."""

MARK_BYTES_MAX = 64  # of any responder's: an initiator keeps one for each peer and interest
NEWS_MAX = 1 << 16  # elements after a mark: comparing everything costs no more than this many
_CONTEXT = "sdstore recon v3 mark"
_NUMBER_BYTES = 6  # 2^48 arrivals
_BLOCK_BYTES = 16  # of AES: both numbers, and 4 bytes of check
_SUM_BYTES = 8


class Numbers(NamedTuple):
    """A moment of arrival order: numbers of the last entry and of the last claim."""

    entry: int
    claim: int


class Moment(NamedTuple):
    """What a mark authenticates: the numbers, the sums of the arrival chains there, and the contents.

    `contents`: the policy, the number of the interest's elements up to there, and a sum of their IDs.
    """

    numbers: Numbers
    sums: tuple[int, int]
    contents: bytes


def mark_of(secret: bytes, interest: bytes, moment: Moment) -> bytes:
    """The mark of a moment. `secret`: at least 16 random bytes that all processes of a node share.

    `interest`: canonical bytes of the interest that is answered.
    """
    key = _key(secret)
    numbers = b"".join(each.to_bytes(_NUMBER_BYTES, "big") for each in moment.numbers)
    block = numbers + _check(key, numbers, interest)
    sums = b"".join(each.to_bytes(_SUM_BYTES, "big", signed=True) for each in moment.sums)
    tag = blake3.blake3(block + sums + moment.contents + interest, key=key)
    return _cipher(key).encryptor().update(block) + tag.digest(length=MARK_BYTES - _BLOCK_BYTES)


def numbers_of(mark: bytes, secret: bytes, interest: bytes) -> Numbers | None:
    """The numbers in a mark of this interest; None if it is no mark of ours.

    Whether all that it authenticates is unchanged is for `is_mark_of`.
    """
    if len(mark) != MARK_BYTES:
        return None
    key = _key(secret)
    block = _cipher(key).decryptor().update(mark[:_BLOCK_BYTES])
    numbers, check = block[: 2 * _NUMBER_BYTES], block[2 * _NUMBER_BYTES :]
    if not hmac.compare_digest(check, _check(key, numbers, interest)):
        return None
    parts = numbers[:_NUMBER_BYTES], numbers[_NUMBER_BYTES:]
    return Numbers(*(int.from_bytes(each, "big") for each in parts))


def _key(secret: bytes) -> bytes:
    return blake3.blake3(secret, derive_key_context=_CONTEXT).digest()


def _cipher(key: bytes) -> Cipher[modes.ECB]:
    # One block, so ECB is AES itself.
    return Cipher(algorithms.AES(key[:_BLOCK_BYTES]), modes.ECB())  # noqa: S305


def _check(key: bytes, numbers: bytes, interest: bytes) -> bytes:
    check_bytes = _BLOCK_BYTES - 2 * _NUMBER_BYTES
    return blake3.blake3(numbers + interest, key=key).digest(length=check_bytes)


def is_mark_of(mark: bytes, secret: bytes, interest: bytes, moment: Moment) -> bool:
    """Whether a mark is that of this moment."""
    return hmac.compare_digest(mark, mark_of(secret, interest, moment))


@dataclass(frozen=True, slots=True)
class Arrived:
    """Elements of an interest as they arrived, entries before claims.

    orders u64[n], ids u8[n, 32], numbers i64[n], is_claim bool[n].
    """

    orders: U64
    ids: U8
    numbers: I64
    is_claim: Mask

    def __len__(self) -> int:
        return len(self.orders)

    def take(self, which: Mask) -> Arrived:
        """Some of them."""
        return Arrived(
            self.orders[which], self.ids[which], self.numbers[which], self.is_claim[which]
        )

    def after(self, numbers: Numbers) -> Arrived:
        """Those that arrived after a moment."""
        return self.take(self._is_after(numbers)) if len(self) else self

    def up_to(self, numbers: Numbers) -> Arrived:
        """Those that arrived at or before a moment."""
        return self.take(~self._is_after(numbers)) if len(self) else self

    def _is_after(self, numbers: Numbers) -> Mask:
        later: Mask = self.numbers > np.where(self.is_claim, numbers.claim, numbers.entry)
        return later

    def columns(self) -> Columns:
        """Without their numbers."""
        return Columns(self.orders, self.ids, np.zeros(len(self), np.uint32))

    def beside(self, others: Arrived) -> Arrived:
        """These and others."""
        if not len(self):
            return others
        return Arrived(
            np.concatenate((self.orders, others.orders)),
            np.concatenate((self.ids, others.ids)),
            np.concatenate((self.numbers, others.numbers)),
            np.concatenate((self.is_claim, others.is_claim)),
        )


NOTHING_CAME = Arrived(
    np.empty(0, np.uint64),
    np.empty((0, ID_BYTES), np.uint8),
    np.empty(0, np.int64),
    np.empty(0, bool),
)


def view_of(elements: Columns, key: SessionKey) -> View:
    """A view of these elements and no others."""
    index = RangeIndex()
    index.insert(elements.orders, elements.ids, elements.groups)
    return View(index, key)
