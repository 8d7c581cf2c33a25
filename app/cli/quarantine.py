"""Verbs for messages that the policy of a node keeps apart: quarantine list, release, drop."""

from __future__ import annotations

from typing import Annotated

import typer

from app.cli.messages import hex_argument
from app.cli.options import DEFAULT_NODE, AsJson, NodeUrl, node_client
from app.cli.output import human_bytes, print_json, print_note, print_table, stdout, table

verbs = typer.Typer()
quarantine = typer.Typer(help="List, release and drop the messages in the quarantine of a node.")
verbs.add_typer(quarantine, name="quarantine")

Digest = Annotated[str, typer.Argument(metavar="DIGEST", help="The digest of the message.")]


@quarantine.command("list")
def list_(node: NodeUrl = DEFAULT_NODE, as_json: AsJson = False) -> None:
    """List the messages, oldest first."""
    with node_client(node) as client:
        found = list(client.quarantine())
    if as_json:
        for each in found:
            print_json(each)
    elif found:
        rows = [
            (
                *(each["digest"], each["message_id"], each["channel_id"], each["way"]),
                *(human_bytes(each["frame_bytes"]), each["held_at"], each["reason"]),
            )
            for each in found
        ]
        print_table(
            table("digest", "message", "channel", "way", "size", "held at", "reason", rows=rows)
        )
    else:
        print_note("the quarantine is empty")


@quarantine.command()
def release(digest: Digest, node: NodeUrl = DEFAULT_NODE, as_json: AsJson = False) -> None:
    """Store a message; the policy does not see it again."""
    with node_client(node) as client:
        released = client.release_quarantined(hex_argument(digest, "DIGEST"))
    if as_json:
        print_json(released)
    else:
        stdout().print(f"released {released['digest']}: {released['outcome']}", markup=False)


@quarantine.command()
def drop(digest: Digest, node: NodeUrl = DEFAULT_NODE, as_json: AsJson = False) -> None:
    """Delete a message, and refuse it from now on."""
    dropped = hex_argument(digest, "DIGEST")
    with node_client(node) as client:
        client.drop_quarantined(dropped)
    if as_json:
        print_json({"dropped": dropped.hex()})
    else:
        stdout().print(f"dropped {dropped.hex()}", markup=False)
