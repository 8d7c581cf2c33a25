"""A node whose SQLite file is damaged says so, and stays not ready until somebody mended it."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.app.cli.test_check import garbage, leaves_of, overwrite
from tests.support.attacked import eventually
from tests.support.federation import message
from tests.support.server import running_node
from tests.support.snapshots import conversation, fill_store

PROBED_S = 2.5
"""The writer and the readiness look again every second."""


def test_a_node_that_a_damaged_file_kept_from_writing_is_not_ready_until_it_is_restarted(
    tmp_path: Path,
) -> None:
    path = tmp_path / "sdstore.db"
    fill_store(f"sqlite:///{path}", conversation(seed=3), 500)
    for page in leaves_of(path, "messages_by_id"):
        overwrite(path, page, garbage)
    with running_node(tmp_path) as node:
        assert node.http.get("/readyz").status_code == 200
        refused = node.publish(message(1)).json()
        assert (refused["status"], refused["code"]) == (503, "store_unavailable")
        assert refused["title"] == "The database is unavailable"
        assert "sdstore check --deep" in refused["detail"]
        ends_s = time.monotonic() + PROBED_S
        while time.monotonic() < ends_s:
            answer = node.http.get("/readyz")
            assert (answer.status_code, answer.json()["code"]) == (503, "not_ready")
            assert "sdstore check --deep" in answer.json()["detail"]
            time.sleep(0.1)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_nothing_is_acknowledged_into_a_file_that_was_deleted_or_replaced(
    tmp_path: Path, is_replaced: bool
) -> None:
    path, aside = tmp_path / "sdstore.db", tmp_path / "aside.db"
    with running_node(tmp_path) as node:
        assert node.publish(message(1)).status_code == 201
        path.rename(aside)
        if is_replaced:
            shutil.copy(aside, path)
        refused = node.publish(message(2)).json()
        assert (refused["status"], refused["code"]) == (503, "store_unavailable")
        assert "was deleted or replaced" in refused["detail"]
        answer = node.http.get("/readyz")
        assert (answer.status_code, answer.json()["code"]) == (503, "not_ready")
        # The right file is back: nothing was lost, and the node goes on by itself.
        aside.rename(path)
        assert eventually(lambda: node.http.get("/readyz").status_code == 200, PROBED_S)
        assert node.publish(message(2)).status_code == 201
        assert node.publish(message(1)).json()["outcome"] == "duplicate"


def test_a_file_that_is_deleted_while_nobody_writes_makes_the_node_unready(tmp_path: Path) -> None:
    with running_node(tmp_path) as node:
        (tmp_path / "sdstore.db").rename(tmp_path / "aside.db")
        assert eventually(lambda: node.http.get("/readyz").status_code == 503, PROBED_S)
