"""What a node remembers of one peer from one session to the next."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from recon.interest import Interest

REFUSALS_MAX = 65_536  # elements a side; beyond it the oldest are tried once more


class Refusals:
    """Elements that a local policy turned away, with their order values; the oldest go first."""

    def __init__(self) -> None:
        self._orders: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._orders)

    def __contains__(self, element_id: bytes) -> bool:
        return element_id in self._orders

    def add(self, element_id: bytes, order: int = 0) -> None:
        """Remember an element; its order value matters only where it would be fetched."""
        self._orders[element_id] = order
        if len(self._orders) > REFUSALS_MAX:
            self._orders.popitem(last=False)

    def order_of(self, element_id: bytes) -> int | None:
        """The order value of an element that was refused."""
        return self._orders.get(element_id)

    def items(self) -> list[tuple[bytes, int]]:
        """(element ID, order value) of all."""
        return list(self._orders.items())


class Proof(NamedTuple):
    """That both sides held the same of an interest: what its root was, if it has one, and when."""

    interest: Interest
    root: bytes | None
    elements_count: int
    at_s: float


@dataclass(slots=True)
class PeerMemory:
    """Kept per peer, so that one peer's bad frame of a message never costs another's good one.

    `responder_nonce` and `interest` save the hand-shake while the peer still honours them;
    `index_length` is the length of our index when the last session began, `proof` the last
    comparison under a session's key that found everything equal. `refused_here` is what we turned
    away, `refused_there` what the peer did: neither is moved again.
    """

    responder_nonce: bytes = b""
    interest: bytes = b""
    interest_read_at_s: float = float("-inf")
    index_length: int = 0
    proof: Proof | None = None
    refused_here: Refusals = field(default_factory=Refusals)
    refused_there: Refusals = field(default_factory=Refusals)
