"""Autobase, live: bases of the npm package `autobase` in a node process, driven step by step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.ordering.graphs import Sent
from tests.support.node import NodeProcess, node_process, node_project

PROJECT = Path(__file__).parents[1] / "ordering" / "autobase"


@dataclass(frozen=True, slots=True)
class State:
    """The order of one base: `indexed` is confirmed, `signed` is also signed by a majority."""

    indexed: list[str]
    tip: list[str]
    signed: list[str]


class Autobase:
    """Bases that all index. A node is "WRITER:LENGTH"; a writer is a number."""

    def __init__(self, node: NodeProcess) -> None:
        self._node = node
        self.keys: list[str] = []

    def open(self, count: int) -> None:
        """New bases, which know each other as indexers; the old ones are closed."""
        self.keys = self._node.call(op="open", count=count)["keys"]

    def append(self, writer: int) -> None:
        """Write a node that refers to all heads that the base knows."""
        self._node.call(op="append", writer=writer)

    def sync(self, left: int, right: int) -> None:
        """Both bases know afterwards what one of them knew."""
        self._node.call(op="sync", left=left, right=right)

    def state(self, writer: int) -> State:
        """The order that a base sees."""
        return State(**self._node.call(op="state", writer=writer))

    def graph(self) -> list[Sent]:
        """All nodes, causes first. Their senders are the keys of the bases, which break ties in both."""
        causes: dict[str, list[str]] = self._node.call(op="nodes")["nodes"]
        placed: dict[str, Sent] = {}
        while len(placed) < len(causes):
            for each, before in causes.items():
                if each not in placed and all(cause in placed for cause in before):
                    key = self.keys[int(each.partition(":")[0])]
                    placed[each] = Sent(each, key, tuple(before))
        return list(placed.values())


@contextmanager
def autobase() -> Iterator[Autobase]:
    """Autobase until the block ends; the first run installs it."""
    with node_process(node_project(PROJECT) / "peer.mjs") as process:
        yield Autobase(process)
