"""The order of a channel: a confirmed prefix that never changes, and a tentative tail.

Source: the design document of Autobase (Holepunch), "eventual consistent ordering of a distributed set
of messages from multiple writers". docs/ordering.md explains it with graphs.

The rules, in the terms of `graph`, whose nodes are the messages of indexers:

1. Anchors. Each node has at most one anchor: the highest candidate before it that is possible for it.
   If two such candidates exist and neither is before the other, the node has no anchor and is not a
   candidate: its view cannot tell which of the two somebody else has confirmed.
2. Order of a view up to a candidate c: the order up to c's anchor, then all other nodes before c, then
   c. Nodes between two anchors are in topological order; of several that could be next, the one with
   the smallest key (sender ID, message ID, as UTF-8 bytes) is. Each node is preceded by the messages of
   others that it names, in the order of its causal history, without those that are in the order already.
   So the order depends on the view of c alone, and on nothing that other writers claim.
3. Confirmation. c is confirmed in a view that contains witnesses of c by a majority of indexers, which
   is the document's double quorum: a majority that knows of a majority, and of no contender.
4. The order of a view: the order up to the highest candidate that is an anchor of all its highest possible
   candidates, directly or through anchors, but at least the confirmed prefix; then the other nodes, as in
   rule 2; then the messages that no node names, in topological order. A tail of more than `TAIL_MAX` messages
   does not follow candidates. What is after the confirmed prefix is tentative: the rule decides how
   often it changes, not what is confirmed.
5. Waiting. An indexer's message waits for all that it names: until the nodes are in the graph, and the messages
   of others are known. A message of another writer waits for what it names until a node names it.

6. Changed roles, which begin at a confirmed message: a message of an indexer is a node if it names that message
   or a node. Its earlier messages are as those of others.

Absent messages. A message that refers to one that never arrives is in the order as soon as a node names it: the
node names it without its cause, and that is the agreement. If the cause arrives later, it enters where
a node names it. An indexer that names what nobody can get stops its own messages, and no
other as long as other indexers name only messages of it whose views they hold.

Why a confirmed prefix never changes. Two contenders cannot both be confirmed: the votes that their
witnesses know would have an indexer in common, and the later of its two votes would not be clean. If c
is confirmed anywhere, it is possible for every candidate c' after it, because a majority has or can
have witnesses. So c or a candidate after c is the anchor of c', and by induction the order up to c' begins
with the order up to c. This is the worst-case assumption of the document: each candidate is
ordered as if everything that may be confirmed elsewhere is.

The document asks for a lead of two degrees over "any other quorum that has been referenced", and gives no
proof that all views compare the same degrees. Rule 3 is stricter: any contender in the view of a witness
spoils it, also one without a quorum. With it the promise has the proof above. The document counts references of
writers who are not indexers as votes and contenders; here they count for nothing, because any writer could stop the
order with an ID that does not exist. It leaves the order of merged branches open; rule 1 decides it.

`PRECONDITIONS` must hold. A breach that is seen is reported, and nothing more is confirmed after it. Majorities
are not Byzantine quorums: a lying indexer can break the promise without anybody who sees it.

Progress. The prefix grows while a majority of indexers exchange messages and there are moments in which
a majority refers to one node before it sees a contender. No deterministic rule can promise more in an
asynchronous network (Fischer, Lynch, Paterson 1985).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from sdstore.errors import SdstoreError
from sdstore.ordering.graph import LANE_BITS, Graph, Item, Leaf, Node, meet
from sdstore.ordering.layout import Layout

# ---- votes and quorums


def degrees(
    target: str,
    causes: Mapping[str, Sequence[str]],
    senders: Mapping[str, str],
    indexers: Sequence[str],
) -> dict[str, int]:
    """The degree of the target's quorum in the view of each node that has the target in its view.

    `causes`: the direct causes of each node, in an order in which causes come first.
    Nodes of other writers than `indexers` see degrees and add nothing to them.
    """
    majority = len(indexers) // 2 + 1
    # reached[x][d]: the indexers that are known, in the view of x, to have seen degree d.
    reached: dict[str, list[set[str]]] = {}
    for node, before in causes.items():
        known = [reached[each] for each in before if each in reached]
        if node != target and not known:
            continue
        levels: list[set[str]] = [set()]
        for each in known:
            for degree, who in enumerate(each):
                if degree == len(levels):
                    levels.append(set())
                levels[degree] |= who
        sender = senders[node]
        degree = 0
        while True:
            if sender in indexers:
                levels[degree].add(sender)
            if len(levels[degree]) < majority or degree == len(causes):
                break
            degree += 1
            if degree == len(levels):
                levels.append(set())
        reached[node] = levels
    return {node: _degree(levels, majority) for node, levels in reached.items()}


def _degree(levels: Sequence[set[str]], majority: int) -> int:
    degree = 0
    while degree < len(levels) and len(levels[degree]) >= majority:
        degree += 1
    return degree


# ---- the order

_LANE = (1 << LANE_BITS) - 1

WAITING_MAX = 100_000
"""Messages that wait for causes: some 60 MB. Beyond it an indexer's message is refused with an error. Those of
others fill at most half of it, and of `WAITING_CAUSES_MAX`: beyond that they do not wait."""
WAITING_CAUSES_MAX = 400_000
"""Causes that they wait for, counted for each message: some 120 MB, if all differ. Beyond it as above."""
RELEASED_MAX = 1_000
"""Messages that one call orders, if one arrival releases more: some 40 ms. The next calls order the others."""
TAIL_MAX = 4_096
"""A longer tail does not follow candidates (rule 4). Two halves of the indexers that always write at once,
while others are silent, can turn the whole tail over with each message: this bounds its cost to milliseconds."""

PRECONDITIONS = (
    "senders are authentic",
    "an indexer refers to its own previous message in each message",
    "an indexer never writes two messages after the same one",
    "an ID names one message of an indexer",
    "all readers use the same indexers",
)
"""What the promise of a confirmed prefix rests on. `Ordering.breaches` has those that are seen to fail."""


class OrderingError(SdstoreError, ValueError):
    """Misuse of `Ordering`; `code` is stable."""


class BreachKind(StrEnum):
    """How a precondition is broken."""

    NO_INDEXERS = "no_indexers"
    """No indexers are named, so nothing can be confirmed."""
    FORK = "fork"
    """An indexer's message does not refer to its message before, so two messages can follow the same one."""
    VARIANT = "variant"
    """Another message has the same ID as an indexer's, or as one that claims to be. The first counts."""
    PROOF = "proof"
    """The messages of a proof do not confirm what the proof contains."""


@dataclass(frozen=True, slots=True)
class Breach:
    """A broken precondition; the order after it is tentative. `detail` is for people.

    `message_id` and `other_message_id` are the two messages that show it; equal for a variant. `path` and
    `other_path`: how they came, as far as the caller of `Ordering.add` said.
    """

    kind: BreachKind
    sender_id: str = ""
    message_id: str = ""
    detail: str = ""
    other_message_id: str = ""
    path: str = ""
    other_path: str = ""


@dataclass(frozen=True, slots=True)
class Proof:
    """What was confirmed, and what shows it: another `Ordering` that begins with it confirms the same.

    `heads`: the last message of each indexer when the prefix last grew. `hash`: SHA-256 of the confirmed IDs in
    hexadecimal. `breaches`: those seen by then or later; with them nothing more is confirmed.
    """

    heads: tuple[str, ...] = ()
    confirmed_count: int = 0
    hash: str = ""
    breaches: tuple[Breach, ...] = ()


@dataclass(frozen=True, slots=True)
class Indexer:
    """What an ordering has of an indexer, to see which one confirmation waits for.

    `message_count` is 0 for one that never wrote; then `last_message_id` is "". `unseen_count`: messages of other
    indexers, in the order, that its last message has not seen. They are confirmed when a majority has
    seen them, and has seen a majority that has.
    """

    sender_id: str
    message_count: int
    last_message_id: str
    unseen_count: int


@dataclass(frozen=True, slots=True)
class WaitsFor:
    """What confirmation waits for: messages by `count` of `sender_ids` that show that they have seen `message_id`, the
    first indexer's message of the tail, and that a majority has. If no indexer names the tail, it is its first one.
    """

    message_id: str
    count: int
    sender_ids: tuple[str, ...]


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

    References of `indexers` count towards quorums, and bring other messages into the order. A message of a
    `relayed` writer is part of the order once an indexer's message names it; those of others are in the
    tail before.
    """

    indexers: Sequence[str] = ()
    relayed: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True, slots=True)
class RolesChange:
    """Other roles, which begin at the message `after`: see `Ordering.with_roles`."""

    after: str
    roles: Roles


@dataclass(slots=True)
class _Waiting:
    """A message that is not in the order yet; `is_leaf`: no indexer wrote it."""

    sender_id: str
    causes: tuple[str, ...]
    missing_count: int = 0
    is_leaf: bool = False


Added = tuple[str, str, tuple[str, ...], str]
"""The arguments of `Ordering.add`."""


class Ordering:
    """The order of one channel as messages arrive, causes first or not. See the module."""

    def __init__(self, roles: Roles, proof: Proof | None = None) -> None:
        """With a `proof` of the same roles, indexers' messages wait for those that it consists of, and these
        are ordered first: so what it confirms is confirmed, whatever arrives first here.

        Raises `OrderingError` (`invalid_indexers`) if an indexer is named twice or has no ID.
        """
        if len(set(roles.indexers)) != len(roles.indexers) or "" in roles.indexers:
            raise OrderingError("invalid_indexers", "each indexer is named once, and has an ID")
        if relayed := roles.relayed.intersection(roles.indexers):
            raise OrderingError("invalid_indexers", f"{min(relayed)!r} is indexing and relayed")
        self.roles = roles
        self.breaches: list[Breach] = []
        """The preconditions that are seen to be broken: the first breach of each kind by each indexer.

        If there are any, nothing more is confirmed, and readers may disagree about what comes next.
        """
        if not roles.indexers:
            self._report(Breach(BreachKind.NO_INDEXERS, detail="no indexers are named"))
        self._after = ""  # the message at which the roles begin
        self._numbers = {sender: i for i, sender in enumerate(sorted(roles.indexers))}
        self._graph = Graph(len(roles.indexers))
        self._items: dict[str, Node | Leaf] = {}
        self._waiting: dict[str, _Waiting] = {}
        self._waiting_causes_count = 0
        self._waits: dict[str, dict[str, None]] = {}  # a cause, and the messages that wait for it
        self._everything = Node("", ("", ""))
        """As if a node referred to all heads: its view and its tops are those of rule 4."""
        self._everything.tops = self._graph.ground.tops
        self._layout = Layout(self._graph.ground)
        self._confirmed_count = 0
        self._confirmed = self._graph.ground
        """The highest confirmed candidate."""
        self._confirmed_view = 0  # when the prefix last grew
        self._hash = hashlib.sha256()
        self._hashed_count = 0
        self._proof = proof if proof is not None and proof.heads else None
        self._unproved = dict.fromkeys(proof.heads) if proof is not None else {}
        """The messages of the proof that have not been added, as far as known."""
        self._ready: list[str] = []  # messages that wait for nothing, until a call orders them
        self._held: dict[str, _Waiting] = {}  # indexers' messages, until the proof is complete
        self._proved: dict[str, None] = {}  # those of the proof
        self._paths: dict[str, str] = {}  # of indexers' messages
        if proof is not None and not proof.heads:
            self._report_all(proof.breaches)

    def with_roles(self, roles: Roles, after: str, proof: Proof | None = None) -> Ordering:
        """The order of the same messages under other roles from a confirmed message on.

        The order up to the message `after` stays as it is, and is confirmed. What comes after it is ordered as a
        channel of its own, by the new indexers, and whatever this ordering confirmed of it counts no longer.
        So all readers have to change at the same message; those who do agree, as much as they have
        seen. Breaches are noticed anew among the messages after it. Costs as much as adding them again.

        Raises `OrderingError`: `not_confirmed` if `after` is not in the confirmed prefix, `invalid_indexers`.
        """
        changed, rest = self.begin_roles(roles, after, proof)
        for each in rest:
            changed.add(*each)
        while changed.is_behind:
            changed.go_on()
        return changed

    def begin_roles(
        self, roles: Roles, after: str, proof: Proof | None = None
    ) -> tuple[Ordering, Iterator[Added]]:
        """`with_roles` for whoever adds the messages in steps: those after `after`, as arguments of `add`."""
        if not self.is_confirmed(after):
            raise OrderingError("not_confirmed", f"{after!r} is not in the confirmed prefix")
        changed = Ordering(roles, proof)
        changed._after = after
        changed._begin_with(self._layout.fixed[: self._items[after].place + 1])
        return changed, self._rest(changed)

    def _rest(self, changed: Ordering) -> Iterator[Added]:
        for message_id, item in self._items.items():
            if message_id not in changed._items:
                yield message_id, item.key[0], item.references, self._paths.get(message_id, "")
        for message_id, waiting in (self._waiting | self._held).items():
            path = self._paths.get(message_id, "")
            yield message_id, waiting.sender_id, waiting.causes, path

    def _begin_with(self, items: Sequence[Item]) -> None:
        for each in items:
            leaf = self._items[each.message_id] = Leaf(each.message_id, each.key, each.references)
            leaf.is_settled = True
        self._layout = Layout(self._graph.ground, self._items.values())
        self._confirmed_count = len(self._items)

    # --- the answer ----------------------------------------------------------------------------

    @property
    def confirmed(self) -> list[str]:
        """The confirmed prefix."""
        return self.page(0, self._confirmed_count)

    @property
    def tail(self) -> list[str]:
        """The tentative tail."""
        return self.page(self._confirmed_count, len(self))

    @property
    def confirmed_count(self) -> int:
        """The length of the confirmed prefix."""
        return self._confirmed_count

    @property
    def proof(self) -> Proof:
        """What is confirmed by now, for an ordering that begins with it."""
        if self._proof is not None:
            return self._proof
        view = self._confirmed_view
        last = [(view >> (LANE_BITS * at)) & _LANE for at in range(len(self._graph.chains))]
        heads = [
            chain[count - 1] for chain, count in zip(self._graph.chains, last, strict=True) if count
        ]
        return Proof(
            tuple([each.message_id for each in heads]),
            self._confirmed_count,
            self._confirmed_hash(),
            tuple(self.breaches),
        )

    def _confirmed_hash(self) -> str:
        names = [f"{len(e)}:{e}" for e in self.page(self._hashed_count, self._confirmed_count)]
        self._hash.update("".join(names).encode("utf-8", "surrogatepass"))
        self._hashed_count = self._confirmed_count
        return self._hash.hexdigest()

    def is_confirmed(self, message_id: str) -> bool:
        """Whether a message is in the confirmed prefix."""
        item = self._items.get(message_id)
        return item is not None and item.is_settled

    @property
    def waits_for(self) -> WaitsFor | None:
        """What confirmation of the tail waits for; None if there is no tail, or a breach ends confirmation."""
        first = next(iter(self.page(self._confirmed_count, self._confirmed_count + 1)), None)
        if first is None or self.breaches:
            return None
        graph = self._graph
        node = self._layout.first_node(self._confirmed_count)
        if node is None or node.indexer < 0:
            return WaitsFor(first, 1, tuple(self._numbers))
        seen_by = [bool(chain) and graph.sees(chain[-1].seen, node) for chain in graph.chains]
        done = seen_by
        if sum(seen_by) >= graph.majority:
            done = [
                has_seen
                and graph.is_clean(chain[-1].seen, node)
                and graph.votes(chain[-1].seen, node) >= graph.majority
                for has_seen, chain in zip(seen_by, graph.chains, strict=True)
            ]
        # With a contender there can be enough of them: any later message can confirm both.
        open_ = tuple(
            each for each, is_done in zip(self._numbers, done, strict=True) if not is_done
        )
        count = max(graph.majority - sum(done), 1)
        return WaitsFor(node.message_id, count, open_ or tuple(self._numbers))

    @property
    def unnamed(self) -> list[str]:
        """Messages of the tail that no indexer's message names."""
        tail = self._layout.page(self._confirmed_count, len(self))
        return [each.message_id for each in tail if isinstance(each, Leaf) and not each.namers]

    def __len__(self) -> int:
        """The number of ordered messages."""
        return len(self._layout)

    def page(self, start: int, stop: int) -> list[str]:
        """A part of the order: confirmed prefix, then tail. 0 <= start, stop."""
        return [item.message_id for item in self._layout.page(start, stop)]

    @property
    def missing(self) -> list[str]:
        """Causes that have not been added, and for which others wait."""
        missing = [each for each in self._waits if each not in self._waiting]
        return missing + [each for each in self._unproved if each not in self._waits]

    @property
    def indexers(self) -> list[Indexer]:
        """The indexers by name. A message that waits, or of a fork, is not counted."""
        graph = self._graph
        total = sum(map(len, graph.chains))
        found = []
        for sender_id, number in self._numbers.items():
            chain = graph.chains[number]
            seen = chain[-1].seen if chain else 0
            seen_count = sum([seen >> (LANE_BITS * at) & _LANE for at in range(len(graph.chains))])
            last = chain[-1].message_id if chain else ""
            found.append(Indexer(sender_id, len(chain), last, total - seen_count))
        return found

    @property
    def waiting(self) -> list[str]:
        """Messages that wait for causes, in the order of their arrival. They have no place in the order."""
        return list(self._waiting)

    @property
    def waiting_count(self) -> int:
        """Messages that wait for causes."""
        return len(self._waiting)

    # --- adding --------------------------------------------------------------------------------

    def add(self, message_id: str, sender_id: str, causes: Iterable[str], path: str = "") -> Change:
        """Add a message; `causes` are the IDs in its causal history. A reference to itself is ignored.
        `path`: the way that the message came, to be named by a breach.

        A known message changes nothing; if it differs from the one that is known, that is a breach.

        Raises `OrderingError` (`too_many_waiting`) if it must wait and `WAITING_MAX` messages wait, or all
        together for `WAITING_CAUSES_MAX` causes. The message can be added again later.
        """
        references = tuple(dict.fromkeys(each for each in causes if each != message_id))
        if message_id in self._items or message_id in self._waiting or message_id in self._held:
            self._compare(message_id, sender_id, references, path)
            return Change()
        is_leaf = sender_id not in self._numbers
        if path and not is_leaf:
            self._paths[message_id] = path
        if self._proof is not None and (not is_leaf or message_id in self._unproved):
            return self._hold(self._proof, message_id, _Waiting(sender_id, references), is_leaf)
        return self._add(message_id, sender_id, references, is_leaf)

    def _add(
        self, message_id: str, sender_id: str, references: tuple[str, ...], is_leaf: bool
    ) -> Change:
        if self._wait(message_id, sender_id, references, is_leaf):
            return self._take(message_id, None) if is_leaf else Change()
        return self._take(message_id, _Waiting(sender_id, references))

    def _hold(self, proof: Proof, message_id: str, message: _Waiting, is_leaf: bool) -> Change:
        """Keep an indexer's message until the proof is complete; then order those of the proof first."""
        change = Change()
        if is_leaf:
            change = self._add(message_id, message.sender_id, message.causes, is_leaf)
        else:
            if len(self._held) >= WAITING_MAX:
                detail = f"{WAITING_MAX} messages wait for messages of the proof, such as {list(self._unproved)[:5]}; add those first"
                raise OrderingError("too_many_waiting", detail)
            self._held[message_id] = message
        if message_id in self._unproved:
            del self._unproved[message_id]
            open_ = [] if is_leaf else [message_id]
            while open_:
                each = open_.pop()
                self._proved[each] = None
                for cause in self._held[each].causes:
                    if cause in self._held:
                        if cause not in self._proved:
                            open_.append(cause)
                    elif cause not in self._items and cause not in self._waiting:
                        self._unproved[cause] = None
        if not self._unproved:
            change = self._prove(proof)
        return change

    def _prove(self, proof: Proof) -> Change:
        """Order the messages of the proof, then the others that were held."""
        before = len(self._layout)
        held, self._held, self._proof = self._held, {}, None
        for message_id in self._proved:
            message = held.pop(message_id)
            self._add(message_id, message.sender_id, message.causes, is_leaf=False)
        while self._ready:
            self.go_on()
        self._report_all(proof.breaches)
        if (self._confirmed_count, self._confirmed_hash()) != (proof.confirmed_count, proof.hash):
            detail = (
                f"the proof's messages confirm {self._confirmed_count} messages, or others than the "
                f"{proof.confirmed_count} of the proof: other indexers, or copies with other causes"
            )
            self._report(Breach(BreachKind.PROOF, detail=detail))
        for message_id, message in held.items():
            self._add(message_id, message.sender_id, message.causes, is_leaf=False)
        self._proved = {}
        confirmed = tuple(self.page(0, self._confirmed_count))
        return Change(confirmed, before, len(self._layout) - before)

    def _report_all(self, breaches: Iterable[Breach]) -> None:
        for each in breaches:
            self._report(each)

    @property
    def is_behind(self) -> bool:
        """Whether messages that wait for nothing are not in the order yet: see `go_on`."""
        return bool(self._ready)

    def go_on(self) -> Change:
        """Order more of the messages that one arrival released, if it released more than a call orders.

        `add` goes on too. Until `is_behind` is false, the order lacks some messages.
        """
        return self._take("", None)

    def _compare(
        self, message_id: str, sender_id: str, references: tuple[str, ...], path: str
    ) -> None:
        """Compare a message with the one of the same ID."""
        if waiting := self._waiting.get(message_id) or self._held.get(message_id):
            known = waiting.sender_id, waiting.causes
        else:
            item = self._items[message_id]
            known = item.key[0], item.references
        is_of_indexer = sender_id in self._numbers or known[0] in self._numbers
        if is_of_indexer and known != (sender_id, references):
            detail = f"{message_id!r} was added with another sender or other causes before"
            other = self._paths.get(message_id, "")
            kind = BreachKind.VARIANT
            self._report(Breach(kind, known[0], message_id, detail, message_id, path, other))

    def _wait(
        self, message_id: str, sender_id: str, references: tuple[str, ...], is_leaf: bool
    ) -> bool:
        items, waiting = self._items, self._waiting
        missing = [each for each in references if each not in items]
        if missing and not is_leaf:  # other writers' messages need not be in the order
            missing = [e for e in missing if e not in waiting or not waiting[e].is_leaf]
        if not missing:
            return False
        causes_count = self._waiting_causes_count + len(missing)
        share = 2 if is_leaf else 1
        if len(waiting) >= WAITING_MAX // share or causes_count > WAITING_CAUSES_MAX // share:
            if is_leaf:
                return False
            detail = (
                f"{len(waiting)} messages (at most {WAITING_MAX}) wait for {self._waiting_causes_count} missing "
                f"causes (at most {WAITING_CAUSES_MAX}); add the causes, then this message again"
            )
            raise OrderingError("too_many_waiting", detail)
        waiting[message_id] = _Waiting(sender_id, references, len(missing), is_leaf)
        self._waiting_causes_count += len(missing)
        for each in missing:
            self._waits.setdefault(each, {})[message_id] = None
        return True

    def _take(self, message_id: str, message: _Waiting | None) -> Change:
        """Add a message, and those that waited for it. `None`: it waits itself; others need only know it."""
        confirmed_before, ordered_before = self._confirmed_count, len(self._layout)
        changed = ordered_before
        ready, left_count = self._ready, RELEASED_MAX
        if message is None:
            self._release(message_id, ready, leaves_too=False)
        while message is not None or (ready and left_count):
            left_count -= 1
            if message is None:
                message_id = ready.pop()
                message = self._waiting.pop(message_id, None)
                if message is None:  # a node named it
                    continue
            changed = min(changed, self._enter(message_id, message, ready))
            message = None
        return Change(
            tuple(self.page(confirmed_before, self._confirmed_count)),
            ordered_before - changed,
            len(self._layout) - ordered_before,
        )

    def _enter(self, message_id: str, message: _Waiting, ready: list[str]) -> int:
        """Put a message into the order, and what it names; returns the first place that can have changed."""
        number = self._numbers.get(message.sender_id)
        if number is not None and self._after and not self._is_after(message.causes):
            number = None
            if self._wait(message_id, message.sender_id, message.causes, is_leaf=True):
                self._release(message_id, ready, leaves_too=False)
                return len(self._layout)
        if number is None:
            leaf = self._insert_leaf(message_id, message)
            if leaf.is_relayed:
                changed = len(self._layout)
            else:
                changed = self._shorten(self._layout.place_unnamed(leaf))
        else:
            for each in message.causes:
                if each not in self._items:  # the node names it, so it waits no longer
                    self._insert_leaf(each, self._stop_waiting(each))
                    self._release(each, ready)
            changed = self._place(self._insert(message_id, message, number))
        self._release(message_id, ready)
        return changed

    def _is_after(self, causes: Sequence[str]) -> bool:
        """Whether a message of an indexer was written after its roles began: rule 6."""
        return self._after in causes or any(
            isinstance(self._items.get(each), Node) for each in causes
        )

    def _release(self, cause: str, ready: list[str], *, leaves_too: bool = True) -> None:
        """A cause is in the order, or (not `leaves_too`) another writer's message is known."""
        waiters = self._waits.get(cause)
        if waiters is None:
            return
        for each in list(waiters):
            waiting = self._waiting[each]
            if waiting.is_leaf and not leaves_too:
                continue
            del waiters[each]
            waiting.missing_count -= 1
            self._waiting_causes_count -= 1
            if not waiting.missing_count:
                ready.append(each)
        if not waiters:
            del self._waits[cause]

    def _stop_waiting(self, message_id: str) -> _Waiting:
        """A message that waits no longer, although causes are missing."""
        waiting = self._waiting.pop(message_id)
        for each in waiting.causes:
            waiters = self._waits.get(each, {})
            if message_id in waiters:
                del waiters[message_id]
                self._waiting_causes_count -= 1
                if not waiters:
                    del self._waits[each]
        return waiting

    def _insert_leaf(self, message_id: str, message: _Waiting) -> Leaf:
        leaf = Leaf(message_id, (message.sender_id, message_id), message.causes)
        causes = [self._items.get(each) for each in message.causes]
        leaf.parents = tuple([each for each in causes if isinstance(each, Leaf)])
        leaf.is_relayed = message.sender_id in self.roles.relayed
        self._items[message_id] = leaf
        return leaf

    def _insert(self, message_id: str, message: _Waiting, number: int) -> Node:
        """Make an indexer's node, whose causes are here: rule 1."""
        graph = self._graph
        causes = [self._items[each] for each in message.causes]
        parents = tuple([each for each in causes if isinstance(each, Node)])
        node = Node(message_id, (message.sender_id, message_id), message.causes, parents)
        if len(parents) < len(causes):
            node.leaves = tuple([each for each in causes if isinstance(each, Leaf)])
        self._items[message_id] = node
        node.seen = graph.union(parents)
        votes = self._continues_its_chain(node, number)
        if votes:
            graph.append(node, number)
        node.tops = graph.highest_possible(parents, node.seen)
        if votes and len(node.tops) == 1:
            graph.make_candidate(node, node.tops[0])
        return node

    def _continues_its_chain(self, node: Node, number: int) -> bool:
        """Whether an indexer's node refers to its node before; if not, that is a breach."""
        chain = self._graph.chains[number]
        if not chain or chain[-1] in node.parents:
            return True
        sender_id = node.key[0]
        if beside := self._graph.first_unseen(node.seen, number):
            other = beside.message_id
            detail = f"of two messages by {sender_id!r} neither comes after the other"
        else:
            other = chain[-1].message_id
            detail = f"{sender_id!r} does not refer to its own message before this one"
        paths = [self._paths.get(each, "") for each in (node.message_id, other)]
        self._report(Breach(BreachKind.FORK, sender_id, node.message_id, detail, other, *paths))
        return False

    def _report(self, breach: Breach) -> None:
        is_known = any(
            breach.kind is each.kind
            and (breach.sender_id == each.sender_id or each.kind is BreachKind.VARIANT)
            for each in self.breaches
        )
        if not is_known:
            self.breaches.append(breach)

    # --- order ---------------------------------------------------------------------------------

    def _place(self, node: Node) -> int:
        """Put a node, and the messages that it names, into the order.

        Returns the first place that can have another message than before.
        """
        layout, everything = self._layout, self._everything
        if node.indexer >= 0:
            heads = (node, everything)
            view = self._graph.union(heads)
            everything.tops = self._graph.highest_possible(heads, view)
            everything.seen = view
            if not self.breaches and (confirmed := self._graph.confirmed_by(node)):
                self._confirmed = confirmed
        changed = layout.place(node, self._end())
        if not self._confirmed.is_settled:
            self._settle()
        return self._shorten(changed)

    def _shorten(self, changed: int) -> int:
        """A tail that is too long follows no candidates; returns the first place that changed."""
        if self._layout.top is not self._confirmed and self._is_tail_long():
            return min(changed, self._layout.place(None, self._confirmed))
        return changed

    def _end(self) -> Node:
        """Rule 4: the candidate up to which the order is known."""
        if self._is_tail_long() and self._confirmed.is_settled:
            return self._confirmed
        end = meet([top.anchor for top in self._everything.tops])
        return end if end.depth > self._confirmed.depth else self._confirmed

    def _is_tail_long(self) -> bool:
        return len(self._layout) - self._confirmed_count > TAIL_MAX

    def _settle(self) -> None:
        """Rule 3: move the end of the confirmed prefix to the confirmed candidate."""
        self._confirmed_view = self._everything.seen
        for item in self._layout.settle(self._confirmed, self._confirmed_count):
            if isinstance(item, Node) and item.depth:
                self._graph.forget(item)
        self._confirmed_count = self._confirmed.place + 1
