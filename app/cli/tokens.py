"""Verbs for the access tokens of a node: token new, token list, token revoke."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.interrupts import loading
from app.cli.options import AsJson, ConfigFile, DataDir
from app.cli.output import (
    CliError,
    Exit,
    print_json,
    print_note,
    print_table,
    stdout,
    table,
    time_text,
)
from app.errors import Code, Problem
from app.server.settings import load_settings

if TYPE_CHECKING:
    from types import ModuleType

    from app.access.tokens import Token, TokenFile

verbs = typer.Typer()
token = typer.Typer(help="Make, list and revoke the access tokens of a node.")
verbs.add_typer(token, name="token")

_UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_DURATION = re.compile(r"(\d{1,9})([smhd])")


@token.command()
def new(
    scope: Annotated[
        list[str],
        typer.Option("--scope", help="read, publish, sync or admin; may be repeated."),
    ],
    name: Annotated[str, typer.Option("--name", help="What it is for, for people.")] = "",
    channel: Annotated[
        list[str] | None,
        typer.Option("--channel", metavar="C", help="Only this channel; may be repeated."),
    ] = None,
    prefix: Annotated[
        list[str] | None,
        typer.Option(
            "--prefix", metavar="P", help="Only channels that begin with P; may be repeated."
        ),
    ] = None,
    expires_in: Annotated[
        str | None,
        typer.Option("--expires-in", metavar="TIME", help="For example 12h or 90d; unset: never."),
    ] = None,
    data_dir: DataDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Make a token and print it; it is shown once."""
    file = _file(data_dir, config)
    expires_in_s = None if expires_in is None else _seconds(expires_in)
    try:
        made, text = file.create(
            name=name,
            scopes=scope,
            channels=channel or (),
            prefixes=prefix or (),
            expires_in_s=expires_in_s,
        )
    except Problem as problem:
        if problem.code is not Code.INVALID_PARAMETER:
            raise
        raise CliError(Exit.USAGE, problem.code, problem.detail) from None
    if as_json:
        print_json(made.document() | {"token": text})
        return
    sys.stdout.write(f"{text}\n")
    print_note(f"token {made.token_id}: {_grants(made)}")


@token.command("list")
def list_(data_dir: DataDir = None, config: ConfigFile = None, as_json: AsJson = False) -> None:
    """List the tokens, without their secrets."""
    file = _file(data_dir, config)
    found = file.read()
    if as_json:
        for each in found:
            print_json(each.document())
    elif found:
        rows = [
            (
                each.token_id,
                each.name,
                _scopes(each),
                _channels(each),
                time_text(each.expires_at_ms),
            )
            for each in found
        ]
        print_table(table("ID", "name", "scopes", "channels", "expires", rows=rows, whole=("ID",)))
    else:
        print_note(f"no tokens in {file.path}")


@token.command()
def revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="The ID of the token.")],
    data_dir: DataDir = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Revoke a token; it holds when the command ends."""
    revoked = _file(data_dir, config).revoke(token_id)
    sleep(_library().HOLDS_AFTER_S)
    if as_json:
        print_json({"revoked": revoked.token_id})
    else:
        stdout().print(f"revoked token {revoked.token_id}", markup=False)


def _library() -> ModuleType:
    """`app.access.tokens`, which brings numpy: the help of all verbs does without."""
    with loading():
        from app.access import tokens  # noqa: PLC0415

    return tokens


def _file(data_dir: Path | None, config: Path | None) -> TokenFile:
    settings, _ = load_settings(config, {"data_dir": data_dir})
    tokens = _library()
    file: TokenFile = tokens.TokenFile(tokens.tokens_path(settings))
    return file


def _seconds(text: str) -> float:
    found = _DURATION.fullmatch(text)
    if found is None:
        detail = f"--expires-in {text!r} is not a number with s, m, h or d, such as 90d"
        raise CliError(Exit.USAGE, "invalid_parameter", detail)
    return int(found[1]) * _UNITS_S[found[2]]


def _grants(made: Token) -> str:
    return f"{_scopes(made)}; {_channels(made)}; expires {time_text(made.expires_at_ms)}"


def _scopes(made: Token) -> str:
    return ", ".join(made.document()["scopes"])


def _channels(made: Token) -> str:
    if made.channels is None:
        return "every channel"
    return ", ".join([*made.channels.channels, *(f"{each}*" for each in made.channels.prefixes)])
