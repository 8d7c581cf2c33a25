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


FAULTS = [
    _fault(
        "a lead of one degree instead of two",
        "graph:Graph.confirmed_by",
        instead(_confirmed_by_one_witness),
    ),
    _fault("a vote counts twice", "graph:Graph.votes", after(lambda votes, *_: votes + 1)),
    _fault("a tie is reversed", "graph:Item.__init__", before(_reverse)),
    _fault("a fork votes", "order:Ordering._continues_its_chain", returns(True)),
    _fault("a second message with an ID is not noticed", "order:Ordering._compare", returns(None)),
]
