"""Faults planted in the ordering."""

from __future__ import annotations

from typing import Any

from tests.mutants.fault import Fault, Plant, after, before, instead, returns

_TESTS = tuple(
    f"tests/ordering/test_{name}.py" for name in ("examples", "breaches", "roles", "properties")
)


def _fault(name: str, seam: str, plant: Plant) -> Fault:
    return Fault(f"ordering: {name}", f"sdstore.ordering.{seam}", plant, _TESTS)


def _confirmed_by_one_witness(graph: Any, node: Any) -> Any:
    for candidate in node.tops:
        while not candidate.is_settled:
            has_quorum = graph.votes(node.seen, candidate) >= graph.majority
            if has_quorum and graph.is_clean(node.seen, candidate):
                return candidate
            candidate = candidate.anchor
    return None


class _Reversed(str):
    __slots__ = ()
    __lt__ = str.__gt__
    __gt__ = str.__lt__
    __le__ = str.__ge__
    __ge__ = str.__le__


def _reverse(item: Any, message_id: Any, key: Any, references: Any) -> Any:
    return item, message_id, tuple(map(_Reversed, key)), references


def _with_last_key(loose: Any, node: Any) -> Any:
    node.key = ("\U0010ffff", node.message_id)
    return loose, node


def _after_everything_confirmed(ordering: Any, roles: Any, *after: str) -> Any:
    return ordering, roles, *[ordering.confirmed[-1] for _ in after]


FAULTS = [
    _fault(
        "a lead of one degree instead of two",
        "graph:Graph.confirmed_by",
        instead(_confirmed_by_one_witness),
    ),
    _fault("a vote counts twice", "graph:Graph.votes", after(lambda votes, *_: votes + 1)),
    _fault("a tie is reversed", "graph:Item.__init__", before(_reverse)),
    _fault("a contender does not matter", "graph:Graph._examine", returns(None)),
    _fault("everything is possible", "graph:Graph.is_possible", returns(True)),
    _fault("nothing is possible", "graph:Graph.is_possible", returns(False)),
    _fault(
        "what others may confirm unseen is not assumed", "graph:Graph._can_witness", returns(False)
    ),
    _fault("an indexer can always be a witness", "graph:Graph._can_witness", returns(True)),
    _fault(
        "a view with two candidates takes either",
        "graph:Graph.highest_possible",
        after(lambda tops, *_: tops[:1]),
    ),
    _fault(
        "a search goes below what is possible",
        "graph:Graph._below_contenders",
        after(lambda lower, *_: lower.anchor),
    ),
    _fault(
        "the order ends with one of two candidates", "graph:meet", instead(lambda tops: tops[0])
    ),
    _fault("a new message goes to the end", "layout:Loose.insert", before(_with_last_key)),
    _fault("a message stays behind a cause that moved", "layout:Loose.advance", returns(False)),
    _fault("what comes after a cut message stays", "layout:_named_after", returns([])),
    _fault(
        "new indexers begin where the old ones are",
        "order:Ordering.with_roles",
        before(_after_everything_confirmed),
    ),
    _fault("what is named is not placed", "layout:Layout._leave_unnamed", returns(None)),
    _fault("a fork votes", "order:Ordering._continues_its_chain", returns(True)),
    _fault("a second message with an ID is not noticed", "order:Ordering._compare", returns(None)),
]
