"""A snapshot beside nodes that hold less, more and something else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import Mock

import pytest

from app.ingest.prepare import Publication
from pipeline import manifest as manifests
from pipeline import verify
from pipeline.export import export_snapshot
from pipeline.tables import channel_summaries
from pipeline.verify import Fault, Finding, compare_with_node
from sdstore.sds.codec import decode
from tests.support.server import running_node
from tests.support.snapshots import CHANNELS, conversation, fill_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow


def by_channel(publications: Sequence[Publication]) -> list[list[Publication]]:
    channels = [decode(each.frame)[0].channel_id for each in publications]
    return [
        [each for each, channel in zip(publications, channels, strict=True) if channel == name]
        for name in CHANNELS
    ]


def fill(folder: Path, *channels: Sequence[Publication]) -> str:
    folder.mkdir()
    url = f"sqlite:///{folder / 'sdstore.db'}"
    fill_store(url, chain.from_iterable(channels), sum(map(len, channels)))
    return url


def compared(spark: SparkSession, snapshot: Path, node_url: str) -> Iterator[Finding]:
    return compare_with_node(spark, snapshot, manifests.load(snapshot), node_url)


def test_every_channel_is_judged_and_those_that_grew_in_one_query(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = by_channel(list(islice(conversation(seed=31), 300)))
    later = by_channel(list(islice(conversation(seed=32), 300)))
    export_snapshot(spark, fill(tmp_path / "a", *first), tmp_path / "snapshot")
    same, less, other, grown, torn = range(len(CHANNELS))
    held = [list(each) for each in first]
    held[less].pop()
    held[other][-1] = later[other][0]
    held[grown] += later[grown]
    held[torn] = held[torn][1:] + later[torn]
    fill(tmp_path / "b", *held)
    monkeypatch.setattr(verify, "channel_summaries", summed := Mock(wraps=channel_summaries))
    with running_node(tmp_path / "b") as node:
        findings = list(compared(spark, tmp_path / "snapshot", node.url))
    assert {(each.fault, each.where) for each in findings} == {
        (Fault.NODE_LACKS_ENTRIES, f"channel {CHANNELS[less]!r}"),
        (Fault.NODE_DIFFERS, f"channel {CHANNELS[other]!r}"),
        (Fault.NODE_DIFFERS, f"channel {CHANNELS[torn]!r}"),
    }
    assert held[same] == first[same]
    # Both channels that grew at once, and the torn one again, which might have grown meanwhile.
    assert summed.call_count == 3
