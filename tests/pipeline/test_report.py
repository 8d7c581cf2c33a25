"""The report of a small conversation whose numbers can be counted by hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.csv
import pytest

from app.ingest.prepare import Publication
from pipeline.export import export_snapshot
from pipeline.report import write_report
from sdstore.sds.codec import encode
from sdstore.sds.model import HistoryEntry, Message
from tests.support.snapshots import fill_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow

CHANNEL = "<b>chat</b>"


def message(name: str, sender: str, lamport: int, *named: str, content: bytes = b"x") -> Message:
    return Message(
        message_id=name,
        channel_id=CHANNEL,
        sender_id=sender,
        lamport_timestamp=lamport,
        causal_history=tuple(map(HistoryEntry, named)),
        content=content,
    )


CONVERSATION = [
    message("a", "alice", 1),
    message("b", "bob", 2, "a"),
    message("c", "carol", 2, "a", "never seen"),
    message("d", "alice", 3, "b", "c"),
    message("e", "bob", 4, "d", "d"),
    message("e", "bob", 4, "d", content=b"something else"),
    message("a", "alice", 5, content=b"x"),
    message("f", "carol", 2**62, "e"),
]


def test_a_report_counts_what_is_there(spark: SparkSession, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'sdstore.db'}"
    fill_store(url, (Publication(encode(each)) for each in CONVERSATION), len(CONVERSATION), days=2)
    export_snapshot(spark, url, tmp_path / "snapshot")
    tables = write_report(spark, tmp_path / "snapshot", tmp_path / "out")

    activity = tables["activity"].to_pylist()
    assert [each["messages"] for each in activity] == [4, 4]
    assert [each["messages_so_far"] for each in activity] == [4, 8]
    assert [each["senders"] for each in activity] == [3, 3]
    [gap] = tables["gaps"].to_pylist()
    assert (gap["missing_messages"], gap["references"]) == (1, 1)
    several = {each["message_id"]: each for each in tables["equivocations"].to_pylist()}
    assert several["a"]["contents"] == 1
    assert not several["a"]["is_equivocation"]
    assert several["e"]["variants"] == 2
    assert several["e"]["is_equivocation"]
    [graph] = tables["graphs"].to_pylist()
    assert (graph["messages"], graph["depth"], graph["width"], graph["cyclic"]) == (8, 5, 2, 0)
    assert [each["message_id"] for each in tables["clocks"].to_pylist()] == ["f"]
    # "a" and "d" are named by others within their day's write, "b" and "c" a day later.
    assert sum(each["messages"] for each in tables["lags"].to_pylist()) == 5
    assert max(each["lag_s_p95"] for each in tables["lags"].to_pylist()) == 86_400

    out = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"index.html", "messages.png", "activity.csv", "activity.parquet"} <= out
    page = (tmp_path / "out" / "index.html").read_text()
    assert "&lt;b&gt;chat&lt;/b&gt;" in page
    assert "<title>Snapshot snapshot</title>" in page
    assert 'src="growth.png"' in page
    assert CHANNEL not in page
    assert pyarrow.csv.read_csv(tmp_path / "out" / "activity.csv").num_rows == 2
    assert (tmp_path / "out" / "messages.png").read_bytes().startswith(b"\x89PNG")
