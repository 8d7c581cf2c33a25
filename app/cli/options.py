"""Options and arguments that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from app.cli.exits import CliError, Exit

DEFAULT_NODE = "http://127.0.0.1:8000"


def _node_url(text: str) -> str:
    """The URL, if it is one that a node can have. Raises CliError."""
    try:
        parts = urlsplit(text)
        is_good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        text.encode()
    except ValueError:
        is_good = False
    if not is_good or "?" in text or "#" in text:
        detail = f"--node is http://HOST[:PORT] or https://HOST[:PORT], not {text}"
        raise CliError(Exit.USAGE, "invalid_parameter", detail)
    return text


NodeUrl = Annotated[
    str,
    typer.Option("--node", metavar="URL", help="The node to talk to.", callback=_node_url),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
ChannelId = Annotated[
    str | None, typer.Option("--channel", metavar="C", help="Look in this channel only.")
]
ChannelIds = Annotated[
    list[str] | None,
    typer.Option("--channel", metavar="C", help="Only this channel; may be repeated."),
]
DatabaseUrl = Annotated[
    str | None,
    typer.Option("--database", metavar="URL", help="sqlite:///PATH or postgresql://…"),
]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", metavar="DIR", help="Folder of the node's data.")
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Settings as TOML.")
]
