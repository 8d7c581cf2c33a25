"""What a planted fault is."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """`right` stands exactly once in the file at `path`; `wrong` takes its place."""

    name: str
    path: str
    right: str
    wrong: str
    tests: tuple[str, ...]
