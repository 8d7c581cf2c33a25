"""The verb that reconciles a node with a peer now."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from app.cli.bar import figures_of, sync_progress
from app.cli.exits import exit_of_sync
from app.cli.node import node_client
from app.cli.options import DEFAULT_NODE, AsJson, ChannelIds, NodeUrl
from app.cli.output import counted, human_bytes, print_error, print_json, stdout
from app.errors import Code
from app.federation.report import SyncOutcome
from sdstore.client import StoreClient

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
    """Make a running node and a peer equal, now."""
    with node_client(node) as client:
        started = client.start_sync(peer_url, channel or [], dry_run=dry_run)
        document = watch(client, started.id, started.document)
    report = document["report"]
    if as_json:
        print_json(document)
    else:
        print_report(report, peer_url)
    return exit_of_sync(report["outcome"])


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
