"""Verbs that look after a store: check, reindex, migrate, backup."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.backup import back_up
from app.cli.database import (
    SQLITE_PREFIX,
    database_errors,
    database_settings,
    existing_store,
    require_database,
)
from app.cli.exits import CliError, Exit
from app.cli.interrupts import loading
from app.cli.options import AsJson, ConfigFile, DatabaseUrl, DataDir
from app.cli.output import (
    counted,
    human_bytes,
    print_error,
    print_json,
    print_note,
    progress_bar,
    stdout,
)
from app.errors import Problem
from app.settings import Settings
from app.store.faults import StoreError as DatabaseError

if TYPE_CHECKING:
    from app.cli.audit import Findings

verbs = typer.Typer()


@verbs.command()
def check(
    deep: Annotated[
        bool,
        typer.Option(
            "--deep", help="Have the database check itself; read and hash every message as well."
        ),
    ] = False,
    database: DatabaseUrl = None,
    data_dir: DataDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> int:
    """Check that database, index and roots agree; the node may be running."""
    settings = database_settings(database, data_dir, config)
    findings = asyncio.run(_check(settings, deep=deep))
    if as_json:
        print_json(
            {
                "sound": not findings.damages,
                "deep": deep,
                "channels": findings.channels,
                "entries": findings.entries,
                "lost": findings.lost_count,
                "damages": findings.damages,
                "advice": findings.advice,
                "unchecked": findings.unchecked,
            }
        )
    else:
        _print(findings, settings)
    return Exit.NO if findings.damages else Exit.DONE


@verbs.command()
def reindex(
    database: DatabaseUrl = None,
    data_dir: DataDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Build the indexes of a store anew, from its rows; on SQLite the node must be stopped."""
    settings = database_settings(database, data_dir, config)
    require_database(settings.database_url)
    with loading():
        from app.store.integrity import DAMAGED_SUFFIX, rebuild_postgres, rebuild_sqlite  # noqa: PLC0415

    left_out: Counter[str] = Counter()
    with database_errors():
        if settings.database_url.startswith(SQLITE_PREFIX):
            path = Path(settings.database_url.removeprefix(SQLITE_PREFIX))
            left_out = rebuild_sqlite(path)
        else:
            rebuild_postgres(settings.database_url)
    if as_json:
        print_json({"database": settings.shown_database_url, "rows_left_out": dict(left_out)})
        return
    for table, count in left_out.items():
        print_error(
            f"damaged: {counted(count, 'row', 'rows')} of table {table} could not be read and are "
            f"not in the new file; the old one is {path}{DAMAGED_SUFFIX}"
        )
    stdout().print(f"{settings.shown_database_url}: indexes built anew", markup=False)


@verbs.command()
def migrate(
    database: DatabaseUrl = None,
    data_dir: DataDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Upgrade the database schema; `serve` does it too when it starts."""
    with loading():
        from app.cli.migrating import migrated  # noqa: PLC0415 - half a second of imports

    settings = database_settings(database, data_dir, config)
    require_database(settings.database_url)
    before, after = asyncio.run(migrated(settings))
    if as_json:
        print_json({"database": settings.shown_database_url, "before": before, "after": after})
        return
    what = f"is at revision {after}" if before == after else f"went from {before} to {after}"
    stdout().print(f"{settings.shown_database_url} {what}", markup=False)


@verbs.command()
def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where the copy goes.")],
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    database: DatabaseUrl = None,
    data_dir: DataDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Copy a SQLite store while its node goes on; `serve --database` can use the copy as it is."""
    if file.exists() and not force:
        raise CliError(Exit.REFUSED, "file_exists", f"{file} is there already; --force replaces it")
    settings = database_settings(database, data_dir, config)
    with progress_bar() as bar:
        task = bar.add_task("copying", total=None, figures="")
        size = back_up(
            settings.database_url,
            file,
            lambda done, total: bar.update(task, completed=done, total=total),
        )
    if as_json:
        print_json({"file": str(file), "bytes": size})
    else:
        stdout().print(f"copied to {file} ({human_bytes(size)})", markup=False)


async def _check(settings: Settings, *, deep: bool) -> Findings:
    with loading():
        from app.cli.audit import Findings, audit, audit_structure  # noqa: PLC0415 - half a second of imports
        from app.store.integrity import is_damage  # noqa: PLC0415

    findings = Findings()
    require_database(settings.database_url)
    with database_errors():
        if deep and not await audit_structure(settings, findings):
            return findings
    try:
        async with existing_store(settings) as store:
            with progress_bar() as bar:
                total, _ = await store.arrivals.watermark()
                task = bar.add_task("checking", total=total or None, figures="")
                await audit(
                    store,
                    findings,
                    deep=deep,
                    tick=lambda count: bar.update(task, advance=count),
                )
    except (CliError, Problem) as error:
        if not is_damage(error):
            raise
        findings.add(f"the database refuses to go on: {error}")
    except (DatabaseError, MemoryError) as error:
        # Of a snapshot that could not be opened, or of this machine: neither is about the rows.
        if not is_damage(error):
            raise CliError(Exit.LOCAL_FAULT, "store_unavailable", str(error)) from error
        findings.add(f"the database refuses to go on: {error}")
    except Exception as error:  # noqa: BLE001 - damaged rows fail in every way that values can
        findings.add(f"a row cannot be understood: {type(error).__name__}: {error}")
    return findings


def _print(findings: Findings, settings: Settings) -> None:
    for damage in findings.damages:
        print_error(f"damaged: {damage}")
    for text in (*findings.advice, *findings.unchecked):
        print_note(text)
    entries = counted(findings.entries, "message", "messages")
    channels = counted(findings.channels, "channel", "channels")
    verdict = "damaged" if findings.damages else "sound"
    extent = f"{entries} in {channels}" if findings.is_complete else "not all messages were checked"
    stdout().print(f"{settings.shown_database_url}: {verdict}, {extent}", markup=False)
