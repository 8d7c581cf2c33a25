"""Verbs that open a store themselves: import, export, backup, migrate, check, reindex."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.database import (
    SQLITE_PREFIX,
    back_up,
    database_errors,
    database_settings,
    existing_store,
    migrated,
    require_database,
)
from app.cli.files import (
    FileFormat,
    format_of_name,
    is_stdout,
    open_input,
    require_one_output,
    size_of,
)
from app.cli.main import loading
from app.cli.output import (
    AsJson,
    ChannelIds,
    CliError,
    ConfigFile,
    DatabaseUrl,
    DataDir,
    Exit,
    counted,
    human_bytes,
    print_counts,
    print_error,
    print_json,
    print_note,
    print_refusal,
    progress_bar,
    stdout,
)
from app.errors import Code, Problem
from app.server.settings import Settings
from app.store.database import StoreError as DatabaseError

if TYPE_CHECKING:
    from app.cli.checking import Findings


verbs = typer.Typer()


# --- messages between a file and a store ---------------------------------------------------------


@verbs.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Messages to store; - is stdin.")],
    file_format: Annotated[
        FileFormat, typer.Option("--format", help="Format of the file.")
    ] = FileFormat.AUTO,
    from_start: Annotated[
        bool,
        typer.Option(
            "--from-start", help="Begin at the first message, even after an interrupted import."
        ),
    ] = False,
    database: DatabaseUrl = None,
    data_dir: DataDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> int:
    """Store the messages of a file. The node must not be running on the same SQLite file.

    An interrupted import continues where it stopped. --json prints one line for each message that was
    refused, then one with the counts.
    """
    with loading():
        from app.cli.copying import Import, ImportProgress  # noqa: PLC0415 - half a second of imports

    settings = database_settings(database, data_dir, config)
    with open_input(file) as stream, progress_bar() as bar:
        task = bar.add_task("importing", total=size_of(stream), figures="")

        def began(progress: ImportProgress) -> None:
            if progress.items_count:
                print_note(f"continuing behind message {progress.items_count:,}", bar.console)

        def tell(progress: ImportProgress, refusals: list[dict[str, Any]]) -> None:
            for document in refusals:
                print_json(document) if as_json else print_refusal(document, bar.console)
            bar.update(
                task,
                completed=progress.position,
                figures=f"{progress.items_count:,} messages",
            )

        importing = Import(stream, file, file_format)
        counts = asyncio.run(importing.run(settings, began, tell, is_fresh=from_start))
    if as_json:
        print_json({"outcome": "done", "counts": dict(counts)})
    else:
        print_counts("imported", counts)
    return Exit.REFUSED if counts["refused"] else Exit.DONE


@verbs.command()
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write; - is stdout.")],
    file_format: Annotated[
        FileFormat, typer.Option("--format", help="Format of the file; auto decides by its name.")
    ] = FileFormat.AUTO,
    channel: ChannelIds = None,
    database: DatabaseUrl = None,
    data_dir: DataDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> int:
    """Write the messages of a store to a file, in the order they arrived.

    The node may be running. A file that an earlier export wrote, whole or interrupted, is continued
    with the messages it lacks. If it was written with other channels or from another store, and older
    messages are missing, the exit code is 1. It is 1 too if the store has no messages of a channel that
    --channel names; the others are exported. NDJSON alone keeps retrieval hints, protobuf alone keeps
    frames byte for byte. Messages with damaged frames are named and left out; the exit code is then 6.
    """
    with loading():
        from app.cli.copying import export_to, no_messages_of  # noqa: PLC0415 - half a second of imports

    require_one_output(file, as_json=as_json)
    if file_format in (FileFormat.AUTO, FileFormat.FRAME):
        file_format = format_of_name(file)
    settings = database_settings(database, data_dir, config)
    with progress_bar() as bar:
        task = bar.add_task("exporting", total=None, figures="")

        def tell(messages_count: int, total: int) -> None:
            figures = f"{messages_count:,} messages"
            bar.update(task, completed=messages_count, total=total, figures=figures)

        done = asyncio.run(export_to(settings, file, file_format, frozenset(channel or ()), tell))
    unknown = done.pop("unknown")
    if as_json:
        print_json({"file": str(file), **done})
    elif not is_stdout(file):
        messages = counted(done["messages"], "message", "messages")
        size = human_bytes(done["bytes"])
        before = f" behind the {done['before']:,} already in it" if done["before"] else ""
        stdout().print(f"exported {messages} ({size}) to {file}{before}", markup=False)
    for digest in done["damaged"]:
        print_note(f"left out: the frame of {digest} is damaged")
    if done["lacking"]:
        lacking = counted(done["lacking"], "message", "messages")
        detail = f"{file} lacks {lacking} older than its last one; export to a new file"
        print_error(f"foreign_file: {detail}")
    if unknown:
        print_error(f"{Code.NOT_FOUND}: {no_messages_of(settings, unknown)}")
    if done["damaged"]:
        return Exit.LOCAL_FAULT
    return Exit.NO if done["lacking"] or unknown else Exit.DONE


# --- the database ----------------------------------------------------------------------------------


@verbs.command()
def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File of the copy.")],
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    database: DatabaseUrl = None,
    data_dir: DataDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Copy a SQLite store while its node runs. Serve the copy with a `--data-dir` of its own."""
    if file.exists() and not force:
        raise CliError(Exit.REFUSED, "file_exists", f"{file} exists already; --force replaces it")
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


@verbs.command()
def migrate(
    database: DatabaseUrl = None,
    data_dir: DataDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Upgrade the database schema; `serve` also does this when it starts."""
    settings = database_settings(database, data_dir, config)
    require_database(settings.database_url)
    before, after = asyncio.run(migrated(settings))
    if as_json:
        print_json({"database": settings.shown_database_url, "before": before, "after": after})
        return
    what = f"is at revision {after}" if before == after else f"went from {before} to {after}"
    stdout().print(f"{settings.shown_database_url} {what}", markup=False)


@verbs.command()
def check(
    deep: Annotated[
        bool,
        typer.Option(
            "--deep", help="Also run the database's own check, and read and hash every message."
        ),
    ] = False,
    database: DatabaseUrl = None,
    data_dir: DataDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> int:
    """Check that database, index and roots agree. The node may be running."""
    settings = database_settings(database, data_dir, config)
    findings = asyncio.run(_checked(settings, deep=deep))
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
        _print_findings(findings, settings)
    return Exit.NO if findings.damages else Exit.DONE


async def _checked(settings: Settings, *, deep: bool) -> Findings:
    with loading():
        from app.cli.checking import Findings, advise, check_database, check_store  # noqa: PLC0415 - half a second of imports
        from app.store.integrity import is_damage  # noqa: PLC0415

    findings = Findings()
    require_database(settings.database_url)
    with database_errors():
        is_readable = not deep or await check_database(settings, findings)
    try:
        if is_readable:
            async with existing_store(settings) as store:
                with progress_bar() as bar:
                    total, _ = await store.arrivals.watermark()
                    task = bar.add_task("checking", total=total or None, figures="")
                    await check_store(
                        store,
                        findings,
                        deep=deep,
                        tick=lambda count: bar.update(task, advance=count),
                    )
    except (CliError, Problem) as error:
        if not is_damage(error):
            raise
        findings.add(f"the database cannot be read any further: {error}")
    except (DatabaseError, MemoryError) as error:
        # The snapshot could not be opened, or memory ran out: the rows are not at fault.
        if not is_damage(error):
            raise CliError(Exit.LOCAL_FAULT, "store_unavailable", str(error)) from error
        findings.add(f"the database cannot be read any further: {error}")
    except Exception as error:  # noqa: BLE001 - damaged rows fail in every way that values can
        findings.add(f"a row has values that cannot be read: {type(error).__name__}: {error}")
    advise(settings, findings)
    return findings


def _print_findings(findings: Findings, settings: Settings) -> None:
    for damage in findings.damages:
        print_error(f"damaged: {damage}")
    for text in (*findings.advice, *findings.unchecked):
        print_note(text)
    entries = counted(findings.entries, "message", "messages")
    channels = counted(findings.channels, "channel", "channels")
    verdict = "damaged" if findings.damages else "sound"
    extent = f"{entries} in {channels}" if findings.is_complete else "not all messages were checked"
    stdout().print(f"{settings.shown_database_url}: {verdict}, {extent}", markup=False)


@verbs.command()
def reindex(
    database: DatabaseUrl = None,
    data_dir: DataDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Rebuild the indexes of a store, or a damaged SQLite file. On SQLite the node must be stopped."""
    settings = database_settings(database, data_dir, config)
    require_database(settings.database_url)
    with loading():
        from app.cli.checking import rebuild_sqlite  # noqa: PLC0415 - half a second of imports
        from app.store.integrity import rebuild_postgres  # noqa: PLC0415

    rebuilt = None
    with database_errors():
        if settings.database_url.startswith(SQLITE_PREFIX):
            rebuilt = asyncio.run(rebuild_sqlite(settings))
        else:
            rebuild_postgres(settings.database_url)
    if as_json:
        kept = rebuilt and {**rebuilt.published._asdict(), "old_file": str(rebuilt.old_file)}
        print_json({"database": settings.shown_database_url, "left_out": kept})
        return
    if rebuilt:
        published = rebuilt.published
        print_note(
            f"more than indexes is damaged: {counted(published.messages_count, 'message', 'messages')} can be "
            f"read and match their digests; {published.unreadable_count:,} that were found do not; a sync with "
            f"a peer brings what is missing; the old file is kept as {rebuilt.old_file}"
        )
    stdout().print(f"{settings.shown_database_url}: indexes rebuilt", markup=False)
