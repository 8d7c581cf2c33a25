from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.stores import Stores, make_stores


@pytest.fixture(scope="session", params=["sqlite", "postgres"])
def stores(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stores]:
    yield from make_stores(request.param, tmp_path_factory.mktemp("stores"))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
