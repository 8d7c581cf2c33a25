"""An online copy of a SQLite store: the node goes on reading and writing meanwhile."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from app.cli.database import SQLITE_PREFIX, require_database
from app.cli.exits import CliError, Exit
from app.errors import Code, Problem

PAGES_PER_STEP = 4_096  # 16 MiB: the bar moves, and a busy writer is not held up
# SQLite would even read the log of the store before into the copy that takes its place.
_BESIDE_A_STORE = ("-wal", "-writer")

Tell = Callable[[int, int], None]


def back_up(database_url: str, target: Path, tell: Tell) -> int:
    """Copy the database to `target`, which appears whole or not at all; its size in bytes.

    `tell` is called with the pages that are done and that there are. Raises CliError, Problem.
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
    _sync_folder(target.parent)
    return size


def _require_unused(source: Path, *targets: Path) -> None:
    """Raises CliError where a target is the store itself, or another one that may be open."""
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
        # One file, without a log beside it.
        copy.execute("PRAGMA journal_mode = DELETE")
        (verdict,) = copy.execute("PRAGMA quick_check(1)").fetchone()
        if verdict != "ok":
            raise CliError(Exit.NO, "damaged", f"{source} is damaged: {verdict}")
    with draft.open("rb") as written:
        os.fsync(written.fileno())


def _problem(error: sqlite3.Error) -> Problem:
    from app.store.sqlite import problem_of  # noqa: PLC0415 - half a second of imports

    return problem_of(error) or Problem(Code.STORE_UNAVAILABLE, str(error))


def _sync_folder(folder: Path) -> None:
    """A rename is on disk when its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
