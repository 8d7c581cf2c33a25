"""The verb that reconciles a node with a peer now."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from app.cli.bar import figures_of, sync_progress
from app.cli.exits import CliError, Exit, exit_of_sync
from app.cli.node import is_known, node_client
from app.cli.options import DEFAULT_NODE, AsJson, ChannelIds, NodeUrl
from app.cli.output import counted, human_bytes, print_error, print_json, print_note, stdout
from app.errors import Code
from sdstore.client import StoreClient
from sdstore.client.errors import StoreError
from sdstore.client.records import Sync
from sdstore.sync.report import SyncOutcome

verbs = typer.Typer()

POLL_INTERVAL_S = 0.1


@verbs.command()
def sync(
    peer_url: Annotated[str, typer.Argument(metavar="PEER_URL", help="The store to sync with.")],
    node: NodeUrl = DEFAULT_NODE,
    channel: ChannelIds = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Find the differences and move nothing.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Make a running node and a peer equal, now.

    The node does the work. Ctrl-C ends only this command; the same command again shows the sync
    that is still under way. The exit code is 1 where the two nodes want no channel in common, and
    where neither has messages of a channel that --channel names.
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
        print_json({**document, "unknown_channels": unknown})
    else:
        print_report(report, peer_url)
    for each in unknown:
        print_error(f"not_found: neither {node} nor {peer_url} has messages of channel {each!r}")
    if unknown or _shares_nothing(report):
        return Exit.NO
    return exit_of_sync(report["outcome"])


def _begun(client: StoreClient, peer_url: str, channels: Sequence[str], *, dry_run: bool) -> Sync:
    """A new session with the peer, or the same one where it is under way already."""
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
    """Channels that neither side has messages of: after a sync a node knows those of both."""
    if report["outcome"] != SyncOutcome.IN_SYNC or _shares_nothing(report):
        return []
    return [each for each in dict.fromkeys(channels) if not is_known(client, each)]


def _shares_nothing(report: dict[str, Any]) -> bool:
    """Whether the session ended before its first request, because no channel is wanted by both."""
    return report["outcome"] == SyncOutcome.IN_SYNC and not report["requests"]


def watch(client: StoreClient, sync_id: str, document: Any) -> dict[str, Any]:
    """Show a session until it is finished; its last document."""
    with sync_progress() as bar:
        task = bar.add_task("syncing", total=100, figures="")
        while True:
            progress = document["progress"]
            bar.update(
                task,
                completed=progress["in_sync_percent"],
                segments=progress["segments"],
                figures=figures_of(progress),
            )
            if document["state"] == "finished":
                return dict(document)
            time.sleep(POLL_INTERVAL_S)
            document = client.sync(sync_id).document


def print_report(report: dict[str, Any], peer_url: str) -> None:
    """What a session did, for people."""
    console = stdout()
    outcome = SyncOutcome(report["outcome"])
    headline = _HEADLINES.get(report["code"], _HEADLINES[outcome]).format(peer=peer_url)
    if _shares_nothing(report):
        console.print(f"not synced with {peer_url}: {report['detail']}", style="bold", markup=False)
        return
    if report["set_aside_count"] and outcome is SyncOutcome.IN_SYNC:
        headline += f", but for {counted(report['set_aside_count'], 'element', 'elements')}"
    console.print(headline, style="bold", markup=False)
    if report["detail"]:
        print_error(f"{report['code']}: {report['detail']}")
    for line in _lines(report) if report["rounds"] else ():
        console.print(f"  {line}", markup=False)
    for each in report["set_aside"]:
        side = "not here" if each["lacked_by"] == "here" else "not there"
        console.print(f"    {each['kind']} {each['id']} {side}: {each['code']}", markup=False)


# By code where that says more than the outcome.
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
        missing = (
            f"{report['missing_here']:,} missing here, {report['missing_there']:,} missing there"
        )
        lines += [f"{compared} compared (messages, and hints published with them); {missing}"]
    lines += [_moved(report, what) for what in ("received", "sent") if _is_any(report, what)]
    if report["mended"] or report["lost_here"]:
        lost = counted(report["lost_here"], "entry", "entries")
        mended = counted(report["mended"], "entry", "entries")
        lines.append(f"content of {mended} that was lost here fetched again; {lost} still lost")
    lines.append(
        f"{counted(report['rounds'], 'round', 'rounds')}, "
        f"{counted(report['requests'], 'request', 'requests')}, "
        f"{human_bytes(report['bytes_up'])} up, {human_bytes(report['bytes_down'])} down, "
        f"{report['seconds']:.2f} s"
    )
    if report["set_aside_count"]:
        lines.append("set aside, because one side has lost the content or refuses it:")
    return lines


def _is_any(report: dict[str, Any], what: str) -> bool:
    return bool(report[f"entries_{what}"] or report[f"claims_{what}"])


def _moved(report: dict[str, Any], what: str) -> str:
    entries = counted(report[f"entries_{what}"], "entry", "entries")
    claims = counted(report[f"claims_{what}"], "hint claim", "hint claims")
    return f"{what} {entries} and {claims}"
