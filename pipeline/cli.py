"""The verbs `sdstore snapshot …`. Spark is imported only by verbs that need it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.cli.database import SQLITE_PREFIX, database_settings, require_database
from app.cli.messages import Indexers, NonIndexers, Relayed, print_order
from app.cli.output import (
    AsJson,
    ChannelIds,
    CliError,
    DatabaseUrl,
    DataDir,
    Exit,
    counted,
    human_bytes,
    node_client,
    node_url,
    print_error,
    print_json,
    print_note,
    print_table,
    stdout,
    table,
)
from app.store import sqlite
from app.store.database import StoreError as StoreFault
from pipeline import manifest as manifests
from pipeline.manifest import (
    LOGS_FILE,
    RANGE_ENTRIES,
    PipelineError,
    list_snapshots,
    prune_snapshots,
    require_free,
)
from sdstore.errors import how_to_install

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

verbs = typer.Typer()
snapshot = typer.Typer(help="Snapshots of a store that prove themselves: Parquet and a manifest.")
verbs.add_typer(snapshot, name="snapshot")

_URL = re.compile(r"(sqlite:///|postgresql://)")
_ROWS_SHOWN = 100

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the snapshot.")]
NewFolder = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to make.")]
Master = Annotated[
    str | None,
    typer.Option("--master", metavar="URL", help="Spark cluster; default: this machine."),
]


@snapshot.command()
def export(
    folder: Folder,
    parent: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Snapshot to write the changes to.")
    ] = None,
    copy: Annotated[
        bool,
        typer.Option("--copy", help="Copy the parent's unchanged files; do not link to them."),
    ] = False,
    channel: ChannelIds = None,
    file_rows: Annotated[
        int, typer.Option(min=1, help="Maximum number of messages in one file.")
    ] = RANGE_ENTRIES,
    database: DatabaseUrl = None,
    data_dir: DataDir = None,
    master: Master = None,
    as_json: AsJson = False,
) -> int:
    """Write a snapshot of the store as it is now; the node may be running."""
    url = existing_url(database, data_dir)
    sides = (url,) if parent is None else (url, parent)
    with opened(master, *sides, target=folder) as spark:
        from pipeline.export import export_snapshot

        made = export_snapshot(
            spark,
            url,
            folder,
            parent=parent,
            channel_ids=channel,
            rows_max=file_rows,
            copies=copy,
        )
    if as_json:
        print_json({"folder": str(folder), **_summary(made)})
    else:
        share = f"{human_bytes(made.bytes_written)} of {human_bytes(made.table_bytes)} written"
        _say(f"{folder}: {counted(made.entries.count, 'message', 'messages')}, {share}")
        _say(f"root {made.entries.root}")
        _say_lost(made.lost_count)
    return Exit.DONE


@snapshot.command()
def verify(
    folder: Folder,
    node: Annotated[
        str | None,
        typer.Option("--node", metavar="URL", help="Compare with this live node as well."),
    ] = None,
    master: Master = None,
    as_json: AsJson = False,
) -> int:
    """Hash every row and compute every root again; list what is damaged."""
    if node is not None:
        require_node(node_url(node))
    with opened(master, folder) as spark:
        from pipeline.verify import verify_snapshot

        found = verify_snapshot(spark, folder, node)
    if as_json:
        findings = [asdict(each) for each in found.findings]
        counts = {
            "rows": found.rows_count,
            "retired": found.retired_count,
            "lost": found.lost_count,
        }
        print_json({"sound": not findings, **counts, "findings": findings})
    else:
        for each in found.findings:
            print_error(str(each))
        verdict = "damaged" if found.findings else "sound"
        retired = f", {found.retired_count:,} of them retired" if found.retired_count else ""
        _say(f"{folder}: {verdict}, {counted(found.rows_count, 'row', 'rows')} checked{retired}")
        _say_lost(found.lost_count)
    return Exit.NO if found.findings else Exit.DONE


@snapshot.command()
def restore(
    folder: Folder,
    database: DatabaseUrl = None,
    data_dir: DataDir = None,
    unverified: Annotated[
        bool, typer.Option("--unverified", help="Restore the intact rows of a damaged snapshot.")
    ] = False,
    master: Master = None,
    as_json: AsJson = False,
) -> int:
    """Load a snapshot into a store. To resume a stopped restore, run it again."""
    url = database_settings(database, data_dir, None).database_url
    require_writable(url)
    if not unverified:
        with opened(master, folder) as spark:
            from pipeline.verify import verify_snapshot

            if findings := verify_snapshot(spark, folder).findings:
                raise CliError(Exit.NO, "damaged_snapshot", f"nothing was restored: {findings[0]}")
    with faults_told():
        from pipeline.database import shown
        from pipeline.restore import restore_snapshot

        done = restore_snapshot(folder, url)
    if as_json:
        # Not asdict, which cannot copy a Counter.
        counts = {each.name: getattr(done, each.name) for each in fields(done)}
        print_json({**counts, "database": shown(url)})
    else:
        for code, count in done.refused.items():
            print_error(f"{code}: {counted(count, 'row', 'rows')} refused")
        _say(f"{done.rows_count:,} rows read, {done.written_count:,} written: {shown(url)}")
    return Exit.PARTIAL if done.refused else Exit.DONE


@snapshot.command()
def diff(
    left: Annotated[str, typer.Argument(metavar="A", help="Snapshot, data folder, or URL.")],
    right: Annotated[str, typer.Argument(metavar="B", help="Snapshot, data folder, or URL.")],
    limit: Annotated[int, typer.Option(min=0, help="Rows to list for each side.")] = _ROWS_SHOWN,
    as_json: AsJson = False,
) -> int:
    """List the entries that only one of two sides has."""
    sides = _side(left), _side(right)
    ranges: list[dict[str, Any]] = []
    ranges_count = 0
    rows: dict[str, Any] = {name: {"count": 0, "rows": []} for name in ("left_only", "right_only")}
    if not _have_equal_roots(*sides):
        with faults_told():
            from pipeline.diff import diff as compare

            found = compare(*sides, limit)
        ranges, ranges_count = [asdict(each) for each in found.ranges], found.ranges_count
        for name, only in (("left_only", found.left_only), ("right_only", found.right_only)):
            listed = [{**row, "digest": row["digest"].hex()} for row in only.rows]
            rows[name] = {"count": only.count, "rows": listed}
    if as_json:
        equal = not ranges_count
        print_json({"equal": equal, "ranges_count": ranges_count, "ranges": ranges, **rows})
    else:
        _print_difference(left, right, rows, ranges_count)
    return Exit.NO if ranges_count else Exit.DONE


@snapshot.command()
def report(
    folder: Folder,
    out: NewFolder,
    master: Master = None,
    as_json: AsJson = False,
) -> int:
    """Write tables, pictures and an HTML page about a snapshot."""
    with opened(master, folder, target=out) as spark:
        from pipeline.report import write_report

        tables = write_report(spark, folder, out)
    if as_json:
        rows = {name: table.num_rows for name, table in tables.items()}
        print_json({"folder": str(out), "rows": rows})
    else:
        _say(f"{out / 'index.html'}")
    return Exit.DONE


@snapshot.command()
def logs(
    folder: Folder,
    out: NewFolder,
    master: Master = None,
    as_json: AsJson = False,
) -> int:
    """Write the position of every message in its channel's log, as DIR/logs.parquet."""
    with opened(master, folder, target=out) as spark:
        from pipeline.ordering import write_logs

        rows_count = write_logs(spark, folder, out)
    if as_json:
        print_json({"folder": str(out), "rows": rows_count})
    else:
        _say(f"{out / LOGS_FILE}: {counted(rows_count, 'message', 'messages')}")
    return Exit.DONE


@snapshot.command()
def order(
    folder: Folder,
    channel_id: Annotated[str, typer.Argument(metavar="CHANNEL", help="The channel.")],
    indexer: Indexers = None,
    non_indexer: NonIndexers = None,
    relayed: Relayed = None,
    master: Master = None,
    as_json: AsJson = False,
) -> int:
    """Show the order of a channel: the confirmed prefix, which never changes, then the tentative tail."""
    named = [*(indexer or ()), *(non_indexer or ()), *(relayed or ())]
    if "" in named or len(set(named)) < len(named):
        detail = "name each sender once; an empty name is no sender"
        raise CliError(Exit.USAGE, "invalid_parameter", detail)
    with opened(master, folder) as spark:
        from app.orders import Wanted
        from pipeline.ordering import channel_order

        wanted = Wanted(channel_id, tuple(sorted(indexer or ())), tuple(sorted(relayed or ())))
        found = channel_order(spark, folder, wanted)
        print_order(found.items, found.summary, as_json=as_json)
    return Exit.DONE


@snapshot.command("list")
def list_(folder: Annotated[Path, typer.Argument(metavar="DIR")], as_json: AsJson = False) -> int:
    """List the snapshots in a folder, oldest first, each with its parent."""
    require_folder(folder)
    listed = list_snapshots(folder)
    if as_json:
        print_json(
            [
                {"folder": str(each.folder), "fault": each.fault}
                | ({} if each.manifest is None else _summary(each.manifest))
                for each in listed
            ]
        )
        return Exit.DONE
    if not listed:
        print_note(f"no snapshots in {folder}")
        return Exit.DONE
    rows = [
        (each.folder.name, each.fault or "", "", "")
        if (made := each.manifest) is None
        else (
            each.folder.name,
            made.created_at,
            f"{made.entries.count:,}",
            made.parent.name if made.parent else "",
        )
        for each in listed
    ]
    print_table(table("snapshot", "made", "messages", "parent", rows=rows, right=("messages",)))
    return Exit.DONE


@snapshot.command()
def prune(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    keep: Annotated[int, typer.Option("--keep", min=1, help="Newest snapshots to keep.")],
    as_json: AsJson = False,
) -> int:
    """Remove the oldest snapshots in a folder; the others stay complete."""
    require_folder(folder)
    removed = prune_snapshots(folder, keep)
    if as_json:
        print_json({"removed": [str(each) for each in removed]})
    else:
        for each in removed:
            _say(f"removed {each}")
    return Exit.DONE


def _side(text: str) -> Path | str:
    """A URL, the folder of a snapshot, or a node's data folder."""
    if _URL.match(text):
        return text
    folder = Path(text)
    return existing_url(None, folder) if (folder / "sdstore.db").is_file() else folder


def _have_equal_roots(left: Path | str, right: Path | str) -> bool:
    """Whether both are snapshots with equal roots, read from their manifests without Spark."""
    if not (isinstance(left, Path) and isinstance(right, Path)):
        return False
    with snapshot_faults_told():
        return manifests.load(left).entries == manifests.load(right).entries


def _summary(manifest: Any) -> dict[str, Any]:
    document = asdict(manifest)
    names = ("snapshot_id", "created_at", "parent", "watermark", "entries", "claims")
    made = {name: document[name] for name in (*names, "bytes_written")}
    return {**made, "lost": manifest.lost_count}


def _print_difference(left: str, right: str, rows: dict[str, Any], ranges_count: int) -> None:
    if not ranges_count:
        _say("equal")
        return
    _say(f"{counted(ranges_count, 'range differs', 'ranges differ')}")
    for name, side in (("left_only", left), ("right_only", right)):
        _say(f"only in {side}: {counted(rows[name]['count'], 'message', 'messages')}")
        for row in rows[name]["rows"]:
            _say(f"  {row['digest']}  {row['channel_id']!r}  {row['message_id']!r}")


def _say(text: str) -> None:
    stdout().print(text, markup=False)


def _say_lost(count: int) -> None:
    if count:
        frames = counted(count, "message has", "messages have")
        print_error(f"{frames} no content, because the store had lost it before the export")


# ---- the first steps of every verb: validate the arguments, then start Spark

_EXITS = {
    "damaged_snapshot": Exit.NO,
    "not_found": Exit.NO,
    "order_too_large": Exit.NO,
    "parent_mismatch": Exit.USAGE,
    "target_not_free": Exit.USAGE,
}
"""By the code of the error; others are faults of this machine."""
_PYTHON_ERROR = re.compile(r"^Traceback .*?^(\w[\w.]*: .*?)$", re.MULTILINE | re.DOTALL)


@contextmanager
def opened(
    master: str | None, *sides: Path | str, target: Path | None = None
) -> Iterator[SparkSession]:
    """A Spark session; errors become lines and exit codes (`faults_told`).

    Before Spark starts, the snapshots and stores of `sides` are opened, and `target` must not exist.
    """
    with faults_told():
        from pipeline.database import open_database
        from pipeline.session import spark_session

        for side in sides:
            if isinstance(side, Path):
                manifests.load(side)
            else:
                open_database(side).close()
        if target is not None:
            require_free(target)
        # Py4J also logs what it raises to the root logger, which would print pages after Ctrl-C.
        logging.getLogger().addFilter(lambda _: False)
        with spark_session(master) as spark:
            yield spark


@contextmanager
def faults_told() -> Iterator[None]:
    """The faults of snapshots, stores and Spark as lines and exit codes."""
    try:
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]
        from pyspark.errors import PySparkException
    except ImportError as error:
        detail = f"snapshots need Spark ({error}); {how_to_install('spark')}"
        raise CliError(Exit.LOCAL_FAULT, "spark_missing", detail) from None
    try:
        with snapshot_faults_told():
            yield
    except (PySparkException, Py4JError) as error:
        raise CliError(Exit.LOCAL_FAULT, "spark_failed", reason_of(str(error))) from error


@contextmanager
def snapshot_faults_told() -> Iterator[None]:
    """The faults of snapshots and stores as lines and exit codes; Spark need not be installed."""
    try:
        yield
    except PipelineError as error:
        exit_code = _EXITS.get(error.code, Exit.LOCAL_FAULT)
        raise CliError(exit_code, error.code, str(error)) from error
    except StoreFault as error:
        raise CliError(Exit.LOCAL_FAULT, "store_unavailable", str(error)) from error


def reason_of(report: str) -> str:
    """The line with the cause in Spark's report, which nests Python tracebacks in Java ones."""
    found = _PYTHON_ERROR.search(report)
    return found[1] if found else report.partition("\n")[0]


def require_folder(folder: Path) -> None:
    """Raises CliError if the folder does not exist."""
    if not folder.is_dir():
        raise CliError(Exit.NO, "not_found", f"there is no folder {folder}")


def require_writable(url: str) -> None:
    """Raises CliError unless a restore could begin to write to the store at `url`."""
    with snapshot_faults_told():
        if url.startswith(SQLITE_PREFIX):
            sqlite.require_writable(Path(url.removeprefix(SQLITE_PREFIX)))
        else:
            from pipeline.database import connected

            connected(url).close()


def require_node(url: str) -> None:
    """Raises StoreError or CliError unless a node answers at `url`."""
    with node_client(url) as client:
        client.info()


def existing_url(database: str | None, data_dir: Path | None) -> str:
    """The URL of the database that the flags name; CliError if its file does not exist."""
    url = database_settings(database, data_dir, None).database_url
    require_database(url)
    return url
