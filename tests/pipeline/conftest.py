"""One Spark session for all tests: starting one takes seconds, and a process can have one only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from bench.postgres_server import running_postgres
from pipeline import cli
from pipeline.export import export_snapshot
from pipeline.session import spark_session
from tests.support.snapshots import conversation, fill_store
from tests.support.stores import PostgresStores, SqliteStores

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.support.stores import Stores


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    with spark_session("local[2,4]") as session:
        session.conf.set("spark.sql.shuffle.partitions", 2)
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


@pytest.fixture
def verbs(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    """Command lines run in the session of all tests."""
    monkeypatch.setattr(cli, "opened", lambda *_, **__: nullcontext(spark))


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.slow)], scope="module")
def stores(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stores]:
    if request.param == "sqlite":
        yield SqliteStores(tmp_path_factory.mktemp("sqlite"))
        return
    with running_postgres() as url, closing(PostgresStores(url)) as made:
        yield made
