"""One Spark session for all tests: starting one takes seconds, and a process can have one only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pipeline.export import export_snapshot
from pipeline.session import spark_session
from tests.support.snapshots import conversation, fill_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    with spark_session("local[2,4]") as session:
        yield session


@pytest.fixture(scope="session")
def store_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A store with 3,000 messages that arrived on three days; nobody writes to it."""
    url = f"sqlite:///{tmp_path_factory.mktemp('store') / 'sdstore.db'}"
    fill_store(url, conversation(seed=1), 3_000, days=3)
    return url


@pytest.fixture(scope="session")
def snapshot(spark: SparkSession, store_url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A snapshot of that store; copy it before changing anything."""
    folder = tmp_path_factory.mktemp("snapshots") / "first"
    export_snapshot(spark, store_url, folder)
    return folder
