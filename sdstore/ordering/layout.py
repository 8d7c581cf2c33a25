"""The order of a channel as a list: a fixed part up to the last candidate, then a loose part.

- The *fixed part* is the order up to the highest candidate of the order, rule 2 of `order`: a list that grows and is
  cut at its end.
- The *loose part* is all that comes after it in topological order; of several messages that could be
  next, the one with the smallest key is. A message is inserted after its causes, before the first message with a
  greater key. The loose part can be long (nobody confirms, or no indexer refers to some writers), so it is
  a list of blocks: each operation looks into few blocks, and at one number of each other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain

from sdstore.ordering.graph import Key, Node

BLOCK_NODES = 128
"""A block is split when it has twice as many: about the square root of a tail of 10^5 messages."""
SORT_FACTOR = 16
"""The loose part is sorted as a whole if it has at most so many times the messages that move."""


class _Block:
    """Successive nodes of the loose part."""

    __slots__ = ("greatest", "nodes", "number")

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        self.number = 0
        self.greatest: Key = max(node.key for node in nodes)
        for node in nodes:
            node.home = self


class Loose:
    """The loose part."""

    def __init__(self, nodes: Sequence[Node] = ()) -> None:
        """`nodes` are in order."""
        self._blocks = [
            _Block(list(nodes[start : start + BLOCK_NODES]))
            for start in range(0, len(nodes), BLOCK_NODES)
        ]
        self._count = len(nodes)
        self._ends: list[int] = []
        """The numbers of nodes up to the ends of the first blocks, as far as they are computed."""
        self._renumber(0)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Node]:
        return chain.from_iterable(block.nodes for block in self._blocks)

    def slice(self, start: int, stop: int) -> list[Node]:
        """The nodes with these ranks."""
        found: list[Node] = []
        for block in self._blocks:
            count = len(block.nodes)
            if start < count and stop > 0:
                found += block.nodes[max(start, 0) : stop]
            start, stop = start - count, stop - count
        return found

    def rank(self, node: Node) -> int:
        """How many nodes come before this one."""
        block: _Block = node.home
        ends = self._ends
        while len(ends) < block.number:
            ends.append((ends[-1] if ends else 0) + len(self._blocks[len(ends)].nodes))
        return (ends[block.number - 1] if block.number else 0) + block.nodes.index(node)

    def insert(self, node: Node) -> None:
        """Insert a node that no node here comes after."""
        block, at = self._find(node)
        if block is None:
            self._blocks.append(_Block([node]))
            self._renumber(len(self._blocks) - 1)
        else:
            self._put(node, block, at)
        self._count += 1

    def remove(self, node: Node) -> None:
        """Remove a node."""
        self._take(node)
        self._count -= 1

    def advance(self, node: Node) -> bool:
        """Move a node to an earlier place if its causes allow it by now; returns whether it moved."""
        block, at = self._find(node)
        if block is None or block.nodes[at] is node:
            return False
        self._take(node)
        self._put(node, block, at)
        return True

    def _find(self, node: Node) -> tuple[_Block | None, int]:
        """The place after the causes of a node, before the first node whose key is not smaller."""
        blocks, key = self._blocks, node.key
        if not blocks:
            return None, 0
        number = at = 0
        homes = [parent for parent in node.parents if parent.home is not None]
        if homes:
            number = max([parent.home.number for parent in homes])
            nodes = blocks[number].nodes
            at = 1 + max([nodes.index(each) for each in homes if each.home.number == number])
        while True:
            block = blocks[number]
            if block.greatest >= key:
                for place in range(at, len(block.nodes)):
                    if block.nodes[place].key >= key:
                        return block, place
            number += 1
            if number == len(blocks):
                return block, len(block.nodes)
            at = 0

    def _put(self, node: Node, block: _Block, at: int) -> None:
        block.nodes.insert(at, node)
        node.home = block
        del self._ends[block.number :]
        if node.key > block.greatest:
            block.greatest = node.key
        if len(block.nodes) >= 2 * BLOCK_NODES:
            upper = _Block(block.nodes[BLOCK_NODES:])
            del block.nodes[BLOCK_NODES:]
            block.greatest = max([each.key for each in block.nodes])
            self._blocks.insert(block.number + 1, upper)
            self._renumber(block.number + 1)

    def _take(self, node: Node) -> None:
        block: _Block = node.home
        node.home = None
        block.nodes.remove(node)
        del self._ends[block.number :]
        if not block.nodes:
            del self._blocks[block.number]
            self._renumber(block.number)
        elif node.key == block.greatest:
            block.greatest = max([each.key for each in block.nodes])

    def _renumber(self, start: int) -> None:
        del self._ends[start:]
        for number in range(start, len(self._blocks)):
            self._blocks[number].number = number


class Layout:
    """The order: fixed part, loose part."""

    def __init__(self, ground: Node, base: Iterable[Node] = ()) -> None:
        """`base`: nodes that everything else comes after, in order."""
        self.fixed = list(base)
        for place, node in enumerate(self.fixed):
            node.place = place
        ground.place = len(self.fixed) - 1
        self.top = ground
        self._loose = Loose()

    def __len__(self) -> int:
        return len(self.fixed) + len(self._loose)

    def page(self, start: int, stop: int) -> list[Node]:
        """The nodes with these places."""
        fixed_count = len(self.fixed)
        if stop <= fixed_count:
            return self.fixed[start:stop]
        loose = self._loose.slice(max(start - fixed_count, 0), stop - fixed_count)
        return self.fixed[start:] + loose

    def unplaced(self, node: Node) -> list[Node]:
        """The node and the nodes before it that are not in the order, causes first."""
        found, open_ = {node: None}, [node]
        while open_:
            for parent in open_.pop().parents:
                if parent.place < 0 and parent.home is None and parent not in found:
                    found[parent] = None
                    open_.append(parent)
        return in_topological_order(found)

    def place(self, fresh: Sequence[Node], top: Node) -> int:
        """Add nodes, causes first; the fixed part then ends with the candidate `top`.

        Returns the first place that has another node than before.
        """
        for node in fresh:
            for parent in node.parents:
                if not parent.is_settled:
                    if parent.children is None:
                        parent.children = []
                    parent.children.append(node)
        climb: list[Node] = []
        while not top.is_on_chain:
            climb.append(top)
            top = top.anchor
        if top is self.top and not self._loose and len(fresh) == 1 and climb == [fresh[0]]:
            self._append(fresh[0])
            return len(self.fixed) - 1
        if top is self.top and not climb:
            return min([self._insert(node) for node in fresh])
        return self._rearrange(fresh, top, climb)

    def settle(self, candidate: Node, start: int) -> list[Node]:
        """Settle the nodes from the place `start` to a candidate of the fixed part."""
        settled = self.fixed[start : candidate.place + 1]
        for node in settled:
            node.is_settled = True
            node.children = None
        return settled

    def _append(self, candidate: Node) -> None:
        candidate.place = len(self.fixed)
        self.fixed.append(candidate)
        candidate.is_on_chain = True
        self.top = candidate

    def _insert(self, node: Node) -> int:
        self._loose.insert(node)
        return len(self.fixed) + self._loose.rank(node)

    def _rearrange(self, fresh: Sequence[Node], top: Node, climb: Sequence[Node]) -> int:
        """Cut the fixed part after `top`, and append the order up to the candidates of `climb`, highest first."""
        fixed, loose = self.fixed, self._loose
        start = top.place + 1
        cut = fixed[start:]
        del fixed[start:]
        for node in cut:
            node.place = -1
            node.is_on_chain = False
        self.top = top
        for candidate in reversed(climb):
            for node in in_topological_order(_unfixed(candidate)):
                node.place = len(fixed)
                fixed.append(node)
            candidate.is_on_chain = True
            self.top = candidate
        new_end = fixed[start:]
        taken = [node for node in new_end if node.home is not None]
        if len(loose) > SORT_FACTOR * (len(cut) + len(fresh) + len(taken)):
            return self._move(cut, taken, fresh)
        before = cut + list(loose)
        for node in taken:
            node.home = None
        rest = [node for node in chain(before, fresh) if node.place < 0]
        self._loose = Loose(in_topological_order(dict.fromkeys(rest)))
        return start + _same_count(before, chain(new_end, self._loose))

    def _move(self, cut: Sequence[Node], taken: Sequence[Node], fresh: Sequence[Node]) -> int:
        """Move nodes between the parts, where few nodes of a long loose part are concerned.

        `cut` were the last ones of the fixed part, `taken` are in the fixed part by now.
        """
        fixed, loose = self.fixed, self._loose
        loose_count = len(loose)
        left = [node for node in cut if node.place < 0]
        after = _loose_after(left)
        ranks = {node: loose.rank(node) for node in chain(taken, after)}
        after.sort(key=ranks.__getitem__)
        for node in ranks:
            loose.remove(node)
        gaps = [rank - at for at, rank in enumerate(sorted(ranks.values()))]
        for node, rank in self._advance(taken):
            ranks[node] = rank + bisect_right(gaps, rank)
        for node in chain(left, after, fresh):
            if node.place < 0:
                loose.insert(node)
        # The first difference is where a node is or was that has another place now.
        changed = end = len(self) - len(fresh)
        before = {node: rank + end - loose_count for node, rank in ranks.items()}
        before.update(zip(cut, range(end - loose_count - len(cut), end), strict=False))
        for node in chain(before, fresh):
            place = node.place if node.place >= 0 else len(fixed) + loose.rank(node)
            if place != before.get(node):
                changed = min(changed, place, before.get(node, place))
        return changed

    def _advance(self, removed: Iterable[Node]) -> Iterator[tuple[Node, int]]:
        """Move nodes of the loose part that waited for those removed; gives each and its rank before.

        Moving a node changes no rank of a later one, and only later ones can move because of it.
        """
        loose = self._loose
        open_: list[tuple[int, Key, Node]] = []
        known: set[Node] = set()
        moved: Iterable[Node] = removed
        while True:
            for node in moved:
                for child in node.children or ():
                    if child.home is not None and child not in known:
                        known.add(child)
                        heappush(open_, (loose.rank(child), child.key, child))
            if not open_:
                return
            rank, _, node = heappop(open_)
            moved = ()
            if loose.advance(node):
                yield node, rank
                moved = (node,)


def _unfixed(candidate: Node) -> dict[Node, None]:
    """A candidate and the nodes before it that are not in the fixed part."""
    found, open_ = {candidate: None}, [candidate]
    while open_:
        for parent in open_.pop().parents:
            if parent.place < 0 and parent not in found:
                found[parent] = None
                open_.append(parent)
    return found


def _loose_after(nodes: Iterable[Node]) -> list[Node]:
    """The nodes of the loose part that come after one of these."""
    found: dict[Node, None] = {}
    open_ = list(nodes)
    while open_:
        for child in open_.pop().children or ():
            if child.home is not None and child not in found:
                found[child] = None
                open_.append(child)
    return list(found)


def _same_count(before: Sequence[Node], after: Iterable[Node]) -> int:
    """How many nodes two orders have in common at their start; `after` is the longer one."""
    for count, (one, other) in enumerate(zip(before, after, strict=False)):
        if one is not other:
            return count
    return len(before)


def in_topological_order(nodes: dict[Node, None]) -> list[Node]:
    """Causes first; of several nodes that could be next, the one with the smallest key."""
    if len(nodes) == 1:
        return list(nodes)
    waits: dict[Node, int] = {}
    children: dict[Node, list[Node]] = {}
    for node in nodes:
        count = 0
        for parent in node.parents:
            if parent in nodes:
                count += 1
                children.setdefault(parent, []).append(node)
        waits[node] = count
    ready = [(node.key, node) for node, count in waits.items() if not count]
    heapify(ready)
    in_order: list[Node] = []
    while ready:
        _, node = heappop(ready)
        in_order.append(node)
        for child in children.get(node, ()):
            waits[child] -= 1
            if not waits[child]:
                heappush(ready, (child.key, child))
    return in_order
