"""The order of a channel: a confirmed prefix that never changes, and a tentative tail.

Source: the design document of Autobase (Holepunch), "eventual consistent ordering of a distributed set
of messages from multiple writers". docs/ordering.md explains it with graphs.

The rules, in the terms of `graph`:

1. Anchors. Each node has at most one anchor: the highest candidate before it that is possible for it.
   If two such candidates exist and neither is before the other, the node has no anchor and is not a
   candidate: its view cannot tell which of the two somebody else has confirmed.
2. Order of a view up to a candidate c: the order up to c's anchor, then all other nodes before c, then
   c. Nodes between two anchors are in topological order; of several that could be next, the one with
   the smallest key (sender ID, message ID, as UTF-8 bytes) is. The order depends on the view of c alone.
3. Confirmation. c is confirmed in a view that contains witnesses of c by a majority of indexers, which
   is the document's double quorum: a majority that knows of a majority, and of no contender.
4. The order of a view: the order up to its highest possible candidate, as if a node referred to all
   its heads; then the rest. What is after the confirmed candidate is tentative.

Why a confirmed prefix never changes. Two contenders cannot both be confirmed: the votes that their
witnesses know would have an indexer in common, and the later of its two votes would not be clean. If c
is confirmed anywhere, it is possible for every candidate c' after it, because a majority has or can
have witnesses. So c or a candidate after c is the anchor of c', and by induction the order up to c' begins
with the order up to c. This is the worst-case assumption of the document: each candidate is
ordered as if everything that may be confirmed elsewhere is.

Preconditions: senders are authentic; an indexer refers to its own previous message in each message; all
use one set of indexers; an indexer never writes two messages after the same one. Majorities are not
Byzantine quorums: a lying indexer can break the promise. A breach that is seen is reported, and
nothing more is confirmed after it.

Progress. The prefix grows while a majority of indexers exchange messages and there are moments in which
a majority refers to one node before it sees a contender. No deterministic rule can promise more in an
asynchronous network (Fischer, Lynch, Paterson 1985).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from heapq import heapify, heappop, heappush

from sdstore.ordering.graph import LANE_BITS, Graph, Node

WAITING_MAX = 100_000
"""Messages that wait for causes: some 60 MB. Beyond it a message is refused with an error."""


class OrderingError(ValueError):
    """Misuse of `Ordering`; `code` is stable."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code = code
        self.detail = detail


class BreachKind(StrEnum):
    """How a precondition is broken."""

    NO_INDEXERS = "no_indexers"
    FORK = "fork"
    VARIANT = "variant"
    """Another message has the same ID. `Ordering` takes the first; its owner notes the others."""


@dataclass(frozen=True, slots=True)
class Breach:
    """A broken precondition. `detail` is for people."""

    kind: BreachKind
    sender_id: str = ""
    message_id: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """The effect of adding a message.

    `confirmed`: messages that joined the confirmed prefix, in order. `rewound`: how many of the last
    messages of the order, as it was, have to be taken back; 0 if the order only grew at its end.
    `placed`: messages that are new in the order.
    """

    confirmed: tuple[str, ...] = ()
    rewound: int = 0
    placed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The roles of the writers. A writer that is not named is a non-indexing writer.

    References of `indexers` count towards quorums. A message of a `relayed` writer is part of the order
    once a message of another writer refers to it.
    """

    indexers: Sequence[str] = ()
    relayed: frozenset[str] = field(default_factory=frozenset)


Waiting = tuple[str, str, tuple[str, ...]]  # message ID, sender ID, IDs of the causes


class Ordering:
    """The order of one channel as messages arrive, causes first or not. See the module."""

    def __init__(self, roles: Roles) -> None:
        """Raises `OrderingError` (`invalid_indexers`) if an indexer is named twice or has no ID."""
        if len(set(roles.indexers)) != len(roles.indexers) or "" in roles.indexers:
            raise OrderingError("invalid_indexers", "each indexer is named once, and has an ID")
        if relayed := roles.relayed.intersection(roles.indexers):
            raise OrderingError("invalid_indexers", f"{min(relayed)!r} is indexing and relayed")
        self.roles = roles
        self.breaches: list[Breach] = []
        if not roles.indexers:
            self.breaches.append(Breach(BreachKind.NO_INDEXERS, detail="no indexers are named"))
        self._numbers = {sender: i for i, sender in enumerate(sorted(roles.indexers))}
        self._graph = Graph(len(roles.indexers))
        self._nodes: dict[str, Node] = {}
        self._waiting: dict[str, Waiting] = {}
        self._waits: dict[str, list[str]] = {}  # a missing cause, and the messages that wait for it
        self._order: list[Node] = []
        self._confirmed_count = 0
        self._heads: dict[Node, None] = {}
        self._chain: dict[Node, int] = {}
        """Candidates from the confirmed one to the highest possible one; where the order up to each ends."""
        self._confirmed_candidate: Node | None = None
        self._to_confirm: Node | None = None
        self._base_count = 0

    # --- the answer ----------------------------------------------------------------------------

    @property
    def confirmed(self) -> list[str]:
        """The confirmed prefix."""
        return [node.message_id for node in self._order[: self._confirmed_count]]

    @property
    def tail(self) -> list[str]:
        """The tentative tail."""
        return [node.message_id for node in self._order[self._confirmed_count :]]

    @property
    def confirmed_count(self) -> int:
        """The length of the confirmed prefix."""
        return self._confirmed_count

    def __len__(self) -> int:
        """The number of ordered messages."""
        return len(self._order)

    def page(self, start: int, stop: int) -> list[str]:
        """A part of the order: confirmed prefix, then tail."""
        return [node.message_id for node in self._order[start:stop]]

    @property
    def missing(self) -> list[str]:
        """Causes that have not been added, and for which others wait."""
        return list(self._waits)

    @property
    def waiting(self) -> list[str]:
        """Messages that wait for causes, in the order of their arrival. They have no place in the order."""
        return list(self._waiting)

    @property
    def waiting_count(self) -> int:
        """Messages that wait for causes."""
        return len(self._waiting)

    # --- adding --------------------------------------------------------------------------------

    def add(self, message_id: str, sender_id: str, causes: Iterable[str]) -> Change:
        """Add a message; `causes` are the IDs in its causal history. A known message changes nothing.

        Raises `OrderingError` (`too_many_waiting`) if `WAITING_MAX` messages wait for causes.
        """
        references = tuple(dict.fromkeys(each for each in causes if each != message_id))
        if message_id in self._nodes or message_id in self._waiting:
            return Change()
        if self._wait(message_id, sender_id, references):
            return Change()
        return self._take((message_id, sender_id, references))

    def _wait(self, message_id: str, sender_id: str, references: tuple[str, ...]) -> bool:
        missing = [each for each in references if each not in self._nodes]
        if not missing:
            return False
        if len(self._waiting) >= WAITING_MAX:
            detail = f"{WAITING_MAX} messages wait for causes that were not added"
            raise OrderingError("too_many_waiting", detail)
        self._waiting[message_id] = (message_id, sender_id, references)
        for each in missing:
            self._waits.setdefault(each, []).append(message_id)
        return True

    def _take(self, first: Waiting) -> Change:
        """Add a message whose causes are here, and those that waited for it."""
        confirmed_before, ordered_before = self._confirmed_count, len(self._order)
        changed = ordered_before
        open_ = [first]
        while open_:
            message_id, sender_id, references = open_.pop()
            node = self._insert(message_id, sender_id, references)
            if not node.is_relayed:
                changed = min(changed, self._place(node))
            open_ += [
                self._waiting.pop(each)
                for each in self._waits.pop(message_id, ())
                if all(cause in self._nodes for cause in self._waiting[each][2])
            ]
        return Change(
            tuple(self.page(confirmed_before, self._confirmed_count)),
            ordered_before - changed,
            len(self._order) - ordered_before,
        )

    def _insert(self, message_id: str, sender_id: str, references: tuple[str, ...]) -> Node:
        """Make the node, whose causes are here, and find its anchors."""
        parents = tuple([self._nodes[each] for each in references])
        node = Node(message_id, (sender_id.encode(), message_id.encode()), parents)
        self._nodes[message_id] = node
        node.is_relayed = sender_id in self.roles.relayed
        view = self._graph.union([parent.seen for parent in parents])
        number = self._numbers.get(sender_id, -1)
        if number >= 0:
            chain = self._graph.chains[number]
            if chain and chain[-1] not in parents:
                detail = f"{sender_id!r} does not refer to its own message before this one"
                self.breaches.append(Breach(BreachKind.FORK, sender_id, message_id, detail))
            else:
                node.indexer, node.lane, node.index = number, number * LANE_BITS, len(chain)
                chain.append(node)
                view += 1 << node.lane
        node.seen = view
        node.anchors = self._highest_possible(parents, view)
        node.is_candidate = node.indexer >= 0 and len(node.anchors) <= 1
        if node.indexer >= 0 and not self.breaches:
            self._witness(node)
        return node

    # --- candidates ----------------------------------------------------------------------------

    def _highest_possible(self, heads: Sequence[Node], view: int) -> tuple[Node, ...]:
        """Rule 1: the highest candidates that are possible for the view with these heads."""
        examined = {top for node in heads for top in node.tops}
        open_ = list(examined)
        possible: list[Node] = []
        while open_:
            candidate = open_.pop()
            if self._graph.is_possible(view, candidate):
                possible.append(candidate)
                continue
            for lower in candidate.anchors:
                if lower not in examined:
                    examined.add(lower)
                    open_.append(lower)
        if len(possible) < 2:
            return tuple(possible)
        sees = self._graph.sees
        return tuple(
            each
            for each in possible
            if not any(other is not each and sees(other.seen, each) for other in possible)
        )

    def _witness(self, node: Node) -> None:
        """Rule 3: note of which candidates this node is a witness."""
        bit = 1 << node.indexer
        for top in node.tops:
            candidate: Node | None = top
            while candidate is not None and not candidate.is_settled:
                if self._graph.is_witness(node.seen, candidate):
                    candidate.witnesses |= bit
                    if candidate.witnesses.bit_count() >= self._graph.majority:
                        self._to_confirm = candidate
                        return  # nothing below it needs witnesses of its own
                candidate = candidate.anchors[0] if candidate.anchors else None

    # --- order ---------------------------------------------------------------------------------

    def _place(self, node: Node) -> int:
        """Put a node, and the relayed ones before it, into the order.

        Returns the first place that has another message than before.
        """
        chain = self._chain
        fresh = self._unplaced(node)
        for each in fresh:
            for parent in each.parents:
                self._heads.pop(parent, None)
        self._heads[node] = None
        heads = tuple(self._heads)
        tops = self._highest_possible(heads, self._graph.union([each.seen for each in heads]))
        blocks: list[Node] = []
        top = tops[0] if len(tops) == 1 else self._to_confirm or self._confirmed_candidate
        while top is not None and top not in chain:
            blocks.append(top)
            top = top.anchors[0] if top.anchors else None
        is_cut = False
        while chain and next(reversed(chain)) is not top:
            chain.popitem()
            is_cut = True
        if not is_cut and (not blocks or (blocks == [node] and len(heads) == 1)):
            changed = min([self._squeeze_in(each) for each in fresh])
            if blocks:
                chain[node] = len(self._order)
        else:
            changed = self._lay_out(fresh, blocks)
        self._confirm()
        return changed

    def _unplaced(self, node: Node) -> list[Node]:
        """The node and the relayed nodes before it that have no place yet, causes first."""
        if all(parent.place >= 0 for parent in node.parents):
            return [node]
        found, open_ = {node: None}, [node]
        while open_:
            for parent in open_.pop().parents:
                if parent.place < 0 and parent not in found:
                    found[parent] = None
                    open_.append(parent)
        return _in_topological_order(found)

    def _squeeze_in(self, node: Node) -> int:
        """Insert a node that nothing in the order comes after. Returns its place.

        In the order of rule 2 it comes after its causes, before the first node with a greater key.
        """
        order = self._order
        place = max(
            [parent.place + 1 for parent in node.parents]
            + list(self._chain.values())[-1:]
            + [self._confirmed_count]
        )
        while place < len(order) and order[place].key < node.key:
            place += 1
        order.insert(place, node)
        for at in range(place, len(order)):
            order[at].place = at
        return place

    def _lay_out(self, fresh: Sequence[Node], blocks: list[Node]) -> int:
        """Order anew what comes after the last candidate of the chain; `blocks`: highest first."""
        order, chain = self._order, self._chain
        start = next(reversed(chain.values())) if chain else self._base_count
        before = order[start:]
        loose = dict.fromkeys([*before, *fresh])
        del order[start:]
        while blocks:
            candidate = blocks.pop()
            block = {candidate: None}
            open_ = [candidate]
            while open_:
                for parent in open_.pop().parents:
                    if parent in loose and parent not in block:
                        block[parent] = None
                        open_.append(parent)
            for each in block:
                del loose[each]
            order += _in_topological_order(block)
            chain[candidate] = len(order)
        order += _in_topological_order(loose)
        for at in range(start, len(order)):
            order[at].place = at
        same = 0
        while same < len(before) and before[same] is order[start + same]:
            same += 1
        return start + same

    def _confirm(self) -> None:
        """Rule 3: move the end of the confirmed prefix to the highest confirmed candidate."""
        confirmed, self._to_confirm = self._to_confirm, None
        if confirmed is None:
            return
        end = self._chain[confirmed]
        for each in self._order[self._confirmed_count : end]:
            each.is_settled = True
        self._confirmed_count = end
        self._confirmed_candidate = confirmed
        while next(iter(self._chain)) is not confirmed:
            del self._chain[next(iter(self._chain))]


def _in_topological_order(nodes: Iterable[Node]) -> list[Node]:
    """Causes first; of several nodes that could be next, the one with the smallest key."""
    waits: dict[Node, int] = dict.fromkeys(nodes, 0)
    children: dict[Node, list[Node]] = {}
    for node in waits:
        for parent in node.parents:
            if parent in waits:
                waits[node] += 1
                children.setdefault(parent, []).append(node)
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
