"""The causal graph of a channel: nodes, version vectors, and what one node's view shows about another.

A *view* is a set of messages that contains the causes of each of its messages. The view of a node is
the node with everything before it. Only indexers vote, so a view is described by a version vector over the
indexers: how many messages of each indexer it contains. Each indexer's messages form a chain, because
each refers to the one before it; so "x is in the view of y" is one comparison of two integers.

Definitions, for a node c of an indexer ("a candidate") and n indexers; a majority is n // 2 + 1:

- A *contender* of c is a node of an indexer that is neither before nor after c.
- A node y is *clean* for c if it is c or comes after c, and its view contains no contender of c.
- The *votes* for c in the view of a clean node are the indexers with c or a node after c in it.
- A *witness* of c is a node that is clean for c and whose view has a majority of votes for c.
- c is *possible* for a view if a majority of indexers either have a witness of c in the view, or can
  still write one: all their nodes in the view that are not before c are clean.

Cleanliness never comes back along an indexer's chain, so one binary search finds its last clean node.

A version vector is one integer with a lane of 32 bits for each indexer. The top bit of a lane is free,
so one subtraction compares all lanes: a step per indexer would be 9 times as much work at 9 indexers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

LANE_BITS = 32
_LANE = (1 << LANE_BITS) - 1


class Node:
    """A message in the graph. `eq` is identity."""

    __slots__ = (
        "anchors", "contenders", "examined", "index", "indexer", "is_candidate", "is_relayed",
        "is_settled", "key", "lane", "message_id", "parents", "place", "seen", "witnesses",
    )  # fmt: skip

    def __init__(self, message_id: str, key: tuple[bytes, bytes], parents: Sequence[Node]) -> None:
        self.message_id = message_id
        self.key = key
        self.parents = parents
        self.indexer = -1
        """The number of the indexer that wrote it; -1 for a node that does not vote."""
        self.lane = 0
        """The first bit of that indexer's lane."""
        self.index = -1
        """Its place in the chain of its indexer."""
        self.seen = 0
        """The version vector of its view."""
        self.is_candidate = False
        self.is_relayed = False
        self.anchors: tuple[Node, ...] = ()
        """The highest candidates before this node that are possible for it."""
        self.witnesses = 0
        """Of a candidate: the indexers with a witness of it so far, a bit for each."""
        self.examined = 0
        """Of a candidate: the indexers whose first node that is not before it was examined, as top bits."""
        self.contenders = 0
        """Of a candidate: those of them whose node is a contender."""
        self.is_settled = False
        """It is in the confirmed prefix."""
        self.place = -1
        """Its place in the order; -1 if it is not there."""

    @property
    def tops(self) -> tuple[Node, ...]:
        """The highest candidates in the view of this node, itself included, that are possible for it."""
        return (self,) if self.is_candidate else self.anchors


class Graph:
    """The chains of the indexers, and the definitions above. Views are version vectors."""

    def __init__(self, indexer_count: int) -> None:
        self.chains: list[list[Node]] = [[] for _ in range(indexer_count)]
        self.majority = indexer_count // 2 + 1
        self._ones = sum(1 << (LANE_BITS * i) for i in range(indexer_count))
        self._tops = self._ones << (LANE_BITS - 1)

    def union(self, views: Sequence[int]) -> int:
        """The view that contains all of these."""
        union = 0
        for view in views:
            greater = ((view | self._tops) - union) & self._tops
            lanes = greater - (greater >> (LANE_BITS - 1))
            union = (view & lanes) | (union & ~lanes)
        return union

    def sees(self, view: int, candidate: Node) -> bool:
        """Whether the candidate is in the view."""
        return (view >> candidate.lane) & _LANE > candidate.index

    def votes(self, view: int, candidate: Node) -> int:
        """The votes for the candidate, in the view of a node that is clean for it."""
        later = self._later(view, candidate)
        is_last = not later >> (candidate.lane + LANE_BITS - 1) & 1
        return later.bit_count() + is_last

    def is_clean(self, view: int, candidate: Node) -> bool:
        """Whether a node with this view is clean for the candidate."""
        later = self._later(view, candidate)
        return not self._contenders(later, candidate) & later and self.sees(view, candidate)

    def is_witness(self, view: int, candidate: Node) -> bool:
        """Whether a node with this view is a witness of the candidate."""
        return self.votes(view, candidate) >= self.majority and self.is_clean(view, candidate)

    def is_possible(self, view: int, candidate: Node) -> bool:
        """Whether the candidate is possible for a view, which contains it."""
        later = self._later(view, candidate)
        contenders = self._contenders(later, candidate) & later
        if not contenders:
            return True
        spare = len(self.chains) - self.majority
        # The author of a contender wrote it before it saw the candidate, so it has no witness.
        spare -= contenders.bit_count()
        if spare < 0:
            return False
        for indexer in _indexers(later & ~contenders):
            count = (view >> (indexer * LANE_BITS)) & _LANE
            if not self._can_witness(indexer, count, candidate):
                spare -= 1
                if spare < 0:
                    return False
        return True

    def _later(self, view: int, candidate: Node) -> int:
        """The indexers with nodes in the view that are not before the candidate, as top bits."""
        return ((view | self._tops) - (candidate.seen + self._ones)) & self._tops

    def _contenders(self, later: int, candidate: Node) -> int:
        """The indexers whose first node that is not before the candidate is a contender.

        An indexer's first such node comes after the candidate, and so do all that follow, or it is a
        contender.
        """
        new = later & ~candidate.examined
        if new:
            candidate.examined |= new
            for indexer in _indexers(new):
                before = (candidate.seen >> (indexer * LANE_BITS)) & _LANE
                if not self.sees(self.chains[indexer][before].seen, candidate):
                    candidate.contenders |= 1 << (indexer * LANE_BITS + LANE_BITS - 1)
        return candidate.contenders

    def _can_witness(self, indexer: int, count: int, candidate: Node) -> bool:
        """Whether an indexer, of which a view has `count` nodes, has a witness there or can write one."""
        chain = self.chains[indexer]
        if self.is_clean(chain[count - 1].seen, candidate):
            return True
        first = (candidate.seen >> (indexer * LANE_BITS)) & _LANE
        low, high = first, count - 1  # the first unclean node is one of these
        while low < high:
            middle = (low + high) // 2
            if self.is_clean(chain[middle].seen, candidate):
                low = middle + 1
            else:
                high = middle
        if low > first:
            return self.votes(chain[low - 1].seen, candidate) >= self.majority
        return indexer == candidate.indexer and self.majority == 1


def _indexers(top_bits: int) -> Iterator[int]:
    while top_bits:
        low = top_bits & -top_bits
        yield low.bit_length() // LANE_BITS - 1
        top_bits ^= low
