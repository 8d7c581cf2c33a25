"""Causal graphs, the slow and plain way."""

from __future__ import annotations


def reaches(causes: list[list[int]], start: int) -> set[int]:
    """Everything before a number."""
    found: set[int] = set()
    waiting = [start]
    while waiting:
        new = set(causes[waiting.pop()]) - found
        found |= new
        waiting.extend(new)
    return found
