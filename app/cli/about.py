"""The verb that prints versions."""

from __future__ import annotations

import platform
import sqlite3
from importlib.metadata import version as version_of

import typer

from app.cli.options import AsJson
from app.cli.output import print_json, stdout
from recon.limits import PROTOCOL_VERSION
from sdstore.sds.codec import DECODER_VERSION

verbs = typer.Typer()


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
    name, number = next(iter(versions.items()))
    others = list(versions.items())[1:]
    details = ", ".join(f"{each.replace('_', ' ')} {value}" for each, value in others)
    stdout().print(f"[bold]{name}[/] {number} ({details})")
