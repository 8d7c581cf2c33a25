"""Verbs that move messages between files and a store that is opened directly: import, export."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli.database import database_settings
from app.cli.existing import is_stdout, require_one_output
from app.cli.exits import Exit
from app.cli.frames import FileFormat, format_of_name
from app.cli.interrupts import loading
from app.cli.options import AsJson, ChannelIds, ConfigFile, DatabaseUrl, DataDir
from app.cli.output import (
    counted,
    human_bytes,
    print_error,
    print_json,
    print_note,
    progress_bar,
    stdout,
)
from app.cli.publish import open_input, print_counts, print_refusal, size_of

verbs = typer.Typer()


@verbs.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Messages to store; - is stdin.")],
    file_format: Annotated[
        FileFormat, typer.Option("--format", help="How they lie in the file.")
    ] = FileFormat.AUTO,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Do not go on where an import was interrupted.")
    ] = False,
    database: DatabaseUrl = None,
    data_dir: DataDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> int:
    """Store the messages of a file; the node must not be running on the same SQLite file.

    An import that was interrupted goes on where it was. With --json: one line for each message that
    was refused, then one with the counts.
    """
    with loading():
        from app.cli.importing import Import, Progress  # noqa: PLC0415 - half a second of imports

    settings = database_settings(database, data_dir, config)
    with open_input(file) as stream, progress_bar() as bar:
        task = bar.add_task("importing", total=size_of(stream), figures="")

        def began(progress: Progress) -> None:
            if progress.items_count:
                print_note(f"going on behind message {progress.items_count:,}", bar.console)

        def tell(progress: Progress, refusals: list[dict[str, Any]]) -> None:
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
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to; - is stdout.")],
    file_format: Annotated[
        FileFormat, typer.Option("--format", help="Told by the file's name unless given.")
    ] = FileFormat.AUTO,
    channel: ChannelIds = None,
    database: DatabaseUrl = None,
    data_dir: DataDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> int:
    """Write the messages of a store to a file, in the order they arrived.

    A file that an earlier export wrote is continued: whole or interrupted, it gets what is new; if it
    was written with other channels or from another store and lacks older messages, the exit code is
    1. The node may be running. Only NDJSON keeps retrieval hints, and only protobuf keeps frames byte
    for byte. Messages whose frames are damaged are named and left out; the exit code is then 6.
    """
    with loading():
        from app.cli.exporting import export_to  # noqa: PLC0415 - half a second of imports

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
    if as_json:
        print_json({"file": str(file), **done})
    elif not is_stdout(file):
        messages = counted(done["messages"], "message", "messages")
        size = human_bytes(done["bytes"])
        before = f" behind the {done['before']:,} that were there" if done["before"] else ""
        stdout().print(f"exported {messages} ({size}) to {file}{before}", markup=False)
    for digest in done["damaged"]:
        print_note(f"left out: the frame of {digest} is damaged")
    if done["lacking"]:
        lacking = counted(done["lacking"], "message", "messages")
        detail = f"{file} lacks {lacking} from before its last one: export to a new file"
        print_error(f"foreign_file: {detail}")
    if done["damaged"]:
        return Exit.LOCAL_FAULT
    return Exit.NO if done["lacking"] else Exit.DONE
