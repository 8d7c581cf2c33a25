"""Migrating, with the revisions before and after."""

from __future__ import annotations

from sqlalchemy import create_engine
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

from app.cli.database import open_store
from app.cli.exits import CliError, Exit
from app.settings import Settings
from app.store.migrate import revision_of

_DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg"}


async def migrated(settings: Settings) -> tuple[str | None, str | None]:
    """Open the store, which brings it up to date: its revision before and after."""
    before = _revision(settings.database_url)
    store = await open_store(settings)
    await store.close()
    return before, _revision(settings.database_url)


def _revision(database_url: str) -> str | None:
    url = make_url(database_url)
    engine = create_engine(url.set(drivername=_DRIVERS[url.get_backend_name()]))
    try:
        with engine.connect() as connection:
            return revision_of(connection)
    except DBAPIError as error:
        raise CliError(Exit.LOCAL_FAULT, "store_unavailable", str(error.orig)) from None
    finally:
        engine.dispose()
