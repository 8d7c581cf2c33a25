"""Verbs for messages that the policy of a node keeps apart: quarantine list, release, drop."""

from __future__ import annotations

from string import hexdigits
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.messages import hex_argument
from app.cli.options import DEFAULT_NODE, AsJson, NodeUrl, node_client
from app.cli.output import (
    CliError,
    Exit,
    human_bytes,
    print_json,
    print_note,
    print_table,
    stdout,
    table,
)

if TYPE_CHECKING:
    from sdstore.client import StoreClient

verbs = typer.Typer()
quarantine = typer.Typer(help="List, release and drop the messages in the quarantine of a node.")
verbs.add_typer(quarantine, name="quarantine")

Digest = Annotated[
    str, typer.Argument(metavar="DIGEST", help="The digest of the message, or how it begins.")
]

_DIGITS = 64
SHOWN = 16
"""Digits of a digest in the table: all 64 would take most of a terminal. 10,000 digests do not share so many."""


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
                *(each["digest"][:SHOWN], each["message_id"], each["channel_id"], each["way"]),
                *(human_bytes(each["frame_bytes"]), each["held_at"], each["reason"]),
            )
            for each in found
        ]
        headings = ("digest", "message", "channel", "way", "size", "held at", "reason")
        print_table(table(*headings, rows=rows, whole=("digest",)))
    else:
        print_note("the quarantine is empty")


@quarantine.command()
def release(digest: Digest, node: NodeUrl = DEFAULT_NODE, as_json: AsJson = False) -> None:
    """Store a message; the policy does not see it again."""
    with node_client(node) as client:
        released = client.release_quarantined(_whole(client, digest))
    if as_json:
        print_json(released)
    else:
        stdout().print(f"released {released['digest']}: {released['outcome']}", markup=False)


@quarantine.command()
def drop(digest: Digest, node: NodeUrl = DEFAULT_NODE, as_json: AsJson = False) -> None:
    """Delete a message, and refuse it from now on."""
    with node_client(node) as client:
        dropped = _whole(client, digest)
        client.drop_quarantined(dropped)
    if as_json:
        print_json({"dropped": dropped.hex()})
    else:
        stdout().print(f"dropped {dropped.hex()}", markup=False)


def _whole(client: StoreClient, digest: str) -> bytes:
    """The digest that begins like this. A whole one need not be in the quarantine."""
    if len(digest) >= _DIGITS or not set(digest) <= set(hexdigits):
        return hex_argument(digest, "DIGEST")
    if len(digest) < SHOWN:
        detail = f"{digest!r} is too short: give {SHOWN} digits of the digest at least"
        raise CliError(Exit.USAGE, "invalid_parameter", detail)
    found = [each["digest"] for each in client.quarantine()]
    matching = [each for each in found if each.startswith(digest.lower())]
    if len(matching) != 1:
        detail = f"{len(matching)} messages of the quarantine begin with {digest}"
        raise CliError(Exit.NO, "not_found", detail)
    return bytes.fromhex(matching[0])
