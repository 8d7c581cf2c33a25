"""A store that is opened directly, without its node: opening it, upgrading its schema, copying it."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.output import CliError, Exit
from app.errors import Code, Problem
from app.server.disk import sync_path
from app.server.limits import DEFAULT_LIMITS
from app.server.settings import Settings, load_settings
from app.store.database import StoreError as DatabaseError

if TYPE_CHECKING:
    from app.ingest.door import Door
    from app.store.store import Store


SQLITE_PREFIX = "sqlite:///"

COMMAND_LIMITS = replace(DEFAULT_LIMITS, sqlite_read_s=7 * 86_400)
"""Of a command, which can read a whole store in one transaction, as `check` does."""


def database_settings(database: str | None, data_dir: Path | None, config: Path | None) -> Settings:
    """The settings that `serve` has with the same flags."""
    return load_settings(config, {"database_url": database, "data_dir": data_dir})[0]


@asynccontextmanager
async def existing_store(settings: Settings) -> AsyncIterator[Store]:
    """The store that the settings name, which must exist. Raises CliError."""
    require_database(settings.database_url)
    store = await open_store(settings)
    try:
        yield store
    finally:
        await store.close()


async def open_store(settings: Settings) -> Store:
    """The store that the settings name, created if there is none. Raises CliError."""
    from app.store.store import Store  # noqa: PLC0415 - half a second of imports

    with database_errors():
        return await Store.open(settings.database_url, COMMAND_LIMITS)


@asynccontextmanager
async def open_door(settings: Settings) -> AsyncIterator[Door]:
    """The way into the store that the settings name, which is created if there is none.

    Raises CliError where another process writes to it.
    """
    from app.ingest import door  # noqa: PLC0415 - half a second of imports

    with database_errors():
        async with door.open_door(settings.database_url, DEFAULT_LIMITS) as opened:
            yield opened


@contextmanager
def database_errors() -> Iterator[None]:
    """Raises CliError for a database that cannot be used."""
    try:
        yield
    except DatabaseError as error:
        raise CliError(Exit.LOCAL_FAULT, "store_unavailable", str(error)) from None


def require_database(database_url: str) -> None:
    """Raises CliError for the URL of a SQLite file that does not exist."""
    path = database_url.removeprefix(SQLITE_PREFIX)
    if path != database_url and not Path(path).is_file():
        raise CliError(
            Exit.NO,
            "not_found",
            f"there is no database {path}; name one with --data-dir or --database",
        )


_DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg"}


async def migrated(settings: Settings) -> tuple[str | None, str | None]:
    """Upgrade the schema of a store, by opening it: its revision before and after."""
    before = _revision(settings.database_url)
    store = await open_store(settings)
    await store.close()
    return before, _revision(settings.database_url)


def _revision(database_url: str) -> str | None:
    from sqlalchemy import create_engine  # noqa: PLC0415 - a fifth of a second of imports
    from sqlalchemy.engine import make_url  # noqa: PLC0415
    from sqlalchemy.exc import DBAPIError  # noqa: PLC0415

    from app.store.schema import revision_of  # noqa: PLC0415

    url = make_url(database_url)
    engine = create_engine(url.set(drivername=_DRIVERS[url.get_backend_name()]))
    try:
        with engine.connect() as connection:
            return revision_of(connection)
    except DBAPIError as error:
        raise CliError(Exit.LOCAL_FAULT, "store_unavailable", str(error.orig)) from None
    finally:
        engine.dispose()


PAGES_PER_STEP = 4_096  # 16 MiB: the bar moves, and a busy writer does not wait
# SQLite would apply a log that it finds beside the copy, even if it is that of another store.
_BESIDE_A_STORE = ("-wal", "-writer")

Tell = Callable[[int, int], None]


def back_up(database_url: str, target: Path, tell: Tell) -> int:
    """Copy a SQLite database to `target`, while its node goes on; the size of the copy in bytes.

    The copy appears whole or not at all. `tell` is called with the number of pages done and of all
    pages. Raises CliError, Problem.
    """
    if not database_url.startswith(SQLITE_PREFIX):
        detail = "PostgreSQL has its own tool: pg_dump --format=custom --file FILE URL"
        raise CliError(Exit.USAGE, "unsupported_database", detail)
    require_database(database_url)
    source = Path(database_url.removeprefix(SQLITE_PREFIX))
    draft = target.with_name(f"{target.name}.partial")
    _require_unused(source, target, draft)
    try:
        draft.unlink(missing_ok=True)
        draft.touch()  # where this fails the path of the copy is at fault, not the store
        _copy(source, draft, tell)
        size = draft.stat().st_size
        draft.replace(target)
    except sqlite3.Error as error:
        raise _problem(error) from None
    except OSError as error:
        detail = f"{target} cannot be written: {error.strerror}"
        raise CliError(Exit.LOCAL_FAULT, "io_error", detail) from None
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
    sync_path(target.parent)
    return size


def _require_unused(source: Path, *targets: Path) -> None:
    """Raises CliError where a target is this store, or another store that may be open."""
    for target in targets:
        if target.exists() and target.samefile(source):
            raise CliError(Exit.USAGE, "file_in_use", f"{target} is the store itself")
        for suffix in _BESIDE_A_STORE:
            if (beside := Path(f"{target}{suffix}")).exists():
                detail = f"{beside} belongs to a store, which may be open: choose another file"
                raise CliError(Exit.USAGE, "file_in_use", detail)


def _copy(source: Path, draft: Path, tell: Tell) -> None:
    def progress(_status: int, remaining: int, total: int) -> None:
        tell(total - remaining, total)

    with (
        closing(sqlite3.connect(f"{source.resolve().as_uri()}?mode=ro", uri=True)) as original,
        closing(sqlite3.connect(draft)) as copy,
    ):
        original.backup(copy, pages=PAGES_PER_STEP, progress=progress)
        # The copy is one file, without a log beside it.
        copy.execute("PRAGMA journal_mode = DELETE")
        (verdict,) = copy.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise CliError(Exit.NO, "damaged", f"{source} is damaged: {verdict}")
    sync_path(draft)


def _problem(error: sqlite3.Error) -> Problem:
    from app.store.sqlite import problem_of  # noqa: PLC0415 - half a second of imports

    return problem_of(error) or Problem(Code.STORE_UNAVAILABLE, str(error))
