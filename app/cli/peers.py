"""Verbs about the peers of a node."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from app.cli.exits import CliError, Exit
from app.cli.node import node_client
from app.cli.options import DEFAULT_NODE, AsJson, NodeUrl
from app.cli.output import print_json, print_note, printable, stdout, table
from sdstore.client import StoreClient
from sdstore.client.records import Peer

verbs = typer.Typer()
peers = typer.Typer(help="List, add and remove the peers of a running node.")
verbs.add_typer(peers, name="peers")


@peers.command("list")
def list_(node: NodeUrl = DEFAULT_NODE, as_json: AsJson = False) -> None:
    """List the stores that a node keeps itself equal to."""
    with node_client(node) as client:
        found = client.peers()
    if as_json:
        for peer in found:
            print_json(peer.document)
    elif found:
        rows = [
            (peer.id, peer.url, peer.state, _since(peer), str(peer.document.get("failures", "")))
            for peer in found
        ]
        heads = ("ID", "URL", "state", "since", "failures")
        stdout().print(table(*heads, rows=rows, right=["failures"]))
        for peer in found:
            if peer.document.get("code"):
                code, reason = peer.document["code"], peer.document.get("reason")
                stdout().print(printable(f"{peer.url}: {code}: {reason}"), markup=False)
    else:
        print_note("no peers")


@peers.command()
def add(
    url: Annotated[str, typer.Argument(metavar="URL", help="The store.")],
    node: NodeUrl = DEFAULT_NODE,
    as_json: AsJson = False,
) -> None:
    """Keep a node equal to one more store, until it is removed."""
    with node_client(node) as client:
        peer = client.add_peer(url)
    if as_json:
        print_json(peer.document)
    else:
        stdout().print(f"{peer.url} is peer {peer.id}", markup=False)


@peers.command()
def remove(
    peer: Annotated[str, typer.Argument(metavar="ID|URL", help="The peer.")],
    node: NodeUrl = DEFAULT_NODE,
    as_json: AsJson = False,
) -> None:
    """Forget a peer; what came from it stays."""
    with node_client(node) as client:
        found = _named(client, peer)
        client.remove_peer(found.id)
    if as_json:
        print_json({"removed": found.id, "url": found.url})
    else:
        stdout().print(f"removed peer {found.url}", markup=False)


def _since(peer: Peer) -> str:
    since_ms = peer.document.get("since_ms")
    if not isinstance(since_ms, int):
        return ""
    return datetime.fromtimestamp(since_ms / 1_000).astimezone().isoformat(timespec="seconds")


def _named(client: StoreClient, name: str) -> Peer:
    for peer in client.peers():
        if name.rstrip("/") in (peer.id, peer.url):
            return peer
    raise CliError(Exit.NO, "not_found", f"no peer {name}")
