"""A node whose SQLite file is damaged says so, and stays not ready until somebody mended it."""

from __future__ import annotations

import time
from pathlib import Path

from tests.app.cli.test_check import garbage, leaves_of, overwrite
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
