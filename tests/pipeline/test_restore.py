"""What a restore does to the order of arrival."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from app.ingest.records import Publication
from pipeline.database import open_database
from pipeline.export import export_snapshot
from pipeline.restore import restore_snapshot
from pipeline.scan import Scan
from sdstore.sds.codec import encode
from sdstore.sds.model import Message
from tests.support.snapshots import fill_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.slow


def fill(url: str, publications: Sequence[Publication], *, days: int = 1) -> None:
    fill_store(url, iter(publications), len(publications), days=days)


def frames_in(url: str) -> list[bytes]:
    with open_database(url) as database:
        batches = list(database.entries(Scan()))
    return [frame for batch in batches for frame in batch.column("frame").to_pylist()]


@pytest.mark.parametrize("is_verified", [True, False])
def test_of_the_variants_of_an_id_the_first_stays_the_first(
    spark: SparkSession, tmp_path: Path, *, is_verified: bool
) -> None:
    plain = Message("x", "channel", lamport_timestamp=1, content=b"mallory")
    filtered = replace(plain, content=b"alice", bloom_filter=bytes(18_000))
    frames = [encode(filtered), encode(plain)]
    url, copy_url = (f"sqlite:///{tmp_path}/{name}.db" for name in "ab")
    fill(url, [Publication(frame) for frame in frames])
    export_snapshot(spark, url, tmp_path / "snapshot")
    restore_snapshot(spark, tmp_path / "snapshot", copy_url, is_verified=is_verified)
    assert frames_in(copy_url) == frames
