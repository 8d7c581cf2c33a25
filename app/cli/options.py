"""Options that several verbs share, the client behind --node, and its token and CAs."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.request import getproxies

import typer

from app.access.operator import token_for
from app.cli.output import CliError, Exit
from app.errors import Code
from sdstore.client import StoreClient
from sdstore.client.errors import StoreError
from sdstore.client.exchange import Options, Retry, checked_url

TokenPath = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        envvar="SDSTORE_CLIENT_TOKEN_FILE",
        help="File with an access token, for verbs that call a node.",
    ),
]
CaPath = Annotated[
    Path | None,
    typer.Option(
        "--ca-file",
        metavar="FILE",
        envvar="SDSTORE_CLIENT_CA_FILE",
        help="CA certificates of the node (PEM), for verbs that call one over https.",
    ),
]


@dataclass(slots=True)
class Access:
    """How the verbs of this command line reach a node: its token and the CAs of its certificate."""

    token_file: Path | None = None
    ca_file: Path | None = None

    def token(self, url: str) -> str | None:
        """The access token for a node: that of `--token-file`, or of a node of this user on this machine.

        Raises CliError.
        """
        self.check_proxies()
        return token_for(url) if self.token_file is None else read_token(self.token_file)

    def tls(self) -> ssl.SSLContext | None:
        """The context for https; None for the system's CAs. Raises CliError."""
        if self.ca_file is None:
            return None
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as error:
            detail = f"{self.ca_file}: {error.strerror or error}"
            raise CliError(Exit.LOCAL_FAULT, "cannot_read", detail) from None

    def check_proxies(self) -> None:
        """Raises CliError for a proxy of the environment that cannot be used; it can hold a password."""
        for name, url in getproxies().items():
            scheme, is_url, _ = url.partition("://")
            if name in {"http", "https", "all"} and is_url and scheme not in {"http", "https"}:
                detail = f"{name.upper()}_PROXY is a {scheme} proxy; use one of http or https, or unset it"
                raise CliError(Exit.USAGE, "invalid_parameter", detail)


access = Access()


def with_remedy(reason: str) -> str:
    """Why a node was not reached, with the option that mends it."""
    if "certificate is not trusted" not in reason:
        return reason
    return f"{reason}; if its CA is your own: sdstore --ca-file FILE VERB …"


def read_token(file: Path) -> str:
    """The token in a file. Raises CliError."""
    try:
        text = file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        detail = f"{file}: {getattr(error, 'strerror', None) or error}"
        raise CliError(Exit.LOCAL_FAULT, "cannot_read", detail) from None
    if not text or any(each.isspace() for each in text):
        raise CliError(Exit.USAGE, "invalid_parameter", f"{file} does not contain one token")
    return text


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
