"""Depth and width of a channel's causal graph."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Shape:
    """`depth`: messages on the longest causal chain. `width`: the largest number of messages at one
    distance from the roots. `cyclic_count`: messages on or after a cycle, which have no distance."""

    depth: int
    width: int
    cyclic_count: int


def shape_of(children: NDArray[np.int64], parents: NDArray[np.int64]) -> Shape:
    """The shape of the graph with edges children[i] → parents[i]; -1 is "no parent".

    Every message must be a child at least once. Parents that are not children, and references of a
    message to itself, are ignored. Time and memory are linear in the edges (Kahn 1962).
    """
    nodes, child = np.unique(children, return_inverse=True)
    parent = np.searchsorted(nodes, parents).clip(max=len(nodes) - 1)
    is_edge = (nodes[parent] == parents) & (parent != child)
    child, parent = child[is_edge], parent[is_edge]
    order = np.argsort(parent, kind="stable")
    followers = child[order].tolist()
    starts = np.searchsorted(parent[order], np.arange(len(nodes) + 1)).tolist()
    waiting = np.bincount(child, minlength=len(nodes)).tolist()
    return _shape(followers, starts, waiting)


def _shape(followers: list[int], starts: list[int], waiting: list[int]) -> Shape:
    """Kahn's walk: a node gets its level once all its parents have theirs."""
    level = [1] * len(waiting)
    ready = [node for node, count in enumerate(waiting) if not count]
    widths: dict[int, int] = {}
    done_count = 0
    while ready:
        node = ready.pop()
        done_count += 1
        here = level[node]
        widths[here] = widths.get(here, 0) + 1
        for follower in followers[starts[node] : starts[node + 1]]:
            level[follower] = max(level[follower], here + 1)
            waiting[follower] -= 1
            if not waiting[follower]:
                ready.append(follower)
    return Shape(max(widths, default=0), max(widths.values(), default=0), len(waiting) - done_count)
