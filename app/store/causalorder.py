"""An order in which every message comes after its causes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush


def causal_order(causes: Sequence[Sequence[int]]) -> list[int]:
    """The numbers 0 … n-1, each after its `causes`; of those that could come next, the lowest.

    IDs are free strings, so causes may form cycles. A cycle is walked from its lowest number, and
    the reference that closes it is disregarded; between messages that are not each other's causes
    no reference ever is.
    """
    kept = _without_cycles(causes)
    effects: list[list[int]] = [[] for _ in causes]
    for number, its_causes in enumerate(kept):
        for cause in its_causes:
            effects[cause].append(number)
    open_causes = list(map(len, kept))
    ready = [number for number, count in enumerate(open_causes) if not count]
    ordered: list[int] = []
    while ready:
        cause = heappop(ready)
        ordered.append(cause)
        for number in effects[cause]:
            open_causes[number] -= 1
            if not open_causes[number]:
                heappush(ready, number)
    return ordered


def _without_cycles(causes: Sequence[Sequence[int]]) -> list[list[int]]:
    """The causes of each number, but for those that lead back to where the walk came from."""
    kept: list[list[int]] = [[] for _ in causes]
    is_walked = [False] * len(causes)
    for root in range(len(causes)):
        if is_walked[root]:
            continue
        is_walked[root] = True
        path: dict[int, Iterator[int]] = {root: iter(causes[root])}
        while path:
            number, rest = next(reversed(path.items()))
            cause = next(rest, None)
            if cause is None:
                del path[number]
            elif cause not in path:
                kept[number].append(cause)
                if not is_walked[cause]:
                    is_walked[cause] = True
                    path[cause] = iter(causes[cause])
    return kept
