"""The definitions of `sdstore.ordering`, written down directly, with sets: the oracle of its tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.ordering.graphs import Sent


class Naive:
    """All questions about one graph, whose messages come causes first."""

    def __init__(
        self, indexers: Sequence[str], sent: Sequence[Sent], tail_max: int = 4_096
    ) -> None:
        self.tail_max = tail_max
        self.indexers = set(indexers)
        self.majority = len(indexers) // 2 + 1
        self.sender = {each.message_id: each.sender_id for each in sent}
        self.causes = {each.message_id: each.causes for each in sent}
        self.view: dict[str, set[str]] = {}
        for each in sent:
            parts = [self.view[cause] for cause in each.causes]
            self.view[each.message_id] = {each.message_id}.union(*parts)
        self._anchors: dict[str, list[str]] = {}

    def is_before(self, x: str, y: str) -> bool:
        return x in self.view[y]

    def votes(self, view: Iterable[str], c: str) -> set[str]:
        return {self.sender[y] for y in view if self.is_before(c, y)} & self.indexers

    def is_clean(self, y: str, c: str) -> bool:
        return self.is_before(c, y) and all(
            self.is_before(u, c) or self.is_before(c, u)
            for u in self.view[y]
            if self.sender[u] in self.indexers
        )

    def is_witness(self, y: str, c: str) -> bool:
        return self.is_clean(y, c) and len(self.votes(self.view[y], c)) >= self.majority

    def is_possible(self, view: set[str], c: str) -> bool:
        able = 0
        for indexer in self.indexers:
            own = [y for y in view if self.sender[y] == indexer]
            has_witness = any(self.is_witness(y, c) for y in own)
            can_write = all(self.is_before(y, c) or self.is_clean(y, c) for y in own)
            able += has_witness or can_write
        return able >= self.majority

    def possible(self, view: set[str]) -> list[str]:
        return [c for c in view if self.is_candidate(c) and self.is_possible(view, c)]

    def is_candidate(self, c: str) -> bool:
        if self.sender[c] not in self.indexers:
            return False
        anchors = self.anchors(c)
        return all(self.is_before(a, b) or self.is_before(b, a) for a in anchors for b in anchors)

    def anchors(self, c: str) -> list[str]:
        if c not in self._anchors:
            before = self.view[c] - {c}
            self._anchors[c] = [
                a for a in before if self.is_candidate(a) and self.is_possible(self.view[c], a)
            ]
        return self._anchors[c]

    def in_topological_order(self, nodes: Iterable[str]) -> list[str]:
        left, in_order = set(nodes), []
        while left:
            ready = [x for x in left if not left.intersection(self.causes[x])]
            first = min(ready, key=lambda x: (self.sender[x].encode(), x.encode()))
            left.remove(first)
            in_order.append(first)
        return in_order

    def order_up_to(self, c: str) -> list[str]:
        anchor = max(self.anchors(c), key=lambda a: len(self.view[a]), default=None)
        settled = self.order_up_to(anchor) if anchor else []
        return settled + self.in_topological_order(self.view[c].difference(settled))

    def confirmed(self, view: set[str]) -> list[str]:
        """The confirmed prefix of a view."""
        highest: list[str] = []
        for c in view:
            if self.is_candidate(c):
                witnesses = {self.sender[y] for y in view if self.is_witness(y, c)} & self.indexers
                if len(witnesses) >= self.majority:
                    highest = max(highest, self.order_up_to(c), key=len)
        return highest

    def order(self, view: set[str]) -> list[str]:
        """The whole order of a view."""
        possible = self.possible(view)
        tops = [c for c in possible if not any(d != c and self.is_before(c, d) for d in possible)]
        below_all = set.intersection(*[self.below(c) for c in tops]) if tops else set()
        settled = self.confirmed(view)
        if len(view) - len(settled) <= self.tail_max:
            settled = max([settled, *[self.order_up_to(c) for c in below_all]], key=len)
        return settled + self.in_topological_order(view.difference(settled))

    def below(self, c: str) -> set[str]:
        """The anchor of a candidate, the anchor of that, and so on."""
        anchor = max(self.anchors(c), key=lambda a: len(self.view[a]), default=None)
        return {anchor} | self.below(anchor) if anchor else set()
