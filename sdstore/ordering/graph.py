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

Cleanliness never comes back along an indexer's chain. So an indexer that cannot be a witness of c is
known by one number: the index of its first node that is not clean, where no witness comes before that node. A
candidate keeps these numbers as a version vector (`Node.unable`), and "possible" is one comparison of
the view with it. The numbers are found when a view first asks for them.

A version vector is one integer with a lane of 32 bits for each indexer. The top bit of a lane is free,
so one subtraction compares all lanes: a step per indexer would be 9 times as much work at 9 indexers.

Each candidate refers to its anchor (see `order`), so candidates form a tree. `Node.jump` is a second reference,
to a candidate far below, placed so that a search down a path of k candidates takes O(log k) steps
(Myers, "An applicative random-access stack", 1983).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

LANE_BITS = 32
_LANE = (1 << LANE_BITS) - 1
_TOP = 1 << (LANE_BITS - 1)

STEPS_MAX = 8
"""Impossible candidates that a search examines one by one before it computes how far it can go at once."""

Key = tuple[str, str]


class Item:
    """A message of the order. `eq` is identity."""

    __slots__ = ("children", "home", "is_settled", "key", "message_id", "place", "references")

    def __init__(self, message_id: str, key: Key, references: tuple[str, ...]) -> None:
        self.message_id = message_id
        self.key = key
        """(sender ID, message ID). Strings compare by code point, which is the order of their UTF-8 bytes."""
        self.references = references
        """The IDs in its causal history."""

        # Where it is in the order: see `layout`.
        self.place = -1
        """Its place in the fixed part of the order; -1 if it is not there."""
        self.home: Any = None
        """The block of a loose part that contains it."""
        self.children: list[Any] | None = None
        """Items of the same loose part that refer to it, until it is settled."""
        self.is_settled = False
        """It is in the confirmed prefix."""


class Leaf(Item):
    """A message of a writer who is no indexer. It enters the order where an indexer's message names it."""

    __slots__ = ("is_relayed", "namers", "owner", "parents")

    leaves: tuple[Leaf, ...] = ()
    owned = 0

    def __init__(self, message_id: str, key: Key, references: tuple[str, ...]) -> None:
        super().__init__(message_id, key, references)
        self.parents: tuple[Leaf, ...] = ()
        """The leaves that it refers to: they sort it until an indexer names it."""
        self.namers: list[Node] = []
        """The indexers' messages that name it, until it is settled."""
        self.owner: Node | None = None
        """The first of them in the loose part: the leaf comes before it."""
        self.is_relayed = False


class Node(Item):
    """A message of an indexer in the graph."""

    __slots__ = (
        "anchor", "contenders", "depth", "examined", "fine", "index", "indexer", "is_on_chain",
        "jump", "lane", "leaves", "owned", "parents", "past", "seen", "tops", "unable", "witnesses",
    )  # fmt: skip

    def __init__(
        self,
        message_id: str,
        key: Key,
        references: tuple[str, ...] = (),
        parents: Sequence[Node] = (),
        leaves: tuple[Leaf, ...] = (),
    ) -> None:
        Item.__init__(self, message_id, key, references)
        self.parents = parents
        """The indexers' messages that it refers to."""
        self.leaves = leaves
        """The other messages that it refers to, in the order of its causal history."""
        self.owned = 0
        """How many of them come before it in the loose part because no node before it names them."""
        self.indexer = -1
        """The number of the indexer that wrote it; -1 for a node that does not vote."""
        self.lane = 0
        """The first bit of that indexer's lane."""
        self.index = -1
        """Its place in the chain of its indexer."""
        self.seen = 0
        """The version vector of its view."""
        self.tops: tuple[Node, ...] = ()
        """The highest candidates in its view, itself included, that are possible for it; or the ground."""
        self.is_on_chain = False
        """It is a candidate between the ground and the last candidate of the fixed part."""

        # Of a candidate only: see `Graph.make_candidate`.
        self.anchor = self
        self.jump = self
        self.depth = 0
        """The number of anchors below it."""
        self.witnesses = 0
        """The indexers with a witness of it so far, a bit for each."""
        self.past = 0
        """For each indexer 1 more than the number of its nodes before this one, itself included."""
        self.examined = 0
        """The indexers whose first node that is not before it was examined, as top bits."""
        self.contenders = 0
        """Those of them whose node is a contender, as top bits."""
        self.fine = 0
        """For each indexer 1 more than the number of its nodes that need no examination any more."""
        self.unable = 0
        """For each indexer that cannot be a witness 1 more than the index of the node that shows it."""


class Graph:
    """The chains of the indexers, and the definitions above. Views are version vectors."""

    def __init__(self, indexer_count: int) -> None:
        self.chains: list[list[Node]] = [[] for _ in range(indexer_count)]
        self.majority = indexer_count // 2 + 1
        self.spare = indexer_count - self.majority
        self._ones = sum(1 << (LANE_BITS * i) for i in range(indexer_count))
        self._tops = self._ones << (LANE_BITS - 1)
        self.ground = Node("", ("", ""))
        """Stands for the start of the order: a candidate before all nodes that everybody has confirmed."""
        self.ground.tops = (self.ground,)
        self.ground.is_settled = self.ground.is_on_chain = True

    def append(self, node: Node, indexer: int) -> None:
        """Append a node to the chain of its indexer. Its `seen` contains everything before it."""
        node.indexer, node.lane, node.index = (
            indexer,
            indexer * LANE_BITS,
            len(self.chains[indexer]),
        )
        self.chains[indexer].append(node)
        node.seen += 1 << node.lane

    def make_candidate(self, node: Node, anchor: Node) -> None:
        """Make a node of an indexer a candidate."""
        node.anchor, node.depth = anchor, anchor.depth + 1
        jump = anchor.jump
        is_even = anchor.depth - jump.depth == jump.depth - jump.jump.depth
        node.jump = jump.jump if is_even else anchor
        node.tops = (node,)
        node.past = node.seen + self._ones
        self.forget(node)

    def forget(self, candidate: Node) -> None:
        """Forget what was examined; it is found again if a view asks."""
        candidate.examined = candidate.contenders = 0
        candidate.fine = candidate.past
        candidate.unable = self._tops

    # --- views ---------------------------------------------------------------------------------

    def union(self, nodes: Sequence[Node]) -> int:
        """The view that contains the views of all of these."""
        union = nodes[0].seen if nodes else 0
        for node in nodes:
            if node.seen != union:
                union = self.join(union, node.seen)
        return union

    def join(self, view: int, other: int) -> int:
        """The view that contains both."""
        greater = ((view | self._tops) - other) & self._tops
        lanes = greater - (greater >> (LANE_BITS - 1))
        return (view & lanes) | (other & ~lanes)

    def sees(self, view: int, candidate: Node) -> bool:
        """Whether the candidate is in the view."""
        return (view >> candidate.lane) & _LANE > candidate.index

    def first_unseen(self, view: int, indexer: int) -> Node | None:
        """The first node of an indexer that is not in the view."""
        chain, count = self.chains[indexer], (view >> (indexer * LANE_BITS)) & _LANE
        return chain[count] if count < len(chain) else None

    def votes(self, view: int, candidate: Node) -> int:
        """The votes for the candidate, in the view of a node that is clean for it.

        In other views that contain the candidate contenders count too. The number only grows from a candidate
        to its anchor, and from a view to a larger one.
        """
        later = ((view | self._tops) - candidate.past) & self._tops
        is_last = not later >> (candidate.lane + LANE_BITS - 1) & 1
        return later.bit_count() + is_last

    def is_clean(self, view: int, candidate: Node) -> bool:
        """Whether a node with this view is clean for the candidate."""
        later = ((view | self._tops) - candidate.past) & self._tops
        if later & ~candidate.examined:
            self._examine(candidate, later)
        return not later & candidate.contenders and self.sees(view, candidate)

    def is_possible(self, view: int, candidate: Node) -> bool:
        """Whether the candidate is possible for a view, which contains it."""
        raised = view | self._tops
        later = (raised - candidate.past) & self._tops
        if later & ~candidate.examined:
            self._examine(candidate, later)
        if not later & candidate.contenders:
            return True
        unable_count = ((raised - candidate.unable) & self._tops).bit_count()
        if unable_count > self.spare:
            return False
        unsure = (raised - candidate.fine) & self._tops
        if unable_count + unsure.bit_count() <= self.spare:
            return True
        for indexer in _indexers(unsure):
            count = (view >> (indexer * LANE_BITS)) & _LANE
            if not self._can_witness(indexer, count, candidate):
                unable_count += 1
                if unable_count > self.spare:
                    return False
        return True

    def _examine(self, candidate: Node, later: int) -> None:
        """Find the contenders of a candidate among indexers with nodes that are not before it.

        An indexer's first such node comes after the candidate, and so do all that follow, or it is a
        contender. The author of a contender wrote it before it saw the candidate, so it has no witness.
        """
        new = later & ~candidate.examined
        candidate.examined |= new
        for indexer in _indexers(new):
            lane = indexer * LANE_BITS
            before = (candidate.seen >> lane) & _LANE
            if not self.sees(self.chains[indexer][before].seen, candidate):
                candidate.contenders |= _TOP << lane
                self._exclude(candidate, lane, before)

    def _can_witness(self, indexer: int, count: int, candidate: Node) -> bool:
        """Whether an indexer, of which a view has `count` nodes, has a witness there or can write one."""
        chain, lane = self.chains[indexer], indexer * LANE_BITS
        fine = ((candidate.fine >> lane) & _LANE) - 1  # nodes before this index are clean
        low, high = fine, count
        while (
            low < high
        ):  # find the first node that is not clean; most often it is the last, or no node
            middle = high - 1 if high == count else (low + high) // 2
            if self.is_clean(chain[middle].seen, candidate):
                low = middle + 1
            else:
                high = middle
        first = (candidate.seen >> lane) & _LANE
        last_clean = chain[low - 1] if low > first else candidate
        has_witness = (
            last_clean.indexer == indexer
            and self.votes(last_clean.seen, candidate) >= self.majority
        )
        if has_witness:
            candidate.fine += (_TOP - 1 - fine) << lane
        elif low == count:
            candidate.fine += (count - fine) << lane
        else:
            self._exclude(candidate, lane, low)
            return False
        return True

    def _exclude(self, candidate: Node, lane: int, index: int) -> None:
        """Note that the node with this index shows that its author cannot be a witness."""
        candidate.fine += (_TOP << lane) - (candidate.fine & (_LANE << lane))
        candidate.unable -= (_TOP - index - 1) << lane

    # --- candidates ----------------------------------------------------------------------------

    def highest_possible(self, parents: Sequence[Node], view: int) -> tuple[Node, ...]:
        """The highest candidates that are possible for a view, which is the union of the parents' views.

        A candidate that is possible for a view is possible for each part that contains it. So it is not
        above all tops of that part, and what an earlier parent's view contains needs no second search.
        """
        for parent in parents:
            if parent.seen == view:
                return parent.tops
        covered = 0
        possible: list[Node] = []
        for parent in sorted(parents, key=_depth) if len(parents) > 1 else parents:
            for top in parent.tops:
                candidate, steps = top, 0
                # The ground, with index -1, is in every view.
                while (covered >> candidate.lane) & _LANE <= candidate.index:
                    if self.is_possible(view, candidate):
                        if candidate not in possible:
                            possible.append(candidate)
                        break
                    steps += 1
                    if steps < STEPS_MAX:
                        candidate = candidate.anchor
                    else:
                        candidate = self._below_contenders(view, candidate)
            covered = self.join(covered, parent.seen) if covered else parent.seen
        if len(possible) > 1:
            return tuple(
                each
                for each in possible
                if not any(other is not each and self.sees(other.seen, each) for other in possible)
            )
        return tuple(possible) or self.ground.tops

    def _below_contenders(self, view: int, candidate: Node) -> Node:
        """The next candidate below one that is not possible that can be possible.

        The contenders of a candidate are contenders of each candidate below it that they do not see.
        """
        later = ((view | self._tops) - candidate.past) & self._tops
        contenders = [
            self.chains[indexer][(candidate.seen >> (indexer * LANE_BITS)) & _LANE].seen
            for indexer in _indexers(later & candidate.contenders)
        ]
        return highest(
            candidate.anchor,
            lambda lower: sum(not self.sees(each, lower) for each in contenders) <= self.spare,
        )

    def confirmed_by(self, node: Node) -> Node | None:
        """Note of which candidates an indexer's node is a witness; returns the highest that is confirmed.

        The indexer's node before this one has been here. If that one knew a majority of votes for a candidate, it
        was a witness, or it was not clean and no later node is.
        """
        chain, majority, view = self.chains[node.indexer], self.majority, node.seen
        before = chain[node.index - 1].seen if node.index else 0
        bit = 1 << node.indexer
        for top in node.tops:
            candidate = highest(
                top, lambda each: each.is_settled or self.votes(view, each) >= majority
            )
            while not candidate.is_settled:
                if self.sees(before, candidate) and self.votes(before, candidate) >= majority:
                    break
                if self.is_clean(view, candidate):
                    candidate.witnesses |= bit
                    if candidate.witnesses.bit_count() >= majority:
                        return candidate  # nothing below it needs witnesses of its own
                candidate = candidate.anchor
        return None


def highest(candidate: Node, is_wanted: Callable[[Node], bool]) -> Node:
    """The highest of a candidate and those below it that is wanted; then all below it are, and the ground is."""
    while not is_wanted(candidate):
        candidate = candidate.anchor if is_wanted(candidate.jump) else candidate.jump
    return candidate


def meet(candidates: Sequence[Node]) -> Node:
    """The highest candidate that is each of these, or below it by anchors."""
    one = candidates[0]
    for other in candidates[1:]:
        while one is not other:
            if one.depth < other.depth:
                one, other = other, one
            if one.depth > other.depth:
                one = one.jump if one.jump.depth >= other.depth else one.anchor
            elif one.jump is not other.jump:
                one, other = one.jump, other.jump  # of equal depth too
            else:
                one, other = one.anchor, other.anchor
    return one


def _depth(node: Node) -> int:
    return node.tops[0].depth


def _indexers(top_bits: int) -> Iterator[int]:
    while top_bits:
        low = top_bits & -top_bits
        yield low.bit_length() // LANE_BITS - 1
        top_bits ^= low
