"""Which groups of the range index an interest covers, found at the cost of what it matches."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Mapping

from recon.session import Interest


class ChannelGroups:
    """Numbers of channels by name. Channel n has two groups: entries 2 n, hint claims 2 n + 1."""

    def __init__(self, interests_max: int) -> None:
        self.numbers: dict[str, int] = {}
        self._ascending: list[str] = []
        self._interests_max = interests_max
        self._found: OrderedDict[Interest, tuple[int, frozenset[int]]] = OrderedDict()

    def add(self, numbers: Mapping[str, int]) -> None:
        """Learn of channels."""
        self._ascending = sorted([*self._ascending, *(numbers.keys() - self.numbers.keys())])
        self.numbers |= numbers

    def of(self, interest: Interest) -> frozenset[int] | None:
        """The groups of an interest's elements; None: all."""
        if interest.everything:
            return None
        known_count, groups = self._found.pop(interest, (-1, frozenset[int]()))
        if known_count != len(self.numbers):
            numbers = [self.numbers[name] for name in self._matching(interest)]
            groups = frozenset(group for n in numbers for group in (2 * n, 2 * n + 1))
        self._found[interest] = len(self.numbers), groups
        if len(self._found) > self._interests_max:
            self._found.popitem(last=False)
        return groups

    def _matching(self, interest: Interest) -> Iterator[str]:
        yield from (name for name in interest.channels if name in self.numbers)
        for prefix in interest.prefixes:
            place = bisect_left(self._ascending, prefix)
            while place < len(self._ascending) and self._ascending[place].startswith(prefix):
                yield self._ascending[place]
                place += 1
