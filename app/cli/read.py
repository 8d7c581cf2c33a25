"""Verbs that read from a node: get, hint, channels, gaps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from app.cli.existing import is_stdout, require_one_output
from app.cli.exits import CliError, Exit
from app.cli.node import node_client
from app.cli.options import DEFAULT_NODE, AsJson, ChannelId, NodeUrl
from app.cli.output import print_json, print_note, stdout, table
from app.cli.show import message_document, message_table
from app.hexadecimal import not_a_hex_hint
from sdstore.client import StoreClient
from sdstore.client.records import Channel, StoredMessage

verbs = typer.Typer()

HINT_HELP = "The retrieval hint, in hexadecimal (inside a message in JSON hints are base64)."
HINT_PAGE = 100
HINT_CANDIDATES_MAX = 1_000  # what a node ranks; beyond it are claims nobody should follow


@verbs.command()
def get(
    message_id: Annotated[str, typer.Argument(metavar="ID", help="The message ID.")],
    channel: ChannelId = None,
    digest: Annotated[
        str | None, typer.Option("--digest", metavar="HEX", help="This variant of the message.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Write the frame there; - is stdout."),
    ] = None,
    node: NodeUrl = DEFAULT_NODE,
    as_json: AsJson = False,
) -> None:
    """Fetch a message by its ID."""
    if out is not None:
        require_one_output(out, as_json=as_json)
    variant = None if digest is None else hex_argument(digest, "--digest")
    with node_client(node) as client:
        found = client.get(message_id, channel, variant)
    document = message_document(
        found.frame, found.digest, found.dialect, variants_count=found.variants_count
    )
    if out is not None:
        _write_frame(out, found.frame)
    if as_json:
        print_json(document)
    elif out is None:
        stdout().print(message_table(document))


@verbs.command()
def hint(
    hint_hex: Annotated[str, typer.Argument(metavar="HEX", help=HINT_HELP)],
    channel: ChannelId = None,
    node: NodeUrl = DEFAULT_NODE,
    as_json: AsJson = False,
) -> int:
    """Find the messages that a retrieval hint may mean, the likeliest first."""
    with node_client(node) as client:
        found = _candidates(client, hint_argument(hint_hex, "the hint"), channel)
    if not found:
        raise CliError(Exit.NO, "not_found", "no message is known under this hint")
    documents = [
        message_document(m.frame, m.digest, m.dialect, hints=m.retrieval_hints) for m in found
    ]
    if as_json:
        for document in documents:
            print_json(document)
        return Exit.DONE
    rows = [_row(document) for document in documents]
    stdout().print(
        table("message ID", "channel", "Lamport", "digest", rows=rows, right=["Lamport"])
    )
    return Exit.DONE


@verbs.command()
def channels(node: NodeUrl = DEFAULT_NODE, as_json: AsJson = False) -> None:
    """List the channels a node has messages of."""
    with node_client(node) as client:
        if as_json:
            for each in client.channels():
                print_json(_channel_document(each))
            return
        rows = [
            (each.channel_id, f"{each.count:,}", str(each.lamport_first), str(each.lamport_last))
            for each in client.channels()
        ]
    numbers = ["messages", "first Lamport", "last Lamport"]
    stdout().print(table("channel", *numbers, rows=rows, right=numbers))


@verbs.command()
def gaps(
    channel_id: Annotated[str, typer.Argument(metavar="CHANNEL", help="The channel.")],
    node: NodeUrl = DEFAULT_NODE,
    as_json: AsJson = False,
) -> None:
    """List the messages that a channel's histories name and the node lacks."""
    with node_client(node) as client:
        found: list[dict[str, Any]] = [
            {
                "message_id": each.message_id,
                "hints": [hint.hex() for hint in each.retrieval_hints],
                "met_as_sync": each.met_as_sync,
            }
            for each in client.gaps(channel_id)
        ]
        if not found:
            client.channel(channel_id)  # fails where the node knows no such channel
    if as_json:
        for document in found:
            print_json(document)
    elif found:
        rows = [
            (
                str(each["message_id"]),
                "a sync message had this ID" if each["met_as_sync"] else "",
                ", ".join(each["hints"]),
            )
            for each in found
        ]
        stdout().print(table("missing message", "note", "hints", rows=rows))
    else:
        print_note("no gaps")


def hex_argument(text: str, what: str) -> bytes:
    """Bytes from hexadecimal."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise CliError(Exit.USAGE, "invalid_hex", f"{what} is not hexadecimal") from None


def hint_argument(text: str, what: str) -> bytes:
    """Bytes of a retrieval hint from hexadecimal."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise CliError(Exit.USAGE, "invalid_hex", f"{what} {not_a_hex_hint(text)}") from None


def _candidates(client: StoreClient, hint: bytes, channel: str | None) -> list[StoredMessage]:
    found: list[StoredMessage] = []
    after: str | None = None
    while len(found) < HINT_CANDIDATES_MAX:
        page = client.hint(hint, channel, after=after, limit=HINT_PAGE)
        found += page.messages
        for digest in page.left_out:
            print_note(f"left out: the node has lost the content of {digest.hex()}")
        if page.next is None:
            break
        after = page.next
    return found


def _row(document: dict[str, Any]) -> tuple[str, str, str, str]:
    message = document["message"]
    return (
        message["message_id"],
        message.get("channel_id", ""),
        message["lamport_timestamp"],
        document["meta"]["digest"],
    )


def _channel_document(channel: Channel) -> dict[str, Any]:
    return {
        "channel_id": channel.channel_id,
        "count": channel.count,
        "lamport_first": str(channel.lamport_first),
        "lamport_last": str(channel.lamport_last),
    }


def _write_frame(out: Path, frame: bytes) -> None:
    if is_stdout(out):
        sys.stdout.buffer.write(frame)
    else:
        out.write_bytes(frame)
