"""The first version of the engine, kept as the oracle: a sorted list and BLAKE3 over a range.

It speaks no wire format and knows no bytes budget; it is short enough to be seen to be right. What
it shares with the engine is the protocol: the four-row table, splits of equal count, lists.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import pairwise

import blake3

Element = tuple[int, bytes]
Key = tuple[int, bytes]
Span = tuple[Key, Key | None]

PARTS = 4
LIST_MAX = 4


class Oracle:
    """A set of elements; answers about ranges by recomputing everything."""

    def __init__(self, elements: set[Element]) -> None:
        self._elements = sorted(elements)

    def slice(self, span: Span) -> list[Element]:
        """The elements of a range."""
        lower, upper = span
        stop = len(self._elements) if upper is None else bisect_left(self._elements, upper)
        return self._elements[bisect_left(self._elements, lower) : stop]

    def summary(self, span: Span) -> tuple[bytes, int]:
        """(hash, count)."""
        elements = self.slice(span)
        raw = b"".join(order.to_bytes(8, "big") + element_id for order, element_id in elements)
        return blake3.blake3(raw).digest(), len(elements)

    def split(self, span: Span) -> list[Span]:
        """Parts of equal count that tile the range."""
        elements = self.slice(span)
        marks = sorted({len(elements) * part // PARTS for part in range(1, PARTS)} - {0})
        edges = [span[0], *(elements[mark] for mark in marks), span[1]]
        return list(pairwise(edges))


def differences(ours: Oracle, theirs: Oracle) -> tuple[set[Element], set[Element], list[Span]]:
    """The elements that we have and need, and the ranges in sync, by the reconciliation table."""
    have: set[Element] = set()
    need: set[Element] = set()
    in_sync: list[Span] = []
    waiting: deque[Span] = deque([((0, b""), None)])
    while waiting:
        span = waiting.popleft()
        (our_hash, our_count), (their_hash, their_count) = ours.summary(span), theirs.summary(span)
        if our_count == their_count and our_hash == their_hash:
            in_sync.append(span)
        elif our_count == 0 or their_count == 0 or their_count <= LIST_MAX:
            have |= set(ours.slice(span)) - set(theirs.slice(span))
            need |= set(theirs.slice(span)) - set(ours.slice(span))
        else:
            waiting.extend(theirs.split(span))
    return have, need, in_sync
