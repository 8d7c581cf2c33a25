"""Verbs about the program itself: version, openapi."""

from __future__ import annotations

import json
import platform
import sqlite3
import sys
from importlib.metadata import version as version_of

import typer

from app.cli.interrupts import loading
from app.cli.options import AsJson
from app.cli.output import print_json, stdout
from recon.limits import PROTOCOL_VERSION
from sdstore.sds.codec import DECODER_VERSION

verbs = typer.Typer()


@verbs.command()
def version(as_json: AsJson = False) -> None:
    """Print the versions of sdstore, the protocol, the decoder, Python and SQLite."""
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
    name, number = next(iter(versions.items()))
    others = list(versions.items())[1:]
    details = ", ".join(f"{each.replace('_', ' ')} {value}" for each, value in others)
    stdout().print(f"[bold]{name}[/] {number} ({details})")


@verbs.command()
def openapi(as_json: AsJson = False) -> None:
    """Print the OpenAPI document of the HTTP interface; --json prints it on one line."""
    with loading():
        from app.http.application import openapi_document  # noqa: PLC0415 - a second of imports

    if as_json:
        print_json(openapi_document())
    else:
        sys.stdout.write(json.dumps(openapi_document(), indent=2, ensure_ascii=False) + "\n")
