"""Opening the store of a node that need not run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.exits import CliError, Exit
from app.limits import DEFAULT_LIMITS
from app.settings import Settings, load_settings
from app.store.faults import StoreError as DatabaseError

if TYPE_CHECKING:
    from app.ingest.door import Door
    from app.store.store import Store

SQLITE_PREFIX = "sqlite:///"


def database_settings(database: str | None, data_dir: Path | None, config: Path | None) -> Settings:
    """The settings that `serve` would have with the same flags."""
    return load_settings(config, {"database_url": database, "data_dir": data_dir})[0]


@asynccontextmanager
async def existing_store(settings: Settings) -> AsyncIterator[Store]:
    """The store these settings name; one that is not there is not made."""
    require_database(settings.database_url)
    store = await open_store(settings)
    try:
        yield store
    finally:
        await store.close()


async def open_store(settings: Settings) -> Store:
    """The store these settings name, made where there is none."""
    from app.store.store import Store  # noqa: PLC0415 - half a second of imports

    with database_errors():
        return await Store.open(settings.database_url, DEFAULT_LIMITS)


@asynccontextmanager
async def open_door(settings: Settings) -> AsyncIterator[Door]:
    """The one door of the store these settings name, which is made where there is none.

    Raises CliError where another process writes to it.
    """
    from app.ingest.committer import GroupCommitter  # noqa: PLC0415 - half a second of imports
    from app.ingest.door import Door  # noqa: PLC0415

    store = await open_store(settings)
    try:
        committer = GroupCommitter(store, DEFAULT_LIMITS)
        with database_errors():
            await committer.start()
        try:
            yield Door(store, committer, DEFAULT_LIMITS)
        finally:
            await committer.close()
    finally:
        await store.close()


@contextmanager
def database_errors() -> Iterator[None]:
    """Why a database cannot be used, as one line."""
    try:
        yield
    except DatabaseError as error:
        raise CliError(Exit.LOCAL_FAULT, "store_unavailable", str(error)) from None


def require_database(database_url: str) -> None:
    """Raises CliError where a SQLite URL names no file."""
    path = database_url.removeprefix(SQLITE_PREFIX)
    if path != database_url and not Path(path).is_file():
        raise CliError(Exit.NO, "not_found", f"there is no database {path}")
