"""The causal graph of a channel: nodes, version vectors, and what one node's view shows about another.

A *view* is a set of messages that contains the causes of each of its messages. The view of a node is
the node with everything before it. Only indexers vote, so a node keeps a version vector over the
indexers alone: `seen[i]` is the number of messages of indexer i in the node's view. Each indexer's
messages form a chain, because each refers to the one before it; so for two nodes of indexers "x is in the
view of y" is one comparison of two integers.

Definitions, for a node c of an indexer ("a candidate") and n indexers; a majority is n // 2 + 1:

- A *contender* of c is a node of an indexer that is neither before nor after c.
- A node y is *clean* for c if it is c or comes after c, and its view contains no contender of c.
- The *votes* for c in the view of a clean node are the indexers with c or a node after c in it.
- A *witness* of c is a node that is clean for c and whose view has a majority of votes for c.
- c is *possible* for a node y if a majority of indexers either have a witness of c in the view of y, or
  can still write one: they have no node in the view of y that is unclean for c and not before c.

Cleanliness never comes back along an indexer's chain, so one binary search finds its last clean node.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import gt


class Node:
    """A message in the graph. `eq` is identity."""

    __slots__ = (
        "anchors", "index", "indexer", "is_candidate", "is_relayed", "is_settled", "key", "message_id",
        "parents", "place", "seen", "witnesses",
    )  # fmt: skip

    def __init__(self, message_id: str, key: tuple[bytes, bytes], parents: Sequence[Node]) -> None:
        self.message_id = message_id
        self.key = key
        self.parents = parents
        self.indexer = -1
        """The number of the indexer that wrote it; -1 for a node that does not vote."""
        self.index = -1
        """Its place in the chain of its indexer."""
        self.seen: tuple[int, ...] = ()
        self.is_candidate = False
        self.is_relayed = False
        self.anchors: tuple[Node, ...] = ()
        """The highest candidates before this node that are possible for it."""
        self.witnesses = 0
        """Of a candidate: the indexers with a witness of it so far, a bit for each."""
        self.is_settled = False
        """It is in the confirmed prefix."""
        self.place = -1
        """Its place in the tentative tail; -1 if it is not there."""

    @property
    def tops(self) -> tuple[Node, ...]:
        """The highest candidates in the view of this node, itself included, that are possible for it."""
        return (self,) if self.is_candidate else self.anchors


class Graph:
    """The chains of the indexers, and the definitions above."""

    def __init__(self, indexer_count: int) -> None:
        self.chains: list[list[Node]] = [[] for _ in range(indexer_count)]
        self.majority = indexer_count // 2 + 1

    def sees(self, y: Node, candidate: Node) -> bool:
        """Whether the candidate is in the view of y."""
        return y.seen[candidate.indexer] > candidate.index

    def is_clean(self, y: Node, candidate: Node) -> bool:
        """Whether y is clean for the candidate."""
        author, index = candidate.indexer, candidate.index
        seen = y.seen
        if seen[author] <= index:
            return False
        chains = self.chains
        before = candidate.seen
        # An indexer's first node that is not before the candidate comes after it, or is a contender.
        return all(
            chains[i][before[i]].seen[author] > index
            for i, is_later in enumerate(map(gt, seen, before))
            if is_later
        )

    def votes(self, y: Node, candidate: Node) -> int:
        """The votes for the candidate in the view of a clean node."""
        return sum(map(gt, y.seen, candidate.seen)) + (
            y.seen[candidate.indexer] == candidate.seen[candidate.indexer]
        )

    def is_witness(self, y: Node, candidate: Node) -> bool:
        """Whether y is a witness of the candidate."""
        return self.votes(y, candidate) >= self.majority and self.is_clean(y, candidate)

    def is_possible(self, seen: Sequence[int], candidate: Node) -> bool:
        """Whether the candidate is possible for a view, given as a version vector that contains it."""
        missing = len(seen) - self.majority
        for i, (count, before) in enumerate(zip(seen, candidate.seen, strict=True)):
            if count > before and not self._can_witness(i, count, candidate):
                missing -= 1
                if missing < 0:
                    return False
        return True

    def _can_witness(self, indexer: int, count: int, candidate: Node) -> bool:
        """Whether the indexer, of which a view has `count` nodes, has a witness there or can write one."""
        chain = self.chains[indexer]
        if self.is_clean(chain[count - 1], candidate):
            return True
        low, high = candidate.seen[indexer], count - 1  # the first unclean node is in low..high
        while low < high:
            middle = (low + high) // 2
            if self.is_clean(chain[middle], candidate):
                low = middle + 1
            else:
                high = middle
        if low == candidate.seen[indexer]:
            return indexer == candidate.indexer and self.majority == 1
        return self.votes(chain[low - 1], candidate) >= self.majority
