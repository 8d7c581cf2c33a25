"""An initiator's reports to its caller, in the order it learns them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recon.elements import Range
from recon.errors import RemoteProtocolError


@dataclass(frozen=True, slots=True)
class Have:
    """We hold these and the peer does not: send them. orders u64[n], ids u8[n, 32]."""

    orders: NDArray[np.uint64]
    ids: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Need:
    """The peer holds these and we do not: fetch them.

    `short_ids` u8[n, 6]; None means every element of the range (we hold none there), `count` by
    the peer's word.
    """

    range: Range
    short_ids: NDArray[np.uint8] | None
    count: int


@dataclass(frozen=True, slots=True)
class NotThere:
    """The peer does not name these, which the view has only because they were set aside."""

    orders: NDArray[np.uint64]
    ids: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Stated:
    """The first answer's total of all that the peer holds, and whether it is that of our view.

    The peer does not learn ours. So if it states the same total, it holds, or has read, every element.
    """

    count: int
    agrees: bool


@dataclass(frozen=True, slots=True)
class Fault:
    """The peer broke the protocol or its budget; the session is over."""

    error: RemoteProtocolError


@dataclass(frozen=True, slots=True)
class Expired:
    """The responder's nonce is no longer valid: start a new session with this one."""

    responder_nonce: bytes


@dataclass(frozen=True, slots=True)
class Busy:
    """The responder is at its limit or refuses: the session is over, try again later."""

    retry_after_s: int
    refused: bool


@dataclass(frozen=True, slots=True)
class Unsupported:
    """The responder speaks versions up to `version`, and none of ours: the session is over."""

    version: int


Event = Have | Need | NotThere | Stated | Fault | Expired | Busy | Unsupported
