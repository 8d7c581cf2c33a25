"""Verbs that look after a store: check, migrate, backup."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.backup import back_up
from app.cli.database import database_settings, existing_store, require_database
from app.cli.exits import CliError, Exit
from app.cli.interrupts import loading
from app.cli.options import AsJson, ConfigFile, DatabaseUrl, DataDir
from app.cli.output import counted, human_bytes, print_error, print_json, progress_bar, stdout
from app.settings import Settings

if TYPE_CHECKING:
    from app.cli.audit import Findings

verbs = typer.Typer()


@verbs.command()
def check(
    deep: Annotated[
        bool, typer.Option("--deep", help="Read and hash every message as well.")
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
                "damages": findings.damages,
            }
        )
    else:
        _print(findings, settings)
    return Exit.NO if findings.damages else Exit.DONE


@verbs.command()
def migrate(
    database: DatabaseUrl = None,
    data_dir: DataDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Bring a database to the schema of this version; `serve` does it too when it starts."""
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
        from app.cli.audit import audit  # noqa: PLC0415 - half a second of imports

    async with existing_store(settings) as store:
        with progress_bar() as bar:
            total, _ = await store.watermark()
            task = bar.add_task("checking", total=total or None, figures="")
            return await audit(store, deep=deep, tick=lambda count: bar.update(task, advance=count))


def _print(findings: Findings, settings: Settings) -> None:
    for damage in findings.damages:
        print_error(f"damaged: {damage}")
    entries = counted(findings.entries, "message", "messages")
    channels = counted(findings.channels, "channel", "channels")
    verdict = "damaged" if findings.damages else "sound"
    stdout().print(
        f"{settings.shown_database_url}: {verdict}, {entries} in {channels}", markup=False
    )
