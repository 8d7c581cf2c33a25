"""The audit of a running node: its route, its metrics and `sdstore check --node`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sqlalchemy import text

from app.limits import DEFAULT_LIMITS
from sdstore.client import StoreClient
from tests.app.http.test_lost_content import gauge, node_over, publish_batch, small, until
from tests.app.store.test_frames import in_database
from tests.support.cli import cli
from tests.support.stores import Stores

QUICK = replace(DEFAULT_LIMITS, audit_percent_max=50, audit_delay_s=0, audit_interval_s=0)


def test_a_running_node_shows_what_its_audit_proves_and_finds(
    stores: Stores, tmp_path: Path
) -> None:
    url = stores.new_url()
    with node_over(tmp_path, url, QUICK) as node:
        publish_batch(node, small())
        until(lambda: gauge(node, "audit_passes_total") >= 2)
        assert 'sdstore_audit_open_findings{kind="row"} 0.0' in node.http.get("/metrics").text
        with StoreClient(node.url) as client:
            assert client.audit()["last_pass"]["findings_count"] == 0
        healthy = cli("check", "--node", node.url)
        assert (healthy.code, "0 faults; last whole pass ended: 20" in healthy.out) == (0, True)
        breaking = text("UPDATE messages SET arrival_sum = arrival_sum + 1 WHERE seq = 6")
        in_database(url, lambda connection: connection.execute(breaking))
        shown = 'sdstore_audit_open_findings{kind="row"} 1.0'
        until(lambda: shown in node.http.get("/metrics").text)
        found = cli("check", "--node", node.url)
        assert found.code == 1
        assert "row: message number 6: its sum" in found.err
        assert "remedy: " in found.err
        [finding] = cli("check", "--node", node.url, "--json").json["findings"]
        assert finding["kind"] == "row"
        assert finding["first_at_ms"] <= finding["last_at_ms"]
        # The node goes on, and is ready.
        assert node.http.get("/readyz").status_code == 200
        mending = text("UPDATE messages SET arrival_sum = arrival_sum - 1 WHERE seq = 6")
        in_database(url, lambda connection: connection.execute(mending))
        until(lambda: cli("check", "--node", node.url).code == 0)
    assert cli("check", "--node", "http://127.0.0.1:1", "--deep").code == 2
