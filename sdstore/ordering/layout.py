"""The order of a channel as a list: a fixed part up to the last candidate, then two loose parts.

- The *fixed part* is the order up to the highest candidate of the order, rule 2 of `order`: a list that grows and is
  cut at its end.
- The *named part* has the other messages of indexers in topological order; of several messages that could be
  next, the one with the smallest key is. A message is inserted after its causes, before the first message with a
  greater key. Each is preceded by the messages that it names and that no message before it names.
- The *unnamed part* has the messages that no indexer names yet, in the same order by their own references.

The loose parts can be long (nobody confirms, or no indexer refers to some writers), so each is
a list of blocks: each operation looks into few blocks, and at one number of each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Any, TypeVar

from sdstore.ordering.graph import Item, Key, Leaf, Node

BLOCK_NODES = 128
"""A block is split when it has twice as many: about the square root of a tail of 10^5 messages."""
SORT_FACTOR = 16
"""The named part is sorted as a whole if it has at most so many times the messages that move."""

_K = TypeVar("_K", Node, Leaf)
Sorted = Node | Leaf
"""What a loose part sorts: nodes in the named part, leaves in the unnamed one."""


class _Block:
    """Successive nodes of a loose part, and the number of messages that they are with the leaves they own."""

    __slots__ = ("count", "greatest", "nodes", "number")

    def __init__(self, nodes: list[Any]) -> None:
        self.nodes: list[Any] = nodes
        self.number = 0
        self.count = len(nodes)
        self.greatest: Key = max([node.key for node in nodes])
        for node in nodes:
            node.home = self
            if node.owned:
                self.count += node.owned


class Loose:
    """A loose part."""

    def __init__(self, nodes: Sequence[Node] = ()) -> None:
        """`nodes` are in order, and own no leaves."""
        for node in nodes:
            if node.leaves:
                node.owned = 0
                for leaf in node.leaves:
                    if leaf.place < 0 and leaf.owner is None:
                        leaf.owner = node
                        node.owned += 1
        self._blocks = [
            _Block(list(nodes[start : start + BLOCK_NODES]))
            for start in range(0, len(nodes), BLOCK_NODES)
        ]
        self.count = sum([block.count for block in self._blocks])
        """The number of messages."""
        self._ends: list[int] = []
        """The numbers of messages up to the ends of the first blocks, as far as they are computed."""
        self._renumber(0)

    def __len__(self) -> int:
        """The number of messages."""
        return self.count

    def nodes(self) -> Iterator[Any]:
        """What it sorts, without the leaves that they own."""
        return chain.from_iterable(block.nodes for block in self._blocks)

    def __iter__(self) -> Iterator[Any]:
        for block in self._blocks:
            if block.count == len(block.nodes):
                yield from block.nodes
            else:
                for node in block.nodes:
                    yield from with_leaves(node)

    def slice(self, start: int, stop: int) -> list[Any]:
        """The messages with these ranks."""
        found: list[Any] = []
        for block in self._blocks:
            if stop <= 0:
                break
            count = block.count
            if start < count:
                nodes = block.nodes
                if count != len(nodes):
                    nodes = [each for node in nodes for each in with_leaves(node)]
                found += nodes[max(start, 0) : stop]
            start, stop = start - count, stop - count
        return found

    def rank(self, node: Sorted) -> int:
        """How many messages come before this one and the leaves that it owns."""
        block: _Block = node.home
        ends = self._ends
        while len(ends) < block.number:
            ends.append((ends[-1] if ends else 0) + self._blocks[len(ends)].count)
        at = block.nodes.index(node)
        if block.count != len(block.nodes):
            at += sum([each.owned for each in block.nodes[:at]])
        return (ends[block.number - 1] if block.number else 0) + at

    def insert(self, node: Sorted) -> None:
        """Insert a node that no node here comes after."""
        block, at = self._find(node)
        if block is None:
            self._blocks.append(_Block([node]))
            self._renumber(len(self._blocks) - 1)
        else:
            self._put(node, block, at)
        self.count += 1
        if node.leaves:
            self._attach(node)

    def remove(self, node: Sorted) -> None:
        """Remove a node; the leaves that it owns go to the next node that names them."""
        owned = [leaf for leaf in node.leaves if leaf.owner is node]
        for leaf in owned:
            self.disown(leaf)
        self._take(node)
        self.count -= 1
        for leaf in owned:
            self.own(leaf)

    def advance(self, node: Sorted) -> bool:
        """Move a node to an earlier place if its causes allow it by now; returns whether it moved."""
        block, at = self._find(node)
        if block is None or block.nodes[at] is node:
            return False
        self._take(node)
        self._put(node, block, at)
        if node.leaves:
            self._attach(node)
        return True

    def own(self, leaf: Leaf) -> None:
        """Give a leaf without a place to the first node here that names it."""
        for namer in leaf.namers:
            if namer.home is not None:
                self._offer(leaf, namer)

    def disown(self, leaf: Leaf) -> None:
        """Take a leaf from its owner."""
        if leaf.owner is not None:
            self._add_owned(leaf.owner, -1)
            leaf.owner = None

    def _attach(self, node: Sorted) -> None:
        """Give a node the leaves that it names and that no node before it names."""
        for leaf in node.leaves:
            if leaf.place < 0 and leaf.owner is not node:
                self._offer(leaf, node)

    def _offer(self, leaf: Leaf, namer: Any) -> None:
        if leaf.owner is None or _is_before(namer, leaf.owner):
            self.disown(leaf)
            leaf.owner = namer
            self._add_owned(namer, 1)

    def _add_owned(self, node: Node, count: int) -> None:
        block: _Block = node.home
        node.owned += count
        block.count += count
        self.count += count
        del self._ends[block.number :]

    def _find(self, node: Sorted) -> tuple[_Block | None, int]:
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

    def _put(self, node: Sorted, block: _Block, at: int) -> None:
        block.nodes.insert(at, node)
        block.count += 1 + node.owned
        node.home = block
        del self._ends[block.number :]
        if node.key > block.greatest:
            block.greatest = node.key
        if len(block.nodes) >= 2 * BLOCK_NODES:
            upper = _Block(block.nodes[BLOCK_NODES:])
            del block.nodes[BLOCK_NODES:]
            block.count -= upper.count
            block.greatest = max([each.key for each in block.nodes])
            self._blocks.insert(block.number + 1, upper)
            self._renumber(block.number + 1)

    def _take(self, node: Sorted) -> None:
        block: _Block = node.home
        node.home = None
        block.nodes.remove(node)
        block.count -= 1 + node.owned
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


def with_leaves(node: Any) -> Iterator[Any]:
    """A node of a loose part after the leaves that it owns."""
    if node.owned:
        for leaf in node.leaves:
            if leaf.owner is node:
                yield leaf
    yield node


def _is_before(one: Sorted, other: Sorted) -> bool:
    if one.home is other.home:
        nodes = one.home.nodes
        return bool(nodes.index(one) < nodes.index(other))
    return bool(one.home.number < other.home.number)


class Layout:
    """The order: fixed part, named part, unnamed part."""

    def __init__(self, ground: Node, base: Iterable[Item] = ()) -> None:
        """`base`: messages that everything else comes after, in order."""
        self.fixed: list[Any] = list(base)
        for place, item in enumerate(self.fixed):
            item.place = place
        ground.place = len(self.fixed) - 1
        self.top = ground
        self._named = Loose()
        self._unnamed = Loose()

    def __len__(self) -> int:
        return len(self.fixed) + self._named.count + self._unnamed.count

    def page(self, start: int, stop: int) -> list[Any]:
        """The messages with these places."""
        found: list[Any] = []
        fixed_count, named_count = len(self.fixed), len(self._named)
        if start < fixed_count:
            found = self.fixed[start:stop]
        if stop > fixed_count:
            start, stop = max(start - fixed_count, 0), stop - fixed_count
            if start < named_count:
                found += self._named.slice(start, stop)
            if stop > named_count:
                found += self._unnamed.slice(max(start - named_count, 0), stop - named_count)
        return found

    def first_node(self, start: int) -> Node | None:
        """The first message of an indexer at or after a place before which all is settled."""
        fixed = (self.fixed[at] for at in range(start, len(self.fixed)))
        return next(
            (each for each in chain(fixed, self._named.nodes()) if isinstance(each, Node)), None
        )

    def place_unnamed(self, leaf: Leaf) -> int:
        """Add a message that no indexer names; returns its place."""
        for parent in leaf.parents:
            if parent.home is not None:
                if parent.children is None:
                    parent.children = []
                parent.children.append(leaf)
        self._unnamed.insert(leaf)
        return len(self.fixed) + len(self._named) + self._unnamed.rank(leaf)

    def place(self, node: Node | None, top: Node) -> int:
        """Add a node and the leaves that it names; the fixed part then ends with the candidate `top`.

        Returns the first place that has another message than before.
        """
        if node is not None:
            _register(node)
        climb: list[Node] = []
        while not top.is_on_chain:
            climb.append(top)
            top = top.anchor
        if node is not None and top is self.top:
            if not climb:
                return self._insert(node)
            if climb == [node] and not self._named:
                return self._append(node)
        return self._rearrange(node, top, climb)

    def settle(self, candidate: Node, start: int) -> list[Any]:
        """Settle the messages from the place `start` to a candidate of the fixed part."""
        settled = self.fixed[start : candidate.place + 1]
        for item in settled:
            item.is_settled = True
            item.children = None
            if isinstance(item, Leaf):
                item.namers = []
        return settled

    def _append(self, candidate: Node) -> int:
        start = len(self.fixed)
        before = self._unnamed.slice(0, len(candidate.leaves)) if candidate.leaves else ()
        self._fix(candidate)
        candidate.is_on_chain = True
        self.top = candidate
        if candidate.leaves:
            self._leave_unnamed(candidate.leaves)
            return start + _same_count(before, self.fixed[start:])
        return start

    def _fix(self, node: Node) -> None:
        """Append a node to the fixed part, after the leaves that it names and that have no place."""
        fixed = self.fixed
        for leaf in node.leaves:
            if leaf.place < 0:
                self._named.disown(leaf)
                leaf.place = len(fixed)
                fixed.append(leaf)
        node.place = len(fixed)
        fixed.append(node)

    def _insert(self, node: Node) -> int:
        named, leaves = self._named, node.leaves
        before = self._unnamed.slice(0, len(leaves)) if leaves else ()
        named.insert(node)
        rank = named.rank(node)
        place = len(self.fixed) + rank
        if leaves:
            self._leave_unnamed(leaves)
            if rank + 1 + node.owned == len(named):
                place += _same_count(before, with_leaves(node))
        return place

    def _leave_unnamed(self, leaves: Iterable[Leaf]) -> None:
        """Take leaves that are named by now out of the unnamed part."""
        left = [leaf for leaf in leaves if leaf.home is not None]
        for leaf in left:
            self._unnamed.remove(leaf)
        for _ in _advance(self._unnamed, left):
            pass

    def _rearrange(self, node: Node | None, top: Node, climb: Sequence[Node]) -> int:
        """Cut the fixed part after `top`, and append the order up to the candidates of `climb`, highest first."""
        fixed, named = self.fixed, self._named
        start = top.place + 1
        cut = fixed[start:]
        del fixed[start:]
        for item in cut:
            item.place = -1
            if isinstance(item, Node):
                item.is_on_chain = False
        self.top = top
        new: list[Node] = []
        for candidate in reversed(climb):
            unfixed = in_topological_order(_unfixed(candidate))
            for each in unfixed:
                each.place = start  # until it is fixed
            new += unfixed
            candidate.is_on_chain = True
            self.top = candidate
        taken = [each for each in new if each.home is not None]
        if len(named) > SORT_FACTOR * (len(cut) + 1 + len(taken)):
            changed = self._move(node, cut, new, taken)
        else:
            changed = self._sort(node, cut, new)
        if node is not None and node.leaves:
            self._leave_unnamed(node.leaves)
        return changed

    def _sort(self, node: Node | None, cut: Sequence[Item], new: Sequence[Node]) -> int:
        """Fix the nodes of `new`, and sort the named part as a whole."""
        start = len(self.fixed)
        before = [*cut, *self._named]
        count = len(before)
        nodes = [item for item in before if isinstance(item, Node)]
        if node is not None:
            nodes.append(node)
            if node.leaves:
                before += self._unnamed.slice(0, len(node.leaves))
        for each in nodes:
            each.home = None
            if each.leaves:
                each.owned = 0
                for leaf in each.leaves:
                    leaf.owner = None
        for each in new:
            self._fix(each)
        rest = [each for each in nodes if each.place < 0]
        self._named = Loose(in_topological_order(dict.fromkeys(rest)))
        same = _same_count(before, chain(self.fixed[start:], self._named))
        return start + (same if node is not None else min(same, count))

    def _move(
        self, node: Node | None, cut: Sequence[Item], new: Sequence[Node], taken: Sequence[Node]
    ) -> int:
        """As `_sort`, where few nodes of a long named part are concerned."""
        fixed, named = self.fixed, self._named
        start = len(fixed)
        changed = len(self) + len(cut)
        left = _unplaced(cut, Node)
        after = _named_after(left)
        ranks = {each: named.rank(each) for each in chain(taken, after)}
        after.sort(key=ranks.__getitem__)
        before: dict[Any, int] = {item: start + at for at, item in enumerate(cut)}
        for each, rank in ranks.items():
            for at, item in enumerate(with_leaves(each)):
                before[item] = start + len(cut) + rank + at
        for each in ranks:
            named.remove(each)
        for each in new:
            self._fix(each)
        advanced = list(_advance(named, taken))
        fresh = [] if node is None or node.place >= 0 else [node]
        for each in chain(left, after, fresh):
            named.insert(each)
        for leaf in _unplaced(cut, Leaf):
            named.own(leaf)
        # The first difference is where a message is or was that has another place now.
        places = {item: start + at for at, item in enumerate(fixed[start:])}
        for each in chain(left, after, fresh):
            place = len(fixed) + named.rank(each)
            places.update((item, place + at) for at, item in enumerate(with_leaves(each)))
        moved = [len(fixed) + named.rank(each) for each in advanced]
        for item in before.keys() | places.keys():
            was, place = before.get(item, changed), places.get(item, changed)
            if was != place:
                moved.append(min(was, place))
        return min(moved, default=changed)


def _unplaced(items: Iterable[Item], kind: type[_K]) -> list[_K]:
    return [item for item in items if isinstance(item, kind) and item.place < 0]


def _register(node: Node) -> None:
    for parent in node.parents:
        if not parent.is_settled:
            if parent.children is None:
                parent.children = []
            parent.children.append(node)
    for leaf in node.leaves:
        if not leaf.is_settled:
            leaf.namers.append(node)


def _advance(loose: Loose, removed: Iterable[Sorted]) -> Iterator[Any]:
    """Move nodes of a loose part that waited for those removed; gives those that moved.

    Moving a node changes no place of an earlier one, and only later ones can move because of it.
    """
    open_: list[tuple[int, Key, Any]] = []
    known: set[Any] = set()
    moved: Iterable[Any] = removed
    while True:
        for node in moved:
            for child in node.children or ():
                if child.home is not None and child not in known:
                    known.add(child)
                    heappush(open_, (loose.rank(child), child.key, child))
        if not open_:
            return
        _, _, node = heappop(open_)
        moved = ()
        if loose.advance(node):
            yield node
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


def _named_after(nodes: Iterable[Node]) -> list[Node]:
    """The nodes of the named part that come after one of these."""
    found: dict[Node, None] = {}
    open_ = list(nodes)
    while open_:
        for child in open_.pop().children or ():
            if child.home is not None and child not in found:
                found[child] = None
                open_.append(child)
    return list(found)


def _same_count(before: Sequence[Item], after: Iterable[Item]) -> int:
    """How many messages two orders have in common at their start."""
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
