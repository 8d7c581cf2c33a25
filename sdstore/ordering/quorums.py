"""Votes, quorums and their degrees, as the design document of Autobase defines them.

The order does not need degrees: `Graph.is_witness` is the part of them that confirmation uses. They are
here to explain an order to people, and to test the worked examples of the document.

- A vote for x is a reference from an indexer to x, direct or through other nodes; each indexer has one.
- x has a quorum (degree 1) in a view with votes of a majority of indexers.
- Its degree is one higher once a majority of indexers have nodes in the view whose own views contain
  the quorum of the degree before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


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
