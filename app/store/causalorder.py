"""An order in which every message comes after its causes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from heapq import heappop, heappush


def causal_order(causes: Sequence[Sequence[int]]) -> list[int]:
    """The numbers 0 … n-1, each after its `causes`; of those that could come next, the lowest.

    IDs are free strings, so causes may form cycles. A cycle is walked from its lowest number, and
    the reference that closes it is disregarded; between messages that are not each other's causes
    no reference ever is.
    """
    sorter = TopologicalSorter(_without_cycles(causes))
    sorter.prepare()
    ordered: list[int] = []
    ready: list[int] = []
    while sorter.is_active():
        for number in sorter.get_ready():
            heappush(ready, number)
        number = heappop(ready)
        ordered.append(number)
        sorter.done(number)
    return ordered


def _without_cycles(causes: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """The causes of each number, but for those that lead back to where the walk came from."""
    kept: dict[int, list[int]] = {}
    for root in range(len(causes)):
        if root in kept:
            continue
        kept[root] = []
        path: dict[int, Iterator[int]] = {root: iter(causes[root])}
        while path:
            number, rest = next(reversed(path.items()))
            cause = next(rest, None)
            if cause is None:
                del path[number]
            elif cause not in path:
                kept[number].append(cause)
                if cause not in kept:
                    kept[cause] = []
                    path[cause] = iter(causes[cause])
    return kept
