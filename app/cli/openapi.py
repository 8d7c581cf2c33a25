"""The verb that prints the OpenAPI document."""

from __future__ import annotations

import json
import sys

import typer

from app.cli.interrupts import loading
from app.cli.options import AsJson
from app.cli.output import print_json

verbs = typer.Typer()


@verbs.command()
def openapi(as_json: AsJson = False) -> None:
    """Print the OpenAPI document of the HTTP interface; --json puts it on one line."""
    with loading():
        from app.http.application import openapi_document  # noqa: PLC0415 - a second of imports

    if as_json:
        print_json(openapi_document())
    else:
        sys.stdout.write(json.dumps(openapi_document(), indent=2, ensure_ascii=False) + "\n")
