"""Verbs about the program itself: openapi, version, and the demo."""

from __future__ import annotations

import json
import platform
import sqlite3
import sys
from importlib.metadata import version as version_of
from typing import Annotated

import typer

from app.cli.options import AsJson
from app.cli.output import print_json, stdout
from app.demo.run import MESSAGES_DEFAULT, run_demo
from app.http.application import openapi_document
from recon.limits import PROTOCOL_VERSION
from sdstore.sds.codec import DECODER_VERSION

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


@verbs.command()
def openapi(as_json: AsJson = False) -> None:
    """Print the OpenAPI document of the HTTP interface."""
    if as_json:
        print_json(openapi_document())
    else:
        sys.stdout.write(json.dumps(openapi_document(), indent=2, ensure_ascii=False) + "\n")


@verbs.command()
def version(as_json: AsJson = False) -> None:
    """Print versions."""
    versions = {
        "sdstore": version_of("sdstore"),
        "recon_protocol": PROTOCOL_VERSION,
        "decoder": DECODER_VERSION,
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
    }
    if as_json:
        print_json(versions)
        return
    first, *rest = versions.items()
    details = ", ".join(f"{name.replace('_', ' ')} {number}" for name, number in rest)
    stdout().print(f"[bold]{first[0]}[/] {first[1]} ({details})")
