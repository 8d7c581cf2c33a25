"""Verbs that reconcile: sync a node with a peer, list and change its peers, backfill a file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli.main import loading
from app.cli.output import (
    DEFAULT_NODE,
    AsJson,
    ChannelIds,
    CliError,
    Exit,
    NodeUrl,
    age_text,
    counted,
    exit_of_sync,
    figures_of,
    human_bytes,
    is_known,
    node_client,
    print_error,
    print_json,
    print_note,
    print_table,
    read_token,
    stdout,
    sync_progress,
    table,
    with_remedy,
)
from app.errors import Code
from app.server.logs import printable
from sdstore.client import StoreClient
from sdstore.client.records import Peer, Sync
from sdstore.errors import StoreError
from sdstore.sync.report import NOTHING_SHARED, Progress, SyncOutcome, SyncReport

verbs = typer.Typer()

POLL_INTERVAL_S = 0.1


@verbs.command()
def sync(
    peer_url: Annotated[str, typer.Argument(metavar="PEER_URL", help="The store to sync with.")],
    node: NodeUrl = DEFAULT_NODE,
    channel: ChannelIds = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count the differences and move nothing.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Make a running node and a peer equal, now.

    The node does the work: after Ctrl-C it goes on, and the same command shows the sync again. The
    exit code is 1 if the two nodes want no channel in common, or if neither has messages of a channel
    that --channel names.
    """
    channels = channel or []
    with node_client(node) as client:
        try:
            started = _begun(client, peer_url, channels, dry_run=dry_run)
            document = watch(client, started.id, started.document)
        except KeyboardInterrupt:
            print_note(f"{node} goes on with the sync; the same command shows it again")
            raise
        report = document["report"]
        unknown = _unknown_channels(client, channels, report)
    if as_json:
        print_json(document)
    elif not unknown or set(unknown) != set(channels) or report["set_aside_count"]:
        print_report(report, peer_url)
    for each in unknown:
        print_error(f"not_found: neither {node} nor {peer_url} has messages of channel {each!r}")
    if unknown or _shares_nothing(report):
        return Exit.NO
    return exit_of_sync(report["outcome"])


def _begun(client: StoreClient, peer_url: str, channels: Sequence[str], *, dry_run: bool) -> Sync:
    """A new session with the peer, or the one like it that is already under way."""
    try:
        return client.start_sync(peer_url, channels, dry_run=dry_run)
    except StoreError as error:
        if error.code != Code.SYNC_BUSY or "sync_id" not in error.problem:
            raise
        running = client.sync(str(error.problem["sync_id"]))
    asked = (set(channels), dry_run)
    if (set(running.document["channels"]), running.document["dry_run"]) != asked:
        detail = f"another sync with {peer_url} is under way; try again when it has ended"
        raise CliError(Exit.PARTIAL, Code.SYNC_BUSY, detail)
    print_note(f"a sync with {peer_url} is under way already; this is its progress")
    return running


def _unknown_channels(
    client: StoreClient, channels: Sequence[str], report: dict[str, Any]
) -> list[str]:
    """The channels that neither side has messages of: after a sync the node has those of both."""
    if report["outcome"] != SyncOutcome.IN_SYNC or _shares_nothing(report):
        return []
    return [each for each in dict.fromkeys(channels) if not is_known(client, each)]


def _shares_nothing(report: dict[str, Any]) -> bool:
    """Whether the nodes share no channel, so that nothing was compared."""
    return bool(report["detail"] == NOTHING_SHARED)


def watch(client: StoreClient, sync_id: str, document: Any) -> dict[str, Any]:
    """Show a session until it ends; its last document."""
    with sync_progress() as bar:
        task = bar.add_task("syncing", total=100, figures="")
        while True:
            progress = document["progress"]
            bar.update(
                task,
                completed=progress["in_sync_percent"],
                segments=progress["segments"],
                figures=figures_of(progress, *_pace_of(document)),
            )
            if document["state"] == "finished":
                return dict(document)
            time.sleep(POLL_INTERVAL_S)
            document = client.sync(sync_id).document


def _pace_of(document: Mapping[str, Any]) -> Iterator[str]:
    """Rounds, entries a second, and the time that is left; a node of an earlier version gives none."""
    yield f"round {document['progress']['rounds']}"
    if document.get("entries_per_s"):
        yield f"{document['entries_per_s']:,.0f}/s"
    if document.get("eta_s"):
        yield f"{document['eta_s']:,.0f} s left"


def print_report(report: dict[str, Any], peer_url: str) -> None:
    """Print what a session did, for people."""
    console = stdout()
    outcome = SyncOutcome(report["outcome"])
    headline = _HEADLINES.get(report["code"], _HEADLINES[outcome]).format(peer=peer_url)
    if _shares_nothing(report):
        console.print(f"not synced with {peer_url}: {report['detail']}", style="bold", markup=False)
        return
    if outcome is SyncOutcome.IN_SYNC and not (report["elements"] or report["set_aside_count"]):
        headline = _NOTHING_TO_COMPARE
    if report["set_aside_count"] and outcome is SyncOutcome.IN_SYNC:
        headline += f", except for {counted(report['set_aside_count'], 'element', 'elements')}"
    console.print(headline, style="bold", markup=False)
    if report["detail"]:
        # Without a code the session did well, and the peer did something that an operator wants to know.
        code = report["code"]
        (print_error if code else print_note)(f"{code and code + ': '}{report['detail']}")
    for line in _lines(report) if report["rounds"] else ():
        console.print(f"  {line}", markup=False)
    for each in report["set_aside"]:
        side = "not here" if each["lacked_by"] == "here" else "not there"
        console.print(f"    {each['kind']} {each['id']} {side}: {each['code']}", markup=False)


_NOTHING_TO_COMPARE = (
    "nothing to compare: neither node has messages of the channels that they share"
)
# By code where it says more than the outcome.
_HEADLINES: dict[str, str] = {
    SyncOutcome.IN_SYNC: "in sync with {peer}",
    SyncOutcome.DIFFERENT: "different from {peer}",
    SyncOutcome.PARTIAL: "sync with {peer} is not finished",
    SyncOutcome.REFUSED: "sync with {peer} failed: refused",
    SyncOutcome.PEER_FAULT: "sync with {peer} failed: the peer broke the protocol",
    SyncOutcome.LOCAL_FAULT: "sync with {peer} failed: a fault of this node",
    Code.PEER_UNREACHABLE: "sync with {peer} failed: peer unreachable",
    Code.PEER_VERSION: "sync with {peer} failed: no common version of the protocol",
}


def _lines(report: dict[str, Any]) -> list[str]:
    lines = []
    if report["elements"]:
        compared = counted(report["elements"], "element", "elements")
        lines += [
            f"{compared} compared (messages, and hints published with them)",
            f"{report['missing_here']:,} missing here, {report['missing_there']:,} missing there",
        ]
    lines += [_moved(report, what) for what in ("received", "sent") if _is_any(report, what)]
    if report["mended"] or report["lost_here"]:
        lost = counted(report["lost_here"], "entry", "entries")
        mended = counted(report["mended"], "entry", "entries")
        lines.append(f"fetched the lost content of {mended} again; {lost} still without content")
    lines.append(
        f"{counted(report['rounds'], 'round', 'rounds')}, "
        f"{counted(report['requests'], 'request', 'requests')}, "
        f"{human_bytes(report['bytes_up'])} up, {human_bytes(report['bytes_down'])} down, "
        f"{report['seconds']:.2f} s"
    )
    if report["set_aside_count"]:
        lines.append("set aside, because one side refuses them or has lost their content:")
    return lines


def _is_any(report: dict[str, Any], what: str) -> bool:
    return bool(report[f"entries_{what}"] or report[f"claims_{what}"])


def _moved(report: dict[str, Any], what: str) -> str:
    entries = counted(report[f"entries_{what}"], "entry", "entries")
    claims = counted(report[f"claims_{what}"], "hint claim", "hint claims")
    return f"{what} {entries} and {claims}"


# --- peers ---------------------------------------------------------------------------------------

peers = typer.Typer(help="List, add and remove the peers of a running node.")
verbs.add_typer(peers, name="peers")


@peers.command("list")
def list_(node: NodeUrl = DEFAULT_NODE, as_json: AsJson = False) -> None:
    """List the peers of a node: the stores that it keeps itself equal to."""
    with node_client(node) as client:
        found = client.peers()
    if as_json:
        for peer in found:
            print_json(peer.document)
    elif found:
        rows = [
            (
                peer.id,
                peer.url,
                peer.state,
                _age_of(peer, "since_ms"),
                _age_of(peer, "in_sync_at_ms", " ago"),
                str(peer.document.get("failures", "")),
            )
            for peer in found
        ]
        heads = ("ID", "URL", "state", "for", "in sync", "failures")
        whole = [each for each in heads if each != "URL"]
        print_table(table(*heads, rows=rows, right=["failures"], whole=whole))
        for peer in found:
            if peer.document.get("code"):
                code, reason = peer.document["code"], peer.document.get("reason")
                stdout().print(printable(f"{peer.url}: {code}: {reason}"), markup=False)
    else:
        print_note("no peers")


@peers.command()
def add(
    url: Annotated[str, typer.Argument(metavar="URL", help="The store.")],
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file", metavar="FILE", help="File with an access token of the store."
        ),
    ] = None,
    node: NodeUrl = DEFAULT_NODE,
    as_json: AsJson = False,
) -> None:
    """Add a peer; the node syncs with it until it is removed."""
    token = None if token_file is None else read_token(token_file)
    with node_client(node) as client:
        peer = client.add_peer(url, token)
    if as_json:
        print_json(peer.document)
    else:
        stdout().print(f"{peer.url} is peer {peer.id}", markup=False)


@peers.command()
def remove(
    peer: Annotated[str, typer.Argument(metavar="ID|URL", help="The peer, by its ID or URL.")],
    node: NodeUrl = DEFAULT_NODE,
    as_json: AsJson = False,
) -> None:
    """Remove a peer; the messages that came from it stay."""
    with node_client(node) as client:
        found = _named(client, peer)
        client.remove_peer(found.id)
    if as_json:
        print_json({"removed": found.id, "url": found.url})
    else:
        stdout().print(f"removed peer {found.url}", markup=False)


def _age_of(peer: Peer, name: str, after: str = "") -> str:
    at_ms = peer.document.get(name)
    return age_text(time.time() - at_ms / 1_000) + after if isinstance(at_ms, int) else ""


def _named(client: StoreClient, name: str) -> Peer:
    for peer in client.peers():
        if name.rstrip("/") in (peer.id, peer.url):
            return peer
    raise CliError(
        Exit.NO, "not_found", f"the node has no peer {name}; `sdstore peers list` lists them"
    )


# --- backfill ------------------------------------------------------------------------------------


@verbs.command()
def backfill(
    channel_id: Annotated[str, typer.Argument(metavar="CHANNEL", help="The channel.")],
    into: Annotated[
        Path,
        typer.Option("--into", metavar="FILE", help="File to create or continue; - is stdout."),
    ],
    node: NodeUrl = DEFAULT_NODE,
    as_json: AsJson = False,
) -> int:
    """Fetch the messages of a channel that a file lacks, by comparing, not by downloading all.

    After an interruption, kill -9 included, the same command fetches the rest. A part of a message at
    the end of the file is removed first. If the node refuses to compare, the whole channel is read.

    The file is NDJSON by its suffix (.ndjson, .jsonl, .json), otherwise length-delimited protobuf.
    A file with messages of another channel, a directory, a named pipe and an SQLite database are refused.
    The directory of the file must exist.
    """
    with loading():
        from app.cli.copying import backfill_file  # noqa: PLC0415 - half a second of imports
        from app.cli.files import format_of_name, is_stdout, require_one_output  # noqa: PLC0415

    require_one_output(into, as_json=as_json)
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
    if report.code or not report.entries_received:
        _require_channel(node, channel_id)
    _raise_fault(report, node)
    if as_json:
        print_json({"channel_id": channel_id, "file": str(into), **asdict(report)})
    elif not is_stdout(into):
        if report.detail:
            print_note(report.detail)
        messages = counted(report.entries_received, "message", "messages")
        figures = f"{counted(report.rounds, 'round', 'rounds')}, {human_bytes(report.bytes_down)}"
        stdout().print(f"{into}: {messages} added ({figures} down)", markup=False)
    return exit_of_sync(report.outcome)


def _require_channel(node: str, channel_id: str) -> None:
    """Raises StoreError or CliError, with the codes of all verbs, if the channel cannot be fetched."""
    with node_client(node) as client:
        try:
            client.channel(channel_id)
        except StoreError as error:
            if error.code != Code.FORBIDDEN:  # a token with the scope `sync` alone can compare
                raise


def _raise_fault(report: SyncReport, node: str) -> None:
    """Raises CliError for a session that failed; the peer of a backfill is the node itself."""
    if report.code == Code.PEER_UNREACHABLE:
        raise CliError(Exit.LOCAL_FAULT, "unreachable", f"{node}: {with_remedy(report.detail)}")
    if report.code:
        raise CliError(exit_of_sync(report.outcome), report.code, f"{node}: {report.detail}")
