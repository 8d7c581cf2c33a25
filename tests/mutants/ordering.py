"""Faults planted in the ordering."""

from __future__ import annotations

from typing import Any

from tests.mutants.fault import Fault, Plant, after, before, instead, returns

_TESTS = tuple(f"tests/ordering/test_{name}.py" for name in ("examples", "breaches", "properties"))


def _fault(name: str, seam: str, plant: Plant) -> Fault:
    return Fault(f"ordering: {name}", f"sdstore.ordering.{seam}", plant, _TESTS)


def _confirm_with_one_witness(ordering: Any, node: Any) -> None:
    for candidate in node.tops:
        while candidate is not None and not candidate.is_settled:
            if ordering._graph.is_witness(node.seen, candidate):
                ordering._to_confirm = candidate
                return
            candidate = candidate.anchors[0] if candidate.anchors else None


def _reverse(key: bytes) -> bytes:
    return bytes(255 - each for each in key)


FAULTS = [
    _fault(
        "a lead of one degree instead of two",
        "order:Ordering._witness",
        instead(_confirm_with_one_witness),
    ),
    _fault("a vote counts twice", "graph:Graph.votes", after(lambda votes, *_: votes + 1)),
    _fault(
        "a tie is reversed",
        "graph:Node.__init__",
        before(lambda node, name, key, parents: (node, name, tuple(map(_reverse, key)), parents)),
    ),
    _fault("a contender does not matter", "graph:Graph._contenders", returns(0)),
    _fault("everything is possible", "graph:Graph.is_possible", returns(True)),
    _fault("nothing is possible", "graph:Graph.is_possible", returns(False)),
    _fault(
        "what others may confirm unseen is not assumed", "graph:Graph._can_witness", returns(False)
    ),
    _fault(
        "a view with two candidates takes either",
        "order:Ordering._highest_possible",
        after(lambda tops, *_: tops[:1]),
    ),
    _fault(
        "a new message goes to the end",
        "order:Ordering._squeeze_in",
        before(lambda ordering, node: (ordering, _with_last_key(node))),
    ),
]


def _with_last_key(node: Any) -> Any:
    node.key = (b"\xff", b"")
    return node
