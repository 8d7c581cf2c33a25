"""Options and arguments that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_NODE = "http://127.0.0.1:8000"

NodeUrl = Annotated[str, typer.Option("--node", metavar="URL", help="The node to talk to.")]
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
