"""Runs the verb of a command line, and turns its result or error into an exit code.

A verb's module is imported when the verb is used: reading from a node does not wait for the imports
of the server.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperGroup, TyperOption
from typer.exceptions import TyperException

from app.cli.main import loading
from app.cli.output import CaPath, CliError, Exit, TokenPath, access, exit_of, print_error
from app.errors import Problem, SettingsError
from sdstore.errors import StoreError

COMPLETION_VARIABLE = "_SDSTORE_COMPLETE"
"""Set by the script of `--show-completion` when the shell asks for completions."""

BEFORE_THE_VERB = ("--token-file", "--ca-file")
"""Options of `sdstore` itself."""

MODULES = {
    "serve": "app.cli.serve",
    "wait": "app.cli.serve",
    "publish": "app.cli.messages",
    "get": "app.cli.messages",
    "hint": "app.cli.messages",
    "channels": "app.cli.messages",
    "gaps": "app.cli.messages",
    "order": "app.cli.messages",
    "indexer": "app.cli.indexer",
    "tail": "app.cli.messages",
    "backfill": "app.cli.sync",
    "sync": "app.cli.sync",
    "peers": "app.cli.sync",
    "interests": "app.cli.operator",
    "reload": "app.cli.operator",
    "token": "app.cli.operator",
    "quarantine": "app.cli.operator",
    "retire": "app.cli.operator",
    "retention": "app.cli.operator",
    "import": "app.cli.store",
    "export": "app.cli.store",
    "backup": "app.cli.store",
    "migrate": "app.cli.store",
    "check": "app.cli.store",
    "reindex": "app.cli.store",
    "demo": "app.cli.demo",
    "openapi": "app.cli.serve",
    "version": "app.cli.serve",
    "snapshot": "pipeline.cli",
}
"""The verbs, and the modules that have them as a Typer `verbs`."""

TOP = __name__.removesuffix("app.cli.program")
"""What precedes the names of packages: nothing in a checkout, `sdstore.` in a wheel (hatch_build.py)."""


class LazyGroup(TyperGroup):
    """Verbs by name, imported when they are used; help lists them in the order of `MODULES`."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """The names of all verbs."""
        return list(MODULES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """The verb of this name, or None."""
        if cmd_name not in MODULES:
            return None
        with loading():
            module = import_module(TOP + MODULES[cmd_name])
        return _unwrapped(typer.main.get_group(module.verbs).commands.get(cmd_name))


_type_in_help = TyperOption.display_type_rich


def _type_of(option: TyperOption, ctx: Any) -> str | None:
    """The type that help shows: a flag has none, because it takes no value."""
    return None if option.is_flag else _type_in_help(option, ctx)


TyperOption.display_type_rich = _type_of  # type: ignore[assignment, method-assign]


def _unwrapped(verb: Any) -> Any:
    """The verb with one line for each paragraph of its help: the terminal's width wraps it."""
    if verb is not None and verb.help:
        paragraphs = inspect.cleandoc(verb.help).split("\n\n")
        verb.help = "\n\n".join(each.replace("\n", " ") for each in paragraphs)
    for each in getattr(verb, "commands", {}).values():
        _unwrapped(each)
    return verb


app = typer.Typer(
    cls=LazyGroup,
    help="Run a store node for SDS messages, and work with one.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"sdstore {version('sdstore')}")
        raise typer.Exit(Exit.DONE)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_show_version, help="Print the version and exit."
        ),
    ] = False,
    token_file: TokenPath = None,
    ca_file: CaPath = None,
) -> None:
    """Run a store node for SDS messages, and work with one."""
    access.token_file, access.ca_file = token_file, ca_file
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(Exit.USAGE)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; the exit code."""
    if sys.__stdout__ is None:
        print_error("io_error: stdout is closed")
        return Exit.LOCAL_FAULT
    try:
        code = _exit_code(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        code = Exit.DONE  # the reader of our output has closed it: it has seen enough
        _let_go_of(sys.stdout)
    except OSError as error:
        print_error(f"io_error: {error}")
        code = Exit.LOCAL_FAULT
        _let_go_of(sys.stdout)
    if sys.__stderr__ is not None:
        _let_go_of(sys.stderr)
    return code


def _exit_code(arguments: Sequence[str]) -> int:
    try:
        return _invoke(arguments)
    except CliError as error:
        print_error(str(error))
        return error.exit_code
    except (StoreError, Problem) as error:
        print_error(f"{error.code}: {error.detail}")
        return exit_of(error)
    except SettingsError as error:
        print_error(f"invalid_setting: {error}")
        return Exit.USAGE
    except TyperException as error:
        reason = error.format_message()
        if getattr(error, "option_name", None) in BEFORE_THE_VERB:
            name = error.option_name  # type: ignore[attr-defined]
            reason += f"; it comes before the verb: sdstore {name} FILE VERB …"
        print_error(f"usage: {reason}")
        return Exit.USAGE
    except UnicodeEncodeError as error:
        print_error(f"invalid_parameter: {error.object} is not UTF-8")
        return Exit.USAGE
    except (KeyboardInterrupt, typer.Abort):
        return Exit.INTERRUPTED


def _invoke(arguments: Sequence[str]) -> int:
    """Run the verb. Typer's own entry point would turn a broken pipe into exit code 1."""
    if COMPLETION_VARIABLE in os.environ:
        app(prog_name="sdstore")  # prints the completions, and exits
    command = typer.main.get_command(app)
    try:
        with command.make_context("sdstore", list(arguments)) as context:
            code = command.invoke(context)
    except typer.Exit as end:
        code = end.exit_code
    return code if isinstance(code, int) else Exit.DONE


def _let_go_of(stream: TextIO) -> None:
    """Flush a stream. If that fails, point it at the null device: the interpreter would try again at
    its end, and exit with 120.
    """
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
