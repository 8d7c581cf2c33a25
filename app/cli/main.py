"""The entry point. It handles Ctrl-C before it imports anything that takes long."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import NoReturn

from sdstore.errors import MissingExtraError, extra

EXIT_CODE = 130
"""128 + SIGINT, as in shells."""


@contextmanager
def loading() -> Iterator[None]:
    """While modules are imported, Ctrl-C ends the process at once.

    An import can swallow a KeyboardInterrupt (extension modules clear errors while they start), and
    there is nothing yet that needs an orderly end.
    """
    with _on_ctrl_c(_end):
        yield


@contextmanager
def waiting() -> Iterator[None]:
    """While a task itself reads a file or a pipe, Ctrl-C ends the read.

    The event loop's own handler cancels the task. That does not help a task that is inside a read: a
    pipe may be silent for hours.
    """
    import asyncio  # noqa: PLC0415 - the first lines of the program import this module

    with _on_ctrl_c(signal.default_int_handler):
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
        yield


def _end(_number: int, _frame: object) -> NoReturn:
    os._exit(EXIT_CODE)


@contextmanager
def _on_ctrl_c(handler: signal._HANDLER) -> Iterator[None]:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A background job of a shell ignores Ctrl-C, which is meant for another process.
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# Loading a thousand modules makes many objects and next to no cycles: collections take an eighth of the
# time. Here, because each worker of a service loads this module first.
gc.set_threshold(50_000)


def main() -> NoReturn:
    """The console script."""
    # A verb reports its errors itself, once; only `serve` logs.
    logging.getLogger(__name__.removesuffix(".cli.main")).addHandler(logging.NullHandler())
    try:
        with extra("server"):
            code = _run()
    except KeyboardInterrupt:
        code = EXIT_CODE
    except MissingExtraError as error:
        # Without its packages there is neither `print_error` nor `Exit`.
        sys.stderr.write(f"sdstore: server_missing: {error}\n")
        code = 6
    sys.exit(code)


def _run() -> int:
    with loading():
        from app.cli.program import run  # noqa: PLC0415 - takes long

    if isinstance(sys.stdout, TextIOWrapper):
        # File names may hold any bytes; the escape is valid in JSON, too.
        sys.stdout.reconfigure(errors="backslashreplace")
    return run(sys.argv[1:])
