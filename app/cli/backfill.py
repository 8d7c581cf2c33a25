"""The verb that keeps a file equal to a channel, through reconciliation."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from app.cli.bar import figures_of, sync_progress
from app.cli.existing import is_stdout, require_one_output
from app.cli.exits import CliError, Exit, exit_of_sync
from app.cli.frames import format_of_name
from app.cli.interrupts import loading
from app.cli.node import node_client
from app.cli.options import DEFAULT_NODE, AsJson, NodeUrl
from app.cli.output import counted, human_bytes, print_json, stdout
from app.errors import Code
from sdstore.sync.report import Progress, SyncReport

verbs = typer.Typer()


@verbs.command()
def backfill(
    channel_id: Annotated[str, typer.Argument(metavar="CHANNEL", help="The channel.")],
    into: Annotated[
        Path,
        typer.Option(
            "--into", metavar="FILE", help="Where its messages go; made or continued; - is stdout."
        ),
    ],
    node: NodeUrl = DEFAULT_NODE,
    as_json: AsJson = False,
) -> int:
    """Fetch the messages of a channel that a file lacks, by comparing, not by downloading all.

    The file is NDJSON by its suffix (.ndjson, .jsonl, .json), else length-delimited protobuf.
    """
    require_one_output(into, as_json=as_json)
    with loading():
        from app.cli.filestore import backfill_file  # noqa: PLC0415 - half a second of imports

    with sync_progress() as bar:
        task = bar.add_task("backfilling", total=100, figures="", segments=[])

        def changed(progress: Progress) -> None:
            segments = [{"state": s, "share": share} for s, share in progress.segments]
            bar.update(
                task,
                completed=progress.in_sync_percent,
                segments=segments,
                figures=figures_of(asdict(progress)),
            )

        work = backfill_file(node, channel_id, into, format_of_name(into), changed)
        is_new = not into.exists()
        try:
            report = asyncio.run(work)
        finally:
            if is_new and into.is_file() and not into.stat().st_size:
                into.unlink()
    _raise_fault(report, node)
    if not report.entries_received:
        with node_client(node) as client:
            client.channel(channel_id)  # fails where the node knows no such channel
    if as_json:
        print_json({"channel_id": channel_id, "file": str(into), **asdict(report)})
    elif not is_stdout(into):
        messages = counted(report.entries_received, "message", "messages")
        figures = f"{counted(report.rounds, 'round', 'rounds')}, {human_bytes(report.bytes_down)}"
        stdout().print(f"{into}: {messages} added ({figures} down)", markup=False)
    return exit_of_sync(report.outcome)


def _raise_fault(report: SyncReport, node: str) -> None:
    if report.code == Code.PEER_UNREACHABLE:
        raise CliError(Exit.LOCAL_FAULT, "unreachable", f"{node}: {report.detail}")
    if report.code:
        raise CliError(exit_of_sync(report.outcome), report.code, f"{node}: {report.detail}")
