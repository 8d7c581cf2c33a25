"""The definitions of `sdstore.ordering`, written down directly, with sets: the oracle of its tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.ordering.graphs import Sent


class Naive:
    """All questions about one graph, whose messages come causes first. A set of messages may lack causes."""

    def __init__(
        self,
        indexers: Sequence[str],
        sent: Sequence[Sent],
        tail_max: int = 4_096,
        base: Sequence[str] = (),
    ) -> None:
        """`base`: the order up to the message at which the indexers begin."""
        self.tail_max = tail_max
        self.indexers = set(indexers)
        self.majority = len(indexers) // 2 + 1
        self.sender = {each.message_id: each.sender_id for each in sent}
        self.causes = {e.message_id: tuple(c for c in e.causes if c not in base) for e in sent}
        self.past: dict[str, set[str]] = {}
        """Everything that a message refers to, whoever wrote it, and itself."""
        self.view: dict[str, set[str]] = {}
        """The indexers' messages that an indexer's message refers to through indexers' messages."""
        for each in sent:
            known = [cause for cause in self.causes[each.message_id] if cause in self.sender]
            self.past[each.message_id] = {each.message_id}.union(*[self.past[c] for c in known])
            is_after = not base or base[-1] in each.causes or any(c in self.view for c in known)
            if each.sender_id in self.indexers and is_after:
                parts = [self.view[c] for c in known if c in self.view]
                self.view[each.message_id] = {each.message_id}.union(*parts)
        self._anchors: dict[str, list[str]] = {}

    # --- what enters

    def entered(self, held: set[str]) -> set[str]:
        """The messages that do not wait: a node when all that it names is there, another one when all
        that it names has entered, or a node names it."""
        entered: set[str] = set()
        while True:
            more = {each for each in held - entered if self._enters(each, held, entered)}
            more |= {
                cause
                for each in more & self.indexers_messages
                for cause in self.causes[each]
                if cause in held
            }
            if more <= entered:
                return entered
            entered |= more

    @property
    def indexers_messages(self) -> set[str]:
        return set(self.view)

    def _enters(self, x: str, held: set[str], entered: set[str]) -> bool:
        is_leaf = x not in self.view
        return all(
            cause in entered or (not is_leaf and cause in held and cause not in self.view)
            for cause in self.causes[x]
        )

    # --- what is confirmed

    def is_before(self, x: str, y: str) -> bool:
        return x in self.view[y]

    def votes(self, view: Iterable[str], c: str) -> set[str]:
        return {self.sender[y] for y in view if self.is_before(c, y)}

    def is_clean(self, y: str, c: str) -> bool:
        return self.is_before(c, y) and all(
            self.is_before(u, c) or self.is_before(c, u) for u in self.view[y]
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

    def followed_by(self, settled: list[str], nodes: Iterable[str]) -> list[str]:
        """An order, then nodes, each after the messages of others that it names."""
        order = list(settled)
        for node in self.in_topological_order(set(nodes).difference(settled)):
            named = [c for c in self.causes[node] if c not in self.view and c not in order]
            order += [*named, node]
        return order

    def order_up_to(self, c: str) -> list[str]:
        anchor = max(self.anchors(c), key=lambda a: len(self.view[a]), default=None)
        return self.followed_by(self.order_up_to(anchor) if anchor else [], self.view[c])

    def confirmed(self, held: set[str]) -> list[str]:
        """The confirmed prefix of who holds these messages."""
        view = self.entered(held) & self.indexers_messages
        highest: list[str] = []
        for c in view:
            if self.is_candidate(c):
                witnesses = {self.sender[y] for y in view if self.is_witness(y, c)}
                if len(witnesses) >= self.majority:
                    highest = max(highest, self.order_up_to(c), key=len)
        return highest

    def order(self, held: set[str], relayed: Iterable[str] = ()) -> list[str]:
        """The whole order of who holds these messages."""
        entered = self.entered(held)
        view = entered & self.indexers_messages
        possible = self.possible(view)
        tops = [c for c in possible if not any(d != c and self.is_before(c, d) for d in possible)]
        below_all = set.intersection(*[self.below(c) for c in tops]) if tops else set()
        settled = self.confirmed(held)
        named = self.followed_by(settled, view)
        unnamed = {x for x in entered.difference(named) if self.sender[x] not in relayed}
        if len(named) + len(unnamed) - len(settled) <= self.tail_max:
            settled = max([settled, *[self.order_up_to(c) for c in below_all]], key=len)
        return self.followed_by(settled, view) + self.in_topological_order(unnamed)

    def below(self, c: str) -> set[str]:
        """The anchor of a candidate, the anchor of that, and so on."""
        anchor = max(self.anchors(c), key=lambda a: len(self.view[a]), default=None)
        return {anchor} | self.below(anchor) if anchor else set()
