from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from bench.postgres_server import URL_VARIABLE, running_postgres
from tests.support.stores import PostgresStores, SqliteStores, Stores


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """The maintenance database of the one server of a test run."""
    with running_postgres() as url:
        yield url


@pytest.fixture(scope="session")
def postgres_stores(postgres_url: str) -> Iterator[PostgresStores]:
    """Databases of that server."""
    stores = PostgresStores(postgres_url)
    yield stores
    # A server of our own goes away with everything in it.
    if URL_VARIABLE in os.environ:
        stores.close()


@pytest.fixture(scope="session")
def sqlite_stores(tmp_path_factory: pytest.TempPathFactory) -> SqliteStores:
    """SQLite files."""
    return SqliteStores(tmp_path_factory.mktemp("stores"))


@pytest.fixture(scope="session", params=["sqlite", "postgres"])
def stores(request: pytest.FixtureRequest) -> Stores:
    """Both kinds of databases, one after the other."""
    found: Stores = request.getfixturevalue(f"{request.param}_stores")
    return found


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
