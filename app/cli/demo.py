"""The verb that shows two nodes diverge and heal."""

from __future__ import annotations

from typing import Annotated

import typer

from app.cli.options import AsJson
from app.demo.run import MESSAGES_DEFAULT, run_demo

verbs = typer.Typer()


@verbs.command()
def demo(
    messages: Annotated[
        int, typer.Option("--messages", min=10, max=100_000, help="Messages over both nodes.")
    ] = MESSAGES_DEFAULT,
    as_json: AsJson = False,
) -> int:
    """Start two nodes that diverge, make them whole, and prove it."""
    return run_demo(messages, as_json=as_json)
