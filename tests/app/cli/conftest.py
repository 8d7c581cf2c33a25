"""Nodes for the command line to talk to: started once, so every test uses channels of its own."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.cli.demo import running_node


@pytest.fixture(scope="session")
def node_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of the node."""
    return tmp_path_factory.mktemp("node")


@pytest.fixture(scope="session")
def node(node_folder: Path) -> Iterator[str]:
    """The URL of a node in a process of its own."""
    with running_node(node_folder) as url:
        yield url


@pytest.fixture(scope="session")
def other_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of another one."""
    with running_node(tmp_path_factory.mktemp("other")) as url:
        yield url


@pytest.fixture(scope="session")
def silent() -> Iterator[str]:
    """The URL of somebody who takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
