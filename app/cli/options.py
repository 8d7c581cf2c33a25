"""Options that several verbs share, and the client behind --node."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from app.cli.access import access, with_remedy
from app.cli.output import CliError, Exit
from app.errors import Code
from sdstore.client import StoreClient
from sdstore.client.errors import StoreError
from sdstore.client.exchange import Options, Retry, checked_url

DEFAULT_NODE = "http://127.0.0.1:8000"


def node_url(text: str) -> str:
    """The URL, if it is one that a node can have. Raises CliError."""
    try:
        url = checked_url(text)
    except ValueError as error:
        raise CliError(Exit.USAGE, "invalid_parameter", f"--node {error}") from error
    # By name, the call could reach another program that listens on [::1] (`app.access.operator`).
    return re.sub(r"^http://localhost(?=[:/]|$)", "http://127.0.0.1", url)


NodeUrl = Annotated[
    str,
    typer.Option(
        "--node",
        metavar="URL",
        envvar="SDSTORE_CLIENT_NODE",
        help="URL of the node.",
        callback=node_url,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ChannelId = Annotated[
    str | None, typer.Option("--channel", metavar="C", help="Look in this channel only.")
]
ChannelIds = Annotated[
    list[str] | None,
    typer.Option("--channel", metavar="C", help="Only this channel; may be repeated."),
]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        "--database", metavar="URL", help="URL of the database: sqlite:///PATH or postgresql://…"
    ),
]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", metavar="DIR", help="Folder of the node's data.")
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="TOML file with settings.")
]

# One more attempt for a node that is just starting, but no minutes of silence: a person waits.
PATIENCE = Options(retry=Retry(attempts_max=2))


@contextmanager
def node_client(url: str) -> Iterator[StoreClient]:
    """A client of the node at `url`, whose URL becomes part of errors that are not the node's own."""
    with StoreClient(url, token=access.token(url), tls=access.tls(), options=PATIENCE) as client:
        try:
            yield client
        except StoreError as error:
            if error.status:
                raise
            raise CliError(
                Exit.PEER_FAULT if error.code == "reply_too_large" else Exit.LOCAL_FAULT,
                error.code,
                f"{url}: {with_remedy(error.detail)}",
            ) from None


def is_known(client: StoreClient, channel_id: str) -> bool:
    """Whether the node has messages of a channel; True also where it cannot tell."""
    try:
        client.channel(channel_id)
    except StoreError as error:
        return error.code != Code.NOT_FOUND
    return True
