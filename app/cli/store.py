"""Verbs that touch a store directly: check."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.database import database_settings, existing_store
from app.cli.exits import Exit
from app.cli.options import AsJson, ConfigFile, DatabaseUrl, DataDir
from app.cli.output import counted, print_error, print_json, progress_bar, stdout
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


async def _check(settings: Settings, *, deep: bool) -> Findings:
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
    stdout().print(f"{settings.database_url}: {verdict}, {entries} in {channels}", markup=False)
